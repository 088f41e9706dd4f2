"""Lookups that are loading, looked at all together."""

from __future__ import annotations

import numpy as np
import pytest

from orbitkv.vllm.loading import Loading

PENDING = 7


@pytest.fixture
def words() -> memoryview:
    records = np.full(16, PENDING, np.uint64)
    return records.data


@pytest.fixture
def loading(words: memoryview) -> Loading:
    loading = Loading()
    for slot in range(4):
        loading.add(f"request-{slot}", 16 * slot, (words, slot, PENDING), until=100.0 + slot)
    return loading


def test_a_lookup_is_loading_as_long_as_its_record_says_so(loading: Loading, words: memoryview) -> None:
    loading.begin_step(1.0)
    assert loading.still == {"request-0": 0, "request-1": 16, "request-2": 32, "request-3": 48}
    loading.end_step()
    words[1] = PENDING + 1
    loading.begin_step(2.0)
    assert set(loading.still) == {"request-0", "request-2", "request-3"}


def test_nothing_is_loading_between_steps(loading: Loading) -> None:
    loading.begin_step(1.0)
    loading.end_step()
    assert not loading.still


def test_no_lookup_is_loading_beyond_its_time(loading: Loading) -> None:
    loading.begin_step(101.0)
    assert set(loading.still) == {"request-2", "request-3"}


def test_what_is_discarded_or_added_within_a_step_counts_at_once(loading: Loading, words: memoryview) -> None:
    loading.begin_step(1.0)
    loading.discard("request-0")
    loading.discard("request-0")
    loading.add("another", 5, (words, 9, PENDING), until=100.0)
    assert "request-0" not in loading.still
    assert loading.still["another"] == 5
    loading.end_step()
    words[9] = 0
    loading.begin_step(2.0)
    assert set(loading.still) == {"request-1", "request-2", "request-3"}


def test_all_are_forgotten_with_their_client(loading: Loading) -> None:
    loading.begin_step(1.0)
    loading.clear()
    assert not loading.still
    loading.begin_step(2.0)
    assert not loading.still
