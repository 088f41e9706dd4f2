"""Queries from the first call to the end of their leases.

Every operation is in one of four places: waiting for a place (`_for_place`), waiting for bytes (`_for_bytes`), answered
(its leases live, or the answer waits to be fetched), or restoring. `_pump` moves on what can move, whenever something
came back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import GroupHashes, LeasedPages, Loading, Nothing, PollQuery, Query, Ready
from orbitkv.protocol.records import RecordState

from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Deadlines, Loop
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.queries.boundaries import common_boundary
from orbitkv_agent.queries.budget import ByteBudget, Phase
from orbitkv_agent.queries.leases import Lease, Leases, PinnedPages
from orbitkv_agent.queries.operations import QueryOperation, State
from orbitkv_agent.queries.queue import Lanes, Places
from orbitkv_agent.sessions.errors import Refused, invalid, stale
from orbitkv_agent.sessions.instances import Instance, Registration
from orbitkv_agent.store.cache import PageCache

if TYPE_CHECKING:
    from orbitkv_agent.config import AgentConfig
    from orbitkv_agent.sessions.session import Session

MAX_HASH_BYTES: Final = 32
"""Longest engine hash."""
MAX_OPERATIONS: Final = 4000
"""Operations of one session, waiting ones included; beyond it a query is refused."""
MAX_HELD_HASHES: Final = 64 << 20
"""Bytes of hashes that one session's operations may hold."""


class _Outcome(Enum):
    SETTLED = "settled"
    OWNER_FULL = "owner-full"
    FULL = "full"


class QueryService:
    """Owns all query operations, leases and the byte budget. Used by the owner thread only."""

    def __init__(self, loop: Loop, cache: PageCache, counters: Counters, config: AgentConfig) -> None:
        self.budget = ByteBudget(config.query_budget_bytes, config.instance_budget_bytes)
        self.leases = Leases()
        self.draining = False
        self._loop = loop
        self._cache = cache
        self._counters = counters
        self._places: Places[Session] = Places(config.max_session_queries, config.max_queries)
        self._for_place: Lanes[Session, QueryOperation] = Lanes()
        self._for_bytes: Lanes[Instance, QueryOperation] = Lanes()
        self._answered: Deadlines[QueryOperation] = Deadlines(loop, config.reply_ttl_ms / 1000, self._expire)
        self._held_hashes: dict[Session, int] = {}
        self._pumping = False

    @property
    def outstanding(self) -> int:
        """Operations that wait or whose leases live, admitted or not."""
        return self._places.taken + len(self._for_place)

    @property
    def unadmitted(self) -> int:
        """Those among them that wait for a place."""
        return len(self._for_place)

    @property
    def waiting_for_bytes(self) -> int:
        """Those among them that wait for bytes."""
        return len(self._for_bytes)

    # --------------------------------------------------------------------------------------------------------- requests

    def query(
        self, session: Session, message: Query, instance: Instance | None, proving: Registration | None = None
    ) -> Ready | Loading | Nothing:
        """Start, revise or poll an operation.

        Args:
            instance: the one that the message names, None when it is not known.
            proving: the registration whose proof pages are asked for.

        Raises:
            Refused: INVALID, a field; STALE, an older revision; BUSY, too many operations.
        """
        known = session.operations.get(message.operation)
        if known is not None:
            if message.revision < known.revision and guard("stale-revision"):
                raise stale(f"operation {message.operation} is at revision {known.revision} already")
            if message.revision == known.revision:
                if known.hashes != message.hashes and guard("same-hashes"):
                    raise invalid(
                        f"operation {message.operation}, revision {message.revision}: the hashes differ from those asked "
                        "for before; other hashes are a new revision"
                    )
                return self._answer(known)
            self._withdraw(known)
        if self.draining:
            return Nothing("draining")
        if instance is None or (proving is None and not instance.serving):
            return Nothing("not-serving")
        held = self._check(session, message, instance, proving)
        operation = QueryOperation(session, instance, message.operation, message.revision, message.hashes, proving)
        operation.hash_bytes_held = held
        self._held_hashes[session] = self._held_hashes.get(session, 0) + held
        session.operations[operation.number] = operation
        instance.operations[operation] = None
        if self._places.full or self._places.lane_is_full(session) or self._for_place.waits_in(session):
            self._counters.query_unadmitted += 1
            self._for_place.append(session, operation)
        else:
            self._admit(operation)
            if self._for_bytes:
                self._pump()  # it waits behind others, and is tried after them
        if operation.answer is None:
            if message.max_wait_ms <= 0:
                self._settle(operation, Nothing("budget"))
            else:
                operation.timer = self._loop.call_later(
                    message.max_wait_ms / 1000, lambda: self._settle(operation, Nothing("budget"))
                )
        return self._answer(operation)

    def poll(self, session: Session, message: PollQuery) -> Ready | Loading | Nothing:
        """Return the state of an operation.

        Raises:
            Refused: STALE, there is a newer revision.
        """
        operation = session.operations.get(message.operation)
        if operation is None or message.revision > operation.revision:
            return Nothing("gone")
        if message.revision < operation.revision and guard("stale-revision"):
            raise stale(f"operation {message.operation} is at revision {operation.revision} already")
        return self._answer(operation)

    def cancel(self, session: Session, numbers: Sequence[int]) -> None:
        """Withdraw operations; unknown ones are none."""
        for number in numbers:
            operation = session.operations.get(number)
            if operation is not None:
                self._withdraw(operation)

    def release(self, session: Session, numbers: Sequence[int]) -> None:
        """Return leases unused; those that are gone already are none.

        Raises:
            Refused: STALE, one of them was promised to another session.
        """
        leases = [lease for lease in map(self.leases.find, numbers) if lease is not None and lease.live]
        for lease in leases:
            if lease.operation.session is not session and guard("own-lease"):
                raise stale(f"lease {lease.number} was not promised to this session")
        for lease in leases:
            if lease.live:  # the same number may be named twice
                self._end_unused(lease)

    # --------------------------------------------------------------------------------------------------------- restores

    def consume(self, lease: Lease) -> None:
        """Bind a live lease to a restore; its operation no longer counts as outstanding."""
        operation = lease.operation
        self.leases.consume(lease)
        if guard("budget-drain"):
            lease.charge.move(Phase.RESTORING)
        else:
            lease.charge.release()
        if operation.state is State.READY:
            operation.to(State.RESTORING)
            self._give_place(operation)
        if not any(each.live for each in operation.leases):
            self._answered.discard(operation)
            self._forget(operation)
        self._pump()

    def end_consumed(self, lease: Lease) -> None:
        """The restore of a lease ended: no copy touches its pages any more."""
        operation = lease.operation
        self.leases.end(lease)
        self._finish_restoring(operation)
        self._pump()

    # ----------------------------------------------------------------------------------------------------- lost parties

    def revoke(self, instance: Instance) -> None:
        """The instance cannot hit any more: nothing that was promised to it holds."""
        for operation in list(instance.operations):
            if operation.state is State.NONE:
                self._settle(operation, Nothing("not-serving"))
            elif operation.proving is None or operation.proving.retired:
                self._end_live_leases(operation)

    def end_session(self, session: Session) -> None:
        """Its stream ended: queries and unconsumed leases go at once."""
        for operation in list(session.operations.values()):
            self._withdraw(operation)

    def drain(self) -> None:
        """Answer what waits, admit nothing more. Leases stay for restores that are on their way."""
        self.draining = True
        for operation in [*self._for_place, *self._for_bytes]:
            self._settle(operation, Nothing("draining"))

    # --------------------------------------------------------------------------------------------------------- internals

    def _check(self, session: Session, message: Query, instance: Instance, proving: Registration | None) -> int:
        tokens = instance.group_tokens if proving is None else {key: 1 for key in proving.groups}
        asked = [each.group for each in message.hashes]
        if len(set(asked)) != len(asked):
            raise invalid(f"hashes name a group twice: {asked}")
        unknown = [group for group in asked if group not in tokens]
        if unknown or not asked:
            raise invalid(f"hashes name groups {asked}; instance {instance} has {sorted(tokens)}")
        if len(asked) != len(tokens) and proving is None and guard("all-groups"):
            raise invalid(
                f"hashes name groups {sorted(asked)}; a hit needs every group of instance {instance}: {sorted(tokens)}"
            )
        held = 0
        for part in message.hashes:
            check_hashes(part)
            held += len(part.blob)
        if (
            len(session.operations) >= MAX_OPERATIONS
            or self._held_hashes.get(session, 0) + held > max(MAX_HELD_HASHES, held)
        ):
            raise Refused(ErrorKind.BUSY, f"this session has {len(session.operations)} queries; let some of them end first")
        return held

    def _answer(self, operation: QueryOperation) -> Ready | Loading | Nothing:
        answer = operation.answer
        if answer is None:
            if operation.record is None and operation.session.records is not None:
                operation.record = operation.session.records.open()
            return Loading(operation.admitted, operation.record)
        if isinstance(answer, Ready):
            # The promise is repeated only while it holds: it may have been revoked, or partly used, since it was made.
            if not (operation.state is State.READY and all(lease.live for lease in operation.leases)) and guard("live-lease"):
                self._forget(operation)
                return Nothing("gone")
            return answer
        self._forget(operation)
        return answer

    def _admit(self, operation: QueryOperation) -> None:
        self._places.take(operation.session)
        operation.admitted = True
        if self._for_bytes or self._attempt(operation) is not _Outcome.SETTLED:
            self._counters.query_budget_waits += 1
            self._for_bytes.append(operation.instance, operation)

    def _attempt(self, operation: QueryOperation) -> _Outcome:
        """Try to answer: look up, reserve, pin, lease."""
        instance, proving, budget = operation.instance, operation.proving, self.budget
        if operation.bytes_hint:
            if budget.owner_is_full(instance, operation.bytes_hint):
                return _Outcome.OWNER_FULL
            if budget.is_full(operation.bytes_hint):
                return _Outcome.FULL
        space = instance.space if proving is None else proving.proof_space
        if space is None or (proving is None and not instance.serving):
            return self._settle(operation, Nothing("not-serving"))
        ...
        return _Outcome.SETTLED
