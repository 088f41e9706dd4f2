"""Restores: a lease is consumed, the client copies, and says when it is done."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import RecordRef, RestoreDone, RestorePlan, StartRestore
from orbitkv.protocol.records import RecordState
from orbitkv_agent import faults
from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Loop
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.queries.leases import Lease, handle_numbers
from orbitkv_agent.queries.service import QueryService
from orbitkv_agent.sessions.errors import stale
from orbitkv_agent.sessions.instances import Registration
from orbitkv_agent.sessions.session import Session, is_own
from orbitkv_agent.transfers.plans import PlanRefused, check_blocks, group_of, same_groups


@dataclass(eq=False, slots=True)
class Restore:
    """A restore whose plan went to the client. `bytes` is what it copies, without padding."""

    number: int
    session: Session
    registration: Registration
    lease: Lease
    record: RecordRef
    bytes: int
    started: float
    warned: float | None = None

    def __str__(self) -> str:
        return f"restore {self.number} of {self.session}, instance {self.registration.instance}, {self.bytes} bytes"


@dataclass(eq=False, slots=True)
class _Waiting:
    """An accepted restore that waits for one of the device's places; nothing was said about it yet."""

    session: Session
    sequence: int
    registration: Registration
    lease: Lease
    bytes: int


class Restores:
    """All restores. Used by the owner thread only.

    Args:
        limit: most that are in flight on one device. In host mode each registration counts as one: its process copies.
    """

    def __init__(self, loop: Loop, queries: QueryService, counters: Counters, limit: int) -> None:
        self._loop = loop
        self._queries = queries
        self._counters = counters
        self._limit = limit
        self._numbers = handle_numbers()
        self._restores: dict[int, Restore] = {}
        self._in_flight: Counter[Registration] = Counter()
        self._waiting: dict[Registration, deque[_Waiting]] = {}
        self.inflight_bytes = 0

    def __len__(self) -> int:
        return len(self._restores)

    def __iter__(self) -> Iterator[Restore]:
        """Those in flight, oldest first."""
        return iter(list(self._restores.values()))

    @property
    def waiting(self) -> int:
        """Accepted restores that wait for a place."""
        return sum(map(len, self._waiting.values()))

    def start(self, session: Session, sequence: int, message: StartRestore, registration: Registration) -> None:
        """Accept a restore; its plan is sent now, or when the device has a place.

        Raises:
            Refused: STALE, the lease cannot be used; otherwise a field. The lease stays what it was.
        """
        try:
            lease, size = self._check(message, registration)
        except PlanRefused as refusal:
            raise refusal.count(self._counters.plans_refused) from None
        if session.records is None:
            return
        self._queries.consume(lease)
        registration.copy_started()
        waiting = _Waiting(session, sequence, registration, lease, size)
        if self._in_flight[registration] >= self._limit:
            self._waiting.setdefault(registration, deque()).append(waiting)
        else:
            self._grant(waiting)

    def done(self, session: Session, message: RestoreDone) -> None:
        """The client's copies ended.

        Raises:
            Refused: STALE, no such restore of this session is in flight.
        """
        restore = self._restores.get(message.restore)
        if restore is None or not is_own(restore.session, session):
            raise stale(f"restore {message.restore} is not in flight in this session")
        faults.hit("restore-done")
        self._end(restore, copied=message.copied)

    def end_stream(self, session: Session) -> None:
        """Restores that were never answered have no copy: they end at once."""
        for registration, queue in list(self._waiting.items()):
            for waiting in [each for each in queue if each.session is session]:
                queue.remove(waiting)
                self._drop(waiting)
            if not queue:
                self._waiting.pop(registration, None)

    def end_copies(self, session: Session) -> None:
        """The session's process copies nothing any more."""
        for restore in list(session.restores.values()):
            self._end(restore, copied=False)

    # ------------------------------------------------------------------------------------------- internals

    def _check(self, message: StartRestore, registration: Registration) -> tuple[Lease, int]:
        if message.ready is not None or message.layer_words:
            field = "ready" if message.ready is not None else "layer_words"
            raise PlanRefused(
                "unsupported", f"{field}: timeline words are not there in host mode", ErrorKind.UNSUPPORTED
            )
        lease = self._queries.leases.find(message.lease)
        if lease is None or not lease.live:
            raise PlanRefused(
                "stale",
                f"lease {message.lease} is not alive: used, returned, expired or revoked; ask again",
                ErrorKind.STALE,
            )
        if lease.operation.instance is not registration.instance or lease.shard != registration.shard:
            raise PlanRefused(
                "stale",
                f"lease {message.lease} is for worker {lease.shard} of instance {lease.operation.instance}, "
                f"registration {registration.number} is worker {registration.shard} of {registration.instance}",
                ErrorKind.STALE,
            )
        leased = lease.pages.pages
        size = 0
        exact = guard("restore-shape")
        if exact:
            same_groups([part.group for part in message.blocks], [part.group for part in leased])
        for part, pages in zip(message.blocks, leased, strict=exact):
            group = group_of(registration, part.group)
            blocks = check_blocks(part, group, pages.count if exact else len(part.blob) // 4)
            size += int((blocks >= 0).sum()) * group.page_bytes
        return lease, size

    def _grant(self, waiting: _Waiting) -> None:
        session, registration, lease = waiting.session, waiting.registration, waiting.lease
        record = session.records.open() if session.records is not None else None
        if record is None:  # thousands of operations of this session are open
            self._drop(waiting)
            refusal = PlanRefused("busy", "this session has no completion record left; let others end", ErrorKind.BUSY)
            session.refuse(waiting.sequence, refusal.count(self._counters.plans_refused))
            return
        # A proof is kept for one worker by itself, as its only shard.
        places = lease.pages.places(0 if lease.operation.proving is not None else lease.shard)
        restore = Restore(next(self._numbers), session, registration, lease, record, waiting.bytes, self._loop.now())
        self._restores[restore.number] = restore
        session.restores[restore.number] = restore
        self._in_flight[registration] += 1
        self.inflight_bytes += restore.bytes
        session.reply(waiting.sequence, RestorePlan(restore.number, record, places))

    def _drop(self, waiting: _Waiting) -> None:
        self._queries.end_consumed(waiting.lease)
        waiting.registration.copy_ended()

    def _end(self, restore: Restore, *, copied: bool) -> None:
        session, registration = restore.session, restore.registration
        del self._restores[restore.number]
        del session.restores[restore.number]
        self._in_flight[registration] -= 1
        self.inflight_bytes -= restore.bytes
        self._queries.end_consumed(restore.lease)
        if session.records is not None:
            session.records.close(restore.record, RecordState.DONE if copied else RecordState.FAILED)
            session.notify()
        if copied:
            self._counters.load_bytes += restore.bytes
            self._counters.load_duration.observe(self._loop.now() - restore.started)
        else:
            self._counters.load_failures += 1
        registration.copy_ended()
        self._next(registration)

    def _next(self, registration: Registration) -> None:
        queue = self._waiting.get(registration, deque())
        while queue and self._in_flight[registration] < self._limit:
            self._grant(queue.popleft())
        if not queue:
            self._waiting.pop(registration, None)
            if not self._in_flight[registration]:
                del self._in_flight[registration]
