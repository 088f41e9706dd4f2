"""Order of last use as an append-only log: using a thousand entries is a few array writes, not as many list moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Entries = npt.NDArray[np.int64]
"""Indices of entries (see `index.EntryTable`). The machine's own index type: numpy converts any other at each use."""

BLOCK_MENTIONS = 4096
_SLACK_MENTIONS = 2 * BLOCK_MENTIONS
_FIRST_SCANNED = 256  # and twice as many each time that they were not enough
_MAX_SCANNED = 16 * BLOCK_MENTIONS  # bounds one call of `oldest`, however many stale mentions lie ahead


class _Block:
    """Mentions in order: `entries[start:end]`, each with the tick at which it was made."""

    __slots__ = ("end", "entries", "start", "ticks")

    def __init__(self) -> None:
        self.entries = np.empty(BLOCK_MENTIONS, np.int32)
        self.ticks = np.empty(BLOCK_MENTIONS, np.int64)
        self.start = 0
        self.end = 0

    def append(self, entries: Entries, ticks: npt.NDArray[np.int64]) -> int:
        """Add as many of the mentions as fit; returns how many."""
        count = min(len(entries), BLOCK_MENTIONS - self.end)
        self.entries[self.end : self.end + count] = entries[:count]
        self.ticks[self.end : self.end + count] = ticks[:count]
        self.end += count
        return count


class AccessLog:
    """Least-recently-used order of the entries of one retention class of one cache namespace.

    `last_ticks` is the entry table's column of last ticks, shared by all logs: ticks are unique, so a mention is valid,
    in this log and no other, exactly while `last_ticks[entry]` is its tick. Using an entry again, moving it to another
    class or freeing it makes older mentions stale without touching them.

    `live` is how many entries belong here; its owner keeps it. Each `mention` compacts a bounded piece of the log while
    it is longer than twice that, which keeps it under three times `live` (plus two blocks).
    """

    def __init__(self, last_ticks: npt.NDArray[np.int64]) -> None:
        self._last_ticks = last_ticks
        # Older than all of _blocks, and compacted in the current pass.
        self._compacted: deque[_Block] = deque()
        self._blocks: deque[_Block] = deque([_Block()])
        self._mentions = 0
        self.live = 0

    def __len__(self) -> int:
        """Mentions held, stale ones included."""
        return self._mentions

    def mention(self, entries: Entries, ticks: npt.NDArray[np.int64]) -> None:
        """Make `entries` the most recently used, the last of them most of all.

        The caller has written the same `ticks` to `last_ticks`.
        """
        self._mentions += len(entries)
        remaining = len(entries)
        while remaining:
            if self._blocks[-1].end == BLOCK_MENTIONS:
                self._blocks.append(_Block())
            remaining -= self._blocks[-1].append(entries[-remaining:], ticks[-remaining:])
        budget = 4 * len(entries)
        while budget > 0 and self._mentions > 2 * self.live + _SLACK_MENTIONS:
            budget -= self._compact_block()

    def oldest(
        self,
        limit: int,
        eligible: Callable[[Entries], npt.NDArray[np.bool_]],
        cost: Callable[[Entries], npt.NDArray[np.int32]],
        target: int,
    ) -> Entries:
        """Take the least recently used eligible entries until their `cost` sums to `target`, at most `limit` of them.

        What is taken has no mention any more. A mention of an ineligible entry is dropped, and its last tick becomes 0:
        whoever makes it eligible again mentions it then. So pinned entries are not walked over again and again. One
        call looks at a bounded number of mentions and may return less than there is.
        """
        taken: list[Entries] = []
        total = 0
        scanned = 0
        window = _FIRST_SCANNED
        while limit > 0 and total < target and scanned < _MAX_SCANNED:
            block = self._head()
            if block is None:
                break
            end = min(block.end, block.start + window)
            window *= 2
            entries = block.entries[block.start : end].astype(np.int64)
            valid = np.flatnonzero(self._last_ticks[entries] == block.ticks[block.start : end])
            candidates = entries[valid]
            allowed = eligible(candidates)
            victims = candidates[allowed][:limit]
            sums = np.cumsum(cost(victims)) if len(victims) else np.zeros(0, np.int64)
            count = min(len(victims), int(np.searchsorted(sums, target - total)) + 1)
            victims = victims[:count]
            consumed = end - block.start
            if count and (count == limit or total + int(sums[count - 1]) >= target):
                consumed = int(valid[np.flatnonzero(allowed)[count - 1]]) + 1
            passed = candidates[: int(np.searchsorted(valid, consumed))]
            self._last_ticks[passed] = 0
            block.start += consumed
            self._mentions -= consumed
            scanned += consumed
            if count:
                taken.append(victims)
                total += int(sums[count - 1])
                limit -= count
        return np.concatenate(taken) if taken else np.zeros(0, np.int64)

    def _head(self) -> _Block | None:
        """The oldest block that still has mentions; empty ones before it are dropped."""
        while self._compacted:
            if self._compacted[0].start < self._compacted[0].end:
                return self._compacted[0]
            self._compacted.popleft()
        while self._blocks[0].start == self._blocks[0].end:
            if len(self._blocks) == 1:
                return None
            self._blocks.popleft()
        return self._blocks[0]

    def _compact_block(self) -> int:
        """Move the valid mentions of the next block to the compacted part; returns how many mentions were looked at."""
        if len(self._blocks) == 1:
            # The pass is over but for the block that is being filled: the next one starts at the oldest again.
            self._compacted.extend(self._blocks)
            self._blocks, self._compacted = self._compacted, deque()
        block = self._blocks.popleft()
        if not self._blocks:
            self._blocks.append(_Block())
        looked_at = block.end - block.start
        entries = block.entries[block.start : block.end].astype(np.int64)
        ticks = block.ticks[block.start : block.end]
        valid = self._last_ticks[entries] == ticks
        entries, ticks = entries[valid], ticks[valid]
        self._mentions += len(entries) - looked_at
        while len(entries):
            if not self._compacted or self._compacted[-1].end == BLOCK_MENTIONS:
                self._compacted.append(_Block())
            count = self._compacted[-1].append(entries, ticks)
            entries, ticks = entries[count:], ticks[count:]
        return max(looked_at, 1)
