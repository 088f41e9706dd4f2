"""Queries from the first call to the end of their leases.

Every operation waits for its turn (`Turns`), is answered (its leases live, or the answer waits to be fetched), or
is restoring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import GroupHashes, Loading, Nothing, PollQuery, Query, Ready
from orbitkv.protocol.records import RecordState
from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Deadlines, Loop
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.queries.budget import ByteBudget, Phase
from orbitkv_agent.queries.leases import Lease, Leases, PinnedPages
from orbitkv_agent.queries.lookup import Found, check_asked, look_up
from orbitkv_agent.queries.operations import QueryOperation, State, sign
from orbitkv_agent.queries.shares import Shares
from orbitkv_agent.queries.turns import Outcome, Turns
from orbitkv_agent.sessions.errors import Refused, invalid, stale
from orbitkv_agent.sessions.instances import Instance, Registration
from orbitkv_agent.sessions.spaces import KeySpaces
from orbitkv_agent.store.cache import PageCache

if TYPE_CHECKING:
    from orbitkv_agent.config import AgentConfig
    from orbitkv_agent.sessions.session import Session

MAX_WAIT_MS: Final = 30_000
"""Longest time for which an answer stays "loading", whatever the client allows."""
MAX_OPERATIONS: Final = 4000
"""Operations of one session, waiting ones included; beyond it a query is refused."""
MAX_HELD: Final = 32 << 20
"""Bytes that operations of one cache namespace may hold, unless one alone has more: `OPERATION_BYTES` each, and the
hashes of those that wait."""
OPERATION_BYTES: Final = 1 << 10
_FEW_PAGES: Final = 16
"""Of a small answer the places are looked up before they are asked for: a restore of it is short, and begins sooner."""


class QueryService:
    """Owns all query operations, leases and the byte budget. Used by the owner thread only.

    Args:
        several: whether instances of several tenants are there (see `Shares`).
    """

    def __init__(
        self,
        loop: Loop,
        cache: PageCache,
        spaces: KeySpaces,
        counters: Counters,
        config: AgentConfig,
        several: Callable[[], bool],
    ) -> None:
        self.budget = ByteBudget(config.query_budget_bytes, config.instance_budget_bytes, Shares(several))
        self.leases = Leases()
        self.draining = False
        self._loop = loop
        self._cache = cache
        self._spaces = spaces
        self._counters = counters
        self._turns = Turns(config.max_session_queries, config.max_queries, self._attempt, counters, Shares(several))
        self._answered: Deadlines[QueryOperation] = Deadlines(loop, config.reply_ttl_ms / 1000, self._expire)
        self._held: dict[str, int] = {}

    @property
    def outstanding(self) -> int:
        """Operations that wait or whose leases live, admitted or not."""
        return self._turns.outstanding

    @property
    def unadmitted(self) -> int:
        """Those among them that wait for a place."""
        return self._turns.for_place

    @property
    def waiting_for_bytes(self) -> int:
        """Those among them that wait for bytes."""
        return self._turns.for_bytes

    # -------------------------------------------------------------------------------------------- requests

    def query(
        self,
        session: Session,
        sequence: int,
        message: Query,
        instance: Instance | None,
        proving: Registration | None = None,
    ) -> None:
        """Start, revise or poll an operation, and send the answer.

        Args:
            instance: the one that the message names, None when it is not known.
            proving: the registration whose proof pages are asked for.

        Raises:
            Refused: INVALID, a field; STALE, an older revision; BUSY, too many operations.
        """
        known = session.operations.get(message.operation)
        if known is not None:
            _check_revision(known, message.revision)
            if message.revision == known.revision:
                if known.asked != sign(message.hashes) and guard("same-hashes"):
                    raise invalid(
                        f"operation {message.operation}, revision {message.revision}: the hashes differ from those "
                        "asked for before; other hashes are a new revision"
                    )
                session.reply(sequence, self._answer(known))
                return
            self._withdraw(known)
        if self.draining:
            session.reply(sequence, Nothing("draining"))
        elif instance is None or (proving is None and not instance.serving):
            session.reply(sequence, Nothing("not-serving"))
        else:
            held = self._check(session, message, instance, proving)
            if not self._answer_at_once(session, sequence, message, instance, proving):
                self._check_held(session, held)
                session.reply(sequence, self._enter(session, message, instance, proving))

    def poll(self, session: Session, message: PollQuery) -> Ready | Loading | Nothing:
        """Return the state of an operation.

        Raises:
            Refused: STALE, there is a newer revision.
        """
        operation = session.operations.get(message.operation)
        if operation is None or message.revision > operation.revision:
            return Nothing("gone")
        _check_revision(operation, message.revision)
        return self._answer(operation)

    def cancel(self, session: Session, numbers: Sequence[int]) -> None:
        """Withdraw operations; unknown ones are none."""
        for number in numbers:
            operation = session.operations.get(number)
            if operation is not None:
                self._withdraw(operation)

    def release(self, session: Session, numbers: Sequence[int]) -> None:
        """Return leases unused; those that are gone already, and those of others, are none."""
        leases = [
            lease
            for lease in map(self.leases.find, numbers)
            if lease is not None and lease.live and (lease.operation.session is session or not guard("own-lease"))
        ]
        for lease in leases:
            if lease.live:  # the same number may be named twice
                self._end_unused(lease)
                if not lease.operation.leases:
                    self._forget(lease.operation)

    # -------------------------------------------------------------------------------------------- restores

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
            self._turns.give_place(operation)
        if not any(each.live for each in operation.leases):
            self._answered.discard(operation)
            self._forget(operation)

    def consumed(self, lease: Lease) -> None:
        """What follows from `consume` and can wait until the copy is on its way: the lease's pages are in demand, and
        others may have their turn."""
        if lease.operation.proving is None:  # a proof is no demand
            lease.pages.use()
        self._turns.pump()

    def end_consumed(self, lease: Lease) -> None:
        """The restore of a lease ended: no copy touches its pages any more."""
        operation = lease.operation
        self.leases.end(lease)
        self._finish_restoring(operation)
        self._turns.pump()

    # ---------------------------------------------------------------------------------------- lost parties

    def revoke(self, instance: Instance) -> None:
        """The instance cannot hit any more: nothing that was promised to it holds."""
        for operation in list(instance.operations):
            if operation.state is State.NONE and operation.proving is None:
                self._settle(operation, Nothing("not-serving"))
        self.revoke_leases(instance)

    def revoke_leases(self, instance: Instance) -> None:
        """Take back what was promised to an instance and not consumed; proofs of live registrations stay."""
        for operation in list(instance.operations):
            if (operation.proving is None or operation.proving.retired) and guard("revoked-lease"):
                self._end_live_leases(operation)
        self._turns.pump()

    def end_session(self, session: Session) -> None:
        """Its stream ended: queries and unconsumed leases go at once."""
        for operation in list(session.operations.values()):
            self._withdraw(operation)

    def set_budget(self, limit: int, instance_limit: int) -> None:
        """Change the byte budget, of all and of one instance. What is reserved stays until it is released."""
        self.budget.set_limits(limit, instance_limit)
        self._turns.pump()

    def drain(self) -> None:
        """Answer what waits, admit nothing more. Leases stay for restores that are on their way."""
        self.draining = True
        for operation in self._turns.waiting():
            self._settle(operation, Nothing("draining"))

    # ------------------------------------------------------------------------------------------- internals

    def _check(self, session: Session, message: Query, instance: Instance, proving: Registration | None) -> int:
        """Return how many bytes of hashes the agent would keep while this query waits."""
        groups = instance.group_pages if proving is None else proving.group_pages
        if len(session.operations) >= MAX_OPERATIONS:
            raise Refused(
                ErrorKind.BUSY, f"this session has {len(session.operations)} queries; let some of them end first"
            )
        return check_asked(message.hashes, groups, proof=proving is not None)

    def _check_held(self, session: Session, held: int) -> None:
        others = self._held.get(session.namespace or "", 0)
        if others and others + held + OPERATION_BYTES > MAX_HELD:
            raise Refused(
                ErrorKind.BUSY, f"the queries of this cache namespace hold {others} bytes; let some of them end first"
            )

    def _answer_at_once(
        self,
        session: Session,
        sequence: int,
        message: Query,
        instance: Instance,
        proving: Registration | None,
    ) -> bool:
        """Answer a new query that need not wait for others or for bytes; return whether it was answered.

        The answer goes out first, because an engine's scheduler is waiting for it. What it promises is pinned and
        leased right after; nobody else is served in between.
        """
        if not self._turns.is_free(session):
            return False
        found = self._look_up(instance, proving, message)
        nothing = self._nothing(instance, found, proving)
        if nothing is not None:
            session.reply(sequence, nothing)
            return True
        if not self.budget.fits(instance, instance.tenant, found.bytes):
            return False
        ready = self._ready(found, proving)
        session.reply(sequence, ready)
        if session.is_open:  # otherwise it could not be sent: nobody knows of the promise
            operation = self._open(session, message, [], instance, proving)
            self._turns.take_place(operation)
            self._keep(operation, found, ready)
        return True

    def _enter(
        self, session: Session, message: Query, instance: Instance, proving: Registration | None
    ) -> Ready | Loading | Nothing:
        """Have a new query wait for its turn, or for bytes, at most as long as it allows."""
        operation = self._open(session, message, message.hashes, instance, proving)
        self._turns.enter(operation)
        if operation.answer is None:
            if message.max_wait_ms <= 0:
                self._settle(operation, Nothing("budget"))
            else:
                wait = min(message.max_wait_ms, MAX_WAIT_MS) / 1000
                operation.timer = self._loop.call_later(wait, lambda: self._give_up(operation))
        return self._answer(operation)

    def _open(
        self,
        session: Session,
        message: Query,
        kept: list[GroupHashes],
        instance: Instance,
        proving: Registration | None,
    ) -> QueryOperation:
        """Note a new operation. `kept`: the hashes of one that waits."""
        operation = QueryOperation(session, instance, message.operation, message.revision, kept, proving)
        operation.asked = sign(message.hashes)
        namespace = instance.namespace
        self._held[namespace] = self._held.get(namespace, 0) + OPERATION_BYTES + _hash_bytes(kept)
        session.operations[operation.number] = operation
        instance.operations[operation] = None
        return operation

    def _answer(self, operation: QueryOperation) -> Ready | Loading | Nothing:
        answer = operation.answer
        if answer is None:
            if operation.record is None and operation.session.records is not None:
                operation.record = operation.session.records.open()
            return Loading(operation.admitted, operation.record)
        if isinstance(answer, Ready):
            # The promise is repeated only while it holds: it may have been revoked, or partly used, since it was made.
            if not (operation.state is State.READY and all(lease.live for lease in operation.leases)) and guard(
                "live-lease"
            ):
                self._forget(operation)
                return Nothing("gone")
            return answer
        self._forget(operation)
        return answer

    def _attempt(self, operation: QueryOperation, *, behind: bool) -> Outcome:
        """Try to answer an operation that has a place; see `Attempt`."""
        instance, proving = operation.instance, operation.proving
        if operation.bytes_hint and not self.budget.fits(instance, instance.tenant, operation.bytes_hint):
            return self._whose_bytes(instance, operation.bytes_hint)
        if not (instance.serving if proving is None else not proving.retired):
            return self._settle(operation, Nothing("not-serving"))
        found = self._look_up(instance, proving, operation)
        nothing = self._nothing(instance, found, proving)
        if nothing is not None:
            return self._settle(operation, nothing)
        operation.bytes_hint = found.bytes
        if behind or not self.budget.fits(instance, instance.tenant, found.bytes):
            return self._whose_bytes(instance, found.bytes)
        return self._keep(operation, found, self._ready(found, proving))

    def _whose_bytes(self, instance: Instance, size: int) -> Outcome:
        """Who has the bytes that are missing: the instance's tenant, everybody together, or the instance itself."""
        if not self.budget.shared(instance.tenant, size):
            return Outcome.TENANT_FULL
        return Outcome.FULL if self.budget.is_full(size) else Outcome.OWNER_FULL

    def _look_up(self, instance: Instance, proving: Registration | None, asked: Query | QueryOperation) -> Found:
        parts = asked.hashes
        if proving is None:
            return look_up(self._spaces.of(instance, parts[0].hash_bytes), instance.group_pages, parts)
        return look_up(self._spaces.of_proof(proving, parts[0].hash_bytes), proving.group_pages, parts)

    def _nothing(self, instance: Instance, found: Found, proving: Registration | None) -> Nothing | None:
        """The answer if nothing of it can ever be leased."""
        if not found.pages:
            self._count(instance, found, proving)
            return Nothing("miss")
        if self.budget.oversized(found.bytes):
            self._counters.query_oversized += 1
            return Nothing("oversized")
        return None

    def _ready(self, found: Found, proving: Registration | None) -> Ready:
        shards = len(found.shard_bytes) if proving is None else 1
        return Ready(list(islice(self.leases.numbers, shards)), found.boundaries, found.pages, found.bytes)

    def _keep(self, operation: QueryOperation, found: Found, ready: Ready) -> Outcome:
        """Reserve bytes that fit, pin, and lease to each shard, under the numbers in `ready`."""
        self._count(operation.instance, found, operation.proving)
        owner, tenant = operation.instance, operation.instance.tenant
        charges = [self.budget.charge(owner, tenant, each) for each in found.shard_bytes]
        operation.to(State.PREPARING)
        # What is in memory needs no preparation: it is ready at once.
        pinned = PinnedPages(self._cache, found.pages, found.runs, len(charges))
        operation.to(State.READY)
        shards = range(len(charges))
        if operation.proving is not None:
            shards = range(operation.proving.shard, operation.proving.shard + 1)
        for number, shard, charge in zip(ready.leases, shards, charges, strict=True):
            charge.move(Phase.READY)
            self.leases.grant(number, operation, shard, pinned, charge)
            if operation.proving is None and pinned.count <= _FEW_PAGES:
                pinned.places(shard)
        return self._settle(operation, ready)

    def _count(self, instance: Instance, found: Found, proving: Registration | None) -> None:
        if proving is None:  # a proof is no demand
            hits = sum([leased.count for leased in found.pages])
            self._counters.cache_block_hits += hits
            self._counters.cache_block_misses += found.asked - hits
            instance.demand.count(instance.group_pages, found.asked, hits)

    def _settle(self, operation: QueryOperation, answer: Ready | Nothing) -> Outcome:
        """Keep the answer until it is fetched or too old, and wake the client if it was told to wait."""
        if operation.timer is not None:
            operation.timer.cancel()
            operation.timer = None
        operation.answer = answer
        self._let_go_of_hashes(operation)
        self._answered.add(operation)
        if isinstance(answer, Nothing):
            self._turns.leave(operation)
            operation.to(State.RETIRED)
            operation.instance.operations.pop(operation, None)
        self._close_record(operation)
        return Outcome.ANSWERED

    def _give_up(self, operation: QueryOperation) -> None:
        """It waited as long as the client allows."""
        self._settle(operation, Nothing("budget"))
        self._turns.pump()

    def _close_record(self, operation: QueryOperation) -> None:
        records = operation.session.records
        if operation.record is not None and records is not None:
            records.close(operation.record, RecordState.SETTLED)
            operation.record = None
            operation.session.notify()

    def _forget(self, operation: QueryOperation) -> None:
        """The client's number means nothing any more."""
        if operation.timer is not None:
            operation.timer.cancel()
            operation.timer = None
        self._answered.discard(operation)
        operations = operation.session.operations
        if operations.get(operation.number) is operation:
            del operations[operation.number]
            self._let_go_of_hashes(operation)
            namespace = operation.instance.namespace
            self._held[namespace] -= OPERATION_BYTES
            if not self._held[namespace]:
                del self._held[namespace]

    def _let_go_of_hashes(self, operation: QueryOperation) -> None:
        if operation.hashes:
            self._held[operation.instance.namespace] -= _hash_bytes(operation.hashes)
            operation.hashes = []

    def _withdraw(self, operation: QueryOperation) -> None:
        """The client wants no answer any more; what is restoring drains."""
        self._forget(operation)
        if operation.state is State.NONE:
            self._turns.leave(operation)
            operation.to(State.RETIRED)
            operation.instance.operations.pop(operation, None)
            self._close_record(operation)
            self._turns.pump()
        else:
            self._end_live_leases(operation)

    def _expire(self, operation: QueryOperation) -> None:
        """Nobody fetched or used the answer in time."""
        self._counters.leases_expired += sum(lease.live for lease in operation.leases)
        self._withdraw(operation)

    def _end_live_leases(self, operation: QueryOperation) -> None:
        for lease in [each for each in operation.leases if each.live]:
            self._end_unused(lease)

    def _end_unused(self, lease: Lease) -> None:
        operation = lease.operation
        self.leases.end(lease)
        if operation.state is State.READY:
            if not operation.leases:
                self._turns.give_place(operation)
                operation.to(State.RETIRED)
                operation.instance.operations.pop(operation, None)
        else:
            self._finish_restoring(operation)
        self._turns.pump()

    def _finish_restoring(self, operation: QueryOperation) -> None:
        if not operation.leases:
            operation.to(State.DRAINED)
            operation.to(State.RETIRED)
            operation.instance.operations.pop(operation, None)
            self._forget(operation)


def _hash_bytes(hashes: list[GroupHashes]) -> int:
    return sum([len(part.blob) for part in hashes])


def _check_revision(operation: QueryOperation, revision: int) -> None:
    """What was asked for before is not answered with what is asked for now."""
    if revision < operation.revision and guard("stale-revision"):
        raise stale(f"stale-revision: operation {operation.number} is at revision {operation.revision} already")
