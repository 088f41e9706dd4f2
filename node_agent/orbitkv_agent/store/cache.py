"""The page cache: what queries, leases and saves use of the store."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

from orbitkv_agent.guards import guard
from orbitkv_agent.store.access_log import Entries
from orbitkv_agent.store.arenas import ArenaPool
from orbitkv_agent.store.extents import UNIT_BYTES
from orbitkv_agent.store.hash_table import KEY_BYTES, KEY_WORDS, MAX_ENTRIES, Keys
from orbitkv_agent.store.index import (
    MAX_SHARDS,
    Group,
    KeySpace,
    Run,
    arena_ids_of,
    entries_of,
    place_of,
    rows_of,
    units_of,
)
from orbitkv_agent.store.memory import distinct, some
from orbitkv_agent.store.namespaces import NONE, RETAINED, Namespace, NamespaceCounters, RetentionClass
from orbitkv_agent.store.reclaim import Reclaimer
from orbitkv_agent.store.residency import PageRun, Residency
from orbitkv_agent.store.statistics import StoreStats, collect_stats, verify_invariants

_PAUSE_SECONDS = 0.001
MAX_GROUPS_OF_ONE = 1 << 12
"""Groups of models that one namespace may have pages of: an engine names its model itself, and whoever names a new one
each time must not take the numbers, and the agent's memory, from others."""
MAX_KEY_SPACES_OF_ONE = 2 * MAX_GROUPS_OF_ONE
"""The same for models, with and without pages."""
_NO_ENTRIES: Entries = np.zeros(0, np.int64)


class Reservation:
    """Places for pages of one save, group and shard, to be committed or aborted once.

    `positions` are the indices of the hashes that got a page, ascending; page i of the others is that of hash
    `positions[i]`. Nobody else can get these places while it is open, and nobody sees the entries because of it.
    """

    __slots__ = (
        "arena_ids",
        "dropped",
        "group",
        "in_flight",
        "offsets",
        "open",
        "positions",
        "present",
        "run",
        "shard",
    )

    def __init__(
        self,
        group: Group,
        shard: int,
        positions: npt.NDArray[np.uint32],
        run: Run,
        places: npt.NDArray[np.int64],
        *,
        present: int,
        in_flight: int,
        dropped: dict[str, int],
    ) -> None:
        self.group = group
        self.shard = shard
        self.positions = positions
        self.run = run
        self.arena_ids: npt.NDArray[np.uint32] = arena_ids_of(places).astype(np.uint32)
        self.offsets: npt.NDArray[np.uint64] = (units_of(places) * UNIT_BYTES).view(np.uint64)
        """In bytes, in the arena."""
        self.open = True
        """Neither committed nor aborted."""
        self.present = present
        """Pages that were there already."""
        self.in_flight = in_flight
        """Pages that another reservation is writing, or that this one named twice."""
        self.dropped = dropped
        """Pages that could not be had, by reason: `quota`, `pool_full`. They are the last of the hashes."""

    def __len__(self) -> int:
        return len(self.run)

    @property
    def entries(self) -> Entries:
        """Those that get the pages."""
        return entries_of(self.run)

    @property
    def padded_bytes(self) -> int:
        """What the pages take in the pool."""
        return len(self.run) * self.group.page_units[self.shard] * UNIT_BYTES

    def close(self) -> None:
        """It is committed or aborted now. Raises ValueError if it was before."""
        if not self.open:
            raise ValueError("This reservation was committed or aborted before.")
        self.open = False


class PageCache:
    """Pages in DRAM and their keys, for one owner thread: there is no lock, and only `arenas` has a thread beside it.

    Hashes are passed as one blob, one after another. Entries are named by int64 indices, which are valid in the same
    turn of the owner's thread, while pinned, or while `is_current` says so. No call takes longer than about 2 ms at
    millions of entries; what takes longer is carried on by `reclaim_step`.

    Raises ValueError for a pool of 4 TiB or more.
    """

    def __init__(self, arenas: ArenaPool, *, pause_seconds: float = _PAUSE_SECONDS) -> None:
        if arenas.capacity_bytes >= MAX_ENTRIES * UNIT_BYTES:
            raise ValueError(f"A pool of {arenas.capacity_bytes} bytes is too large: less than 4 TiB are served.")
        self.arenas = arenas
        self._namespaces: dict[str, Namespace] = {}
        self._next_namespace = 1
        self._dropped: set[str] = set()
        """Namespaces to be forgotten as soon as nothing of theirs is left."""
        self._gone = NamespaceCounters()
        """Of those that were forgotten."""
        self._key_spaces: dict[tuple[str, Hashable, Hashable], KeySpace] = {}
        self._residency = Residency(arenas)
        self._index = self._residency.index
        self._entries = self._residency.entries
        self._reclaimer = Reclaimer(self._residency, self._namespaces, pause_seconds)
        self.on_inserted = self._residency.on_inserted
        """Called with (key space, group, hashes) of entries that became complete, once a batch."""
        self.on_evicted = self._residency.on_evicted
        """The same for complete entries that were evicted. A dropped key space is not told entry by entry."""

    # ---- namespaces and key spaces

    def configure_namespace(
        self,
        name: str,
        *,
        quota_bytes: int | None = None,
        guaranteed_bytes: int = 0,
        insert_class: RetentionClass = RetentionClass.PROBATIONARY,
        reset_generation: int = 0,
    ) -> None:
        """Set a namespace's limits, from now on. Beyond a lowered quota its own pages go, by and by.

        A higher reset generation drops all that was kept under lower ones. Raises ValueError for a lower one.
        """
        namespace = self._namespace(name)
        if reset_generation < namespace.reset_generation:
            raise ValueError(
                f"Cache namespace {name!r} is at reset generation {namespace.reset_generation} and cannot go back to"
                f" {reset_generation}."
            )
        namespace.quota_bytes = quota_bytes
        namespace.guaranteed_bytes = guaranteed_bytes
        namespace.insert_class = insert_class
        if reset_generation > namespace.reset_generation:
            namespace.reset_generation = reset_generation
            for key_space in self._key_spaces_of(name):
                self.drop_key_space(key_space)

    def drop_namespace(self, name: str) -> None:
        """Drop all key spaces of a namespace and forget it. Its memory goes back as leases and saves on it end."""
        for key_space in self._key_spaces_of(name):
            self.drop_key_space(key_space)
        for arena in self.arenas.of(name):
            arena.fresh = False
        self.configure_namespace(name, reset_generation=self._namespace(name).reset_generation)
        self._dropped.add(name)

    def open_key_space(
        self,
        namespace: str,
        identity: Hashable,
        key_generation: Hashable = 0,
        *,
        shards: int = 1,
        hash_bytes: int = KEY_BYTES,
    ) -> KeySpace:
        """The key space of a model identity and key generation in a namespace, at the namespace's reset generation.

        Engines of the same identity share it. Raises ValueError if it is open with other `shards` or `hash_bytes`.
        Starts making the namespace's first arena (see `is_ready`). Of thousands, those without entries are dropped.
        """
        if not 1 <= hash_bytes <= KEY_BYTES:
            raise ValueError(f"Engine hashes of {hash_bytes} bytes are not served: 1 to {KEY_BYTES} are.")
        if not 1 <= shards <= MAX_SHARDS:
            raise ValueError(f"{shards} shards are not served: 1 to {MAX_SHARDS} are.")
        owner = self._namespace(namespace)
        known = self._key_spaces.get((namespace, identity, key_generation))
        if known is not None:
            if (known.shards, known.hash_bytes) != (shards, hash_bytes):
                raise ValueError(
                    f"This model is kept with {known.shards} shards and hashes of {known.hash_bytes} bytes, not"
                    f" {shards} and {hash_bytes}: its identity must differ, too."
                )
            return known
        if owner.key_spaces >= MAX_KEY_SPACES_OF_ONE:
            self._drop_empty(owner)
        key_space = KeySpace(self._index, owner, identity, key_generation, shards, hash_bytes)
        owner.key_spaces += 1
        self._key_spaces[(namespace, identity, key_generation)] = key_space
        self._reclaimer.prepare(owner)
        return key_space

    def drop_key_space(self, key_space: KeySpace) -> None:
        """Nothing of it is found any more. Its pages return by `reclaim_step`, and as leases and saves on them end."""
        key = (key_space.namespace.name, key_space.identity, key_space.key_generation)
        if self._key_spaces.get(key) is key_space:
            del self._key_spaces[key]
            key_space.namespace.key_spaces -= 1
        if not key_space.closed and self._index.close(key_space):
            self._reclaimer.sweep()

    def takes(self, key_space: KeySpace, group: int) -> bool:
        """Whether pages of this group may be kept. Where a namespace has as many groups as it may, key spaces of its
        without entries are dropped first; whoever uses such a one opens it again."""
        if group in key_space.groups:
            return True
        namespace = key_space.namespace
        if namespace.groups >= MAX_GROUPS_OF_ONE:
            self._drop_empty(namespace, but=key_space)
        return namespace.groups < MAX_GROUPS_OF_ONE and not self._index.full

    def is_ready(self, namespace: str) -> bool:
        """Whether the namespace has an arena that takes pages. Until then reservations drop them (`pool_full`)."""
        self.arenas.poll()
        return not self.arenas.prefault or any(arena.allocatable for arena in self.arenas.of(namespace))

    # ---- queries and leases

    def pin(self, run: Run) -> None:
        """Keep complete entries, of one namespace, until `unpin`. Raises ValueError if one is not complete."""
        if not self._entries.visible[rows_of(run)].all():
            raise ValueError("Only complete entries can be pinned.")
        self._entries.add_pins(run, 1)

    def unpin(self, run: Run) -> None:
        """Undo one `pin` of each of these entries. Raises ValueError, and changes nothing, if one has no pin left."""
        if not len(run):
            return
        table, rows = self._entries, rows_of(run)
        table.add_pins(run, -1)
        left = table.pins[rows]
        if left.min() < 0:
            table.add_pins(run, 1)
            raise ValueError("An entry was unpinned more often than pinned.")
        if not self._index.closing and table.last_tick[rows].all():
            return
        free = table.last_tick[rows] == 0
        if self._index.closing:
            free |= self._index.closed[table.owner[rows]]
        free &= left == 0
        if free.any():
            self._residency.settle(distinct(entries_of(run)[free]))

    def demand_hit(self, entries: Entries) -> None:
        """A request uses these complete entries, of one namespace, in prefix order: they become retained and recent."""
        if not len(entries):
            return
        namespace = self._residency.namespace_of(entries)
        # The start of a prefix serves more requests than its end, so the end is to go first.
        latest = entries[::-1].copy()
        ticks = self._entries.touch(latest)
        if not (self._entries.retention[latest] == RETAINED).all():
            once = latest[self._entries.last_tick[latest] == ticks]
            self._residency.set_class(namespace, once, RetentionClass.RETAINED)
        namespace.log(RETAINED).mention(latest, ticks)

    def generations(self, entries: Entries) -> npt.NDArray[np.uint32]:
        """Generations of entries, to be kept with indices that outlive the turn."""
        return self._entries.generation[entries]

    def is_current(self, entries: Entries, generations: npt.NDArray[np.uint32]) -> bool:
        """Whether all of these entries are complete, and the same as when `generations` was taken."""
        visible = self._entries.visible[entries]
        return bool(
            (self._entries.generation[entries] == generations).all()
            and visible.all()
            and not self._index.closed[visible].any()
        )

    def places(self, run: Run, shard: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Arena ids and byte offsets of the committed pages of a shard. Pin the entries first."""
        places = self._entries.places(shard)[rows_of(run)]
        if np.count_nonzero(places > 0) != len(places):
            raise ValueError(f"Not all of these entries have a committed page of shard {shard}.")
        return arena_ids_of(places).astype(np.uint32), (units_of(places) * UNIT_BYTES).view(np.uint64)

    def footprint_bytes(self, entries: Entries) -> int:
        """What entries take in the pool with all their shards, padding included."""
        return int(self._entries.units[entries].sum()) * UNIT_BYTES

    # ---- saves

    def make_room(self, key_space: KeySpace, group: int, hashes: bytes, shard: int, page_bytes: int) -> bool:
        """Get an arena, or evict, as `reserve` would have to, so that it is done in another turn; whether it was."""
        self.arenas.poll()
        namespace, units = key_space.namespace, -(-page_bytes // UNIT_BYTES)
        if key_space.closed or self._reclaimer.has_room(namespace, len(hashes) // key_space.hash_bytes, units):
            return False
        keys = np.frombuffer(key_space.padded(hashes), np.uint64).reshape(-1, KEY_WORDS)
        found = self._index.find(key_space.group(group), keys)
        state = self._entries.places(shard)[found]
        kept = distinct(found[state > 0])
        if len(kept):
            self._residency.mention(namespace, kept[::-1])
        return self._reclaimer.make_room(namespace, int(np.count_nonzero(state == 0)), units)

    def reserve(self, key_space: KeySpace, group: int, hashes: bytes, shard: int, page_bytes: int) -> Reservation:
        """Get places for the pages of `shard` that are neither kept nor being written already, first hashes first.

        Evicts where needed and drops what cannot be had. The caller asked `takes`. Raises ValueError if the key space
        was dropped, or keeps this group and shard with another page size.
        """
        self.arenas.poll()
        known = key_space.group(group)
        if key_space.closed:
            raise ValueError("This key space was dropped: open it again.")
        units = _fix_page_size(known, shard, page_bytes)
        blob = key_space.padded(hashes)
        keys = np.frombuffer(blob, np.uint64).reshape(-1, KEY_WORDS)
        tags = self._index.tags(known, keys)
        found = self._index.find(known, keys, tags)
        first = _first_occurrences(keys)
        kept = _NO_ENTRIES
        all_new = first is None and not some(found)  # the usual case, which is worth some lines of its own
        if all_new:
            wanted = np.arange(len(keys), dtype=np.uint32)
        else:
            state = self._entries.places(shard)[found]
            absent, present = state == 0, state > 0
            if first is not None:
                absent &= first
                present &= first
            wanted, kept = np.flatnonzero(absent).astype(np.uint32), found[present]
            if len(kept):
                self._residency.mention(key_space.namespace, kept[::-1])
            existing = found[wanted]
            self._hold(existing)
        runs, reason = self._reclaimer.obtain(key_space.namespace, len(wanted), units)
        places = _places(runs, units)
        granted = len(places)
        chosen = wanted[:granted]
        if all_new:
            run = self._index.add(known, keys[:granted], tags[:granted])
        else:
            self._let_go(existing[granted:])
            run = self._add_missing(known, existing[:granted], keys[chosen], tags[chosen])
        self._fill_in(known, shard, run, runs, places)
        dropped = {} if granted == len(wanted) else {reason: len(wanted) - granted}
        counters = key_space.namespace.counters
        counters.dropped_quota += dropped.get("quota", 0)
        counters.dropped_pool_full += dropped.get("pool_full", 0)
        return Reservation(
            known,
            shard,
            chosen,
            run,
            places,
            present=len(kept),
            in_flight=len(found) - len(kept) - len(wanted),
            dropped=dropped,
        )

    def commit(self, reservation: Reservation) -> None:
        """The bytes of a reservation's pages are in place. An entry becomes visible with its last shard.

        Raises ValueError, and changes nothing, if it was committed or aborted before.
        """
        reservation.close()
        self._index.grow()
        entries, rows = reservation.entries, rows_of(reservation.run)
        if not len(entries):
            return
        table, group = self._entries, reservation.group
        namespace, shards = group.key_space.namespace, group.key_space.shards
        column = table.places(reservation.shard)
        column[rows] = -column[rows]
        table.pending[rows] -= 1
        table.committed[rows] += 1
        fresh = table.retention[rows] == NONE
        if some(fresh):
            self._residency.set_class(namespace, entries[fresh], namespace.insert_class)
        if group.key_space.closed:
            self._residency.settle(entries)
            return
        self._residency.mention(namespace, entries[::-1])
        if shards > 1 and guard("all-shards"):
            entries = rows = entries[table.committed[entries] == shards]
        table.visible[rows] = group.owner
        namespace.counters.insertions += len(entries)
        if len(entries) and self.on_inserted:
            hashes = group.key_space.hashes(entries)
            for listener in self.on_inserted:
                listener(group.key_space, group.number, hashes)

    def abort(self, reservation: Reservation) -> None:
        """Give back the pages of a reservation: nothing of theirs will be written any more.

        Raises ValueError, and changes nothing, if it was committed or aborted before.
        """
        reservation.close()
        self._index.grow()
        entries = reservation.entries
        if not len(entries):
            return
        table, group = self._entries, reservation.group
        column = table.places(reservation.shard)
        self._residency.free_pages(group, reservation.shard, -column[entries])
        column[entries] = 0
        table.units[entries] -= group.page_units[reservation.shard]
        table.pending[entries] -= 1
        self._residency.settle(entries)

    def _hold(self, entries: Entries) -> None:
        """Making room does not evict these (0 for none): they get another shard's page."""
        if some(entries):
            self._entries.pending[entries[entries != 0]] += 1

    def _let_go(self, entries: Entries) -> None:
        """Undo `_hold`, where there was no room."""
        if some(entries):
            refused = entries[entries != 0]
            self._entries.pending[refused] -= 1
            self._residency.settle(refused)

    def _add_missing(self, group: Group, existing: Entries, keys: Keys, tags: Entries) -> Entries:
        """The entries of keys: held ones, and new ones where there is none (0)."""
        missing = existing == 0
        entries = existing.copy()
        entries[missing] = entries_of(self._index.add(group, keys[missing], tags[missing]))
        return entries

    def _fill_in(self, group: Group, shard: int, run: Run, runs: list[PageRun], places: npt.NDArray[np.int64]) -> None:
        """Write reserved places into the table."""
        units = group.page_units[shard]
        entries, rows = entries_of(run), rows_of(run)
        self._entries.places(shard)[rows] = -places
        self._entries.units[rows] += units
        group.pages[shard] += len(entries)
        start = 0
        for arena, first, pages in runs:
            arena.owners[first : first + pages * units : units] = entries[start : start + pages]
            start += pages

    # ---- upkeep

    def expose(self, arena_ids: Iterable[int]) -> None:
        """Somebody may hold these arenas who may not use their namespace any more: they take no new page, and
        `reclaim_step` empties and drops them."""
        for arena_id in arena_ids:
            arena = self.arenas.get(arena_id)
            if arena is not None:
                self._reclaimer.expose(arena)

    def reclaim_step(self) -> bool:
        """Do a bounded piece of pending upkeep; whether to call again soon. Call it when the loop is idle, and when
        `arenas` notifies: it takes over what the arenas' thread finished."""
        again = self._reclaimer.step()
        if self._dropped:
            self._forget_dropped()
        return again

    def stats(self) -> StoreStats:
        """Gauges and counters of the store (see `StoreStats`)."""
        return collect_stats(self._residency, self._namespaces.values(), self._gone)

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts of the store contradict each other. Slow: for tests."""
        verify_invariants(self._residency, self._namespaces.values())

    def close(self) -> None:
        """Close all arenas. Engines that map them keep their mappings, with what is in them."""
        self.arenas.close()

    def _forget_dropped(self) -> None:
        """Forget dropped namespaces that have neither pages nor key spaces any more, and give their arenas back."""
        for name in list(self._dropped):
            if self._key_spaces_of(name):
                self._dropped.discard(name)  # it is used again
                continue
            for arena in list(self.arenas.of(name)):
                if arena.ready and not arena.allocator.used:
                    self.arenas.drop(arena)
            namespace = self._namespaces[name]
            if not namespace.pages and not self.arenas.of(name):
                self._gone.add(namespace.counters)
                del self._namespaces[name]
                self._dropped.discard(name)

    def _drop_empty(self, namespace: Namespace, but: KeySpace | None = None) -> None:
        """Drop the key spaces of a namespace that have no entries, complete or not."""
        for key_space in self._key_spaces_of(namespace.name):
            if key_space is not but and not any(group.entries for group in key_space.groups.values()):
                self.drop_key_space(key_space)

    def _namespace(self, name: str) -> Namespace:
        namespace = self._namespaces.get(name)
        if namespace is None:
            namespace = self._namespaces[name] = Namespace(self._next_namespace, name, self._entries.last_tick)
            self._next_namespace += 1
        return namespace

    def _key_spaces_of(self, name: str) -> list[KeySpace]:
        return [key_space for key_space in self._key_spaces.values() if key_space.namespace.name == name]


def _fix_page_size(group: Group, shard: int, page_bytes: int) -> int:
    """Units of a page of this shard; the first reservation decides."""
    if not 0 <= shard < group.key_space.shards:
        raise ValueError(f"There is no shard {shard} among {group.key_space.shards}.")
    if page_bytes <= 0:
        raise ValueError(f"A page of {page_bytes} bytes cannot be kept.")
    if group.page_bytes[shard] == 0:
        group.page_bytes[shard] = page_bytes
        group.page_units[shard] = -(-page_bytes // UNIT_BYTES)
    elif group.page_bytes[shard] != page_bytes:
        raise ValueError(
            f"Pages of group {group.number}, shard {shard} have {group.page_bytes[shard]} bytes here, not {page_bytes}:"
            " another layout needs another model identity."
        )
    return group.page_units[shard]


def _first_occurrences(keys: Keys) -> npt.NDArray[np.bool_] | None:
    """Where a key is named for the first time; None when all are distinct."""
    words = np.sort(keys[:, 0])
    if not some(words[1:] == words[:-1]):
        return None
    first = np.ones(len(keys), np.bool_)
    seen: set[bytes] = set()
    for position, key in enumerate(keys):
        first[position] = key.tobytes() not in seen
        seen.add(key.tobytes())
    return first


def _places(runs: list[PageRun], units: int) -> npt.NDArray[np.int64]:
    """Places of the pages of runs, one after another."""
    if not runs:
        return np.zeros(0, np.int64)
    pieces = [place_of(arena.id, np.arange(first, first + pages * units, units)) for arena, first, pages in runs]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
