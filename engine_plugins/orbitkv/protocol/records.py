"""Completion records: 64-bit words in memory that the agent writes and a client reads, without a system call.

A word is (generation << 8 | state), written and read as one machine word. A reader that holds (slot, generation) learns
the state of exactly its operation: a slot used again carries another generation. Records are authoritative; the pipe
that comes with them, of which something can be read when they changed, is only a hint to look.

The first words of the region are counters of the session (`Header`). Behind the records are two words more of each:
how many chunks of its copy the agent has handed to a GPU, and, written by the GPU, how many of them are through (lower
half) and how many layers are in place with them, if they are copied layer by layer (upper half). The agent writes the
first before it hands over, with the session's permit in its hands (`permit.py`); of a restore that is copied layer by
layer its upper half is 1 as soon as all of it is with the GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import deque
from enum import IntEnum

from orbitkv.protocol.messages import RecordRef
from orbitkv.protocol.permit import Permit

WORD_BYTES = 8
SLOTS = 4096
"""Records in a region, the header's words among them."""
RECORD_BYTES = SLOTS * WORD_BYTES
REGION_BYTES = 3 * RECORD_BYTES
"""96 KiB. Up to version 1 of the records they are all that is there."""
_HALF = 32
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
    """The agent's side of one session's region. Used by the owner thread only, but for what says otherwise.

    Attributes:
        address: where the region lies in this process: a GPU may be told to write a word of it.
        permit: held while a copy of the session is handed to a GPU. Lives as long as the mapping.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("orbitkv-records", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, REGION_BYTES)
        self._map = mmap.mmap(self._fd, REGION_BYTES)
        self._start: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._start)
        self.permit = Permit()
        self._holders = 1
        fcntl.fcntl(
            self._fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL,
        )
        self._words = memoryview(self._map).cast("Q")
        self._fresh = FIRST_SLOT  # slots from here on were never used; most sessions use few
        self._free: deque[int] = deque()  # first in, first out: a final state stays readable for long

    @property
    def fd(self) -> int:
        """Descriptor of the region; whoever receives it can map it for reading only."""
        return self._fd

    def open(self) -> RecordRef | None:
        """Take a slot in state PENDING, or None when all are in use."""
        if self._fresh < SLOTS:
            slot = self._fresh
            self._fresh += 1
        elif self._free:
            slot = self._free.popleft()
        else:
            return None
        generation = (self._words[slot] >> 8) + 1 & 0xFFFFFFFF
        self._words[SLOTS + slot] = self._words[2 * SLOTS + slot] = 0
        self._words[slot] = generation << 8 | RecordState.PENDING
        return RecordRef(slot, generation)

    def set(self, ref: RecordRef, state: RecordState) -> None:
        """Move an open record to `state`."""
        self._words[ref.slot] = self.word(ref, state)

    def says(self, ref: RecordRef, state: RecordState) -> bool:
        """Whether an open record is in `state`, whoever wrote that."""
        return self._words[ref.slot] == self.word(ref, state)

    @staticmethod
    def word(ref: RecordRef, state: RecordState) -> int:
        """The word that says of an open record that it is in `state`."""
        return ref.generation << 8 | state

    def place(self, ref: RecordRef) -> int:
        """The address of a record's word."""
        return self.address + ref.slot * WORD_BYTES

    def hand_over(self, ref: RecordRef, chunks: int, *, whole: bool = False) -> None:
        """So many chunks of the copy are with a GPU, or about to be; or `whole` of it is. For the thread that hands
        them over.

        Raises:
            ValueError: the session is over, and nobody reads this any more.
        """
        self._words[SLOTS + ref.slot] = whole << _HALF | chunks

    def place_of_chunks(self, ref: RecordRef) -> int:
        """The address of the word in which the GPU counts a copy's chunks that are through, and its layers."""
        return self.address + (2 * SLOTS + ref.slot) * WORD_BYTES

    @staticmethod
    def word_of_chunks(chunks: int, layers: int) -> int:
        """The word that says that so many chunks are through, and so many layers in place."""
        return layers << _HALF | chunks

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
        """Keep the region mapped, and the permit, until `let_go`: a GPU may write to it."""
        self._holders += 1

    def let_go(self) -> None:
        """Undo `hold`."""
        self._holders -= 1
        if not self._holders:
            self._start = None
            self._map.close()
            self.permit.close()


class RecordReader:
    """The client's side: a read-only mapping of one region."""

    def __init__(self, fd: int) -> None:
        size = min(os.fstat(fd).st_size, REGION_BYTES)
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self._all = memoryview(self._map).cast("Q")
        self.words = self._all[:SLOTS]

    def state(self, ref: RecordRef) -> RecordState | None:
        """Return the state of the operation, or None once its slot belongs to another one."""
        word = self.words[ref.slot]
        return RecordState(word & 0xFF) if word >> 8 == ref.generation else None

    def counter(self, counter: Header) -> int:
        """Return a counter of the session."""
        return self.words[counter]

    def layers(self, ref: RecordRef) -> int:
        """How many layers of a restore that is PENDING are in place; 0 when it is in another state, or nobody tells."""
        place = 2 * SLOTS + ref.slot
        layers = self._all[place] >> _HALF if place < len(self._all) else 0
        return layers if self.state(ref) is RecordState.PENDING else 0

    def handed_over(self, ref: RecordRef) -> bool:
        """Whether all of a restore that is copied layer by layer is with the GPU while it is PENDING."""
        place = SLOTS + ref.slot
        whole = place < len(self._all) and bool(self._all[place] >> _HALF)
        return whole and self.state(ref) is RecordState.PENDING

    def drained(self) -> bool:
        """Whether all chunks of copies that were handed to a GPU are through.

        It stays so when the session's permit was taken away before; without that the next one may come at any time.
        """
        if len(self._all) < REGION_BYTES // WORD_BYTES:
            return False  # an agent of an earlier release does not tell
        words = self._all.tolist()
        return not any(
            (handed ^ through) & (1 << _HALF) - 1 and word & 0xFF == RecordState.PENDING
            for word, handed, through in zip(
                words[:SLOTS], words[SLOTS : 2 * SLOTS], words[2 * SLOTS : 3 * SLOTS], strict=True
            )
        )

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self._all.release()
        self._map.close()
