"""One query: its states, and which follows which.

none       waits for a place or for bytes; holds nothing
preparing  bytes are reserved, pages are being brought together
ready      pages are pinned and leased
restoring  a lease was consumed; copies may run
drained    all its copies ended
retired    it holds nothing
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.messages import GroupHashes, Nothing, Ready, RecordRef

if TYPE_CHECKING:
    from orbitkv_agent.loop import Timer
    from orbitkv_agent.queries.leases import Lease
    from orbitkv_agent.sessions.instances import Instance, Registration
    from orbitkv_agent.sessions.session import Session


class State(IntEnum):
    """See the module."""

    NONE = 0
    PREPARING = 1
    READY = 2
    RESTORING = 3
    DRAINED = 4
    RETIRED = 5


_NEXT: Final[tuple[tuple[State, ...], ...]] = (
    (State.PREPARING, State.RETIRED),  # after NONE
    (State.READY, State.RETIRED),  # PREPARING
    (State.RESTORING, State.RETIRED),  # READY
    (State.DRAINED,),  # RESTORING
    (State.RETIRED,),  # DRAINED
    (),  # RETIRED
)


def sign(hashes: list[GroupHashes]) -> int:
    """A number that tells hashes from others, as far as a client can tell: it is another one in each process."""
    return hash(tuple([(part.group, part.hash_bytes, part.blob) for part in hashes]))


class QueryOperation:
    """An operation of one session at one revision.

    Attributes:
        number, revision: the client's.
        hashes: what was asked for, by group; only while it waits for its answer.
        asked: stands for them afterwards (see `sign`).
        proving: the registration whose proof pages were asked for, or None for the store's.
        admitted: it has a place among the outstanding operations.
        ticket: its turn, while it waits.
        bytes_hint: what it needed when it was tried last, 0 if it was not.
        record: word that tells the client when there is an answer; it exists only while the answer is "loading".
        answer: what to tell the client, once known.
        leases: those that have not ended.
    """

    __slots__ = (
        "admitted",
        "answer",
        "asked",
        "bytes_hint",
        "hashes",
        "instance",
        "leases",
        "number",
        "proving",
        "record",
        "revision",
        "session",
        "state",
        "ticket",
        "timer",
    )

    def __init__(
        self,
        session: Session,
        instance: Instance,
        number: int,
        revision: int,
        hashes: list[GroupHashes],
        proving: Registration | None,
    ) -> None:
        self.session = session
        self.instance = instance
        self.number = number
        self.revision = revision
        self.hashes: list[GroupHashes] = hashes
        self.asked = 0
        self.proving = proving
        self.state = State.NONE
        self.admitted = False
        self.ticket = 0
        self.bytes_hint = 0
        self.timer: Timer | None = None
        self.record: RecordRef | None = None
        self.answer: Ready | Nothing | None = None
        self.leases: dict[Lease, None] = {}

    def to(self, state: State) -> None:
        """Move on. A step that is not in the table is a defect and raises AssertionError."""
        if state not in _NEXT[self.state]:
            raise AssertionError(f"query {self.number}: {self.state.name} is not followed by {state.name}")
        self.state = state
