"""`CacheManagerClient`: what an adapter, or any program, uses of the agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Condition
from typing import Any

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.errors import ErrorKind, OrbitKVError, SaveNotSubmittedError
from orbitkv.protocol.messages import (
    Allocation,
    AttachInstance,
    EngineReport,
    Events,
    GroupGeometry,
    Instance,
    InstanceState,
    Ping,
    Pong,
    ProofReport,
    Ranks,
    Register,
    Reply,
    ResetDone,
    ResetInstance,
    TakeEvents,
)
from orbitkv.protocol.records import Header
from orbitkv.protocol.versions import RELEASE

from .allocations import HostAllocation
from .gpu import EngineGpu, StreamPoint
from .handles import RestoreHandle, RestoreStatus, SaveHandle, SaveStatus
from .hashes import BlockHashes
from .layout import Int64
from .queries import Queries, QueryLoading, QueryReady
from .registration import GpuRegistration
from .session import Endpoint, Session
from .transfers import Transfers

REGISTER_TIMEOUT_MS = 120_000
LOOK_S = 0.0002
"""How often a waiting thread looks whether a GPU has written that bytes are in place: it wakes nobody."""


class CacheManagerClient:
    """A client of one boot of the node agent.

    It never reconnects. When the agent ends or restarts, every call raises `OrbitKVError` (UNAVAILABLE), open handles
    end, and the owner makes a new client and registers anew. Queries and the other direct calls belong to one thread;
    restores, saves and registrations are handed to a thread of the client's own.

    Args:
        socket_path: the agent's socket.
        cache_namespace: the tenant whose pages are used; "" is the default one.
        token: proves who we are, in a cluster.
        token_path: file with the token, instead of `token`; a newer one is shown to the agent as soon as it is there.
        name: shown in the agent's status.
        timeout_ms: bound of one call, unless the call says otherwise.
        server_uid: user that the agent must run as (default: this user or root).

    Raises:
        OrbitKVError: UNAVAILABLE, INCOMPATIBLE, DENIED or BUSY, with what to do about it.
    """

    def __init__(
        self,
        socket_path: str = "/tmp/orbitkv-50055.sock",
        *,
        cache_namespace: str = "",
        token: bytes = b"",
        token_path: str = "",
        name: str = "",
        timeout_ms: float = 5000,
        server_uid: int | None = None,
    ) -> None:
        self._endpoint = Endpoint(
            socket_path, cache_namespace, token, name or f"orbitkv {RELEASE}", int(timeout_ms), server_uid, token_path
        )
        self._timeout_ms = timeout_ms
        self._session = Session(self._endpoint, self._late_reply)
        self._queries = Queries(self._session)
        self._transfers: Transfers | None = None
        self._instance_seen = -1
        self._events_seen = 0
        self._restores_seen = 0
        self._closed = False

    # ----------------------------------------------------------------------------------------------------- the session

    @property
    def boot_id(self) -> str:
        """The agent's boot; another one means that everything was lost."""
        return self._session.welcome.boot_id

    @property
    def mode(self) -> str:
        """How pages are copied: "host" (by this process) or "cuda" (by the agent)."""
        return self._session.welcome.mode

    @property
    def options(self) -> dict[str, Any]:
        """Settings of the cache namespace that override the plugin's own."""
        return self._session.welcome.namespace_options

    @property
    def lost(self) -> OrbitKVError | None:
        """Why this client is of no more use, or None. Makes no system call."""
        transfers = self._transfers
        return self._session.connection.broken or (transfers.lost if transfers is not None else None)

    def health(self, timeout_ms: float | None = None) -> tuple[bool, str]:
        """Return whether the agent serves, and what it says about itself."""
        reply = self._session.connection.call(Ping(), self._within(timeout_ms))
        if not isinstance(reply, Pong):
            raise OrbitKVError(ErrorKind.INTERNAL, f"a ping was answered with {type(reply).__name__}")
        return reply.ok, reply.message

    def report_engine(
        self, engine: str, reason: str = "", message: str = "", *, timeout_ms: float | None = None
    ) -> None:
        """Tell the agent which engine this is (name and version) and, if it does not use the cache, why.

        Raises:
            OrbitKVError: the agent did not take it; one of an earlier release never does (INVALID).
        """
        self._session.connection.call(EngineReport(engine, reason, message), self._within(timeout_ms))

    def peer_alive(self) -> bool:
        """Whether the agent's process exists: true also when it is stalled. Asks the kernel, not the agent.

        Raises:
            OrbitKVError: CLOSED or UNAVAILABLE, this client no longer knows the process.
        """
        return self._session.agent_alive()

    def close(self) -> None:
        """Finish queued copies, leave the agent, release everything. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._transfers is not None:
            self._transfers.close()
        self._session.close()

    def __enter__(self) -> CacheManagerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- the instance

    def attach_instance(
        self, instance: Instance, *, key_generation: str = "", events: bool = False, timeout_ms: float | None = None
    ) -> InstanceState:
        """Join an instance as its scheduler, or ask again what it lacks."""
        self._instance_seen = self._session.records.counter(Header.INSTANCE)
        reply = self._session.connection.call(
            AttachInstance(instance, key_generation, events), self._within(timeout_ms)
        )
        if not isinstance(reply, InstanceState):
            raise OrbitKVError(ErrorKind.INTERNAL, f"attaching was answered with {type(reply).__name__}")
        return reply

    def instance_changed(self) -> bool:
        """Whether the instance may have changed since `attach_instance` was called. Makes no system call."""
        return self._session.records.counter(Header.INSTANCE) != self._instance_seen

    def reset_instance(self, instance: Instance, timeout_ms: float | None = None) -> str:
        """Move the instance to a new key generation; return its name.

        Raises:
            OrbitKVError: BUSY, it still has leases, restores or saves.
        """
        reply = self._session.connection.call(ResetInstance(instance), self._within(timeout_ms))
        if not isinstance(reply, ResetDone):
            raise OrbitKVError(ErrorKind.INTERNAL, f"a reset was answered with {type(reply).__name__}")
        return reply.key_generation

    def take_events(self, instance: Instance, timeout_ms: float | None = None) -> Events | None:
        """Return what left the store since the last call, or None (without a system call) when nothing did."""
        seen = self._session.records.counter(Header.EVENTS)
        if seen == self._events_seen:
            return None
        reply = self._session.connection.call(TakeEvents(instance), self._within(timeout_ms))
        if not isinstance(reply, Events):
            raise OrbitKVError(ErrorKind.INTERNAL, f"events were answered with {type(reply).__name__}")
        self._events_seen = seen
        return reply

    # --------------------------------------------------------------------------------------------------------- queries

    def query_prefetch(
        self,
        request_id: str,
        hashes: Sequence[BlockHashes],
        *,
        instance: Instance,
        max_wait_ms: int = 2000,
        wait_for_full_prefix: bool = False,
        proof: bool = False,
        timeout_ms: float | None = None,
    ) -> QueryLoading | QueryReady:
        """Ask which leading pages can be restored, and lease them.

        The same call again asks for the same operation (without a system call while it is loading); other hashes are a
        new revision and retire the older one.

        Args:
            request_id: the engine's request.
            hashes: one `BlockHashes` a KV group.
            instance: the engine incarnation that asks.
            max_wait_ms: after this long the answer is nothing.
            wait_for_full_prefix: keep loading until the rest can be fetched.
            proof: ask for pages saved as a proof of layout.
            timeout_ms: bound of this call.

        Raises:
            OrbitKVError: TIMEOUT (ask again, or compute), UNAVAILABLE, INVALID.
        """
        timeout_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        return self._queries.query(request_id, hashes, instance, max_wait_ms, wait_for_full_prefix, proof, timeout_ms)

    def query_watch(self, request_id: str) -> tuple[memoryview, int, int] | None:
        """For callers that ask hundreds of queries in every step: a loading query's record, to be read in place.

        Returns `(words, index, value)`: the query is loading as long as `words[index] == value`; None when that is not
        known. Readable until the client is closed.
        """
        return self._queries.watch(request_id)

    def cancel_query(self, request_id: str) -> None:
        """Withdraw interest in a request; a lease that was promised and not used returns. Never waits."""
        self._queries.cancel(request_id)

    def query_consumed(self, request_id: str) -> None:
        """The request's lease went into a restore: forget the operation."""
        self._queries.consumed(request_id)

    def release(self, ready: QueryReady) -> None:
        """Give the leases of an answer back unused. Never waits."""
        self._queries.release(ready)

    # ---------------------------------------------------------------------------------------------------- registration

    def register_context_batch(
        self,
        *,
        instance: Instance,
        ranks: Ranks,
        model_identity: str,
        model: str,
        groups: Sequence[GroupGeometry],
        allocations: Sequence[HostAllocation],
        device: str = "host",
        gpu: EngineGpu | None = None,
        used: bool = False,
        timeout_ms: float = REGISTER_TIMEOUT_MS,
    ) -> GpuRegistration:
        """Register all KV memory of one worker.

        Args:
            instance: the engine incarnation.
            ranks: this worker's place in it.
            model_identity: digest of all that gives the bytes their meaning.
            model: the same for people.
            groups: geometry of each KV group.
            allocations: the memory that the geometry refers to, by index.
            device: "host" without a GPU.
            gpu: the GPU that the allocations are memory of.
            used: requests have computed on this memory already.
            timeout_ms: bound of the call.

        Raises:
            OrbitKVError: INVALID or UNSUPPORTED, naming the field; UNAVAILABLE; TIMEOUT; STALE, the agent restarted
                since this client was made, or ended its session: make a new one.
        """
        if self._transfers is None:
            self._session.connection.check()
            self._transfers = Transfers(self._endpoint, self._session.welcome)
        transfers = self._transfers
        request = Register(
            instance=instance,
            ranks=ranks,
            model_identity=model_identity,
            model=model,
            device=device if gpu is None else gpu.uuid,
            allocations=[Allocation(allocation.size, allocation.exported) for allocation in allocations],
            groups=list(groups),
            used=used,
        )
        registration = transfers.call(lambda: transfers.register(request, self, allocations, gpu), timeout_ms)
        assert isinstance(registration, GpuRegistration)
        return registration

    def report_proof(
        self, registration: GpuRegistration, proven: bool, detail: str = "", timeout_ms: float | None = None
    ) -> None:
        """Say how the proof of layout ended. Until it is proven the instance gets no hit."""
        transfers = self._own(registration)
        transfers.call(lambda: transfers.ask(ProofReport(registration.id, proven, detail)), self._within(timeout_ms))

    def unregister_context(self, registration: GpuRegistration, timeout_ms: float = REGISTER_TIMEOUT_MS) -> None:
        """Retire a registration. It accepts nothing new from now on; what was queued drains first."""
        transfers = self._own(registration)
        registration.retired = True
        transfers.call(lambda: transfers.unregister(registration), timeout_ms)

    # -------------------------------------------------------------------------------------------------------- restores

    def start_restore(
        self,
        registration: GpuRegistration,
        lease: int,
        blocks: Sequence[npt.NDArray[np.integer[Any]]],
        *,
        layer_order: bool = False,
        after: StreamPoint | None = None,
    ) -> RestoreHandle:
        """Use a lease, once, for all its pages.

        Args:
            registration: where the blocks are.
            lease: the lease of this worker's shard.
            blocks: block ids of each group, (leased pages,) integers; -1 skips a page.
            layer_order: finish layer after layer, for `wait_layer`. An agent that copies by itself does it in more and
                smaller pieces, hands up to 2 GiB of them to the GPU at once (`RestoreHandle.handed_over` tells when it
                has all) and tells after each 28 MiB; one of an earlier release tells at the end.
            after: nothing is written before the engine's stream has come to this point.

        Raises:
            OrbitKVError: STALE, the registration was retired; INVALID; UNAVAILABLE.
        """
        transfers = self._own(registration)
        handle = RestoreHandle(
            registration, lease, _blocks(registration, blocks, destination=True), layer_order=layer_order, after=after
        )
        transfers.start_restore(handle)
        return handle

    @staticmethod
    def poll_restore(handle: RestoreHandle) -> RestoreStatus:
        """Return the restore's status. Makes no system call."""
        return handle.status

    @staticmethod
    def wait_restore(handle: RestoreHandle, timeout: float | None = None) -> RestoreStatus:
        """Wait until the restore ended, at most `timeout` seconds; return its status. A timeout ends nothing."""
        _wait(handle.changed, lambda: handle.status.final, timeout, _look_s(handle))
        return handle.status

    @staticmethod
    def wait_restore_enqueued(handle: RestoreHandle, timeout: float | None = None) -> bool:
        """Wait until the agent accepted the restore (or it ended); return whether it did in `timeout` seconds."""
        return _wait(handle.changed, lambda: handle.status is not RestoreStatus.PENDING, timeout)

    @staticmethod
    def layers_ready(handle: RestoreHandle) -> int:
        """Return how many layers have all their bytes. Makes no system call."""
        return handle.layers_ready

    @staticmethod
    def wait_layer(handle: RestoreHandle, layer: int, timeout: float | None = None) -> bool:
        """Wait until layer `layer` (from 0) is in place; false when the restore failed or `timeout` seconds passed."""
        _wait(handle.changed, lambda: handle.layers_ready > layer or handle.status.final, timeout, LOOK_S)
        return handle.layers_ready > layer

    def cancel_restore(self, handle: RestoreHandle) -> bool:
        """Cancel a restore of which no copy was submitted; false when it is too late (then it drains)."""
        return self._own(handle.registration).cancel_restore(handle)

    def restore_completions_ready(self) -> bool:
        """Whether a restore ended since the last call. Makes no system call."""
        if self._transfers is None or self._transfers.restores_ended == self._restores_seen:
            return False
        self._restores_seen = self._transfers.restores_ended
        return True

    # ----------------------------------------------------------------------------------------------------------- saves

    def prepare_save(
        self,
        registration: GpuRegistration,
        hashes: Sequence[BlockHashes],
        blocks: Sequence[npt.NDArray[np.integer[Any]]],
        *,
        proof: bool = False,
        after: StreamPoint | None = None,
    ) -> SaveHandle:
        """Capture a save: pages by their hashes and the blocks that hold them, one array a group.

        Nothing is read before the engine's stream has come to the point `after`.

        Raises:
            SaveNotSubmittedError: nothing was started.
        """
        try:
            self._own(registration)
            parts = list(hashes)
            ids = _blocks(registration, blocks, destination=False)
            if [len(part) for part in parts] != [block.size for _, block in ids]:
                raise OrbitKVError(ErrorKind.INVALID, "hashes and blocks: not the same number of pages")
            return SaveHandle(registration, parts, ids, proof=proof, after=after)
        except OrbitKVError as error:
            raise SaveNotSubmittedError(error.kind, str(error)) from None

    def submit_saves(self, handles: Sequence[SaveHandle]) -> None:
        """Submit prepared saves: all of them, or none.

        Raises:
            SaveNotSubmittedError: none was started. (What the agent refuses later ends the handles as NOT_SUBMITTED.)
        """
        if not handles:
            return
        if any(handle.status is not SaveStatus.PREPARED for handle in handles):
            raise SaveNotSubmittedError(ErrorKind.INVALID, "handles: one of them was submitted or cancelled before")
        try:
            transfers = {self._own(handle.registration) for handle in handles}
        except OrbitKVError as error:
            raise SaveNotSubmittedError(error.kind, str(error)) from None
        transfers.pop().submit_saves(handles)

    def start_save(
        self,
        registration: GpuRegistration,
        hashes: Sequence[BlockHashes],
        blocks: Sequence[npt.NDArray[np.integer[Any]]],
    ) -> SaveHandle:
        """Prepare and submit one save."""
        handle = self.prepare_save(registration, hashes, blocks)
        self.submit_saves([handle])
        return handle

    def cancel_save(self, handle: SaveHandle) -> bool:
        """Cancel a save before it is submitted; false when it is too late (then its pages are held until COPIED)."""
        if handle.status is SaveStatus.PREPARED:
            handle.advance(SaveStatus.CANCELLED)
            return True
        return self._own(handle.registration).cancel_save(handle)

    @staticmethod
    def void_save(handle: SaveHandle) -> bool:
        """Keep a running save from becoming visible; false when it is too late. Its pages are held until COPIED."""
        handle.void = True
        return not handle.status.pages_released

    @staticmethod
    def poll_save(handle: SaveHandle) -> SaveStatus:
        """Return the save's status. Makes no system call."""
        return handle.status

    @staticmethod
    def wait_save(handle: SaveHandle, timeout: float | None = None) -> SaveStatus:
        """Wait until the save ended, at most `timeout` seconds; return its status. A timeout ends nothing."""
        _wait(handle.changed, lambda: handle.status.final, timeout)
        return handle.status

    @staticmethod
    def wait_save_copied(handle: SaveHandle, timeout: float | None = None) -> bool:
        """Wait until the engine's pages are free again; return whether they are after `timeout` seconds."""
        return _wait(handle.changed, lambda: handle.status.pages_released, timeout, _look_s(handle))

    # ------------------------------------------------------------------------------------------------------- internals

    def _late_reply(self, reply: Reply) -> None:
        self._queries.late_reply(reply)

    def _within(self, timeout_ms: float | None) -> float:
        return self._timeout_ms if timeout_ms is None else timeout_ms

    def _own(self, registration: GpuRegistration) -> Transfers:
        if registration.client is not self or self._transfers is None:
            raise OrbitKVError(ErrorKind.STALE, "the registration belongs to another client")
        if registration.retired:
            raise OrbitKVError(ErrorKind.STALE, "the registration was retired and accepts nothing new")
        return self._transfers


def _blocks(
    registration: GpuRegistration, blocks: Sequence[npt.NDArray[np.integer[Any]]], *, destination: bool
) -> list[tuple[int, Int64]]:
    """Pair each group's block ids with the group, checked."""
    layouts = registration.layouts
    if len(blocks) != len(layouts):
        raise OrbitKVError(ErrorKind.INVALID, f"blocks: {len(layouts)} groups are registered, {len(blocks)} given")
    pairs = []
    for layout, ids in zip(layouts.values(), blocks, strict=True):
        array = np.ascontiguousarray(ids, np.int64)
        layout.check_blocks(array[array >= 0] if destination else array, destination=destination)
        pairs.append((layout.group, array))
    return pairs


def _look_s(handle: RestoreHandle | SaveHandle) -> float | None:
    """How often to look for its end, None where it is told."""
    return None if handle.registration.gpu is None else LOOK_S


def _wait(changed: Condition, until: Callable[[], bool], timeout: float | None, look_s: float | None = None) -> bool:
    """Wait for what wakes `changed`; with `look_s` also for what nobody tells, looking again and again."""
    if until():
        return True
    deadline = None if timeout is None else time.monotonic() + timeout
    with changed:
        while not until():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            changed.wait(remaining if look_s is None else min(look_s, remaining or look_s))
    return True
