"""Letting queries in: each waits for a place first, then for bytes.

`pump` moves on whoever can move; it is called whenever a place or bytes came back.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from orbitkv_agent.queries.operations import QueryOperation, State
from orbitkv_agent.queries.queue import Lanes, Places
from orbitkv_agent.queries.shares import Shares

if TYPE_CHECKING:
    from orbitkv_agent.observe.counters import Counters
    from orbitkv_agent.sessions.instances import Instance
    from orbitkv_agent.sessions.session import Session


class Outcome(Enum):
    """Of an attempt to answer: ANSWERED, or whose bytes are used up: the instance's, its tenant's, or everybody's."""

    ANSWERED = "answered"
    OWNER_FULL = "owner-full"
    TENANT_FULL = "tenant-full"
    FULL = "full"


class Attempt(Protocol):
    """Tries to answer an operation that has a place.

    `behind`: others wait for bytes, so it is answered only if the answer takes none.
    """

    def __call__(self, operation: QueryOperation, *, behind: bool) -> Outcome:
        """Return what came of it. An answer that holds nothing calls `Turns.leave`."""


class Turns:
    """Who has a place and who waits. Used by the owner thread only.

    Args:
        session_limit: most places of one session.
        limit: most places in all.
        attempt: tries to answer an operation.
        shares: what each tenant has of the places.
    """

    def __init__(self, session_limit: int, limit: int, attempt: Attempt, counters: Counters, shares: Shares) -> None:
        self._places: Places[Session] = Places(session_limit, limit, shares)
        self._for_place: Lanes[Session, QueryOperation] = Lanes()
        self._for_bytes: Lanes[Instance, QueryOperation] = Lanes()
        self._attempt = attempt
        self._counters = counters
        self._pumping = False

    @property
    def outstanding(self) -> int:
        """Operations that wait, or have a place."""
        return self._places.taken + self._for_place.count

    @property
    def for_place(self) -> int:
        """How many wait for a place."""
        return self._for_place.count

    @property
    def for_bytes(self) -> int:
        """How many have a place and wait for bytes."""
        return self._for_bytes.count

    def waiting(self) -> Iterator[QueryOperation]:
        """All that wait."""
        return iter([*self._for_place, *self._for_bytes])

    def is_free(self, session: Session) -> bool:
        """Whether a new operation of this session gets a place at once, and nobody waits for bytes before it."""
        return not self._for_bytes.count and self._places.free(session) and not self._for_place.waits_in(session)

    def take_place(self, operation: QueryOperation) -> None:
        """Give an operation its place. The caller asked `is_free`."""
        self._places.take(operation.session)
        operation.admitted = True

    def enter(self, operation: QueryOperation) -> None:
        """Let a new operation in, or have it wait."""
        if self._places.free(operation.session) and not self._for_place.waits_in(operation.session):
            self._admit(operation)
            if self._for_bytes.count:
                self.pump()  # it waits behind others, and is tried after them
        else:
            self._counters.query_unadmitted += 1
            self._for_place.append(operation.session, operation)

    def leave(self, operation: QueryOperation) -> None:
        """Take an operation in state NONE or READY out of the queues and return its place."""
        if operation.admitted:
            if operation.state is State.NONE and operation.ticket:
                self._for_bytes.remove(operation.instance, operation)
                operation.ticket = 0
            self.give_place(operation)
        elif operation.ticket:
            self._for_place.remove(operation.session, operation)
            operation.ticket = 0

    def give_place(self, operation: QueryOperation) -> None:
        """An operation does not count as outstanding any more."""
        operation.admitted = False
        self._places.give_back(operation.session)

    def pump(self) -> None:
        """Move on whoever can move."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (self._for_bytes.count and self._serve_bytes()) or (self._for_place.count and self._serve_place()):
                pass
        finally:
            self._pumping = False

    def _admit(self, operation: QueryOperation) -> None:
        self.take_place(operation)
        # Whose answer takes no bytes from those that wait for some need not wait behind them.
        if self._attempt(operation, behind=self._for_bytes.count > 0) is not Outcome.ANSWERED:
            self._counters.query_budget_waits += 1
            self._for_bytes.append(operation.instance, operation)

    def _serve_bytes(self) -> bool:
        """Try those who wait for bytes, in order; return whether one was answered."""
        full_owners: set[Instance] = set()
        full_tenants: set[str] = set()
        while (
            first := self._for_bytes.first(lambda each: each in full_owners or each.tenant in full_tenants)
        ) is not None:
            owner, operation = first
            outcome = self._attempt(operation, behind=False)
            if outcome is Outcome.ANSWERED:
                if operation.state is State.READY:
                    self._for_bytes.remove(owner, operation)
                    operation.ticket = 0
                self._counters.query_budget_bypasses += bool(full_owners or full_tenants)
                return True
            if outcome is Outcome.FULL:
                return False  # whoever is younger must not take what this one waits for
            if outcome is Outcome.TENANT_FULL:
                full_tenants.add(owner.tenant)
            else:
                full_owners.add(owner)
        return False

    def _serve_place(self) -> bool:
        """Admit the next one; return whether there was one."""
        if self._places.full:
            return False
        first = self._for_place.first(self._places.lane_is_full)
        if first is None:
            return False
        session, operation = first
        self._for_place.remove(session, operation)
        operation.ticket = 0
        self._admit(operation)
        return True
