"""Handles of restores and saves: what a caller holds while the transfer thread works.

Each status is written by one thread at a time: by the caller's until the job is taken, by the transfer thread after.
Reading it makes no system call.
"""

from __future__ import annotations

import threading
from enum import Enum

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.errors import OrbitKVError
from orbitkv.protocol.messages import RecordRef
from orbitkv.protocol.records import RecordReader, RecordState

from .gpu import StreamPoint
from .hashes import BlockHashes
from .layout import Int64
from .registration import GpuRegistration


class RestoreStatus(Enum):
    """Facts about a restore; only DONE lets the engine use the pages."""

    PENDING = "pending"
    ENQUEUED = "enqueued"
    """Accepted by the agent; copies are running or about to."""
    DONE = "done"
    FAILED = "failed"
    """Ended without all bytes in place, and nothing writes to the pages any more."""
    CANCELLED = "cancelled"
    """Withdrawn before the first copy."""

    @property
    def final(self) -> bool:
        """Nothing changes any more."""
        return self in _FINAL_RESTORE


_FINAL_RESTORE = frozenset({RestoreStatus.DONE, RestoreStatus.FAILED, RestoreStatus.CANCELLED})


class SaveStatus(Enum):
    """Facts about a save. From COPIED on, and in every final state, the engine's pages are free again."""

    PREPARED = "prepared"
    SUBMITTED = "submitted"
    COPIED = "copied"
    COMMITTED = "committed"
    """Visible in the store."""
    NOT_SUBMITTED = "not_submitted"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Nothing changes any more."""
        return self in _FINAL_SAVE

    @property
    def pages_released(self) -> bool:
        """The engine may overwrite the source pages."""
        return self is SaveStatus.COPIED or self in _FINAL_SAVE


_FINAL_SAVE = frozenset({SaveStatus.COMMITTED, SaveStatus.NOT_SUBMITTED, SaveStatus.CANCELLED, SaveStatus.FAILED})


class RestoreHandle:
    """One restore.

    Attributes:
        after: where the engine's stream must have come before the blocks may be written.
        error: why it failed.
    """

    def __init__(
        self,
        registration: GpuRegistration,
        lease: int,
        blocks: list[tuple[int, Int64]],
        *,
        layer_order: bool,
        after: StreamPoint | None = None,
    ) -> None:
        self.after = after
        self.registration = registration
        self.lease = lease
        self.blocks = blocks
        self.layer_order = layer_order
        self._status = RestoreStatus.PENDING
        self._record: tuple[RecordReader, RecordRef] | None = None
        self._layers_ready = 0
        self._handed_over = False
        self.error: OrbitKVError | None = None
        self.changed = threading.Condition()

    @property
    def status(self) -> RestoreStatus:
        """Current status. Where the agent copies, its record tells of the end before anything else does."""
        if self._status is RestoreStatus.ENQUEUED and self._record is not None:
            records, ref = self._record
            if records.state(ref) is RecordState.DONE:
                return RestoreStatus.DONE
        return self._status

    @property
    def layers_ready(self) -> int:
        """Number of layers whose bytes are in place: all once it is done; in `layer_order` they come one by one."""
        status = self.status
        if status is RestoreStatus.DONE:
            return self.registration.layers
        if status is RestoreStatus.ENQUEUED and self._record is not None:
            records, ref = self._record
            self._layers_ready = max(self._layers_ready, records.layers(ref))
        return self._layers_ready

    @property
    def handed_over(self) -> bool:
        """Whether it ends soon even if the agent's process is stopped: all of it is with the GPU, or this process
        copies; in `layer_order` only. If the agent is killed then it still fails."""
        status = self.status
        if status is RestoreStatus.ENQUEUED and self._record is not None:
            records, ref = self._record
            return records.handed_over(ref)
        return self._handed_over and status is RestoreStatus.ENQUEUED

    def copies_here(self) -> None:
        """This process copies it, from now on (transfer thread)."""
        self._handed_over = self.layer_order

    def layers_in_place(self, layers: int) -> None:
        """The first `layers` layers are in place (transfer thread); wakes whoever waits."""
        with self.changed:
            self._layers_ready = layers
            self.changed.notify_all()

    def advance(self, status: RestoreStatus) -> None:
        """Move on (transfer thread, or the caller before it is handed over) and wake whoever waits."""
        with self.changed:  # Invariant: status changes under the lock, so that a waiter cannot miss one.
            self._status = status
            self.changed.notify_all()

    def follow(self, records: RecordReader, ref: RecordRef) -> None:
        """The agent accepted it and copies; where to read how that ends."""
        self._record = (records, ref)
        self.advance(RestoreStatus.ENQUEUED)


class SaveHandle:
    """One save.

    Attributes:
        after: where the engine's stream must have come before the blocks may be read.
        positions: indices of the pages that were copied, an int64 array a group (known from COPIED on).
        present: pages that the store had already.
        dropped: pages that could not be kept, by reason.
        error: why it was not submitted, or failed.
    """

    def __init__(
        self,
        registration: GpuRegistration,
        hashes: list[BlockHashes],
        blocks: list[tuple[int, Int64]],
        *,
        proof: bool,
        after: StreamPoint | None = None,
    ) -> None:
        self.after = after
        self.registration = registration
        self.hashes = hashes
        self.blocks = blocks
        self.proof = proof
        self.positions: list[npt.NDArray[np.int64]] = []
        self.present = 0
        self.dropped: dict[str, int] = {}
        self.error: OrbitKVError | None = None
        self.void = False
        self.changed = threading.Condition()
        self._status = SaveStatus.PREPARED
        self._record: tuple[RecordReader, RecordRef] | None = None

    @property
    def status(self) -> SaveStatus:
        """Current status. Whether a save is copied, and whether it became visible, is read from the agent's record."""
        if self._status is SaveStatus.SUBMITTED and self._record is not None:
            records, ref = self._record
            if records.state(ref) is RecordState.SETTLED:
                return SaveStatus.COPIED
        if self._status is SaveStatus.COPIED and self._record is not None:
            records, ref = self._record
            state = records.state(ref)
            if state is RecordState.DONE:
                self._status = SaveStatus.COMMITTED
            elif state not in (
                RecordState.PENDING,
                RecordState.SETTLED,
            ):  # failed, or so long ago that the slot has another owner
                self._status = SaveStatus.FAILED
        return self._status

    def advance(self, status: SaveStatus) -> None:
        """Move on (transfer thread, or the caller before submission) and wake whoever waits."""
        with self.changed:  # Invariant: status changes under the lock, so that a waiter cannot miss one.
            self._status = status
            self.changed.notify_all()

    def follow(self, records: RecordReader, ref: RecordRef) -> None:
        """Where to read whether the save became visible."""
        self._record = (records, ref)

    @property
    def record(self) -> tuple[RecordReader, RecordRef] | None:
        """The agent's record of this save, once it is submitted."""
        return self._record
