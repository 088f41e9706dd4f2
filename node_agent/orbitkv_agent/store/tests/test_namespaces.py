"""How cache namespaces share one pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orbitkv_agent.store import ArenaPool, PageCache
from orbitkv_agent.store import cache as cache_module
from orbitkv_agent.store.tests.helpers import UNIT, MakeCache, cached, keys, reclaim_all, run, save


def test_beyond_its_quota_a_namespace_evicts_its_own(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    cache.configure_namespace("red", quota_bytes=4 * UNIT)
    red, blue = cache.open_key_space("red", "model"), cache.open_key_space("blue", "model")
    save(cache, blue, *range(8))
    for number in range(6):
        assert save(cache, red, number) == 1
    assert cached(cache, red, *range(6)) == [2, 3, 4, 5]
    assert cached(cache, blue, *range(8)) == list(range(8))


def test_what_a_quota_does_not_allow_is_dropped_and_named(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    cache.configure_namespace("red", quota_bytes=4 * UNIT)
    red = cache.open_key_space("red", "model")
    save(cache, red, 0)
    cache.pin(run(cache, red, 0))
    reservation = cache.reserve(red, 0, keys(*range(1, 7)), 0, UNIT)
    assert (reservation.positions.tolist(), reservation.dropped) == ([0, 1, 2], {"quota": 3})
    assert cache.stats().total_by_key("dropped") == {"pool_full": 0, "quota": 3}


def test_a_lowered_quota_takes_effect_by_and_by(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    red = cache.open_key_space("red", "model")
    for number in range(12):
        save(cache, red, number)
    cache.pin(run(cache, red, 0))
    cache.configure_namespace("red", quota_bytes=5 * UNIT)
    reclaim_all(cache)
    assert cached(cache, red, *range(12)) == [0, 8, 9, 10, 11], "the pinned page stays"
    assert cache.stats().namespaces["red"].used_bytes == 5 * UNIT


def test_a_newcomer_gets_an_arena_of_the_one_that_exceeds_its_guarantee_most(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    cache.configure_namespace("red", guaranteed_bytes=16 * UNIT)
    red, blue = cache.open_key_space("red", "model"), cache.open_key_space("blue", "model")
    save(cache, red, *range(16))
    save(cache, blue, *range(16))
    green = cache.open_key_space("green", "model")
    save(cache, green, 0)
    reclaim_all(cache)
    assert save(cache, green, *range(8)) == 8
    assert cached(cache, red, *range(16)) == list(range(16)), "a guarantee is a guarantee"
    assert len(cached(cache, blue, *range(16))) == 8
    assert cache.stats().namespaces["green"].arena_bytes == 8 * UNIT


def test_memory_that_was_shared_with_one_tenant_is_never_given_to_another(make_cache: MakeCache) -> None:
    cache = make_cache(16, 8)
    red = cache.open_key_space("red", "model")
    save(cache, red, *range(16))
    before = {arena.id for arena in cache.arenas.of("red")}
    blue = cache.open_key_space("blue", "model")
    save(cache, blue, 0)
    reclaim_all(cache)
    save(cache, blue, 0)
    now = cache.arenas.of("blue")
    assert len(now) == 1 and now[0].id not in before
    assert cache.arenas.retired_since(0) == sorted(before - {arena.id for arena in cache.arenas.of("red")})


def test_pages_within_a_guarantee_are_evicted_by_their_owner_only(make_cache: MakeCache) -> None:
    cache = make_cache(16, 8)
    cache.configure_namespace("red", guaranteed_bytes=16 * UNIT)
    red, blue = cache.open_key_space("red", "model"), cache.open_key_space("blue", "model")
    save(cache, red, *range(16))
    assert save(cache, blue, 0) == 0
    reclaim_all(cache)
    assert save(cache, blue, 0) == 0
    assert cached(cache, red, *range(16)) == list(range(16))
    assert save(cache, red, 20) == 1
    assert len(cached(cache, red, *range(16))) == 15


def test_no_arena_is_emptied_that_would_cut_into_a_guarantee(make_cache: MakeCache) -> None:
    cache = make_cache(16, 8)
    cache.configure_namespace("red", guaranteed_bytes=9 * UNIT)
    red, blue = cache.open_key_space("red", "model"), cache.open_key_space("blue", "model")
    save(cache, red, *range(16))
    save(cache, blue, 0)
    reclaim_all(cache)
    assert cached(cache, red, *range(16)) == list(range(16)), "7 units in excess, but an arena has 8"
    cache.configure_namespace("red", guaranteed_bytes=8 * UNIT)
    save(cache, blue, 0)
    reclaim_all(cache)
    assert len(cached(cache, red, *range(16))) == 8


def test_a_guarantee_is_won_back_from_those_who_exceed_theirs(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    red, blue = cache.open_key_space("red", "model"), cache.open_key_space("blue", "model")
    save(cache, red, *range(8))
    save(cache, blue, *range(24))
    cache.configure_namespace("red", guaranteed_bytes=32 * UNIT)
    for start in range(100, 200, 4):
        save(cache, red, *range(start, start + 4))
        reclaim_all(cache)
    assert cache.stats().namespaces["red"].arena_bytes == 32 * UNIT


def test_without_guarantees_busy_namespaces_approach_equal_shares(make_cache: MakeCache) -> None:
    cache = make_cache(64, 8)
    red, blue = cache.open_key_space("red", "model"), cache.open_key_space("blue", "model")
    save(cache, red, *range(64))
    for start in range(1000, 1400, 4):
        save(cache, blue, *range(start, start + 4))
        save(cache, red, *range(start, start + 4))
        reclaim_all(cache)
    shares = {name: one.arena_bytes // UNIT for name, one in cache.stats().namespaces.items()}
    assert sum(shares.values()) == 64
    assert abs(shares["red"] - shares["blue"]) <= 16


def test_memory_freed_for_one_namespace_is_not_snatched_by_another(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    red = cache.open_key_space("red", "model")
    save(cache, red, *range(32))
    blue = cache.open_key_space("blue", "model")
    save(cache, blue, 0)
    for number in range(100, 200):
        save(cache, red, number)
        cache.reclaim_step()
    assert cache.arenas.retired_sequence == 1
    assert cache.stats().namespaces["blue"].arena_bytes == 8 * UNIT
    assert save(cache, blue, 0) == 1


def test_one_arena_is_emptied_for_one_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ArenaPool(32 * UNIT, 8 * UNIT, prefault=False)
    jobs: list[Callable[[], None]] = []
    monkeypatch.setattr(pool._worker, "submit", jobs.append)
    cache = PageCache(pool)
    red = cache.open_key_space("red", "model")
    save(cache, red, *range(32))
    blue = cache.open_key_space("blue", "model")
    save(cache, blue, 0)
    reclaim_all(cache)
    assert len(jobs) == 1, "the kernel is still taking the first one back"
    assert len(cached(cache, red, *range(32))) == 24
    jobs.pop()()
    reclaim_all(cache)
    assert save(cache, blue, 0) == 1
    cache.close()


def test_an_arena_that_was_just_made_is_left_to_its_namespace() -> None:
    cache = PageCache(ArenaPool(32 * UNIT, 16 * UNIT, prefault=True, threaded=False))
    cache.open_key_space("blue", "model")
    red = cache.open_key_space("red", "model")
    save(cache, red, *range(40))
    reclaim_all(cache)
    assert cache.is_ready("blue")
    cache.close()


def test_an_arena_with_a_leased_page_is_passed_over_and_pins_are_waited_for(make_cache: MakeCache) -> None:
    cache = make_cache(16, 8)
    red = cache.open_key_space("red", "model")
    save(cache, red, *range(16))
    held = run(cache, red, *range(16))
    first_arena = cache.places(held, 0)[0] == cache.arenas.of("red")[0].id
    cache.pin(held[first_arena][:1])
    blue = cache.open_key_space("blue", "model")
    save(cache, blue, 0)
    reclaim_all(cache)
    assert save(cache, blue, 0) == 1
    assert len(cached(cache, red, *range(16))) == 8

    cache.pin(run(cache, blue, 0))
    green = cache.open_key_space("green", "model")
    save(cache, green, 0)
    reclaim_all(cache)
    assert save(cache, green, 0) == 0
    cache.unpin(held[first_arena][:1])
    reclaim_all(cache)
    assert save(cache, green, 0) == 1


def test_a_dropped_namespace_leaves_nothing_behind(make_cache: MakeCache) -> None:
    cache = make_cache(16, 8)
    cache.configure_namespace("red", guaranteed_bytes=16 * UNIT)
    red = cache.open_key_space("red", "model")
    save(cache, red, *range(16))
    cache.drop_namespace("red")
    reclaim_all(cache)
    blue = cache.open_key_space("blue", "model")
    assert save(cache, blue, *range(16)) == 16
    assert cache.arenas.of("red") == []


def test_a_dropped_namespace_is_forgotten_with_its_last_page_but_not_what_it_did(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    red = cache.open_key_space("red", "model")
    save(cache, red, *range(12))
    held = run(cache, red, 0, 1)
    cache.pin(held)
    cache.drop_namespace("red")
    reclaim_all(cache)
    assert cache.stats().namespaces["red"].pages == 2
    cache.unpin(held)
    reclaim_all(cache)
    stats = cache.stats()
    assert "red" not in stats.namespaces
    assert stats.total("insertions") == 12
    assert stats.committed_bytes == 0
    assert save(cache, cache.open_key_space("red", "model"), 0) == 1  # the name is as good as any


def test_a_thousand_namespaces_that_came_and_went_leave_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    for number in range(1000):
        name = f"ci-{number}"
        save(cache, cache.open_key_space(name, "model"), 0)
        cache.drop_namespace(name)
        reclaim_all(cache)
    assert not cache.stats().namespaces
    assert cache.stats().total("insertions") == 1000


def test_saves_are_dropped_until_the_first_arena_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ArenaPool(8 << 20, 4 << 20, prefault=True)
    jobs: list[Callable[[], None]] = []
    monkeypatch.setattr(pool._worker, "submit", jobs.append)
    cache = PageCache(pool)
    space = cache.open_key_space("red", "model")
    assert not cache.is_ready("red")
    assert cache.reserve(space, 0, keys(0), 0, UNIT).dropped == {"pool_full": 1}
    for job in jobs:
        job()
    assert cache.is_ready("red")
    assert save(cache, space, 0) == 1
    cache.check_invariants()
    cache.close()


def test_the_next_arena_is_made_before_the_last_one_is_full() -> None:
    cache = PageCache(ArenaPool(2 << 20, 1 << 20, prefault=True, threaded=False))
    space = cache.open_key_space("red", "model")
    assert len(cache.arenas.of("red")) == 1
    save(cache, space, *range(180))
    assert len(cache.arenas.of("red")) == 1
    save(cache, space, *range(180, 220))
    assert len(cache.arenas.of("red")) == 2
    cache.close()


@pytest.mark.parametrize("quota", [0, 1, UNIT - 1])
def test_a_quota_below_one_page_keeps_nothing(make_cache: MakeCache, quota: int) -> None:
    cache = make_cache()
    cache.configure_namespace("red", quota_bytes=quota)
    red = cache.open_key_space("red", "model")
    assert save(cache, red, 0) == 0


def test_namespaces_of_equal_size_do_not_take_memory_from_each_other(make_cache: MakeCache) -> None:
    cache = make_cache(32, 8)
    red, blue = cache.open_key_space("red", "model"), cache.open_key_space("blue", "model")
    save(cache, red, *range(16))
    save(cache, blue, *range(16))
    for number in range(100, 140):
        assert save(cache, blue, number) == 1
        reclaim_all(cache)
    assert cache.arenas.retired_sequence == 0
    assert len(cached(cache, red, *range(16))) == 16


def test_an_arena_that_somebody_kept_without_access_takes_no_new_page_and_goes(make_cache: MakeCache) -> None:
    cache = make_cache(units=16, arena_units=4)
    space = cache.open_key_space("red", "model")
    save(cache, space, 1, 2)
    leased = run(cache, space, 1)
    cache.pin(leased)
    (kept,) = cache.arenas.of("red")
    cache.expose([kept.id, 12345])  # and one that is gone already
    assert save(cache, space, 3) == 1
    assert kept.used_bytes == 2 * UNIT
    reclaim_all(cache)
    assert cached(cache, space, 1, 2, 3) == [1, 3], "what is in use stays until that ends"
    cache.unpin(leased)
    reclaim_all(cache)
    assert cached(cache, space, 1, 2, 3) == [3]
    assert cache.arenas.get(kept.id) is None


def test_namespace_with_as_many_models_as_it_may_have_takes_no_more(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_GROUPS_OF_ONE", 3)
    cache = make_cache(32, 8)
    for model in range(3):
        space = cache.open_key_space("red", model)
        assert cache.takes(space, 0)
        save(cache, space, model)
    assert cache.takes(space, 0), "another page of a model that is there"
    assert not cache.takes(space, 1)
    assert not cache.takes(cache.open_key_space("red", "one more"), 0)
    assert cache.takes(cache.open_key_space("blue", "model"), 0), "others are none the worse"


def test_models_without_pages_make_way_for_others(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_GROUPS_OF_ONE", 3)
    cache = make_cache(32, 8)
    kept, evicted = cache.open_key_space("red", "kept"), cache.open_key_space("red", "evicted")
    save(cache, kept, 1)
    under_way = cache.open_key_space("red", "under way")
    reservation = cache.reserve(under_way, 0, keys(2), 0, UNIT)
    cache.abort(cache.reserve(evicted, 0, keys(3), 0, UNIT))
    fresh = cache.open_key_space("red", "fresh")
    assert cache.takes(fresh, 0)
    save(cache, fresh, 4)
    cache.commit(reservation)
    assert [cached(cache, kept, 1), cached(cache, under_way, 2), cached(cache, fresh, 4)] == [[1], [2], [4]]
    assert evicted.closed
    again = cache.open_key_space("red", "evicted")
    assert not again.closed and not cache.takes(again, 0)


def test_models_that_are_only_asked_for_take_no_memory_for_ever(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_KEY_SPACES_OF_ONE", 4)
    cache = make_cache()
    kept = cache.open_key_space("red", "kept")
    save(cache, kept, 1)
    opened = [cache.open_key_space("red", model) for model in range(50)]
    assert sum(not each.closed for each in opened) <= 3
    assert cached(cache, kept, 1) == [1]
    for each in opened:
        cache.drop_key_space(each)
    assert kept.namespace.key_spaces == 1
