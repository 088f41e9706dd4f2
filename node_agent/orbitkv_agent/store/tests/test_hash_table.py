from __future__ import annotations

import numpy as np
import pytest

from orbitkv_agent.store.hash_table import KEY_WORDS, HashTable

ALL_COLLIDE = (0,) * (KEY_WORDS + 1)


def make(rows: int, factors: tuple[int, ...] | None = None) -> tuple[HashTable, np.ndarray, np.ndarray]:
    keys = np.zeros((rows + 1, KEY_WORDS), np.uint64)
    keys[1:] = np.random.default_rng(3).integers(0, 1 << 63, (rows, KEY_WORDS))
    owners = np.ones(rows + 1, np.uint32)
    owners[0] = 0
    return HashTable(keys, owners, factors=factors), keys, owners


@pytest.mark.parametrize(("rows", "factors"), [(20_000, None), (60, ALL_COLLIDE), (4, ALL_COLLIDE)])
def test_what_was_inserted_is_found_until_removed(rows: int, factors: tuple[int, ...] | None) -> None:
    table, keys, _ = make(rows, factors)
    everyone = np.arange(1, rows + 1)
    for batch in np.array_split(everyone, 20):
        table.insert(batch)
    np.testing.assert_array_equal(table.find(keys[1:], 1), everyone)
    gone = everyone[::3]
    table.remove(gone)
    expected = np.where(np.isin(everyone, gone), 0, everyone)
    np.testing.assert_array_equal(table.find(keys[1:], 1), expected)
    found_singly = [table.find_one(keys[row].tobytes(), 0, 1) for row in everyone]
    assert found_singly == expected.tolist()
    table.remove(everyone[expected != 0])
    assert (table.count, table.spilled) == (0, 0)
    assert not table.find(keys[1:], 1).any()


@pytest.mark.parametrize("factors", [None, ALL_COLLIDE])
def test_the_same_key_of_two_owners_is_two_entries(factors: tuple[int, ...] | None) -> None:
    table, keys, owners = make(8, factors)
    keys[1:] = keys[1]
    owners[1:] = np.arange(1, 9)
    table.insert(np.arange(1, 9))
    assert [int(table.find(keys[1:2], owner)[0]) for owner in range(1, 10)] == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert [table.find_one(keys[1].tobytes(), 0, owner) for owner in range(1, 10)] == [1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_few_entries_spill_while_the_table_grows() -> None:
    table, _, _ = make(60_000)
    for batch in np.array_split(np.arange(1, 60_001), 300):
        table.insert(batch)
        assert table.spilled <= max(8, table.count // 100)


def test_growth_is_left_to_its_own_calls_a_batch_at_a_time() -> None:
    table, _, _ = make(60_000)
    batches = np.array_split(np.arange(1, 60_001), 300)
    for batch in batches[:150]:
        table.insert(batch)
        table.grow()
    before, grown = table.buckets, []
    for batch in batches[150:]:
        table.insert(batch)
        assert table.buckets == before
        table.grow()
        grown.append(table.buckets - before)
        before = table.buckets
    assert max(grown) < 1024 and sum(grown) > 40_000
    assert table.spilled <= table.count // 100


def test_keys_that_were_never_inserted_are_not_found() -> None:
    table, _, _ = make(5_000)
    table.insert(np.arange(1, 5_001))
    strangers = np.random.default_rng(4).integers(0, 1 << 63, (2_000, KEY_WORDS)).astype(np.uint64)
    assert not table.find(strangers, 1).any()
