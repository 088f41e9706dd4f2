from __future__ import annotations

from collections.abc import Iterator

import pytest

from orbitkv_agent.store import ArenaPool, PageCache
from orbitkv_agent.store.tests.helpers import UNIT, MakeCache


@pytest.fixture
def make_cache() -> Iterator[MakeCache]:
    """Makes caches whose arenas do everything inline, sized in units of 4 KiB."""
    made: list[PageCache] = []

    def make(units: int = 16, arena_units: int = 16) -> PageCache:
        pool = ArenaPool(units * UNIT, arena_units * UNIT, prefault=False, threaded=False)
        made.append(PageCache(pool, pause_seconds=float("inf")))
        return made[-1]

    yield make
    for cache in made:
        cache.check_invariants()
        cache.close()
