from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from orbitkv import scheduling
from orbitkv.scheduling import LONG_SLICE_S, SHORT_SLICE_S, slice_s, use_slices

T = TypeVar("T")


def in_a_thread(work: Callable[[], T]) -> T:
    """What `work` returns in a thread of its own, whose slices go with it."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def needs_slices() -> None:
    if not slice_s():
        pytest.skip("this kernel has no slices that a thread can choose (Linux 6.12 has)")


def test_a_thread_has_the_slices_that_it_asks_for_and_those_it_starts_do_not() -> None:
    needs_slices()
    usual = slice_s()

    def asks() -> tuple[bool, float, float]:
        return use_slices(SHORT_SLICE_S), slice_s(), in_a_thread(slice_s)

    assert in_a_thread(asks) == (True, SHORT_SLICE_S, usual)
    assert slice_s() == usual


def test_who_answers_goes_before_the_usual_and_who_copies_after_it() -> None:
    needs_slices()
    assert SHORT_SLICE_S < slice_s() < LONG_SLICE_S


def test_where_slices_cannot_be_had_all_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = slice_s()
    monkeypatch.setattr(scheduling, "_SET_AND_GET", {})
    assert (use_slices(SHORT_SLICE_S), slice_s()) == (False, 0.0)
    monkeypatch.undo()
    monkeypatch.setattr(scheduling, "_SHARING", ())  # as if the thread had a real-time policy
    assert not use_slices(SHORT_SLICE_S)
    monkeypatch.undo()
    assert slice_s() == before
    assert platform.machine() in scheduling._SET_AND_GET, "the numbers of the calls on this machine are not known"
