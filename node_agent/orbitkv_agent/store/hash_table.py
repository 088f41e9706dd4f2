"""The hash table of the index: vectorised, without Python objects for each key, and growing a few buckets at a time."""

from __future__ import annotations

import secrets
import struct

import numpy as np
import numpy.typing as npt

from orbitkv_agent.store.memory import lazy_zeros, some

KEY_BYTES = 32
"""Room for one engine hash; shorter ones are padded with zeros."""

KEY_WORDS = KEY_BYTES // 8
_SLOTS = 4  # of a bucket: half a cache line
_INDEX_BITS = 30
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_TAG_SHIFT = np.uint64(31)  # a tag is the top 33 bits of the hash, so that tag and index fill a positive int64
_TAG_TOP = 1 << 32  # set in every tag: an empty slot (0) then matches none
_MASK64 = (1 << 64) - 1
_FIRST_BUCKETS = 1 << 10
_SPLIT_BATCH = 512  # buckets: fewer at a time are not worth the calls
_MOST_DUE = 8  # insertions leave up to one bucket in so many to `grow`
_BUCKET_BYTES = 8 * _SLOTS
_unpack_words = struct.Struct(f"<{KEY_WORDS}Q").unpack_from
_unpack_slots = struct.Struct(f"<{_SLOTS}q").unpack_from

MAX_ENTRIES = 1 << _INDEX_BITS

Keys = npt.NDArray[np.uint64]
"""Engine hashes as rows of four 64-bit words, shape (n, 4)."""

Indices = npt.NDArray[np.int64]


class HashTable:
    """Maps (owner, key) to an entry index in 1..MAX_ENTRIES-1; 0 stands for none.

    Keys and owners are not kept here: `keys` and `owners` are columns of the entry table, row by entry index, and are
    compared in full by every look-up. A slot is one int64, (tag << 30 | index); four slots make a bucket; what finds
    its bucket full goes to a list of its own (well under one entry in a hundred).

    Linear hashing: a few buckets are split at a time, so the table grows in place and in step with its contents, and
    there is no moment at which millions of entries move. It does not shrink.

    The hash is multiply-add with secret odd factors: nobody outside can choose keys that collide.
    """

    def __init__(self, keys: Keys, owners: npt.NDArray[np.uint32], *, factors: tuple[int, ...] | None = None) -> None:
        self._keys = keys
        self._owners = owners
        # Single items are read through these: numpy takes several times as long for them.
        self._scalar_keys = keys.data
        self._scalar_owners = owners.data
        self._factors = factors or tuple(secrets.randbits(64) | 1 for _ in range(KEY_WORDS + 1))
        self._key_factors = np.array(self._factors[:KEY_WORDS], np.uint64)
        self._owner_factor = self._factors[KEY_WORDS]
        self._max_buckets = max(_FIRST_BUCKETS, 3 * len(keys) // 2)
        self._slots: npt.NDArray[np.int64] = lazy_zeros((self._max_buckets, _SLOTS), np.int64)
        self._flat_slots = self._slots.reshape(-1)
        self._scalar_slots = self._slots.data
        self._spilled: npt.NDArray[np.bool_] = lazy_zeros(self._max_buckets, np.bool_)  # buckets with a list in _spills
        self._spills: dict[int, list[int]] = {}
        self._half = _FIRST_BUCKETS  # buckets at the start of the current round of splits; a power of two
        self._buckets = _FIRST_BUCKETS
        self.count = 0

    @property
    def buckets(self) -> int:
        """Buckets so far."""
        return self._buckets

    @property
    def spilled(self) -> int:
        """Buckets that have more entries than slots."""
        return len(self._spills)

    def find_one(self, blob: bytes, offset: int, owner: int) -> int:
        """Entry of the key at `offset` in `blob` (padded keys of KEY_BYTES), or 0."""
        a, b, c, d = words = _unpack_words(blob, offset)
        e, f, g, h, i = self._factors
        tag = ((a * e + b * f + c * g + d * h + owner * i) & _MASK64) >> 31 | _TAG_TOP
        bucket = tag & (2 * self._half - 1)
        if bucket >= self._buckets:
            bucket -= self._half
        slots = _unpack_slots(self._scalar_slots, bucket * _BUCKET_BYTES)
        if self._spills:
            slots += tuple(self._spills.get(bucket, ()))
        for slot in slots:
            if slot >> _INDEX_BITS == tag:
                index: int = slot & _INDEX_MASK
                if self._scalar_owners[index] == owner and _unpack_words(self._scalar_keys, index * KEY_BYTES) == words:
                    return index
        return 0

    def tags(self, keys: Keys, owner: int) -> Indices:
        """What the table knows `keys` of an owner by, shape (n,): the same for as long as the table exists."""
        return self._tags(keys, np.uint64(owner * self._owner_factor & _MASK64))

    def find(self, keys: Keys, owner: int, tags: Indices | None = None) -> Indices:
        """Entries of `keys`, shape (n,); 0 where there is none. `tags`: theirs, where they are known already."""
        if tags is None:
            tags = self.tags(keys, owner)
        buckets = self._bucket(tags)
        slots = self._slots.take(buckets, axis=0)
        # What remains is the bare index where the tags are equal, and something larger than any index elsewhere.
        slots ^= (tags << _INDEX_BITS)[:, None]
        if not (some(slots <= _INDEX_MASK) or (self._spills and some(self._spilled.take(buckets)))):
            return np.zeros(len(keys), np.int64)
        found: Indices = slots.min(axis=1)
        found[found > _INDEX_MASK] = 0
        other_key = self._keys.take(found, axis=0) != keys
        other_owner = self._owners.take(found) != owner
        if some(other_key) or some(other_owner):
            wrong = np.flatnonzero(other_key.any(axis=1) | other_owner)
            # Absent, unless hidden by a smaller index under the same tag or beyond the slots of its bucket.
            doubtful = wrong[(found[wrong] != 0) | self._spilled[buckets[wrong]]]
            found[wrong] = 0
            blob = keys[doubtful].tobytes()
            for position, row in enumerate(doubtful.tolist()):
                found[row] = self.find_one(blob, position * KEY_BYTES, owner)
        return found

    def insert(self, entries: Indices, tags: Indices | None = None) -> None:
        """Add distinct entries whose keys the table does not hold, with key and owner from the columns. `tags`: as for
        `find`."""
        if tags is None:
            tags = self._tags_of(entries)
        self.count += len(entries)
        while (more := self._due - self._buckets // _MOST_DUE) >= _SPLIT_BATCH:
            self._split(more)
        self._place(self._bucket(tags), tags << _INDEX_BITS | entries)

    def grow(self) -> None:
        """Split a batch of buckets, if so many are due. To be called at some other time after each insertion, which
        takes long enough as it is."""
        if (due := self._due) >= _SPLIT_BATCH:
            self._split(min(due, 2 * _SPLIT_BATCH))

    def remove(self, entries: Indices) -> None:
        """Remove distinct entries; their key and owner must still be in the columns."""
        tags = self._tags_of(entries)
        buckets = self._bucket(tags)
        slots = tags << _INDEX_BITS | entries
        places = (self._slots.take(buckets, axis=0) == slots[:, None]).argmax(axis=1)
        places += buckets * _SLOTS
        elsewhere = self._flat_slots.take(places) != slots
        if some(elsewhere):
            self._remove_spilt(buckets[elsewhere], slots[elsewhere])
            places = places[~elsewhere]
        self._flat_slots[places] = 0
        self.count -= len(entries)

    def _remove_spilt(self, buckets: Indices, slots: Indices) -> None:
        for bucket, slot in zip(buckets.tolist(), slots.tolist(), strict=True):
            rest = self._spills[bucket]
            rest.remove(slot)
            if not rest:
                del self._spills[bucket]
                self._spilled[bucket] = False

    def _place(self, buckets: Indices, slots: Indices) -> None:
        """Write each slot into an empty place of its bucket, or into the bucket's list if there is none."""
        while len(slots):
            places = (self._slots.take(buckets, axis=0) == 0).argmax(axis=1)  # the first empty one, if there is one
            places += buckets * _SLOTS
            full = self._flat_slots.take(places) != 0
            if some(full):
                self._spill(buckets[full], slots[full])
                buckets, slots, places = buckets[~full], slots[~full], places[~full]
            self._flat_slots[places] = slots
            # Of several that went for the same place the last one has it; the others try again.
            lost = self._flat_slots.take(places) != slots
            if not some(lost):
                break
            buckets, slots = buckets[lost], slots[lost]

    def _spill(self, buckets: Indices, slots: Indices) -> None:
        for bucket, slot in zip(buckets.tolist(), slots.tolist(), strict=True):
            self._spills.setdefault(bucket, []).append(slot)
            self._spilled[bucket] = True

    def _tags_of(self, entries: Indices) -> Indices:
        return self._tags(self._keys[entries], self._owners[entries] * np.uint64(self._owner_factor))

    def _tags(self, keys: Keys, salts: np.uint64 | npt.NDArray[np.uint64]) -> Indices:
        """Tag of each key; `salts` are the owners times their factor."""
        hashed = keys @ self._key_factors
        hashed += salts
        hashed >>= _TAG_SHIFT
        tags: Indices = hashed.view(np.int64)
        tags |= _TAG_TOP
        return tags

    def _bucket(self, tags: Indices) -> Indices:
        buckets = tags & (2 * self._half - 1)
        buckets -= (buckets >= self._buckets) * np.int64(self._half)
        return buckets

    @property
    def _due(self) -> int:
        """Buckets to be split until there are three for every two entries."""
        return min(3 * self.count // 2, self._max_buckets) - self._buckets

    def _split(self, count: int) -> None:
        """Split the next buckets: `count` of them, or those that are left of this round."""
        split = self._buckets - self._half
        count = min(count, self._half - split)
        old = self._slots[split : split + count]
        moves = (old >> _INDEX_BITS & self._half) != 0
        self._slots[self._buckets : self._buckets + count] = np.where(moves, old, 0)
        old[moves] = 0
        self._buckets += count
        spilt = split + np.flatnonzero(self._spilled[split : split + count])
        if len(spilt):
            self._place_again(spilt)
        if self._buckets == 2 * self._half:
            self._half = self._buckets

    def _place_again(self, buckets: Indices) -> None:
        """After a split there is room for what had spilled."""
        self._spilled[buckets] = False
        slots = np.array([slot for bucket in buckets.tolist() for slot in self._spills.pop(bucket)], np.int64)
        self._place(self._bucket(slots >> _INDEX_BITS), slots)
