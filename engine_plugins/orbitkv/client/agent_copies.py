"""Restores and saves that the agent copies (CUDA mode).

Restores are sent by the thread that asks for them; everything else happens on the transfer thread. No answer is waited
for: a record tells the end of each. Until it does, nobody knows whether bytes still move: neither a timeout nor a lost
connection ends a handle, only its record, or the end of the agent's process.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence

import numpy as np

from orbitkv.guards import guard
from orbitkv.protocol.errors import ErrorKind, OrbitKVError, SaveNotSubmittedError
from orbitkv.protocol.messages import (
    CommitSave,
    GroupBlocks,
    RecordRef,
    Refusal,
    Reply,
    RestorePlan,
    SavePlan,
    SaveRequest,
    SavesAccepted,
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

    def __len__(self) -> int:
        """Handles that have not ended."""
        return len(self._restores) + len(self._saves) + len(self._unanswered)

    # --- restores

    def restore(self, handle: RestoreHandle) -> None:
        """Send a restore. For any thread; waits for nothing."""
        blocks = [GroupBlocks(group, ids.astype("<i4").tobytes()) for group, ids in handle.blocks]
        request = StartRestore(handle.registration.id, handle.lease, blocks)
        self._unanswered[handle] = None
        try:
            self._session.connection.post(request, lambda reply: self._restore_answered(handle, reply))
        except OrbitKVError as error:  # not all of it went out, so the agent does nothing about it
            self._refused_restore(handle, error)

    def _restore_answered(self, handle: RestoreHandle, reply: Reply) -> None:
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

    # --- ends

    def settle(self) -> None:
        """End what the records say has ended."""
        records = self._session.records
        for restore, ref in list(self._restores.items()):
            state = records.state(ref)
            if state is RecordState.PENDING:
                continue
            del self._restores[restore]
            self._end(restore, state)
        for save, plan in list(self._saves.items()):
            state = records.state(plan.record)
            if state is RecordState.PENDING:
                continue
            del self._saves[save]
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

    def drain(self) -> None:
        """The session is over. Wait until everything has ended: by its record, or with the agent's process.

        Once the process is gone nothing of it writes to a GPU any more, so what is not done then has failed.
        """
        poll = select.poll()
        poll.register(self._session.agent_pidfd, select.POLLIN)
        warned = False
        while True:
            self.settle()
            # Without a connection the agent drains what it accepted, and its records still tell. What it never answered
            # has no record.
            if not len(self):
                return
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
        gone = OrbitKVError(ErrorKind.UNAVAILABLE, "the agent ended before the copy did")
        for restore in [*self._restores, *(each for each in self._unanswered if isinstance(each, RestoreHandle))]:
            restore.error = gone
            self._end_restore(restore, RestoreStatus.FAILED)
        for save in [*self._saves, *(each for each in self._unanswered if isinstance(each, SaveHandle))]:
            save.error = gone
            save.advance(SaveStatus.FAILED)
        self._restores.clear()
        self._saves.clear()
        self._unanswered.clear()


_LOOK_MS = 5
"""How often records are looked at while the agent drains without a connection that could tell."""
