"""Pages in arenas and the entries that own them: placing, mentioning, settling and releasing, in one place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from orbitkv_agent.guards import guard
from orbitkv_agent.store.access_log import Entries
from orbitkv_agent.store.arenas import Arena, ArenaPool
from orbitkv_agent.store.extents import UNIT_BYTES
from orbitkv_agent.store.index import Group, Index, KeySpace, arena_ids_of, units_of
from orbitkv_agent.store.memory import distinct, some
from orbitkv_agent.store.namespaces import EVICTION_ORDER, Namespace, RetentionClass

PageRun = tuple[Arena, int, int]
"""Pages that lie one after another: (arena, first unit, pages)."""

Listener = Callable[[KeySpace, int, list[bytes]], None]
"""Called with the key space, the group and the engine hashes of entries that came or went."""


class Residency:
    """What is in memory. Every change of an entry's pages, pins and class goes through here.

    An entry is *idle* when no lease pins it and no reservation writes to it; only idle entries are released. An idle
    entry with a committed page is mentioned in exactly one access log; without one, or in a dropped key space, it goes.
    """

    def __init__(self, arenas: ArenaPool) -> None:
        self.arenas = arenas
        self.index = Index(arenas.capacity_bytes // UNIT_BYTES)
        self.entries = self.index.entries
        self.on_inserted: list[Listener] = []
        self.on_evicted: list[Listener] = []

    # ---- pages

    def place(self, namespace: Namespace, count: int, units: int) -> list[PageRun]:
        """Find room for `count` pages of `units` units in the namespace's arenas, in as few runs as possible.

        Returns what could be had, which may be less or nothing.
        """
        by_room = [
            (largest, arena.id, arena)
            for arena in self.arenas.of(namespace.name)
            if arena.allocatable and (largest := arena.allocator.largest_free) >= units
        ]
        by_room.sort()
        # The tightest arena that takes them all in one run; otherwise the roomiest ones.
        best = bisect_left(by_room, (count * units,))
        chosen = by_room[best : best + 1] or by_room[::-1]
        runs: list[PageRun] = []
        missing = count
        for _, _, arena in chosen:
            arena.fresh = False
            for first, pages in arena.allocator.allocate_pages(missing, units):
                runs.append((arena, first, pages))
                missing -= pages
            if not missing:
                break
        placed = count - missing
        namespace.used_bytes += placed * units * UNIT_BYTES
        namespace.pages += placed
        return runs

    def free_pages(self, group: Group, shard: int, places: npt.NDArray[np.int64]) -> None:
        """Give the pages at `places` back to their arenas."""
        units = group.page_units[shard]
        ids = arena_ids_of(places)
        if not some(ids != ids[0]):
            self._free_in_arena(int(ids[0]), units_of(places), units)
        else:
            order = np.argsort(ids, kind="stable")
            ids, firsts = ids[order], units_of(places)[order]
            bounds = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
            for start, end in pairwise(bounds):
                self._free_in_arena(int(ids[start]), firsts[start:end], units)
        namespace = group.key_space.namespace
        namespace.used_bytes -= len(places) * units * UNIT_BYTES
        namespace.pages -= len(places)
        group.pages[shard] -= len(places)

    def _free_in_arena(self, arena_id: int, firsts: npt.NDArray[np.int64], units: int) -> None:
        arena = self.arenas.get(arena_id)
        assert arena is not None, "an arena with pages is never dropped"
        arena.allocator.free_pages(firsts, units)
        arena.owners[firsts] = 0

    # ---- entries

    def idle(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of the entries nobody reads or writes."""
        if not guard("pages-in-use"):
            return np.ones(len(entries), np.bool_)
        free: npt.NDArray[np.bool_] = (self.entries.pins[entries] == 0) & (self.entries.pending[entries] == 0)
        return free

    def mention(self, namespace: Namespace, entries: Entries) -> None:
        """Note that entries of one namespace, each named once, were used; the last of them is the most recent.

        There is at least one, and each has a committed page.
        """
        retention = self.entries.retention[entries]
        first = int(retention[0])
        if not some(retention != first):
            namespace.log(first).mention(entries, self.entries.touch(entries))
            return
        for kind in EVICTION_ORDER:
            chosen = entries[retention == kind]
            if len(chosen):
                namespace.log(kind).mention(chosen, self.entries.touch(chosen))

    def set_class(self, namespace: Namespace, entries: Entries, kind: RetentionClass) -> None:
        """Move entries of one namespace, each named once, to a retention class. The caller mentions them."""
        before = self.entries.retention[entries]
        if some(before):  # otherwise all are fresh
            counts = np.bincount(before, minlength=len(RetentionClass)).tolist()
            for old in EVICTION_ORDER:
                namespace.log(old).live -= counts[old]
        namespace.log(kind).live += len(entries)
        self.entries.retention[entries] = kind

    def settle(self, entries: Entries) -> None:
        """Put entries in order of which a pin or a reservation ended: idle ones are released or findable for eviction.

        Entries are of one namespace and named once each.
        """
        table = self.entries
        entries = entries[self.idle(entries)]
        gone = (table.committed[entries] == 0) | self.index.closed[table.owner[entries]]
        if some(gone):
            self.release(entries[gone], evicted=False)
            entries = entries[~gone]
        parked = entries[table.last_tick[entries] == 0]
        if len(parked):
            self.mention(self.namespace_of(parked), parked)

    def namespace_of(self, entries: Entries) -> Namespace:
        """The namespace of entries that are all of one."""
        return self.index.group_of(int(self.entries.owner[entries[0]])).key_space.namespace

    def release(self, entries: Entries, *, evicted: bool) -> int:
        """Remove idle entries, each named once, with all their pages; returns the bytes that this freed.

        `evicted`: for room, which is counted and told to listeners, as opposed to an abandoned or dropped entry.
        """
        owners = self.entries.owner[entries]
        freed = 0
        if not some(owners != owners[0]):
            return self._release(self.index.group_of(int(owners[0])), entries, evicted)
        for owner in distinct(owners.astype(np.int64)).tolist():
            freed += self._release(self.index.group_of(owner), entries[owners == owner], evicted)
        return freed

    def _release(self, group: Group, entries: Entries, evicted: bool) -> int:
        table, namespace = self.entries, group.key_space.namespace
        freed = int(table.units[entries].sum()) * UNIT_BYTES
        by_class = np.bincount(table.retention[entries], minlength=len(RetentionClass)).tolist()
        for kind in EVICTION_ORDER:
            namespace.log(kind).live -= by_class[kind]
        hashes: list[bytes] = []
        if evicted:
            for kind in EVICTION_ORDER:
                namespace.counters.evictions[kind] += by_class[kind]
            namespace.counters.reclaimed_bytes += freed
            if self.on_evicted and not group.key_space.closed:
                hashes = group.key_space.hashes(entries[table.visible[entries] != 0])
        for shard in range(group.key_space.shards):
            column = table.places(shard)
            places = np.abs(column[entries])
            places = places[places != 0]
            if len(places):
                self.free_pages(group, shard, places)
                column[entries] = 0
        self.index.remove(group, entries)
        if hashes:
            for listener in self.on_evicted:
                listener(group.key_space, group.number, hashes)
        return freed
