"""Making room: which entries go, for whom, and how much of it at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from orbitkv_agent.store.access_log import Entries
from orbitkv_agent.store.arenas import Arena
from orbitkv_agent.store.extents import UNIT_BYTES
from orbitkv_agent.store.memory import distinct
from orbitkv_agent.store.namespaces import EVICTION_ORDER, Namespace, RetentionClass
from orbitkv_agent.store.residency import PageRun, Residency

MAX_BATCH = 512  # entries released at a time
_MAX_BATCHES = 4  # of one reservation
_AHEAD = 64  # a full namespace has room made for one part in so many of what it keeps, at once and ahead of need,
_MOST_AHEAD_UNITS = (1 << 30) // UNIT_BYTES  # at most this,
_LEAST_AHEAD_UNITS = (16 << 20) // UNIT_BYTES  # and not where that is so little that each page counts;
_AHEAD_BATCH = 256  # so many entries at a time: twice as many take half as long again
_NEW_SHARE = 8  # and there one part in so many is left to what is new: it could never be asked for again otherwise
_SCANNED_ROWS = 1 << 15  # of the entry table, in one step of the search for dropped entries
_COMPARED_ARENAS = 4
_SAMPLES = 8  # pieces of an arena that are looked at to compare it with others,
_SAMPLED_UNITS = 1 << 12  # each of so many units,
_SAMPLED_ENTRIES = 64  # and at most so many entries
_EXAMINED_UNITS = 1 << 16  # of an arena that is being emptied, in one step
_EXAMINED_ENTRIES = 4 * MAX_BATCH


_NEW_LAST = (RetentionClass.RECLAIMABLE, RetentionClass.RETAINED, RetentionClass.PROBATIONARY)


class Reclaimer:
    """Makes room for reservations, and carries on in small steps with what takes longer.

    A namespace evicts its own pages, by class and then by last use. Memory passes from one namespace to another as
    whole arenas, because what was shared with one tenant's engines is never given to another's: the namespace that
    exceeds its guarantee most is made to empty the arena that costs it least. `pause_seconds` bounds the work of one
    call; the rest is done by `step`.
    """

    def __init__(
        self,
        residency: Residency,
        namespaces: dict[str, Namespace],
        pause_seconds: float,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._residency = residency
        self._arenas = residency.arenas
        self._namespaces = namespaces
        self._pause = pause_seconds
        self._clock = clock
        self._sweep_row = 0  # rows from here on may belong to dropped key spaces; 0 when there is nothing to sweep
        self._wanting: dict[str, None] = {}  # namespaces that wait for an arena of another, in order
        self._asked: set[str] = set()  # namespaces that were prepared so far
        self._emptying: Arena | None = None
        self._emptying_unit = 0  # where the next step goes on
        self._fruitless_units = 0  # examined since the last entry that could be released
        self._exposed: dict[Arena, None] = {}

    # ---- for a reservation

    def obtain(self, namespace: Namespace, count: int, units: int) -> tuple[list[PageRun], str]:
        """Place `count` pages of `units` units, evicting where needed.

        Returns the runs and why they may be fewer than asked for: "quota" or "pool_full".
        """
        deadline = self._clock() + self._pause
        allowed, reason = self._within_quota(namespace, count, units)
        runs: list[PageRun] = []
        missing = self._place_more(namespace, runs, allowed, units)
        while missing and self._add_arena(namespace):
            missing = self._place_more(namespace, runs, missing, units)
        batches = 0
        # While an arena is being faulted in, memory is on its way: nothing is evicted for want of it.
        while missing and batches < _MAX_BATCHES and not self._arenas.is_preparing(namespace.name):
            if (batches and self._clock() >= deadline) or not self._evict(namespace, missing * units):
                break
            missing = self._place_more(namespace, runs, missing, units)
            batches += 1
        if allowed == count and (missing or batches):
            self._want_arena(namespace)
            if self._wanting and self._clock() < deadline:
                self._pass_arena_on()
        elif self._arenas.prefault and not missing:
            self._look_ahead(namespace)
        return runs, "pool_full" if missing else reason

    def make_room(self, namespace: Namespace, count: int, units: int) -> bool:
        """Do ahead what `obtain` would have to for as much: get an arena, or evict one batch; whether that was done."""
        over = _over_quota(namespace, count, units)
        if over > 0:
            return self._evict(namespace, over)
        lacking = self._lacking(namespace, count, units)
        if lacking <= 0:
            return False
        if self._add_arena(namespace):
            return True
        # While an arena is being faulted in, memory is on its way.
        if self._arenas.is_preparing(namespace.name):
            return False
        ahead = _ahead(namespace)
        if not (self._evict(namespace, lacking) if lacking >= ahead else self._evict(namespace, ahead, _AHEAD_BATCH)):
            return False
        self._want_arena(namespace)
        return True

    def has_room(self, namespace: Namespace, count: int, units: int) -> bool:
        """Whether `count` pages of `units` units need neither an arena nor evictions, as far as can be told."""
        return _over_quota(namespace, count, units) <= 0 and self._lacking(namespace, count, units) <= 0

    def _lacking(self, namespace: Namespace, count: int, units: int) -> int:
        """Units that the namespace's arenas have too few."""
        for arena in reversed(self._arenas.of(namespace.name)):
            if count <= 0:
                break
            if arena.allocatable:
                count -= arena.allocator.available_pages(units)
        return count * units

    def prepare(self, namespace: Namespace) -> None:
        """Have the first arena of a namespace faulted in before the first page comes."""
        self._asked.add(namespace.name)
        if self._arenas.prefault and not self._arenas.of(namespace.name) and not self._add_arena(namespace):
            self._want_arena(namespace)

    def sweep(self) -> None:
        """Entries of a key space that was dropped are to be found and released by the next steps."""
        self._sweep_row = 1

    def expose(self, arena: Arena) -> None:
        """Somebody may hold this arena who may not use its namespace any more: the next steps empty and drop it."""
        arena.exposed = True
        self._exposed[arena] = None

    def _within_quota(self, namespace: Namespace, count: int, units: int) -> tuple[int, str]:
        if namespace.quota_bytes is None:
            return count, "pool_full"
        size = units * UNIT_BYTES
        over = _over_quota(namespace, count, units)
        if over > 0:
            self._evict(namespace, over)
        allowed = max(0, min(count, (namespace.quota_bytes - namespace.used_bytes) // size))
        return allowed, "quota" if allowed < count else "pool_full"

    def _place_more(self, namespace: Namespace, runs: list[PageRun], count: int, units: int) -> int:
        if not count:
            return 0
        placed = self._residency.place(namespace, count, units)
        runs += placed
        return count - sum(pages for _, _, pages in placed)

    def _add_arena(self, namespace: Namespace) -> bool:
        """Get the namespace another arena out of free capacity; whether one can take pages now."""
        arena = None if self._arenas.is_preparing(namespace.name) else self._request(namespace.name)
        return arena is not None and arena.allocatable

    def _request(self, name: str) -> Arena | None:
        """Make an arena for a namespace, unless what is free was freed for another one."""
        if self._wanting and name != next(iter(self._wanting)):
            return None
        self._arenas.drop_empty(but_of=name)
        arena = self._arenas.request(name)
        if arena is not None and name in self._wanting:
            self._stop_wanting(name)
        return arena

    def _look_ahead(self, namespace: Namespace) -> None:
        """Have the next arena faulted in before the last one is full, so that saves need not be dropped meanwhile."""
        free = self._arenas.held_bytes(namespace.name) - namespace.used_bytes
        # All of it while nobody else wants any.
        wanted = self._arenas.capacity_bytes if self._arenas.ahead and len(self._asked) == 1 else None
        if free < (wanted or self._arenas.arena_bytes // 4) and self._arenas.room_bytes:
            quota = namespace.quota_bytes
            if quota is None or self._arenas.held_bytes(namespace.name) < quota:
                self._add_arena(namespace)

    def _evict(self, namespace: Namespace, units: int, batch: int = MAX_BATCH) -> bool:
        """Release the namespace's least valuable entries, up to `units` units and one batch; whether any was."""
        table = self._residency.entries
        target, room = units, batch
        victims: list[Entries] = []
        for kind in _order(namespace):
            if target <= 0 or room <= 0:
                break
            taken = namespace.log(kind).oldest(room, self._residency.idle, lambda entries: table.units[entries], target)
            if len(taken):
                victims.append(taken)
                target -= int(table.units[taken].sum())
                room -= len(taken)
        if not victims:
            return False
        self._residency.release(np.concatenate(victims), evicted=True)
        return True

    def _evict_ahead(self, namespace: Namespace) -> bool:
        """Make room in a full namespace before the next save comes, which would wait for it; whether that was done."""
        ahead = _ahead(namespace)
        if not ahead or self._arenas.room_bytes or self._arenas.is_preparing(namespace.name):
            return False
        free = (self._arenas.held_bytes(namespace.name) - namespace.used_bytes) // UNIT_BYTES
        return free < ahead and self._evict(namespace, ahead - free, _AHEAD_BATCH)

    # ---- in small steps

    def step(self) -> bool:
        """Do a bounded piece of what is left to do; whether another piece could be done at once."""
        self._arenas.poll()
        if self._sweep_row:
            self._sweep_rows()
            return True
        if self._exposed and self._empty_exposed():
            return True
        for namespace in self._namespaces.values():
            if namespace.over_quota_bytes and self._evict(namespace, -(-namespace.over_quota_bytes // UNIT_BYTES)):
                return True
            if self._arenas.ahead and namespace.name in self._asked:
                if self._arenas.of(namespace.name):
                    self._look_ahead(namespace)
                else:
                    self.prepare(namespace)
            if self._evict_ahead(namespace):
                return True
        return bool(self._wanting) and self._pass_arena_on()

    def _empty_exposed(self) -> bool:
        """One step of emptying exposed arenas; whether there was progress. What is in use goes when that ends."""
        progress = False
        for arena in list(self._exposed):
            if self._arenas.get(arena.id) is arena and arena.ready:
                entries = distinct(arena.owners[np.flatnonzero(arena.owners)].astype(np.int64))
                entries = entries[self._residency.idle(entries)][:MAX_BATCH]
                if len(entries):
                    self._residency.release(entries, evicted=True)
                    progress = True
                if arena.allocator.used:
                    continue
                self._arenas.drop(arena)
                progress = True
            elif self._arenas.get(arena.id) is arena:
                continue  # it is being made, and then it is dropped
            del self._exposed[arena]
        return progress

    def _sweep_rows(self) -> None:
        table, index = self._residency.entries, self._residency.index
        end = min(self._sweep_row + _SCANNED_ROWS, table.rows_used)
        rows = self._sweep_row + np.flatnonzero(index.closed[table.owner[self._sweep_row : end]])
        # What a lease or a reservation still holds goes when that ends.
        rows = rows[self._residency.idle(rows)]
        if len(rows):
            self._residency.release(rows[:MAX_BATCH], evicted=False)
        if len(rows) <= MAX_BATCH:
            self._sweep_row = end if end < table.rows_used else 0

    def _want_arena(self, namespace: Namespace) -> None:
        """The namespace had to evict its own, or to go without: see whether it may claim another's memory."""
        if namespace.name in self._wanting or self._arenas.is_preparing(namespace.name):
            return
        if self._victim_of(namespace) is not None:
            self._wanting[namespace.name] = None

    def _stop_wanting(self, name: str) -> None:
        del self._wanting[name]
        if not self._wanting and self._emptying is not None:
            self._emptying.draining = False
            self._emptying = None

    def _pass_arena_on(self) -> bool:
        """One step of emptying an arena for the namespace that waits longest; whether there was progress."""
        name = next(iter(self._wanting))
        namespace = self._namespaces.get(name)
        if namespace is None or self._arenas.is_preparing(name):
            self._stop_wanting(name)
            return True
        if self._request(name) is not None:
            return True
        if self._arenas.discarding:
            return False  # the memory is on its way: `poll` tells when it is here
        arena = self._emptying
        if arena is None or not self._may_empty(arena):
            if arena is not None:
                arena.draining = False
            arena = self._emptying = self._victim_of(namespace)
            if arena is None:
                self._stop_wanting(name)
                return False
            arena.draining = True
            self._emptying_unit = self._fruitless_units = 0
        if arena.allocator.used:
            self._release_some(arena)
        if arena.allocator.used == 0:
            self._emptying = None
            self._arenas.drop(arena)
            return True
        # All that is left may be in use: then later steps try again, as the owner comes by.
        return self._fruitless_units < arena.allocator.capacity

    def _release_some(self, arena: Arena) -> None:
        """Release the next entries with a page in this arena that nobody uses."""
        start = self._emptying_unit
        window = arena.owners[start : start + _EXAMINED_UNITS]
        units = np.flatnonzero(window)[:_EXAMINED_ENTRIES]
        entries = window[units].astype(np.int64)
        idle = np.flatnonzero(self._residency.idle(entries))[:MAX_BATCH]
        examined = len(window)
        if len(idle) == MAX_BATCH:
            examined = int(units[idle[-1]]) + 1
        elif len(units) == _EXAMINED_ENTRIES:
            examined = int(units[-1]) + 1
        self._emptying_unit = start + examined if start + examined < arena.allocator.capacity else 0
        self._fruitless_units += examined
        if len(idle):
            self._fruitless_units = 0
            self._residency.release(distinct(entries[idle]), evicted=True)

    def _may_empty(self, arena: Arena) -> bool:
        if self._arenas.get(arena.id) is not arena:
            return False
        return self._namespaces[arena.namespace].excess_bytes >= arena.used_bytes

    def _victim_of(self, namespace: Namespace) -> Arena | None:
        """The arena that another namespace has to empty for this one, or None if it has no such claim.

        A namespace may claim memory while it is within its guarantee, while it has none at all, or while another one
        exceeds its guarantee by so much more that both are nearer to each other afterwards.
        """
        entitled = namespace.used_bytes < namespace.guaranteed_bytes or not self._arenas.of(namespace.name)
        for other in sorted(self._namespaces.values(), key=lambda one: -one.excess_bytes):
            if other is namespace or not other.excess_bytes:
                continue
            if not entitled and other.excess_bytes - namespace.excess_bytes < 2 * self._arenas.arena_bytes:
                break
            arenas = [arena for arena in self._arenas.of(other.name) if arena.ready and self._may_empty(arena)]
            if arenas:
                arenas.sort(key=lambda arena: (arena.used_bytes, arena.id))
                return min(arenas[:_COMPARED_ARENAS], key=self._cost_of_emptying)
        return None

    def _cost_of_emptying(self, arena: Arena) -> tuple[int, int]:
        """Entries in use first, since the arena would wait for them; then the classes of those to go. A sample."""
        pieces = np.array_split(arena.owners, _SAMPLES)
        entries = np.concatenate([_first_owners(piece[:_SAMPLED_UNITS]) for piece in pieces])
        in_use = len(entries) - int(self._residency.idle(entries).sum())
        return in_use, int(self._residency.entries.retention[entries].astype(np.int64).sum())


def _over_quota(namespace: Namespace, count: int, units: int) -> int:
    """Units by which `count` more pages of `units` units exceed the namespace's quota."""
    if namespace.quota_bytes is None:
        return 0
    return -((namespace.quota_bytes - namespace.used_bytes) // UNIT_BYTES - count * units)


def _ahead(namespace: Namespace) -> int:
    """Units that room is made for at once when a namespace is full: a batch of entries costs little more than one."""
    units = min(namespace.used_bytes // UNIT_BYTES // _AHEAD, _MOST_AHEAD_UNITS)
    return units if units >= _LEAST_AHEAD_UNITS else 0


def _order(namespace: Namespace) -> Sequence[RetentionClass]:
    """The classes in the order in which their entries go."""
    new = namespace.log(RetentionClass.PROBATIONARY).live
    return _NEW_LAST if _ahead(namespace) and new * _NEW_SHARE < namespace.entries else EVICTION_ORDER


def _first_owners(owners: npt.NDArray[np.int32]) -> Entries:
    """The first entries in a piece of an arena, a bounded number of them."""
    return owners[np.flatnonzero(owners)[:_SAMPLED_ENTRIES]].astype(np.int64)
