"""Restores: a lease is consumed and its pages are copied.

In host mode the client copies, by the plan that it gets, and says when it is done. In CUDA mode the agent copies; what
it accepted is in flight from then on, and the completion record tells the end.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    PagePlaces,
    RecordRef,
    RestoreDone,
    RestorePlan,
    StartLayeredRestore,
    StartRestore,
)
from orbitkv.protocol.records import RecordState
from orbitkv_agent import faults
from orbitkv_agent.devices.base import Copier, Copy, CopyPart
from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Loop
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.queries.leases import GroupPlaces, Lease, handle_numbers
from orbitkv_agent.queries.service import QueryService
from orbitkv_agent.sessions.errors import invalid, stale
from orbitkv_agent.sessions.instances import Registration
from orbitkv_agent.sessions.session import Session, SessionState, is_own
from orbitkv_agent.transfers.plans import Checked, PlanRefused, check_blocks, group_of, same_groups
from orbitkv_agent.transfers.progress import CopyProgress

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Restore:
    """An accepted restore. `bytes` is what it copies, without padding; `copy` is the agent's own copy, once begun."""

    number: int
    session: Session
    registration: Registration
    lease: Lease
    record: RecordRef
    bytes: int
    started: float
    begun: bool = False
    copy: Copy | None = None
    warned: float | None = None

    def __str__(self) -> str:
        return f"restore {self.number} of {self.session}, instance {self.registration.instance}, {self.bytes} bytes"


@dataclass(eq=False, slots=True)
class _Waiting:
    """A restore that waits for one of the device's places: until then a client that copies itself gets no plan."""

    session: Session
    sequence: int
    registration: Registration
    lease: Lease
    bytes: int
    blocks: list[Checked] = field(default_factory=list)
    layered: bool = False
    accepted: Restore | None = None


class Restores:
    """All restores. Used by the owner thread only.

    Args:
        limit: most that are in flight on one device. In host mode each registration counts as one: its process copies.
        copier: copies for the engines; None where they do so themselves.
    """

    def __init__(
        self, loop: Loop, queries: QueryService, counters: Counters, limit: int, copier: Copier | None = None
    ) -> None:
        self._loop = loop
        self._queries = queries
        self._counters = counters
        self._limit = limit
        self._copier = copier
        self._numbers = handle_numbers()
        self._restores: dict[int, Restore] = {}
        self._in_flight: Counter[object] = Counter()
        self._waiting: dict[object, deque[_Waiting]] = {}
        self.inflight_bytes = 0

    def __len__(self) -> int:
        return len(self._restores)

    def __iter__(self) -> Iterator[Restore]:
        """Those in flight, oldest first."""
        return iter(list(self._restores.values()))

    @property
    def waiting(self) -> int:
        """Restores that wait for a place and were not answered yet."""
        return sum(each.accepted is None for queue in self._waiting.values() for each in queue)

    def start(self, session: Session, sequence: int, message: StartRestore, registration: Registration) -> None:
        """Accept a restore. It begins now, or when the device has a place.

        Raises:
            Refused: STALE, the lease cannot be used; otherwise a field. The lease stays what it was.
        """
        try:
            lease, size, blocks = self._check(message, registration)
        except PlanRefused as refusal:
            raise refusal.count(self._counters.plans_refused) from None
        if session.records is None:
            return
        layered = isinstance(message, StartLayeredRestore)
        waiting = _Waiting(session, sequence, registration, lease, size, blocks, layered)
        lane = self._lane(registration)
        begins = self._in_flight[lane] < self._limit
        if self._copier is not None:
            # The copy is on its way before the rest is written down: nobody else has a turn meanwhile.
            waiting.accepted = self._accept(waiting)
            if waiting.accepted is None:
                return
        try:
            if begins and self._copier is not None:
                self._begin(waiting)
        finally:  # after a defect, too, when copies may run: then both sides' memory stays held
            self._queries.consume(lease)
            registration.copy_started()
        if not begins:
            self._waiting.setdefault(lane, deque()).append(waiting)
        elif self._copier is None:
            self._begin(waiting)
        if waiting.accepted is not None:  # nobody else needs to know the places
            session.reply(sequence, RestorePlan(waiting.accepted.number, waiting.accepted.record, []))
        self._queries.consumed(lease)

    def done(self, session: Session, message: RestoreDone) -> None:
        """The client's copies ended.

        Raises:
            Refused: STALE, no such restore of this session is in flight.
        """
        restore = self._restores.get(message.restore)
        if restore is None or not is_own(restore.session, session):
            raise stale(f"unknown-restore: {message.restore} is not in flight in this session")
        if self._copier is not None:
            raise invalid(f"restore {message.restore}: this agent copies by itself and knows when it is done")
        faults.hit("restore-done")
        self._end(restore, copied=message.copied)

    def end_stream(self, session: Session) -> None:
        """Restores that have not begun end at once; of those that the agent copies, nothing more is submitted."""
        for lane, queue in list(self._waiting.items()):
            for waiting in [each for each in queue if each.session is session]:
                queue.remove(waiting)
                if waiting.accepted is not None:
                    self._end(waiting.accepted, copied=False)
                else:
                    self._drop(waiting)
            if not queue:
                self._waiting.pop(lane, None)
        for restore in list(session.restores.values()):
            if restore.copy is not None:
                restore.copy.abandon()

    def end_copies(self, session: Session) -> None:
        """The session's process copies nothing any more. What the agent copies itself drains."""
        if self._copier is not None:
            return
        for restore in list(session.restores.values()):
            self._end(restore, copied=False)

    # ------------------------------------------------------------------------------------------- internals

    def _check(self, message: StartRestore, registration: Registration) -> tuple[Lease, int, list[Checked]]:
        if message.ready is not None or message.layer_words:
            name = "ready" if message.ready is not None else "layer_words"
            raise PlanRefused(
                "unsupported",
                f"{name}: words in device memory are not there yet; a client waits for its own streams",
                ErrorKind.UNSUPPORTED,
            )
        lease = self._queries.leases.find(message.lease)
        # Of another cache namespace nothing is said, not even that it has such a lease.
        if lease is None or not lease.live or lease.operation.instance.namespace != registration.instance.namespace:
            raise PlanRefused(
                "stale",
                f"unknown-lease: {message.lease} is not alive: used, returned, expired or revoked; ask again",
                ErrorKind.STALE,
            )
        if lease.operation.instance is not registration.instance or lease.shard != registration.shard:
            raise PlanRefused(
                "stale",
                f"unknown-lease: {message.lease} is for worker {lease.shard} of instance {lease.operation.instance}, "
                f"registration {registration.number} is worker {registration.shard} of {registration.instance}",
                ErrorKind.STALE,
            )
        leased = lease.pages.pages
        size = 0
        ids: list[Checked] = []
        exact = guard("restore-shape")
        if exact:
            same_groups([part.group for part in message.blocks], [part.group for part in leased])
        for part, pages in zip(message.blocks, leased, strict=exact):
            group = group_of(registration, part.group)
            checked = check_blocks(part, group, pages.count if exact else len(part.blob) // 4)
            size += checked.used * group.page_bytes
            ids.append(checked)
        return lease, size, ids

    def _lane(self, registration: Registration) -> object:
        return registration if self._copier is None else self._copier.lane(registration)

    def _accept(self, waiting: _Waiting) -> Restore | None:
        """Accept a restore: from here on its record tells about it. None when it was refused."""
        session, registration, lease = waiting.session, waiting.registration, waiting.lease
        record = session.records.open() if session.records is not None else None
        if record is None:  # thousands of operations of this session are open
            if not lease.live:
                self._drop(waiting)
            refusal = PlanRefused("busy", "this session has no completion record left; let others end", ErrorKind.BUSY)
            session.refuse(waiting.sequence, refusal.count(self._counters.plans_refused))
            return None
        restore = Restore(next(self._numbers), session, registration, lease, record, waiting.bytes, self._loop.now())
        self._restores[restore.number] = restore
        session.restores[restore.number] = restore
        if self._copier is None:
            pages = [
                PagePlaces(group, arenas.astype("<u4").tobytes(), offsets.astype("<u8").tobytes())
                for group, arenas, offsets in _places(lease)
            ]
            session.reply(waiting.sequence, RestorePlan(restore.number, record, pages))
        return restore

    def _begin(self, waiting: _Waiting) -> None:
        restore = waiting.accepted or self._accept(waiting)
        if restore is None:
            return
        restore.begun = True
        self._in_flight[self._lane(restore.registration)] += 1
        self.inflight_bytes += restore.bytes
        if self._copier is not None:
            parts = [
                _part(*places, blocks) for places, blocks in zip(_places(restore.lease), waiting.blocks, strict=True)
            ]
            restore.copy = self._copier.start(
                restore.registration,
                parts,
                lambda error: self._copied(restore, error),
                to_engine=True,
                landed=lambda: _tell(restore),
                progress=CopyProgress.of(restore.session.records, restore.record, RecordState.DONE),
                layered=waiting.layered,
            )

    def _copied(self, restore: Restore, error: str) -> None:
        """No byte of the restore moves any more."""
        faults.hit("restore-done")
        if error:
            logger.warning("%s ended without all of its bytes: %s", restore, error)
        self._end(restore, copied=not error)
        restore.session.close_if_drained()

    def _drop(self, waiting: _Waiting) -> None:
        self._queries.end_consumed(waiting.lease)
        waiting.registration.copy_ended()

    def _end(self, restore: Restore, *, copied: bool) -> None:
        session, registration = restore.session, restore.registration
        del self._restores[restore.number]
        del session.restores[restore.number]
        if restore.begun:
            self._in_flight[self._lane(registration)] -= 1
            self.inflight_bytes -= restore.bytes
        if session.records is not None and session.state is not SessionState.CLOSED:
            session.records.close(restore.record, RecordState.DONE if copied else RecordState.FAILED)
            session.notify()
        self._queries.end_consumed(restore.lease)
        if copied:
            self._counters.load_bytes += restore.bytes
            self._counters.load_duration.observe(self._loop.now() - restore.started)
        else:
            self._counters.load_failures += 1
        registration.copy_ended()
        self._next(self._lane(registration))

    def _next(self, lane: object) -> None:
        queue = self._waiting.get(lane, deque())
        while queue and self._in_flight[lane] < self._limit:
            self._begin(queue.popleft())
        if not queue:
            self._waiting.pop(lane, None)
            if not self._in_flight[lane]:
                del self._in_flight[lane]


def _tell(restore: Restore) -> None:
    """All bytes are in place: whoever reads the record sees it at once, before the owner thread comes to it.

    The slot is the restore's until the owner gives it back, so this, and the GPU with the same word, are its only
    writers; called on a thread of the device.
    """
    records = restore.session.records
    if records is not None:
        with contextlib.suppress(ValueError):  # the session is over, and its records with it
            records.set(restore.record, RecordState.DONE)


def _places(lease: Lease) -> list[GroupPlaces]:
    # A proof is kept for one worker by itself, as its only shard.
    return lease.pages.places(0 if lease.operation.proving is not None else lease.shard)


def _part(group: int, arenas: npt.NDArray[np.uint32], offsets: npt.NDArray[np.uint64], checked: Checked) -> CopyPart:
    blocks = checked.blocks
    if checked.used == blocks.size:
        return CopyPart(group, blocks, arenas, offsets)
    wanted = blocks >= 0
    return CopyPart(group, blocks[wanted], arenas[wanted], offsets[wanted])
