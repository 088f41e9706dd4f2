"""Queries from the first call to the end of their leases.

Every operation is in one of four places: waiting for a place (`_for_place`), waiting for bytes (`_for_bytes`), answered
(its leases live, or the answer waits to be fetched), or restoring. `_pump` moves on what can move, whenever something
came back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from orbitkv_agent.sessions.spaces import KeySpaces
from orbitkv_agent.store.access_log import Entries
from orbitkv_agent.store.cache import PageCache

if TYPE_CHECKING:
    from orbitkv_agent.config import AgentConfig
    from orbitkv_agent.sessions.session import Session

MAX_HASH_BYTES: Final = 32
"""Longest engine hash."""
MAX_WAIT_MS: Final = 30_000
"""Longest time for which an answer stays "loading", whatever the client allows."""
MAX_OPERATIONS: Final = 4000
"""Operations of one session, waiting ones included; beyond it a query is refused."""
MAX_HELD_HASHES: Final = 64 << 20
"""Bytes of hashes that one session's operations may hold."""


class _Outcome(Enum):
    SETTLED = "settled"
    OWNER_FULL = "owner-full"
    FULL = "full"


@dataclass(slots=True)
class _Found:
    """What of an operation's pages is there, as far as all groups reach together.

    Attributes:
        pages: by group; empty when there is nothing.
        entries: the store's, in the order of `pages`; valid in this turn only.
        shard_bytes: padded, in rank order.
        boundaries: page counts at which the request may resume, as runs (first, last, step).
        asked: pages asked for.
    """

    pages: list[LeasedPages]
    entries: list[Entries]
    shard_bytes: list[int]
    boundaries: list[tuple[int, int, int]]
    asked: int


class QueryService:
    """Owns all query operations, leases and the byte budget. Used by the owner thread only."""

    def __init__(
        self, loop: Loop, cache: PageCache, spaces: KeySpaces, counters: Counters, config: AgentConfig
    ) -> None:
        self.budget = ByteBudget(config.query_budget_bytes, config.instance_budget_bytes)
        self.leases = Leases()
        self.draining = False
        self._loop = loop
        self._cache = cache
        self._spaces = spaces
        self._counters = counters
        self._places: Places[Session] = Places(config.max_session_queries, config.max_queries)
        self._for_place: Lanes[Session, QueryOperation] = Lanes()
        self._for_bytes: Lanes[Instance, QueryOperation] = Lanes()
        self._answered: Deadlines[QueryOperation] = Deadlines(loop, config.reply_ttl_ms / 1000, self._expire)
        self._held_hashes: dict[Session, int] = {}
        self._promise: tuple[QueryOperation, _Found, Ready] | None = None
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

    # -------------------------------------------------------------------------------------------- requests

    def query(
        self, session: Session, message: Query, instance: Instance | None, proving: Registration | None = None
    ) -> Ready | Loading | Nothing:
        """Start, revise or poll an operation. Send the answer, then call `keep_promise` in the same turn.

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
                if known.hashes != message.hashes and guard("same-hashes"):
                    raise invalid(
                        f"operation {message.operation}, revision {message.revision}: the hashes differ from those "
                        "asked for before; other hashes are a new revision"
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
        self._enter(operation)
        if self._promise is not None:
            return self._promise[2]
        answer = operation.answer
        if isinstance(answer, Ready):
            return answer
        if answer is None:
            if message.max_wait_ms <= 0:
                self._settle(operation, Nothing("budget"))
            else:
                wait = min(message.max_wait_ms, MAX_WAIT_MS) / 1000
                operation.timer = self._loop.call_later(wait, lambda: self._give_up(operation))
        return self._answer(operation)

    def keep_promise(self) -> None:
        """Pin and lease what the last answer promised.

        The answer goes out first, because an engine's scheduler is waiting for it; nobody else is served in between. If
        it could not be sent, its operation was withdrawn meanwhile and nothing is kept.
        """
        if self._promise is not None:
            operation, found, ready = self._promise
            self._promise = None
            if operation.state is State.NONE:
                self._keep(operation, found, ready)

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
                if not lease.operation.leases:
                    self._forget(lease.operation)

    # -------------------------------------------------------------------------------------------- restores

    def consume(self, lease: Lease) -> None:
        """Bind a live lease to a restore; its operation no longer counts as outstanding."""
        operation = lease.operation
        self.leases.consume(lease)
        if operation.proving is None:  # a proof is no demand
            lease.pages.use()
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
        self._pump()

    def end_session(self, session: Session) -> None:
        """Its stream ended: queries and unconsumed leases go at once."""
        for operation in list(session.operations.values()):
            self._withdraw(operation)

    def drain(self) -> None:
        """Answer what waits, admit nothing more. Leases stay for restores that are on their way."""
        self.draining = True
        for operation in [*self._for_place, *self._for_bytes]:
            self._settle(operation, Nothing("draining"))

    # ------------------------------------------------------------------------------------------- internals

    def _check(self, session: Session, message: Query, instance: Instance, proving: Registration | None) -> int:
        groups = instance.group_pages if proving is None else proving.group_pages
        asked = [each.group for each in message.hashes]
        if asked != list(groups):
            self._check_groups(instance, sorted(asked), sorted(groups), whole=proving is None)
        held = 0
        for part in message.hashes:
            check_hashes(part)
            held += len(part.blob)
            if part.hash_bytes != message.hashes[0].hash_bytes:
                raise invalid("hash_bytes differs between the groups of one query")
        if len(session.operations) >= MAX_OPERATIONS or self._held_hashes.get(session, 0) + held > max(
            MAX_HELD_HASHES, held
        ):
            raise Refused(
                ErrorKind.BUSY, f"this session has {len(session.operations)} queries; let some of them end first"
            )
        return held

    @staticmethod
    def _check_groups(instance: Instance, asked: list[int], groups: list[int], *, whole: bool) -> None:
        if len(set(asked)) != len(asked):
            raise invalid(f"hashes name a group twice: {asked}")
        if not asked or not set(asked) <= set(groups):
            raise invalid(f"hashes name groups {asked}; instance {instance} has {groups}")
        if asked != groups and whole and guard("all-groups"):
            raise invalid(f"hashes name groups {asked}; a hit needs every group of instance {instance}: {groups}")

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

    def _enter(self, operation: QueryOperation) -> None:
        """Let a new operation in, or have it wait."""
        session = operation.session
        if self._places.full or self._places.lane_is_full(session) or self._for_place.waits_in(session):
            self._counters.query_unadmitted += 1
            self._for_place.append(session, operation)
        else:
            self._admit(operation, at_once=True)
            if self._for_bytes:
                self._pump()  # it waits behind others, and is tried after them

    def _admit(self, operation: QueryOperation, *, at_once: bool = False) -> None:
        self._places.take(operation.session)
        operation.admitted = True
        if self._for_bytes and self._serves(operation) and not (found := self._find(operation)).pages:
            # Who finds nothing takes no bytes from those that wait for some, so it need not wait behind them.
            self._count(operation, found)
            self._settle(operation, Nothing("miss"))
        elif self._for_bytes or self._attempt(operation, at_once=at_once) is not _Outcome.SETTLED:
            self._counters.query_budget_waits += 1
            self._for_bytes.append(operation.instance, operation)

    @staticmethod
    def _serves(operation: QueryOperation) -> bool:
        """Whether its instance can hit, or its proof is still wanted."""
        return operation.instance.serving if operation.proving is None else not operation.proving.retired

    def _attempt(self, operation: QueryOperation, *, at_once: bool = False) -> _Outcome:
        """Try to answer: look up, reserve, pin, lease. `at_once`: what is promised is kept after the reply is sent."""
        instance, budget = operation.instance, self.budget
        if operation.bytes_hint:
            blocked = self._blocked(instance, operation.bytes_hint)
            if blocked is not None:
                return blocked
        if not self._serves(operation):
            return self._settle(operation, Nothing("not-serving"))
        found = self._find(operation)
        if not found.pages:
            self._count(operation, found)
            return self._settle(operation, Nothing("miss"))
        size = operation.bytes_hint = sum(found.shard_bytes)
        if budget.oversized(size):
            self._counters.query_oversized += 1
            return self._settle(operation, Nothing("oversized"))
        blocked = self._blocked(instance, size)
        if blocked is not None:
            return blocked
        shards = len(found.shard_bytes) if operation.proving is None else 1
        ready = Ready([self.leases.number() for _ in range(shards)], found.boundaries, found.pages, size)
        if at_once:
            self._promise = (operation, found, ready)
            return _Outcome.SETTLED
        return self._keep(operation, found, ready)

    def _blocked(self, instance: Instance, size: int) -> _Outcome | None:
        """Why these bytes cannot be reserved now."""
        if self.budget.is_full(size):
            return _Outcome.FULL
        return _Outcome.OWNER_FULL if self.budget.owner_is_full(instance, size) else None

    def _find(self, operation: QueryOperation) -> _Found:
        """Look up how far all groups reach together. Holds nothing."""
        instance, proving, hashes = operation.instance, operation.proving, operation.hashes
        hash_bytes = hashes[0].hash_bytes
        if proving is None:
            groups, space = instance.group_pages, self._spaces.of(instance, hash_bytes)
        else:
            groups, space = proving.group_pages, self._spaces.of_proof(proving, hash_bytes)
        asked, entries, reach = 0, [], []
        for part in hashes:
            run = self._cache.lookup(space, part.group, part.blob)
            asked += len(part.blob) // hash_bytes
            entries.append(run)
            reach.append((groups[part.group].block_tokens, len(run)))
        step, longest = common_boundary(reach)
        if not longest:
            return _Found([], [], [], [], asked)
        pages: list[LeasedPages] = []
        shard_bytes: list[int] = []
        for index, part in enumerate(hashes):
            group = groups[part.group]
            count = longest // group.block_tokens
            pages.append(LeasedPages(part.group, 0, count))
            if len(entries[index]) > count:
                entries[index] = entries[index][:count]
            sizes = [count * size for size in group.shard_bytes]
            shard_bytes = [a + b for a, b in zip(shard_bytes, sizes, strict=True)] if shard_bytes else sizes
        tokens = reach[0][0]
        boundary = (step // tokens, longest // tokens, step // tokens)
        return _Found(pages, entries, shard_bytes, [boundary], asked)

    def _keep(self, operation: QueryOperation, found: _Found, ready: Ready) -> _Outcome:
        """Reserve bytes that fit, pin, and lease to each shard, under the numbers in `ready`."""
        self._count(operation, found)
        charges = [self.budget.charge(operation.instance, each) for each in found.shard_bytes]
        operation.to(State.PREPARING)
        # What is in memory needs no preparation: it is ready at once.
        pinned = PinnedPages(self._cache, found.pages, found.entries, len(charges))
        operation.to(State.READY)
        shards = range(len(charges))
        if operation.proving is not None:
            shards = range(operation.proving.shard, operation.proving.shard + 1)
        for number, shard, charge in zip(ready.leases, shards, charges, strict=True):
            charge.move(Phase.READY)
            self.leases.grant(number, operation, shard, pinned, charge)
        return self._settle(operation, ready)

    def _count(self, operation: QueryOperation, found: _Found) -> None:
        if operation.proving is None:  # a proof is no demand
            hits = sum([leased.count for leased in found.pages])
            self._counters.cache_block_hits += hits
            self._counters.cache_block_misses += found.asked - hits

    def _settle(self, operation: QueryOperation, answer: Ready | Nothing) -> _Outcome:
        """Keep the answer until it is fetched or too old, and wake the client if it was told to wait."""
        if operation.timer is not None:
            operation.timer.cancel()
            operation.timer = None
        operation.answer = answer
        self._answered.add(operation)
        if isinstance(answer, Nothing):
            self._leave_queues(operation)
            operation.to(State.RETIRED)
            operation.instance.operations.pop(operation, None)
        self._close_record(operation)
        return _Outcome.SETTLED

    def _give_up(self, operation: QueryOperation) -> None:
        """It waited as long as the client allows."""
        self._settle(operation, Nothing("budget"))
        self._pump()

    def _close_record(self, operation: QueryOperation) -> None:
        records = operation.session.records
        if operation.record is not None and records is not None:
            records.close(operation.record, RecordState.SETTLED)
            operation.record = None
            operation.session.notify()

    def _leave_queues(self, operation: QueryOperation) -> None:
        """Take an operation in state NONE or READY out of the queues and return its place."""
        if operation.admitted:
            if operation.state is State.NONE and operation.ticket:
                self._for_bytes.remove(operation.instance, operation)
                operation.ticket = 0
            self._give_place(operation)
        elif operation.ticket:
            self._for_place.remove(operation.session, operation)
            operation.ticket = 0

    def _give_place(self, operation: QueryOperation) -> None:
        operation.admitted = False
        self._places.give_back(operation.session)

    def _forget(self, operation: QueryOperation) -> None:
        """The client's number means nothing any more."""
        if operation.timer is not None:
            operation.timer.cancel()
            operation.timer = None
        self._answered.discard(operation)
        operations = operation.session.operations
        if operations.get(operation.number) is operation:
            del operations[operation.number]
            session, held = operation.session, operation.hash_bytes_held
            rest = self._held_hashes.pop(session, 0) - held
            if rest:
                self._held_hashes[session] = rest

    def _withdraw(self, operation: QueryOperation) -> None:
        """The client wants no answer any more; what is restoring drains."""
        self._forget(operation)
        if operation.state is State.NONE:
            self._leave_queues(operation)
            operation.to(State.RETIRED)
            operation.instance.operations.pop(operation, None)
            self._close_record(operation)
            self._pump()
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
                self._give_place(operation)
                operation.to(State.RETIRED)
                operation.instance.operations.pop(operation, None)
        else:
            self._finish_restoring(operation)
        self._pump()

    def _finish_restoring(self, operation: QueryOperation) -> None:
        if not operation.leases:
            operation.to(State.DRAINED)
            operation.to(State.RETIRED)
            operation.instance.operations.pop(operation, None)
            self._forget(operation)

    # ---------------------------------------------------------------------------------------------- queues

    def _pump(self) -> None:
        """Move on whoever can move. Called when a place or bytes came back."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (self._for_bytes and self._serve_bytes()) or (self._for_place and self._serve_place()):
                pass
        finally:
            self._pumping = False

    def _serve_bytes(self) -> bool:
        """Try those who wait for bytes, in order; return whether one was answered."""
        full_owners: set[Instance] = set()
        while (first := self._for_bytes.first(full_owners)) is not None:
            owner, operation = first
            outcome = self._attempt(operation)
            if outcome is _Outcome.SETTLED:
                if operation.state is State.READY:
                    self._for_bytes.remove(owner, operation)
                    operation.ticket = 0
                self._counters.query_budget_bypasses += bool(full_owners)
                return True
            if outcome is _Outcome.FULL:
                return False  # whoever is younger must not take what this one waits for
            full_owners.add(owner)
        return False

    def _serve_place(self) -> bool:
        """Admit the next one; return whether there was one."""
        if self._places.full:
            return False
        full_sessions: set[Session] = set()
        while (first := self._for_place.first(full_sessions)) is not None:
            session, operation = first
            if not self._places.lane_is_full(session):
                self._for_place.remove(session, operation)
                operation.ticket = 0
                self._admit(operation)
                return True
            full_sessions.add(session)
        return False


def _check_revision(operation: QueryOperation, revision: int) -> None:
    """What was asked for before is not answered with what is asked for now."""
    if revision < operation.revision and guard("stale-revision"):
        raise stale(f"operation {operation.number} is at revision {operation.revision} already")


def check_hashes(part: GroupHashes) -> int:
    """Return how many hashes a blob holds.

    Raises:
        Refused: INVALID.
    """
    if not 1 <= part.hash_bytes <= MAX_HASH_BYTES:
        raise invalid(f"group {part.group}: hash_bytes is {part.hash_bytes}; 1 to {MAX_HASH_BYTES} are accepted")
    count, rest = divmod(len(part.blob), part.hash_bytes)
    if rest:
        raise invalid(f"group {part.group}: {len(part.blob)} bytes of hashes are no multiple of {part.hash_bytes}")
    return count
