"""Restores and saves that the agent copies (CUDA mode).

Restores are sent by the thread that asks for them; everything else happens on the transfer thread. No answer is waited
for: a record tells the end of each. Until it does, nobody knows whether bytes still move: neither a timeout nor a lost
connection ends a handle, only its record, or the end of the agent's process.

An agent that gives no sign for a while, because its process is stopped, loses the session: the permit to hand over
copies is taken away, and when what it had handed over is through, all handles end. If it was stopped just when it
handed one over, they stay uncertain until the process goes on or ends.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable, Sequence

import numpy as np

from orbitkv.guards import guard
from orbitkv.protocol.errors import ErrorKind, OrbitKVError, SaveNotSubmittedError
from orbitkv.protocol.messages import (
    CommitSave,
    GroupBlocks,
    Ping,
    RecordRef,
    Refusal,
    Reply,
    RestorePlan,
    SavePlan,
    SaveRequest,
    SavesAccepted,
    StartLayeredRestore,
    StartRestore,
    SubmitSaves,
)
from orbitkv.protocol.records import RecordState

from .connection import refusal_error
from .handles import RestoreHandle, RestoreStatus, SaveHandle, SaveStatus
from .session import Session

logger = logging.getLogger("orbitkv")


class AgentCopies:
    """What was sent to the agent and has not ended.

    Args:
        session: with the agent.
        end_restore: ends a handle.
        copied: called with a save whose pages are free and that was committed, or voided.
    """

    def __init__(
        self,
        session: Session,
        end_restore: Callable[[RestoreHandle, RestoreStatus], None],
        copied: Callable[[SaveHandle], None],
    ) -> None:
        self._session = session
        self._end_restore = end_restore
        self._copied = copied
        self._restores: dict[RestoreHandle, RecordRef] = {}
        self._saves: dict[SaveHandle, SavePlan] = {}
        self._unanswered: dict[RestoreHandle | SaveHandle, None] = {}
        self._waiting_since = 0.0  # since when the agent owes something and was not heard of; 0: it owes nothing
        self._asked_at = 0.0  # when it was asked for a sign, 0: it was not, or gave one

    def __len__(self) -> int:
        """Handles that have not ended."""
        return len(self._restores) + len(self._saves) + len(self._unanswered)

    # --- restores

    def restore(self, handle: RestoreHandle) -> None:
        """Send a restore. For any thread; waits for nothing."""
        blocks = [GroupBlocks(group, ids.astype("<i4").tobytes()) for group, ids in handle.blocks]
        by_layer = handle.layer_order and self._session.welcome.messages_version > 1
        kind = StartLayeredRestore if by_layer else StartRestore
        request = kind(handle.registration.id, handle.lease, blocks)
        self._unanswered[handle] = None
        self._waiting_since = self._waiting_since or time.monotonic()
        try:
            self._session.connection.post(request, lambda reply: self._restore_answered(handle, reply))
        except OrbitKVError as error:  # not all of it went out, so the agent does nothing about it
            self._refused_restore(handle, error)

    def _restore_answered(self, handle: RestoreHandle, reply: Reply) -> None:
        self._heard()
        if isinstance(reply, RestorePlan):
            self._unanswered.pop(handle, None)
            self._restores[handle] = reply.record
            handle.follow(self._session.records, reply.record)
        elif isinstance(reply, Refusal):
            self._refused_restore(handle, refusal_error(reply))

    def _refused_restore(self, handle: RestoreHandle, error: OrbitKVError) -> None:
        self._unanswered.pop(handle, None)
        handle.error = error
        self._end_restore(handle, RestoreStatus.FAILED)

    # --- saves

    def save(self, batch: Sequence[SaveHandle], requests: list[SaveRequest]) -> None:
        """Send a batch of saves. Waits for nothing."""
        self._unanswered.update(dict.fromkeys(batch))
        try:
            self._session.connection.post(SubmitSaves(requests), lambda reply: self._saves_answered(batch, reply))
        except OrbitKVError as error:  # not all of it went out, so the agent does nothing about it
            self._refused_saves(batch, error)

    def _saves_answered(self, batch: Sequence[SaveHandle], reply: Reply) -> None:
        self._heard()
        if isinstance(reply, SavesAccepted) and len(reply.plans) == len(batch):
            for handle, plan in zip(batch, reply.plans, strict=True):
                self._unanswered.pop(handle, None)
                handle.present, handle.dropped = plan.present, dict(plan.dropped)
                handle.positions = [np.frombuffer(blob, "<u4").astype(np.int64) for blob in plan.positions]
                handle.follow(self._session.records, plan.record)
                self._saves[handle] = plan
        elif isinstance(reply, Refusal):
            self._refused_saves(batch, refusal_error(reply))

    def _refused_saves(self, batch: Sequence[SaveHandle], error: OrbitKVError) -> None:
        for handle in batch:
            self._unanswered.pop(handle, None)
            handle.error = SaveNotSubmittedError(error.kind, str(error))
            handle.advance(SaveStatus.NOT_SUBMITTED)

    # --- whether the agent is there

    def watch(self) -> float:
        """Ask an agent that owes something whether it is there; return after how many seconds to look again.

        Raises:
            OrbitKVError: UNAVAILABLE, it gives no sign, or the connection ended.
        """
        if not len(self):
            self._waiting_since = self._asked_at = 0.0
            return ASK_S
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        connection = self._session.connection
        if self._asked_at and now - self._asked_at >= SIGN_S:
            connection.take_late_replies()  # it may have answered while this process had no time to look
            if self._asked_at:
                raise OrbitKVError(
                    ErrorKind.UNAVAILABLE,
                    f"the OrbitKV agent at {connection.path} gives no sign: its process is stopped, or gets no time",
                )
        if not self._asked_at and now - self._waiting_since >= ASK_S:
            self._asked_at = now
            connection.post(Ping(), lambda _: self._heard())
        return self._asked_at + SIGN_S - now if self._asked_at else self._waiting_since + ASK_S - now

    def _heard(self) -> None:
        self._asked_at = 0.0
        self._waiting_since = time.monotonic()

    # --- ends

    def settle(self) -> None:
        """End what the records say has ended."""
        records = self._session.records
        for restore, ref in list(self._restores.items()):
            state = records.state(ref)
            if state is RecordState.PENDING or self._restores.pop(restore, None) is None:
                continue  # or it is ended by another thread that drains
            self._end(restore, state)
        for save, plan in list(self._saves.items()):
            state = records.state(plan.record)
            if state is RecordState.PENDING or self._saves.pop(save, None) is None:
                continue
            if state is not RecordState.SETTLED:
                save.error = OrbitKVError(ErrorKind.INTERNAL, "the agent could not copy all of it; its log says why")
                save.advance(SaveStatus.FAILED)
                continue
            save.advance(SaveStatus.COPIED)
            # From here `void_save` comes too late; before, it keeps the pages from becoming visible.
            self._session.connection.send_only(CommitSave(plan.save, copied=not save.void))
            self._copied(save)

    def _end(self, handle: RestoreHandle, state: RecordState | None) -> None:
        if state is RecordState.DONE:
            self._end_restore(handle, RestoreStatus.DONE)
        else:
            handle.error = OrbitKVError(ErrorKind.INTERNAL, "the agent could not copy all of it; its log says why")
            self._end_restore(handle, RestoreStatus.FAILED)

    def drain(self, *, reads: bool) -> None:
        """The session is over. Wait until everything has ended: by its record, or because nothing of it moves any more.

        That is so when the agent can hand nothing over any more and what it had is through, or when its process is
        gone, of which nothing writes to a GPU then. `reads`: this thread is the one that reads what the agent sends.
        """
        poll = select.poll()
        poll.register(self._session.agent_pidfd, select.POLLIN)
        why = "the agent ended before the copy did"
        warned = False
        while True:
            if reads:  # an answer says which record tells of what
                with contextlib.suppress(OrbitKVError):
                    self._session.connection.take_late_replies()
            self.settle()
            # Without a connection the agent drains what it accepted, and its records still tell. What it never answered
            # has no record.
            if not len(self):
                return
            if self._session.withdrawal.complete() and self._session.records.drained():
                why = "the session with the agent was lost before the copy ended"
                break
            if poll.poll(_LOOK_MS) or not guard("uncertain-copies"):
                break
            if not warned:
                warned = True
                logger.warning(
                    "OrbitKV: the agent is lost with %d copies that may still run; their blocks stay held until it "
                    "reports them, or ends",
                    len(self),
                )
        self.settle()
        gone = OrbitKVError(ErrorKind.UNAVAILABLE, why)
        for handle in [*list(self._restores), *list(self._saves), *list(self._unanswered)]:
            handle.error = gone
            if isinstance(handle, RestoreHandle):
                self._end_restore(handle, RestoreStatus.FAILED)
                self._restores.pop(handle, None)
            else:
                handle.advance(SaveStatus.FAILED)
                self._saves.pop(handle, None)
            self._unanswered.pop(handle, None)


ASK_S = 0.25
"""After so long an agent that owes something and was not heard of is asked for a sign."""
SIGN_S = 0.5
"""So long it may take: an agent that gets processor time answers within milliseconds, however much it copies."""
_LOOK_MS = 5
"""How often records are looked at while the agent drains without a connection that could tell."""
