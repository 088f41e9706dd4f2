"""Short words for what every test of the store does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from orbitkv_agent.store import Entries, KeySpace, PageCache
from orbitkv_agent.store.index import entries_of

UNIT = 4096
MakeCache = Callable[..., PageCache]


def key(number: int) -> bytes:
    """An engine hash of 32 bytes."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def save(cache: PageCache, space: KeySpace, *numbers: int, units: int = 1, shard: int = 0) -> int:
    """Keep pages for these hashes; returns how many got a place."""
    reservation = cache.reserve(space, 0, keys(*numbers), shard, units * UNIT)
    cache.commit(reservation)
    return len(reservation)


def run(cache: PageCache, space: KeySpace, *numbers: int) -> Entries:
    return entries_of(space.lookup_run(0, keys(*numbers)))


def cached(cache: PageCache, space: KeySpace, *numbers: int) -> list[int]:
    """Which of the hashes are found, each asked for alone."""
    return [number for number in numbers if len(run(cache, space, number))]


def reclaim_all(cache: PageCache) -> None:
    while cache.reclaim_step():
        pass
