"""What queries, leases and saves can rely on."""

from __future__ import annotations

import numpy as np
import pytest

from orbitkv_agent.store import ArenaPool, KeySpace, PageCache, RetentionClass, reclaim
from orbitkv_agent.store.index import entries_of
from orbitkv_agent.store.tests.helpers import UNIT, MakeCache, cached, key, keys, reclaim_all, run, save

# ------------------------------------------------------------------------------------------------------------ look-ups


def test_the_leading_run_ends_at_the_first_page_that_is_missing(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, 0, 1, 2, 4, 5)
    assert len(run(cache, space, 0, 1, 2, 3, 4, 5)) == 3
    assert len(run(cache, space, 3, 4)) == 0
    assert len(run(cache, space)) == 0
    assert len(space.lookup_run(7, keys(0))) == 0, "another group"


@pytest.mark.parametrize("order", ["as saved", "reversed", "shuffled", "every other one"])
def test_runs_are_found_whatever_the_order_they_were_saved_in(make_cache: MakeCache, order: str) -> None:
    cache = make_cache(2048, 2048)
    space = cache.open_key_space("red", "model")
    for start in range(0, 1200, 100):
        save(cache, space, *range(start, start + 100))
    numbers = list(range(1200))
    if order == "reversed":
        numbers.reverse()
    elif order == "shuffled":
        np.random.default_rng(1).shuffle(numbers)
    elif order == "every other one":
        numbers = numbers[::2]
    found = run(cache, space, *numbers, 5000, *range(5))
    assert len(found) == len(numbers)
    assert space.hashes(found) == [key(number) for number in numbers]


def test_a_hash_named_twice_is_found_twice(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, 1, 2)
    found = run(cache, space, 1, 2, 1)
    assert len(found) == 3
    cache.pin(found)
    cache.demand_hit(found)
    cache.unpin(found)
    assert cache.stats().total_by_key("resident_blocks") == {"reclaimable": 0, "probationary": 0, "retained": 2}


@pytest.mark.parametrize("hash_bytes", [8, 16, 20, 32])
def test_hashes_of_other_lengths_are_kept_as_they_came(make_cache: MakeCache, hash_bytes: int) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model", hash_bytes=hash_bytes)
    blob = b"".join(key(number)[:hash_bytes] for number in range(4))
    cache.commit(cache.reserve(space, 0, blob, 0, UNIT))
    found = entries_of(space.lookup_run(0, blob))
    assert b"".join(space.hashes(found)) == blob
    with pytest.raises(ValueError, match="not a whole number of hashes"):
        space.lookup_run(0, blob + b"x")


def test_namespaces_models_and_key_generations_never_see_each_other(make_cache: MakeCache) -> None:
    cache = make_cache(64, 16)
    spaces = [
        cache.open_key_space("red", "model"),
        cache.open_key_space("blue", "model"),
        cache.open_key_space("red", "other model"),
        cache.open_key_space("red", "model", "second generation"),
    ]
    for number, space in enumerate(spaces):
        save(cache, space, number)
    for number, space in enumerate(spaces):
        assert cached(cache, space, 0, 1, 2, 3) == [number]
    assert cache.open_key_space("red", "model") is spaces[0], "engines of one model share their pages"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"hash_bytes": 33}, "hashes of 33 bytes are not served"),
        ({"shards": 65}, "65 shards are not served"),
        ({"shards": 2}, "its identity must differ"),
    ],
)
def test_key_spaces_that_cannot_be_are_refused(make_cache: MakeCache, options: dict[str, int], complaint: str) -> None:
    cache = make_cache()
    cache.open_key_space("red", "model")
    with pytest.raises(ValueError, match=complaint):
        cache.open_key_space("red", "model", **options)


def test_a_pool_beyond_what_an_index_can_number_is_refused() -> None:
    with pytest.raises(ValueError, match="less than 4 TiB"):
        PageCache(ArenaPool(4 << 40, prefault=False, threaded=False))


# --------------------------------------------------------------------------------------------------------------- saves


def test_a_page_is_invisible_until_committed(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    reservation = cache.reserve(space, 0, keys(0, 1, 2), 0, UNIT)
    assert cached(cache, space, 0, 1, 2) == []
    aborted = cache.reserve(space, 0, keys(3), 0, UNIT)
    cache.commit(reservation)
    assert cached(cache, space, 0, 1, 2, 3) == [0, 1, 2]
    cache.abort(aborted)
    assert cached(cache, space, 0, 1, 2, 3) == [0, 1, 2]
    assert cache.stats().used_bytes == 3 * UNIT


def test_pages_of_one_save_lie_one_after_another(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    reservation = cache.reserve(space, 0, keys(*range(5)), 0, 2 * UNIT + 1)
    assert reservation.padded_bytes == 5 * 3 * UNIT
    assert np.diff(reservation.offsets).tolist() == [3 * UNIT] * 4
    assert set(reservation.arena_ids.tolist()) == {cache.arenas.of("red")[0].id}
    cache.commit(reservation)
    ids, offsets = cache.places(run(cache, space, *range(5)), 0)
    np.testing.assert_array_equal(ids, reservation.arena_ids)
    np.testing.assert_array_equal(offsets, reservation.offsets)


def test_pages_present_or_in_flight_are_not_written_again(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, 0, 1)
    first = cache.reserve(space, 0, keys(0, 1, 2), 0, UNIT)
    second = cache.reserve(space, 0, keys(1, 2, 3, 3), 0, UNIT)
    assert (first.positions.tolist(), first.present, first.in_flight) == ([2], 2, 0)
    assert (second.positions.tolist(), second.present, second.in_flight) == ([2], 1, 2)
    cache.abort(first)
    third = cache.reserve(space, 0, keys(2), 0, UNIT)
    assert third.positions.tolist() == [0], "after the first gave up, it can be had again"
    cache.commit(second)
    cache.commit(third)
    assert cached(cache, space, 0, 1, 2, 3) == [0, 1, 2, 3]


def test_a_reservation_ends_exactly_once(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    committed, aborted = (cache.reserve(space, 0, keys(number), 0, UNIT) for number in (0, 1))
    cache.commit(committed)
    cache.abort(aborted)
    for again in (cache.commit, cache.abort):
        for reservation in (committed, aborted):
            with pytest.raises(ValueError, match="committed or aborted before"):
                again(reservation)
    assert cached(cache, space, 0, 1) == [0]
    cache.check_invariants()


def test_pages_saved_where_others_were_evicted_are_found_whether_their_rows_follow_each_other_or_not(
    make_cache: MakeCache,
) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    for number in range(12):
        save(cache, space, number)
    for number in (2, 3, 4, 7, 9):
        cache._residency.release(np.asarray(run(cache, space, number)), evicted=True)
    save(cache, space, 20, 21, 22, 23, 24, 25)  # into five rows here and there and one behind all
    assert cached(cache, space, *range(30)) == [0, 1, 5, 6, 8, 10, 11, 20, 21, 22, 23, 24, 25]
    for number in (5, 6, 20):
        cache._residency.release(np.asarray(run(cache, space, number)), evicted=True)
    save(cache, space, 26, 27)
    assert cached(cache, space, *range(30)) == [0, 1, 8, 10, 11, 21, 22, 23, 24, 25, 26, 27]
    cache.check_invariants()


@pytest.mark.guard("all-shards")
def test_an_entry_is_visible_with_its_last_shard_and_goes_with_all(make_cache: MakeCache) -> None:
    cache = make_cache(16, 16)
    space = cache.open_key_space("red", "model", shards=2)
    save(cache, space, 0, 1, shard=0)
    assert cached(cache, space, 0, 1) == []
    save(cache, space, 0, shard=1, units=3)
    assert cached(cache, space, 0, 1) == [0]
    entries = run(cache, space, 0)
    assert cache.footprint_bytes(entries) == 4 * UNIT
    with pytest.raises(ValueError, match="committed page of shard 1"):
        cache.places(
            np.array([cache._index.find(space.groups[0], np.frombuffer(keys(1), np.uint64).reshape(1, -1))[0]]), 1
        )
    assert save(cache, space, *range(10, 23), shard=0) == 13
    assert cached(cache, space, 0) == []
    assert cache.stats().used_bytes == 13 * UNIT, "two units were needed: entry 1 had one, entry 0 went with all four"


def test_another_page_size_for_the_same_shard_is_refused(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, 0)
    with pytest.raises(ValueError, match="another layout needs another model identity"):
        save(cache, space, 1, units=2)
    with pytest.raises(ValueError, match="no shard 1"):
        save(cache, space, 1, shard=1)
    with pytest.raises(ValueError, match="page of 0 bytes"):
        save(cache, cache.open_key_space("red", "other"), 1, units=0)


def test_size_classes_state_their_waste(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    cache.commit(cache.reserve(space, 0, keys(0, 1), 0, UNIT - 96))
    cache.commit(cache.reserve(space, 1, keys(0), 0, 2 * UNIT + 1))
    classes = cache.stats().size_classes
    assert {size: (one.pages, one.waste_bytes) for size, one in classes.items()} == {
        UNIT: (2, 192),
        3 * UNIT: (1, UNIT - 1),
    }


# -------------------------------------------------------------------------------------------------- leases and eviction


@pytest.fixture
def large(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> PageCache:
    """A cache that is taken for a large one: 256 pages, of which one part in 64 are 4."""
    monkeypatch.setattr(reclaim, "_LEAST_AHEAD_UNITS", 1)
    return make_cache(256, 64)


def test_a_large_namespace_that_is_full_has_room_made_for_several_saves_at_once(large: PageCache) -> None:
    space = large.open_key_space("red", "model")
    for number in range(256):
        save(large, space, number)
    assert large.make_room(space, 0, keys(1000), 0, UNIT)
    assert cached(large, space, *range(8)) == [4, 5, 6, 7]
    for number in range(1000, 1004):
        assert not large.make_room(space, 0, keys(number), 0, UNIT), "there is room"
        save(large, space, number)
    assert large.make_room(space, 0, keys(*range(2000, 2006)), 0, UNIT)
    assert cached(large, space, *range(4, 12)) == [10, 11], "never less than was asked for"


def test_a_large_namespace_that_is_full_has_room_made_while_nobody_waits(large: PageCache) -> None:
    space = large.open_key_space("red", "model")
    for number in range(192):
        save(large, space, number)
    reclaim_all(large)
    assert cached(large, space, *range(192)) == [*range(192)], "another arena can still be had"
    for number in range(192, 256):
        save(large, space, number)
    large.pin(run(large, space, 0))
    reclaim_all(large)
    assert cached(large, space, *range(8)) == [0, 5, 6, 7], "the oldest but what is in use"
    assert not large.reclaim_step(), "there is room"
    save(large, space, 1000, 1001)
    reclaim_all(large)
    assert cached(large, space, *range(8)) == [0, 6, 7], "252 pages are kept, of which a part in 64 are 3"
    large.unpin(run(large, space, 0))


def test_a_large_namespace_full_of_what_was_used_again_keeps_what_is_new(large: PageCache) -> None:
    space = large.open_key_space("red", "model")
    for number in range(256):
        save(large, space, number)
        large.demand_hit(entries_of(run(large, space, number)))
    for number in range(1000, 1040):
        save(large, space, number)
        reclaim_all(large)
    new = cached(large, space, *range(1000, 1040))
    assert new == [*range(1040 - len(new), 1040)], "the older ones go first"
    assert 30 <= len(new) <= 32, "one page in eight"
    old = cached(large, space, *range(256))
    assert old == [*range(256 - len(old), 256)] and len(old) + len(new) >= 250, "the rest is what was used last"


def test_room_is_made_ahead_for_what_is_new_and_what_is_there_stays(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, *range(16))
    wanted = keys(15, 14, 100, 101)  # the first two would be the first to go
    assert cache.make_room(space, 0, wanted, 0, UNIT)
    assert cached(cache, space, *range(16)) == [*range(12), 14, 15]
    assert not cache.make_room(space, 0, wanted, 0, UNIT), "there is room now"
    reservation = cache.reserve(space, 0, wanted, 0, UNIT)
    assert (reservation.positions.tolist(), reservation.present) == ([2, 3], 2)
    assert cache.stats().namespaces["red"].evictions == {"reclaimable": 0, "probationary": 2, "retained": 0}
    cache.abort(reservation)


def test_room_is_made_ahead_within_the_quota_and_only_where_there_is_none(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    cache.configure_namespace("red", quota_bytes=4 * UNIT)
    space = cache.open_key_space("red", "model")
    save(cache, space, 0, 1)
    assert not cache.make_room(space, 0, keys(2, 3), 0, UNIT)
    assert cache.make_room(space, 0, keys(2, 3, 4), 0, UNIT)
    assert cached(cache, space, 0, 1) == [0]
    cache.pin(run(cache, space, 0))
    assert not cache.make_room(space, 0, keys(*range(2, 9)), 0, UNIT), "what is in use stays"
    cache.drop_key_space(space)
    assert not cache.make_room(space, 0, keys(2, 3, 4, 5), 0, UNIT)


@pytest.mark.guard("pages-in-use")
def test_pinned_pages_are_never_evicted_and_a_full_pool_drops_saves(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, *range(16))
    held = run(cache, space, *range(16))
    cache.pin(held)
    reservation = cache.reserve(space, 0, keys(100, 101), 0, UNIT)
    assert (len(reservation), reservation.dropped) == (0, {"pool_full": 2})
    assert cache.stats().total_by_key("dropped") == {"pool_full": 2, "quota": 0}
    assert cached(cache, space, *range(16)) == list(range(16)), "restores still work"
    cache.unpin(held[:3])
    assert save(cache, space, 100, 101, 102, 103) == 3, "the first hashes get what can be had"
    assert cached(cache, space, *range(16)) == list(range(3, 16))


def test_a_pin_is_released_exactly_once(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, 0, 1)
    held = run(cache, space, 0, 1)
    cache.pin(held)
    cache.pin(held[:1])
    cache.unpin(held)
    with pytest.raises(ValueError, match="more often than pinned"):
        cache.unpin(held)
    cache.unpin(held[:1])
    with pytest.raises(ValueError, match="more often than pinned"):
        cache.unpin(held[:1])


def test_what_is_not_complete_cannot_be_pinned(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    reservation = cache.reserve(space, 0, keys(0), 0, UNIT)
    with pytest.raises(ValueError, match="Only complete entries"):
        cache.pin(reservation.entries)


def test_classes_go_in_order_and_a_demand_hit_promotes(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, 0, 1, 2, 3)
    cache.demand_hit(run(cache, space, 0, 1))
    cache.configure_namespace("red", insert_class=RetentionClass.RECLAIMABLE)
    save(cache, space, *range(10, 22))
    assert cache.stats().total_by_key("resident_blocks") == {"reclaimable": 12, "probationary": 2, "retained": 2}
    save(cache, space, *range(30, 42))
    assert cached(cache, space, *range(30)) == [0, 1, 2, 3], "newest, but reclaimable: gone first"
    cache.configure_namespace("red", insert_class=RetentionClass.RETAINED)
    save(cache, space, *range(50, 64))
    assert cached(cache, space, *range(50)) == [0, 1]
    assert cache.stats().total_by_key("evictions") == {"reclaimable": 24, "probationary": 2, "retained": 0}
    save(cache, space, 70)
    assert cached(cache, space, 0, 1) == [0], "of a prefix the end goes first"


def test_looking_does_not_refresh_and_using_does(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    cache.configure_namespace("red", insert_class=RetentionClass.RETAINED)
    for number in range(16):
        save(cache, space, number)
    run(cache, space, 0)
    cache.demand_hit(run(cache, space, 1))
    save(cache, space, 2, 20)  # publishing a page again is a use, too
    save(cache, space, 21)
    assert cached(cache, space, 0, 1, 2, 3, 20, 21) == [1, 2, 20, 21]


def test_a_released_lease_counts_as_use_where_eviction_had_passed_by(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    for number in range(16):
        save(cache, space, number)
    held = run(cache, space, 0)
    cache.pin(held)
    save(cache, space, 20)
    cache.unpin(held)
    save(cache, space, 21)
    assert cached(cache, space, 0, 1, 2, 3) == [0, 3]


def test_eviction_frees_no_more_than_was_asked_for(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    for number in range(16):
        save(cache, space, number)
    save(cache, space, 20, 21, 22)
    assert cached(cache, space, *range(16)) == list(range(3, 16))
    assert cache.stats().total("reclaimed_bytes") == 3 * UNIT


def test_eviction_goes_on_until_the_free_run_is_long_enough(make_cache: MakeCache) -> None:
    cache = make_cache(16, 16)
    small, large = cache.open_key_space("red", "small"), cache.open_key_space("red", "large")
    save(cache, small, *range(16))
    # Every other page is the most recent: evicting by last use frees holes of one unit first.
    for number in range(0, 16, 2):
        cache.demand_hit(run(cache, small, number))
    assert save(cache, large, 100, units=4) == 1
    assert len(cached(cache, large, 100)) == 1


@pytest.mark.guard("pages-in-use")
def test_a_reservation_is_not_evicted_nor_are_the_pages_it_completes(make_cache: MakeCache) -> None:
    cache = make_cache(16, 16)
    space = cache.open_key_space("red", "model", shards=2)
    save(cache, space, *range(8), shard=0)
    second = cache.reserve(space, 0, keys(*range(8)), 1, UNIT)
    assert len(second) == 8
    other = cache.open_key_space("red", "other")
    assert save(cache, other, 50) == 0
    cache.commit(second)
    assert cached(cache, space, *range(8)) == list(range(8))


def test_a_stale_handle_is_never_current(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, 0)
    entries = run(cache, space, 0)
    generations = cache.generations(entries)
    assert cache.is_current(entries, generations)
    save(cache, space, *range(20, 36))
    assert not cache.is_current(entries, generations), "the row serves another key now"
    entries = run(cache, space, 20)
    generations = cache.generations(entries)
    cache.drop_key_space(space)
    assert not cache.is_current(entries, generations), "dropped, though not yet swept"


def test_events_tell_of_complete_entries_batch_by_batch(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model", shards=2)
    told: list[tuple[str, KeySpace, int, list[bytes]]] = []
    cache.on_inserted.append(lambda *event: told.append(("in", *event)))
    cache.on_evicted.append(lambda *event: told.append(("out", *event)))
    save(cache, space, 0, 1, 2, shard=0)
    assert told == []
    save(cache, space, 0, 1, shard=1)
    assert told == [("in", space, 0, [key(0), key(1)])]
    told.clear()
    other = cache.open_key_space("red", "other")
    save(cache, other, *range(16))
    assert [event for event in told if event[1] is space] == [("out", space, 0, [key(1), key(0)])]
    told.clear()
    cache.drop_key_space(other)
    save(cache, space, *range(30, 38), shard=0)
    reclaim_all(cache)
    assert told == [], "what came back under a new generation must not be reported gone"


# ------------------------------------------------------------------------------------------------------------- dropping


def test_a_dropped_key_space_finds_nothing_and_gives_its_memory_back(make_cache: MakeCache) -> None:
    cache = make_cache()
    space = cache.open_key_space("red", "model")
    save(cache, space, *range(8))
    held, generations = run(cache, space, 0, 1), cache.generations(run(cache, space, 0, 1))
    cache.pin(held)
    writing, given_up = (cache.reserve(space, 0, keys(number), 0, UNIT) for number in (20, 21))
    cache.drop_key_space(space)
    assert cached(cache, space, *range(8)) == []
    with pytest.raises(ValueError, match="was dropped"):
        cache.reserve(space, 0, keys(30), 0, UNIT)
    reclaim_all(cache)
    assert cache.stats().used_bytes == 4 * UNIT, "what is leased or being written stays until that ends"
    assert (cache.generations(held) == generations).all()
    cache.commit(writing)
    cache.abort(given_up)
    cache.unpin(held)
    assert cache.stats().used_bytes == 0
    assert cached(cache, cache.open_key_space("red", "model"), *range(8), 20) == []


def test_a_higher_reset_generation_forgets_everything_before_it(make_cache: MakeCache) -> None:
    cache = make_cache()
    old = cache.open_key_space("red", "model")
    other = cache.open_key_space("blue", "model")
    save(cache, old, 0)
    cache.configure_namespace("red", reset_generation=1)
    new = cache.open_key_space("red", "model")
    assert new is not old and new.reset_generation == 1
    assert cached(cache, old, 0) == cached(cache, new, 0) == []
    assert not other.closed
    with pytest.raises(ValueError, match="cannot go back"):
        cache.configure_namespace("red", reset_generation=0)


def test_group_numbers_return_when_their_last_entry_is_gone(make_cache: MakeCache) -> None:
    cache = make_cache()
    for generation in range(200):
        space = cache.open_key_space("red", "model", generation)
        save(cache, space, 0, 1)
        cache.drop_key_space(space)
        reclaim_all(cache)
    assert len(cache._index.groups) <= 3
    assert cache.stats().entries == 0
