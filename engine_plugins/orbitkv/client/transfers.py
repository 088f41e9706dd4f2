"""The transfer thread: the one thread that registers memory, submits restores and saves, and copies.

In CUDA mode the agent copies; this thread follows what it does (`agent_copies`), and hands work over only when the
engine's streams have come to where it may begin (`fence`).

Callers hand work over through deques (appending and removing are atomic) and an eventfd, and read results from handles.
Restores go first: a save looks for waiting restores after every chunk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from orbitkv.guards import guard
from orbitkv.protocol.errors import ErrorKind, OrbitKVError, SaveNotSubmittedError
from orbitkv.protocol.messages import (
    Challenge,
    ChallengeMet,
    CommitSave,
    GroupBlocks,
    Register,
    Registered,
    Reply,
    RestoreDone,
    RestorePlan,
    SavePlan,
    SaveRequest,
    SavesAccepted,
    StartRestore,
    SubmitSaves,
    Unregister,
    Welcome,
)
from orbitkv.protocol.records import Header
from orbitkv.scheduling import LONG_SLICE_S, use_slices

from .agent_copies import AgentCopies
from .allocations import HostAllocation
from .arenas import ArenaMap
from .copies import plan_pages
from .fence import Fence
from .gpu import EngineGpu
from .handles import RestoreHandle, RestoreStatus, SaveHandle, SaveStatus
from .registration import GpuRegistration
from .session import Endpoint, Session

logger = logging.getLogger("orbitkv")


class Transfers:
    """Owner of the transfer session.

    Args:
        endpoint: the agent.
        client: what the agent said to the client's own session, with which this one belongs.

    Raises:
        OrbitKVError: the session could not be opened; STALE, the agent restarted since the client's own was.
    """

    def __init__(self, endpoint: Endpoint, client: Welcome) -> None:
        self._endpoint = endpoint
        self._session = Session(endpoint, self._late_reply)
        try:
            self._session.join(client, endpoint.timeout_ms)
        except BaseException:
            self._session.close()
            raise
        self._arenas = ArenaMap(self._session.connection, endpoint.timeout_ms)
        self._arenas_seen = 0
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._restores: deque[RestoreHandle] = deque()
        self._saves: deque[list[SaveHandle]] = deque()
        self._uncommitted: deque[SaveHandle] = deque()
        self._agent: AgentCopies | None = None
        if self._session.welcome.mode != "host":
            self._agent = AgentCopies(self._session, self._end_restore, self._uncommitted.append)
        self._fence: Fence[RestoreHandle | list[SaveHandle]] = Fence(self._queue, self._fence_failed)
        self.restores_ended = 0
        self.lost: OrbitKVError | None = None
        self._closing = False
        self._ended = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        for fd in (self._wake, self._session.hint_fd, self._session.agent_pidfd, self._session.connection.fileno()):
            self._poll.register(fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="orbitkv-transfer", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ callers' threads

    def call(self, work: Callable[[], Any], timeout_ms: float) -> Any:
        """Run `work` on the transfer thread and return its result.

        Raises:
            OrbitKVError: TIMEOUT, or what `work` raised.
        """
        self._check()
        future: Future[Any] = Future()
        self._calls.append((work, future))
        self._hand_over()
        try:
            return future.result(timeout_ms / 1000)
        except TimeoutError:
            raise OrbitKVError(
                ErrorKind.TIMEOUT, f"the OrbitKV agent at {self._endpoint.path} did not finish in {timeout_ms:.0f} ms"
            ) from None

    def register(
        self,
        request: Register,
        client: object,
        allocations: Sequence[HostAllocation],
        gpu: EngineGpu | None,
    ) -> GpuRegistration:
        """Register engine memory (on the transfer thread)."""
        reply = self._session.connection.call(request, _REGISTER_MS)
        if isinstance(reply, Challenge) and gpu is not None:
            reply = self._meet(reply, allocations, gpu)
        if not isinstance(reply, Registered):
            raise OrbitKVError(ErrorKind.INTERNAL, f"a registration was answered with {type(reply).__name__}")
        registration = GpuRegistration(
            reply.registration, client, request.groups, allocations, proof_required=reply.proof_required, gpu=gpu
        )
        if registration.page_bytes != reply.page_bytes:
            raise OrbitKVError(ErrorKind.INTERNAL, "agent and client disagree about the size of a page")
        return registration

    def _meet(self, challenge: Challenge, allocations: Sequence[HostAllocation], gpu: EngineGpu) -> Reply:
        """Show that this process may write the memory that it registers; what was there is put back."""
        before: list[tuple[int, npt.NDArray[np.uint8]]] = []
        try:
            for (allocation, offset), value in zip(challenge.places, challenge.values, strict=True):
                owner = allocations[allocation]
                if not 0 <= offset <= owner.size - len(value):
                    raise OrbitKVError(ErrorKind.INTERNAL, "the agent's challenge lies outside of the memory")
                kept, shown = np.empty(len(value), np.uint8), np.frombuffer(value, np.uint8)
                gpu.read(kept.ctypes.data, owner.address + offset, len(value))
                before.append((owner.address + offset, kept))
                gpu.write(owner.address + offset, shown.ctypes.data, len(value))
            return self._session.connection.call(ChallengeMet(challenge.challenge), _REGISTER_MS)
        finally:
            for address, kept in before:
                gpu.write(address, kept.ctypes.data, len(kept))

    def ask(self, request: Any) -> Reply:
        """Send a request of this session (on the transfer thread)."""
        return self._session.connection.call(request, self._endpoint.timeout_ms)

    def unregister(self, registration: GpuRegistration) -> None:
        """Finish the registration's queued work, then retire it (on the transfer thread)."""
        while True:
            if self._step():
                continue
            if not (self._open_copies or self._fence):
                break
            self._wait()
        self._session.connection.call(Unregister(registration.id), _REGISTER_MS)

    def start_restore(self, handle: RestoreHandle) -> None:
        """Queue a restore."""
        self._check()
        if handle.after is not None and guard("stream-points"):
            self._fence.put(handle.after, handle)
        else:
            self._queue(handle)

    def cancel_restore(self, handle: RestoreHandle) -> bool:
        """Take a restore back, if the thread has not taken it yet."""
        try:
            self._restores.remove(handle)
        except ValueError:
            if self._fence.withdraw(handle) is None:
                return False
        self._end_restore(handle, RestoreStatus.CANCELLED)
        return True

    def submit_saves(self, handles: Sequence[SaveHandle]) -> None:
        """Queue a batch of saves.

        Raises:
            SaveNotSubmittedError: nothing of it was started.
        """
        try:
            self._check()
        except OrbitKVError as error:
            raise SaveNotSubmittedError(error.kind, str(error)) from None
        for handle in handles:
            handle.advance(SaveStatus.SUBMITTED)
        for batch in _batches(handles):
            # Of points on one stream the last is reached last.
            after = batch[-1].after
            if after is not None and guard("stream-points"):
                self._fence.put(after, batch)
            else:
                self._queue(batch)

    def cancel_save(self, handle: SaveHandle) -> bool:
        """Take a save back, if the thread has not taken its batch yet."""
        waiting = [item for item in self._fence.items() if isinstance(item, list)]
        for batch in [*waiting, *list(self._saves)]:
            if handle in batch:
                after = self._fence.withdraw(batch)
                if after is None:
                    try:
                        self._saves.remove(batch)
                    except ValueError:
                        return False
                rest = [other for other in batch if other is not handle]
                if rest and after is not None:
                    self._fence.put(after, rest)
                elif rest:
                    self._queue(rest)
                handle.advance(SaveStatus.CANCELLED)
                return True
        return False

    def close(self) -> None:
        """Drain what was queued, end the thread, close the session."""
        self._closing = True
        self._notify()
        self._thread.join(None if self._agent is None else _CLOSE_S)
        if self._thread.is_alive():
            # The agent does not say how its copies ended. The thread goes on waiting for that, and with it the handles.
            logger.warning("OrbitKV: the agent has not ended its copies after %d s; left as it is", _CLOSE_S)
            return
        self._fence.close()
        self._session.close()
        os.close(self._wake)

    def _check(self) -> None:
        self._session.connection.check()
        if self.lost is not None:
            raise self.lost
        if self._closing:
            raise OrbitKVError(ErrorKind.CLOSED, "this OrbitKV client is closed; make a new one")

    def _queue(self, work: RestoreHandle | list[SaveHandle]) -> None:
        """Let the thread take a restore or a batch of saves."""
        if isinstance(work, list):
            self._saves.append(work)
        elif self._agent is not None:
            self._agent.restore(work)
            if self._ended:  # perhaps nobody looks after it any more
                self._agent.drain(reads=False)
            return
        else:
            self._restores.append(work)
        self._hand_over()

    def _fence_failed(self, error: Exception) -> None:
        """The engine's GPU failed: nobody can say when its blocks may be touched."""
        self.lost = self.lost or OrbitKVError(ErrorKind.INTERNAL, f"the engine's GPU failed: {error}")
        self._closing = True
        self._hand_over()

    def _hand_over(self) -> None:
        """Wake the thread for what was just queued; if it has ended meanwhile, end what nobody will take any more."""
        self._notify()
        if self._ended:
            self._fail_all()

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # already woken 2**64 times: it will wake
            os.eventfd_write(self._wake, 1)

    # -------------------------------------------------------------------------------------------------- transfer thread

    def _run(self) -> None:
        use_slices(LONG_SLICE_S)  # the engine's threads go first when they wake up
        try:
            while True:
                if self._step():
                    continue
                if self._closing and (self.lost or not (self._open_copies or self._fence)):
                    break
                self._wait()
        except OrbitKVError as error:
            self.lost = error
        except BaseException as error:
            self.lost = OrbitKVError(ErrorKind.INTERNAL, f"the transfer thread ended: {error!r}")
            raise
        finally:
            self._ended = True  # before the queues are emptied: whoever queues after that sees it
            self._fail_all()
            if self._agent is not None:
                self._agent.drain(reads=True)
                self._fail_all()
            self._arenas.close()

    @property
    def _open_copies(self) -> bool:
        """Whether the agent copies for us."""
        return self._agent is not None and len(self._agent) > 0

    def _step(self) -> bool:
        """Do one piece of work; return whether there was any."""
        if self._agent is not None:
            self._agent.settle()
        self._settle_commits()
        call = _pop(self._calls)
        if call is not None:
            self._answer(*call)
            return True
        if self._run_restores():
            return True
        batch = _pop(self._saves)
        if batch is not None:
            self._save(batch)
            return True
        arenas = self._session.records.counter(Header.ARENAS)
        if arenas != self._arenas_seen:
            self._arenas_seen = arenas
            self._arenas.sync()
            return True
        return False

    def _wait(self) -> None:
        connection = self._session.connection
        self._poll.modify(connection.fileno(), select.POLLIN | (select.POLLOUT if connection.unsent else 0))
        longest_s = None if self._agent is None else self._agent.watch()
        for fd, events in self._poll.poll(None if longest_s is None else max(0.0, longest_s) * 1000 + 1):
            if fd == self._session.agent_pidfd:
                raise OrbitKVError(ErrorKind.UNAVAILABLE, f"the OrbitKV agent at {self._endpoint.path} ended")
            if fd == connection.fileno():
                if events & select.POLLOUT:
                    connection.flush()
                # Between calls only what nobody waits for any more can come, and the agent holds it until we answer.
                connection.take_late_replies()
                continue
            with contextlib.suppress(BlockingIOError):
                os.read(fd, _HINTS_BYTES)

    def _answer(self, work: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(work())
        except OrbitKVError as error:
            future.set_exception(error)
            self._reraise_if_broken(error)
        except Exception as error:  # a defect in `work` belongs to its caller, not to this thread
            future.set_exception(error)

    def _run_restores(self) -> bool:
        worked = False
        while (handle := _pop(self._restores)) is not None:
            self._restore(handle)
            worked = True
        return worked

    def _restore(self, handle: RestoreHandle) -> None:
        registration = handle.registration
        plan: RestorePlan | None = None
        try:
            blocks = [GroupBlocks(group, ids.astype("<i4").tobytes()) for group, ids in handle.blocks]
            reply = self._session.connection.call(
                StartRestore(registration.id, handle.lease, blocks), self._endpoint.timeout_ms
            )
            if not isinstance(reply, RestorePlan):
                raise OrbitKVError(ErrorKind.INTERNAL, f"a restore was answered with {type(reply).__name__}")
            plan = reply
            handle.copies_here()
            handle.advance(RestoreStatus.ENQUEUED)
            self._copy_restore(handle, plan)
        except Exception as caught:
            error = handle.error = _as_error(caught)
            if plan is not None:
                self._session.connection.send_only(RestoreDone(plan.restore, copied=False))
            self._end_restore(handle, RestoreStatus.FAILED)
            self._reraise_if_broken(error)
            return
        self._session.connection.send_only(RestoreDone(plan.restore, copied=True))
        self._end_restore(handle, RestoreStatus.DONE)

    def _copy_restore(self, handle: RestoreHandle, plan: RestorePlan) -> None:
        for (group, ids), places in zip(handle.blocks, plan.pages, strict=True):
            layout = handle.registration.layouts[group]
            wanted = ids >= 0
            blocks = ids[wanted].astype(np.int64)
            layout.check_blocks(blocks, destination=True)
            pages = self._arenas.addresses(places, layout.page_bytes)
            if pages.size != ids.size:
                raise OrbitKVError(ErrorKind.INTERNAL, "the agent's plan does not match the blocks of the restore")
            copy = plan_pages(layout, blocks, pages[wanted], to_engine=True, layer_order=handle.layer_order)
            per_layer = np.cumsum(layout.size) * blocks.size
            for done in copy.chunks():
                if handle.layer_order:
                    handle.layers_in_place(int(np.searchsorted(per_layer, done, side="right")))

    def _save(self, batch: list[SaveHandle]) -> None:
        if self._agent is not None:
            self._agent.save(batch, [_request(handle) for handle in batch])
            return
        try:
            reply = self._session.connection.call(
                SubmitSaves([_request(handle) for handle in batch]), self._endpoint.timeout_ms
            )
            if not isinstance(reply, SavesAccepted) or len(reply.plans) != len(batch):
                raise OrbitKVError(ErrorKind.INTERNAL, f"saves were answered with {type(reply).__name__}")
        except OrbitKVError as error:
            # In host mode only this thread copies: without plans nothing has started, whatever became of the call.
            for handle in batch:
                handle.error = SaveNotSubmittedError(error.kind, str(error))
                handle.advance(SaveStatus.NOT_SUBMITTED)
            self._reraise_if_broken(error)
            return
        for handle, plan in zip(batch, reply.plans, strict=True):
            handle.follow(self._session.records, plan.record)
        for index, (handle, plan) in enumerate(zip(batch, reply.plans, strict=True)):
            try:
                self._copy_save(handle, plan)
            except OrbitKVError as error:  # the thread ends: nothing of the rest was copied
                for rest in batch[index + 1 :]:
                    rest.error = error
                    rest.advance(SaveStatus.FAILED)
                raise

    def _copy_save(self, handle: SaveHandle, plan: SavePlan) -> None:
        handle.present, handle.dropped = plan.present, dict(plan.dropped)
        try:
            handle.positions = [np.frombuffer(blob, "<u4").astype(np.int64) for blob in plan.positions]
            for (group, ids), positions, places in zip(handle.blocks, handle.positions, plan.pages, strict=True):
                layout = handle.registration.layouts[group]
                pages = self._arenas.addresses(places, layout.page_bytes)
                for _ in plan_pages(layout, ids[positions], pages, to_engine=False).chunks():
                    self._run_restores()
        except Exception as caught:
            error = handle.error = _as_error(caught)
            self._session.connection.send_only(CommitSave(plan.save, copied=False))
            handle.advance(SaveStatus.FAILED)
            self._reraise_if_broken(error)
            return
        handle.advance(SaveStatus.COPIED)
        # From here `void_save` comes too late; before, it keeps the pages from becoming visible.
        self._session.connection.send_only(CommitSave(plan.save, copied=not handle.void))
        self._uncommitted.append(handle)

    def _settle_commits(self) -> None:
        """Wake whoever waits for a save to become visible."""
        while self._uncommitted and self._uncommitted[0].status.final:
            self._wake_waiters(self._uncommitted.popleft())

    def _fail_all(self) -> None:
        """The session is over: nothing copies any more, so every open handle gets its final state."""
        error = self.lost or OrbitKVError(ErrorKind.CLOSED, "this OrbitKV client was closed")
        while (call := _pop(self._calls)) is not None:
            call[1].set_exception(error)
        for waiting in self._fence.take_all():
            (self._saves if isinstance(waiting, list) else self._restores).append(waiting)  # type: ignore[arg-type]
        while (handle := _pop(self._restores)) is not None:
            handle.error = error
            self._end_restore(handle, RestoreStatus.FAILED)
        while (batch := _pop(self._saves)) is not None:
            for save in batch:
                save.error = SaveNotSubmittedError(error.kind, str(error))
                save.advance(SaveStatus.NOT_SUBMITTED)
        while (copied := _pop(self._uncommitted)) is not None:
            if not copied.status.final:
                copied.error = error
                copied.advance(SaveStatus.FAILED)
            self._wake_waiters(copied)

    def _end_restore(self, handle: RestoreHandle, status: RestoreStatus) -> None:
        self.restores_ended += 1
        handle.advance(status)

    @staticmethod
    def _wake_waiters(handle: SaveHandle) -> None:
        with handle.changed:
            handle.changed.notify_all()

    def _reraise_if_broken(self, error: OrbitKVError) -> None:
        """End the thread when there is nobody to talk to, or nobody who answers while it should close."""
        if self._session.connection.broken is not None or (self._closing and error.kind is ErrorKind.TIMEOUT):
            raise error

    def _late_reply(self, reply: Reply) -> None:
        """What the agent accepted after we stopped waiting for it was never copied: say so."""
        connection = self._session.connection
        if isinstance(reply, RestorePlan):
            connection.send_only(RestoreDone(reply.restore, copied=False))
        elif isinstance(reply, SavesAccepted):
            for plan in reply.plans:
                connection.send_only(CommitSave(plan.save, copied=False))
        elif isinstance(reply, Registered):
            connection.send_only(Unregister(reply.registration))


_HINTS_BYTES = 4096
"""All hints that came; the agent's are a pipe, or an eventfd in earlier releases."""
_REGISTER_MS = 120_000
_CLOSE_S = 10
"""Longest wait for copies that the agent makes, when a client is closed."""
_BATCH_PAGES = 128
"""Pages in one request to the agent, so that it is not held up for others (a larger save goes alone)."""


T = TypeVar("T")


def _pop(queue: deque[T]) -> T | None:
    """Take the first of a queue that other threads use too, or None."""
    try:
        return queue.popleft()
    except IndexError:
        return None


def _as_error(caught: Exception) -> OrbitKVError:
    """What a handle says of its end. A defect, or memory that cannot be had, ends one handle and not the thread."""
    if isinstance(caught, OrbitKVError):
        return caught
    return OrbitKVError(ErrorKind.INTERNAL, f"the copy could not be made: {caught!r}")


def _batches(handles: Sequence[SaveHandle]) -> Iterator[list[SaveHandle]]:
    batch: list[SaveHandle] = []
    pages = 0
    for handle in handles:
        size = sum(ids.size for _, ids in handle.blocks)
        if batch and pages + size > _BATCH_PAGES:
            yield batch
            batch, pages = [], 0
        batch.append(handle)
        pages += size
    if batch:
        yield batch


def _request(handle: SaveHandle) -> SaveRequest:
    return SaveRequest(
        registration=handle.registration.id,
        hashes=[part.wire() for part in handle.hashes],
        blocks=[GroupBlocks(group, ids.astype("<i4").tobytes()) for group, ids in handle.blocks],
        proof=handle.proof,
    )
