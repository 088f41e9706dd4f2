"""Completion records: 64-bit words in memory that the agent writes and a client reads, without a system call.

A word is (generation << 8 | state), written and read as one machine word. A reader that holds (slot, generation) learns
the state of exactly its operation: a slot used again carries another generation. Records are authoritative; the eventfd
that comes with them is only a hint to look.

The first words of the region are counters of the session (`Header`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import deque
from enum import IntEnum

from orbitkv.protocol.messages import RecordRef

WORD_BYTES = 8
SLOTS = 4096
"""Words in a region, the header's among them: 32 KiB."""
REGION_BYTES = SLOTS * WORD_BYTES
_F_SEAL_FUTURE_WRITE = 0x0010


class Header(IntEnum):
    """Indices of the session's counters; each only grows."""

    ARENAS = 0
    """Changes when arenas of the session were retired (`SyncArenas`)."""
    EVENTS = 1
    """Changes when the store has events for the session's instance (`TakeEvents`)."""
    INSTANCE = 2
    """Changes when the state of the session's instance changed."""


FIRST_SLOT = 8


class RecordState(IntEnum):
    """State of the operation that a record belongs to."""

    FREE = 0
    PENDING = 1
    """Query: loading. Restore or save: accepted, its pages are held."""
    SETTLED = 2
    """Query: `PollQuery` has an answer. Save in CUDA mode: the agent's copy ended, the pages are free, and
    `CommitSave` is awaited."""
    DONE = 3
    """Restore: all bytes are in place. Save: visible in the store."""
    FAILED = 4
    """Restore or save: ended without effect."""


class RecordWriter:
    """The agent's side of one session's region. Used by the owner thread only.

    Attributes:
        address: where the region lies in this process: a GPU may be told to write a word of it.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("orbitkv-records", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, REGION_BYTES)
        self._map = mmap.mmap(self._fd, REGION_BYTES)
        self._start: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._start)
        self._holders = 1
        fcntl.fcntl(
            self._fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL,
        )
        self._words = memoryview(self._map).cast("Q")
        self._free = deque(range(FIRST_SLOT, SLOTS))  # first in, first out: a final state stays readable for long
        self._generations = [0] * SLOTS

    @property
    def fd(self) -> int:
        """Descriptor of the region; whoever receives it can map it for reading only."""
        return self._fd

    def open(self) -> RecordRef | None:
        """Take a slot in state PENDING, or None when all are in use."""
        if not self._free:
            return None
        slot = self._free.popleft()
        generation = self._generations[slot] = (self._generations[slot] + 1) & 0xFFFFFFFF
        self._words[slot] = generation << 8 | RecordState.PENDING
        return RecordRef(slot, generation)

    def set(self, ref: RecordRef, state: RecordState) -> None:
        """Move an open record to `state`."""
        self._words[ref.slot] = self.word(ref, state)

    @staticmethod
    def word(ref: RecordRef, state: RecordState) -> int:
        """The word that says of an open record that it is in `state`."""
        return ref.generation << 8 | state

    def place(self, ref: RecordRef) -> int:
        """The address of a record's word."""
        return self.address + ref.slot * WORD_BYTES

    def close(self, ref: RecordRef, state: RecordState) -> None:
        """Write the final state and give the slot back; readers keep seeing it until the slot is taken again."""
        self._words[ref.slot] = self.word(ref, state)
        self._free.append(ref.slot)

    def bump(self, counter: Header) -> None:
        """Advance a counter of the session."""
        self._words[counter] += 1

    def destroy(self) -> None:
        """Close, and unmap when nobody else holds the region; clients keep their own mapping."""
        self._words.release()
        os.close(self._fd)
        self.let_go()

    def hold(self) -> None:
        """Keep the region mapped until `let_go`: a GPU may write to it."""
        self._holders += 1

    def let_go(self) -> None:
        """Undo `hold`."""
        self._holders -= 1
        if not self._holders:
            self._start = None
            self._map.close()


class RecordReader:
    """The client's side: a read-only mapping of one region."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, REGION_BYTES, prot=mmap.PROT_READ)
        self.words = memoryview(self._map).cast("Q")

    def state(self, ref: RecordRef) -> RecordState | None:
        """Return the state of the operation, or None once its slot belongs to another one."""
        word = self.words[ref.slot]
        return RecordState(word & 0xFF) if word >> 8 == ref.generation else None

    def counter(self, counter: Header) -> int:
        """Return a counter of the session."""
        return self.words[counter]

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self._map.close()
