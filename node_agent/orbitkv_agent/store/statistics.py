"""Figures about the store, and the check that its parts agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from orbitkv_agent.store.extents import UNIT_BYTES
from orbitkv_agent.store.index import Group, arena_ids_of, units_of
from orbitkv_agent.store.namespaces import EVICTION_ORDER, Namespace, NamespaceCounters, RetentionClass
from orbitkv_agent.store.residency import Residency


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace. Counters are since the agent's start; blocks are entries."""

    used_bytes: int
    pages: int
    arena_bytes: int
    resident_blocks: dict[str, int]
    insertions: int
    evictions: dict[str, int]
    reclaimed_bytes: int
    dropped: dict[str, int]


@dataclass(slots=True)
class SizeClassStats:
    """Pages of one padded size: how many, and the bytes of padding in them."""

    pages: int = 0
    waste_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole pool. `used_bytes` counts pages, padding included; `committed_bytes` the arenas they lie in."""

    capacity_bytes: int
    committed_bytes: int
    used_bytes: int
    largest_free_bytes: int
    arenas: int
    arena_failures: int
    entries: int
    namespaces: dict[str, NamespaceStats]
    gone: NamespaceStats
    """Counters of namespaces that were dropped; they have nothing else any more."""
    size_classes: dict[int, SizeClassStats] = field(default_factory=dict)
    """By padded page size in bytes."""

    def total(self, name: str) -> int:
        """Sum of a number over the namespaces, with those that are gone."""
        return sum(getattr(one, name) for one in (*self.namespaces.values(), self.gone))

    def total_by_key(self, name: str) -> dict[str, int]:
        """Sum of a mapping (`resident_blocks`, `evictions`, `dropped`) over the namespaces and those that are gone."""
        totals: dict[str, int] = {}
        for one in (*self.namespaces.values(), self.gone):
            for key, value in getattr(one, name).items():
                totals[key] = totals.get(key, 0) + value
        return totals


def collect_stats(residency: Residency, namespaces: Iterable[Namespace], gone: NamespaceCounters) -> StoreStats:
    """Read all figures; costs a walk over arenas and groups, not over entries."""
    arenas = residency.arenas
    largest = max((arena.allocator.largest_free * UNIT_BYTES for arena in arenas if arena.allocatable), default=0)
    by_name = {one.name: _namespace_stats(one, arenas.held_bytes(one.name)) for one in namespaces}
    size_classes: dict[int, SizeClassStats] = {}
    for group in residency.index.groups:
        if group is not None:
            _add_size_classes(size_classes, group)
    return StoreStats(
        capacity_bytes=arenas.capacity_bytes,
        committed_bytes=arenas.committed_bytes,
        used_bytes=sum(one.used_bytes for one in by_name.values()),
        largest_free_bytes=max(largest, arenas.room_bytes),
        arenas=sum(1 for _ in arenas),
        arena_failures=arenas.failures,
        entries=residency.index.count,
        namespaces=by_name,
        gone=_stats(gone),
        size_classes=size_classes,
    )


def _namespace_stats(namespace: Namespace, arena_bytes: int) -> NamespaceStats:
    blocks = {kind.name.lower(): namespace.log(kind).live for kind in EVICTION_ORDER}
    return _stats(namespace.counters, namespace.used_bytes, namespace.pages, arena_bytes, blocks)


def _stats(
    counters: NamespaceCounters,
    used_bytes: int = 0,
    pages: int = 0,
    arena_bytes: int = 0,
    resident_blocks: dict[str, int] | None = None,
) -> NamespaceStats:
    return NamespaceStats(
        used_bytes=used_bytes,
        pages=pages,
        arena_bytes=arena_bytes,
        resident_blocks=resident_blocks or {},
        insertions=counters.insertions,
        evictions={kind.name.lower(): counters.evictions[kind] for kind in EVICTION_ORDER},
        reclaimed_bytes=counters.reclaimed_bytes,
        dropped={"pool_full": counters.dropped_pool_full, "quota": counters.dropped_quota},
    )


def _add_size_classes(size_classes: dict[int, SizeClassStats], group: Group) -> None:
    for page_bytes, units, pages in zip(group.page_bytes, group.page_units, group.pages, strict=True):
        if pages:
            size_class = size_classes.setdefault(units * UNIT_BYTES, SizeClassStats())
            size_class.pages += pages
            size_class.waste_bytes += pages * (units * UNIT_BYTES - page_bytes)


def verify_invariants(residency: Residency, namespaces: Iterable[Namespace]) -> None:
    """Raise AssertionError if what the table, the arenas, the logs and the counters say differs."""
    table, index = residency.entries, residency.index
    rows = np.flatnonzero(table.owner[: table.rows_used])
    assert len(rows) == index.count, "the hash table holds what the entry table holds"
    assert 0 not in rows
    assert not table.owner[table.rows_used :].any()
    assert table.available == table.capacity - len(rows), "each row is in use or free, once"
    pages: dict[tuple[int, int], int] = {}
    used: dict[str, int] = {}
    live: dict[tuple[str, int], int] = {}
    for row in rows.tolist():
        group = index.group_of(int(table.owner[row]))
        key_space = group.key_space
        assert index.find(group, table.keys[row : row + 1]).tolist() == [row], "an entry is found by its key"
        shards = [int(table.places(shard)[row]) for shard in range(key_space.shards)]
        assert sum(place > 0 for place in shards) == table.committed[row]
        assert sum(place < 0 for place in shards) == table.pending[row]
        assert any(shards), "an entry without pages is gone"
        complete = all(place > 0 for place in shards) and (not key_space.closed or table.visible[row] != 0)
        assert table.visible[row] == (group.owner if complete else 0), "visible exactly when complete"
        assert table.pins[row] >= 0
        assert table.pins[row] == 0 or complete, "only complete entries are pinned"
        kind = int(table.retention[row])
        assert (kind == RetentionClass.NONE) == (table.committed[row] == 0)
        if kind != RetentionClass.NONE:
            live[key_space.namespace.name, kind] = live.get((key_space.namespace.name, kind), 0) + 1
            assert table.last_tick[row] != 0 or not residency.idle(rows[rows == row]).all(), (
                "an idle entry can be evicted"
            )
        units = 0
        for shard, place in enumerate(shards):
            if place:
                where = np.array([abs(place)])
                spot = (int(arena_ids_of(where)[0]), int(units_of(where)[0]))
                assert spot not in pages, "no two pages share a place"
                pages[spot] = group.page_units[shard]
                units += group.page_units[shard]
                arena = residency.arenas.get(spot[0])
                assert arena is not None
                assert arena.owners[spot[1]] == row
                assert arena.namespace == key_space.namespace.name, "an arena serves one namespace"
        assert table.units[row] == units
        used[key_space.namespace.name] = used.get(key_space.namespace.name, 0) + units * UNIT_BYTES
    for namespace in namespaces:
        assert namespace.used_bytes == used.get(namespace.name, 0)
        for kind in EVICTION_ORDER:
            assert namespace.log(kind).live == live.get((namespace.name, kind), 0)
    for arena in residency.arenas:
        _verify_arena(arena.id, arena.allocator.extents(), arena.allocator.used, arena.allocator.capacity, pages)
        assert np.count_nonzero(arena.owners) == sum(1 for arena_id, _ in pages if arena_id == arena.id)
    assert residency.arenas.committed_bytes <= residency.arenas.capacity_bytes


def _verify_arena(
    arena_id: int, free: list[tuple[int, int]], used: int, capacity: int, pages: dict[tuple[int, int], int]
) -> None:
    pieces = sorted(free + [(first, units) for (owner, first), units in pages.items() if owner == arena_id])
    position = 0
    for first, units in pieces:
        assert first == position, "pages and free extents cover an arena without gap or overlap"
        position += units
    assert position == capacity
    assert used == capacity - sum(units for _, units in free)
