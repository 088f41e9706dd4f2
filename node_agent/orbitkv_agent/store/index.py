"""What is cached: key spaces, their groups, and the table of entries."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from orbitkv_agent.store.access_log import Entries
from orbitkv_agent.store.hash_table import KEY_BYTES, KEY_WORDS, HashTable, Indices, Keys
from orbitkv_agent.store.memory import lazy_zeros
from orbitkv_agent.store.namespaces import Namespace

MAX_GROUPS = 1 << 20
MAX_SHARDS = 64

Run = range | Entries
"""Entries in the order of their pages, shape (n,): a range where their rows follow each other, which costs no array."""

_NOTHING = range(0)
_KEY = np.dtype(f"V{KEY_BYTES}")

_OFFSET_BITS = 32  # of a place: arena id << 32 | unit in the arena


class EntryTable:
    """One row an entry, as columns indexed by entry; row 0 stands for "none" and stays zero.

    An entry is one engine hash of one group of one key space, with one page a shard. Columns are sized for the most
    entries that the pool can hold and cost memory only where rows were used.
    """

    def __init__(self, max_entries: int) -> None:
        self.capacity = max_entries
        rows = self.capacity + 1
        self.keys: npt.NDArray[np.uint64] = lazy_zeros((rows, KEY_WORDS), np.uint64)
        """Engine hash, padded with zeros."""
        self.owner: npt.NDArray[np.uint32] = lazy_zeros(rows, np.uint32)
        """Number of the group it belongs to; 0 for a free row."""
        self.visible: npt.NDArray[np.uint32] = lazy_zeros(rows, np.uint32)
        """The same while every shard's page is committed, otherwise 0: one comparison finds both out."""
        self.generation: npt.NDArray[np.uint32] = lazy_zeros(rows, np.uint32)
        """Rises each time that the row becomes free."""
        self.pins: npt.NDArray[np.int32] = lazy_zeros(rows, np.int32)
        """Leases that hold the entry."""
        self.pending: npt.NDArray[np.uint8] = lazy_zeros(rows, np.uint8)
        """Shards that are reserved and not committed."""
        self.committed: npt.NDArray[np.uint8] = lazy_zeros(rows, np.uint8)
        """Shards that are committed."""
        self.units: npt.NDArray[np.int32] = lazy_zeros(rows, np.int32)
        """4 KiB units of all its pages, reserved ones included."""
        self.retention: npt.NDArray[np.uint8] = lazy_zeros(rows, np.uint8)
        """RetentionClass."""
        self.last_tick: npt.NDArray[np.int64] = lazy_zeros(rows, np.int64)
        """When it was last used; 0 while no access log mentions it."""
        self._places: list[npt.NDArray[np.int64] | None] = [None] * MAX_SHARDS
        self._free: npt.NDArray[np.int32] = lazy_zeros(rows, np.int32)
        self._free_count = 0
        self._fresh = 1  # rows from here on were never used
        self._next_tick = 1

    @property
    def rows_used(self) -> int:
        """Rows below this one were in use at some time."""
        return self._fresh

    @property
    def available(self) -> int:
        """How many entries can be added."""
        return self._free_count + self.capacity + 1 - self._fresh

    def places(self, shard: int) -> npt.NDArray[np.int64]:
        """Column of the places (see `place_of`) of a shard's pages: 0 for none, negated until committed."""
        column = self._places[shard]
        if column is None:
            column = self._places[shard] = lazy_zeros(self.capacity + 1, np.int64)
        return column

    def take_rows(self, count: int) -> Run:
        """Take `count` free rows, in long ascending runs where possible: these make look-ups of prefixes fast."""
        reused = min(count, self._free_count)
        fresh = self._fresh
        self._fresh += count - reused
        if not reused:
            return range(fresh, self._fresh)
        self._free_count -= reused
        rows = np.empty(count, np.int64)
        rows[:reused] = self._free[self._free_count : self._free_count + reused]
        rows[:reused].sort()
        rows[reused:] = np.arange(fresh, self._fresh)
        first, last = int(rows[0]), int(rows[-1])
        return range(first, last + 1) if last - first == count - 1 else rows

    def free_rows(self, rows: Entries) -> None:
        """Clear rows and make them available; handles to them are stale from now on."""
        self.owner[rows] = 0
        self.visible[rows] = 0
        self.generation[rows] += 1
        self.pending[rows] = 0
        self.committed[rows] = 0
        self.units[rows] = 0
        self.retention[rows] = 0
        self.last_tick[rows] = 0
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)

    def add_pins(self, run: Run, count: int) -> None:
        """Add to the pins of a run's entries; of one that is named twice, twice."""
        if isinstance(run, range):
            self.pins[run.start : run.stop] += count
        else:
            # A number of the column's type: numpy takes another, five times slower way for a Python number.
            np.add.at(self.pins, run, np.int32(count))

    def touch(self, entries: Entries) -> npt.NDArray[np.int64]:
        """Give entries new ticks, ascending in their order, and return these. The last mention of an entry holds."""
        ticks = np.arange(self._next_tick, self._next_tick + len(entries), dtype=np.int64)
        self._next_tick += len(entries)
        self.last_tick[entries] = ticks
        return ticks


class Group:
    """One KV cache group of a key space. Page sizes go by shard, fixed by each shard's first reservation."""

    def __init__(self, key_space: KeySpace, number: int, owner: int) -> None:
        self.key_space = key_space
        self.number = number
        self.owner = owner
        self.owner_bytes = owner.to_bytes(4, "little")
        self.entries = 0
        self.page_bytes = [0] * key_space.shards
        self.page_units = [0] * key_space.shards
        self.pages = [0] * key_space.shards


class KeySpace:
    """Keys that may match each other: one model identity in one cache namespace, at one key and reset generation.

    Made by `PageCache.open_key_space`. An entry is complete when `shards` pages are committed. Hashes are `hash_bytes`
    long. Once `closed`, it finds nothing and takes nothing.
    """

    def __init__(
        self,
        index: Index,
        namespace: Namespace,
        identity: Hashable,
        key_generation: Hashable,
        shards: int,
        hash_bytes: int,
    ) -> None:
        self.namespace = namespace
        self.identity = identity
        self.key_generation = key_generation
        self.reset_generation = namespace.reset_generation
        self.shards = shards
        self.hash_bytes = hash_bytes
        self.closed = False
        self.groups: dict[int, Group] = {}
        self._index = index

    def group(self, number: int) -> Group:
        """The group of this number, made if there was none. Raises ValueError once closed."""
        group = self.groups.get(number)
        if group is None:
            if self.closed:
                raise ValueError("This key space was dropped: open it again.")
            group = self.groups[number] = self._index.add_group(self, number)
        return group

    def padded(self, blob: bytes) -> bytes:
        """Hashes one after another, each padded to KEY_BYTES. Raises ValueError for a piece of a hash."""
        if self.hash_bytes == KEY_BYTES and len(blob) % KEY_BYTES == 0:
            return blob
        count, rest = divmod(len(blob), self.hash_bytes)
        if rest:
            raise ValueError(f"{len(blob)} bytes are not a whole number of hashes of {self.hash_bytes} bytes.")
        keys = np.zeros((count, KEY_BYTES), np.uint8)
        keys[:, : self.hash_bytes] = np.frombuffer(blob, np.uint8).reshape(count, self.hash_bytes)
        return keys.tobytes()

    def lookup_run(self, group: int, blob: bytes) -> Run:
        """Entries of the longest leading run of complete pages for the hashes in `blob`.

        To be pinned in the same turn, or not used. Once closed, it finds nothing.
        """
        known = self.groups.get(group)
        if known is None or self.closed:
            return _NOTHING
        if self.hash_bytes != KEY_BYTES or len(blob) % KEY_BYTES:
            blob = self.padded(blob)
        return self._index.lookup_run(known, blob)

    def hashes(self, entries: Entries) -> list[bytes]:
        """Engine hashes of entries of this key space."""
        blob = self._index.entries.keys[entries].tobytes()
        return [blob[start : start + self.hash_bytes] for start in range(0, len(blob), KEY_BYTES)]


class Index:
    """Finds entries by key. Group numbers (owners) are reused only when no entry carries them any more."""

    def __init__(self, max_entries: int) -> None:
        self.entries = EntryTable(max_entries)
        self.groups: list[Group | None] = [None]
        self._table = HashTable(self.entries.keys, self.entries.owner)
        # Small pieces are read through these: numpy takes several times as long for them.
        self._scalar_keys = self.entries.keys.data.cast("B")
        self._scalar_visible = self.entries.visible.data
        self._free_owners: list[int] = []
        self.closed: npt.NDArray[np.bool_] = lazy_zeros(MAX_GROUPS, np.bool_)
        """By owner: whether its key space was dropped."""
        self.closing = 0
        """Dropped groups that still have entries."""

    @property
    def count(self) -> int:
        """Entries that exist, complete or not."""
        return self._table.count

    @property
    def full(self) -> bool:
        """Whether no group can be added."""
        return not self._free_owners and len(self.groups) >= MAX_GROUPS

    def add_group(self, key_space: KeySpace, number: int) -> Group:
        """Register a group. Raises OverflowError when the index is `full`."""
        if self.full:
            raise OverflowError(f"The store already keeps {MAX_GROUPS - 1} groups of models.")
        if self._free_owners:
            owner = self._free_owners.pop()
        else:
            owner = len(self.groups)
            self.groups.append(None)
        key_space.namespace.groups += 1
        group = self.groups[owner] = Group(key_space, number, owner)
        self.closed[owner] = False
        return group

    def group_of(self, owner: int) -> Group:
        """The group with this number."""
        group = self.groups[owner]
        assert group is not None
        return group

    def close(self, key_space: KeySpace) -> bool:
        """Make a key space find nothing from now on. Returns whether entries of it are left to be released."""
        key_space.closed = True
        left = False
        for group in key_space.groups.values():
            self.closed[group.owner] = True
            self.closing += 1
            left |= group.entries > 0
            self._forget_if_done(group)
        return left

    def lookup_run(self, group: Group, blob: bytes) -> Run:
        """See `KeySpace.lookup_run`; `blob` holds padded hashes.

        Pages saved together have neighbouring rows, so one look-up finds where a run starts and comparing memory finds
        where it ends. Where runs are short, one vectorised look-up takes over.
        """
        count = len(blob) // KEY_BYTES
        owner = group.owner
        runs: list[range] = []
        position = 0
        while position < count:
            if 8 * (len(runs) - 2) > position:
                return np.concatenate([*map(entries_of, runs), self._lookup_each(blob, position, owner)])
            first = self._table.find_one(blob, position * KEY_BYTES, owner)
            if self._scalar_visible[first] != owner:
                break
            length = self._run_length(first, blob, position, count - position, group)
            runs.append(range(first, first + length))
            position += length
        if not runs:
            return _NOTHING
        return runs[0] if len(runs) == 1 else np.concatenate([*map(entries_of, runs)])

    def _lookup_each(self, blob: bytes, position: int, owner: int) -> Entries:
        """Entries of the leading run of complete pages for the keys from `position` on."""
        keys = np.frombuffer(blob, np.uint64, offset=position * KEY_BYTES).reshape(-1, KEY_WORDS)
        found = self._table.find(keys, owner)
        hit = self.entries.visible[found] == owner
        return found if hit.all() else found[: int(hit.argmin())]

    def tags(self, group: Group, keys: Keys) -> Indices:
        """See `HashTable.tags`: for keys that are looked up and then added."""
        return self._table.tags(keys, group.owner)

    def find(self, group: Group, keys: Keys, tags: Indices | None = None) -> Entries:
        """Entries of keys, whatever their state, shape (n,); 0 where there is none."""
        return self._table.find(keys, group.owner, tags)

    def add(self, group: Group, keys: Keys, tags: Indices) -> Run:
        """New entries, waiting for their first page, for distinct keys that have none.

        Each gets a page: the rows last as long as the pages do.
        """
        run = self.entries.take_rows(len(keys))
        rows = rows_of(run)
        self.entries.keys[rows] = keys
        self.entries.owner[rows] = group.owner
        self.entries.pending[rows] = 1
        self._table.insert(entries_of(run), tags)
        group.entries += len(run)
        return run

    def grow(self) -> None:
        """See `HashTable.grow`: to be called once after each `add`, in another turn."""
        self._table.grow()

    def remove(self, group: Group, entries: Entries) -> None:
        """Remove entries of one group; their pages were released."""
        self._table.remove(entries)
        self.entries.free_rows(entries)
        group.entries -= len(entries)
        self._forget_if_done(group)

    def _forget_if_done(self, group: Group) -> None:
        if group.key_space.closed and group.entries == 0 and self.groups[group.owner] is group:
            self.groups[group.owner] = None
            self.closing -= 1
            group.key_space.namespace.groups -= 1
            self._free_owners.append(group.owner)

    def _run_length(self, first: int, blob: bytes, position: int, limit: int, group: Group) -> int:
        """How many of the next `limit` keys are complete entries in the rows from `first` on (the first is)."""
        end = min(first + limit, self.entries.capacity + 1)
        limit = end - first
        wanted = blob[position * KEY_BYTES : (position + limit) * KEY_BYTES]
        keys = self._scalar_keys[first * KEY_BYTES : end * KEY_BYTES].tobytes()
        states = self._scalar_visible[first:end].tobytes()
        if keys == wanted and states == group.owner_bytes * limit:
            return limit
        if keys[KEY_BYTES : 2 * KEY_BYTES] != wanted[KEY_BYTES : 2 * KEY_BYTES]:
            return 1
        same = (np.frombuffer(keys, _KEY) == np.frombuffer(wanted, _KEY)) & (
            np.frombuffer(states, np.uint32) == group.owner
        )
        return limit if same.all() else int(same.argmin())


def rows_of(run: Run) -> slice | Entries:
    """What selects a run's rows in a column."""
    return slice(run.start, run.stop) if isinstance(run, range) else run


def entries_of(run: Run) -> Entries:
    """A run as an array."""
    return np.arange(run.start, run.stop, dtype=np.int64) if isinstance(run, range) else run


def place_of(arena_id: int, first_units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Places of pages as one number each."""
    return (arena_id << _OFFSET_BITS) + first_units


def arena_ids_of(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Arena ids of places."""
    return places >> _OFFSET_BITS


def units_of(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """First units of places in their arenas."""
    return places & ((1 << _OFFSET_BITS) - 1)
