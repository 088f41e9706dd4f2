"""The connector's half in a worker: restores into the engine's KV memory, and saves from it.

Nothing here waits for a copy or for the agent, but for a moment at a preemption and while the engine computes nothing.
Work is handed to the client's own thread, and what became of it is read from its handles once a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orbitkv.client import (
    BlockHashes,
    CacheManagerClient,
    ErrorKind,
    GpuRegistration,
    Instance,
    OrbitKVError,
    Ranks,
    RestoreHandle,
    SaveHandle,
    SaveStatus,
)
from orbitkv.client.gpu import StreamPoint
from orbitkv.config import PluginConfig
from orbitkv.guards import guard
from orbitkv.injection import StayOff, tell_agent
from orbitkv.protocol.reasons import OffReason

from . import proof, together
from .attachment import Attachment, Off, connect
from .identity import Identity, IdentityRefusedError
from .injected import engine_name
from .landing import Landing
from .layout import Layout
from .metadata import Load, Save, StepMetadata, WorkerReport
from .restores import Restores, Running

logger = logging.getLogger("vllm.orbitkv")

REGISTER_S = 120.0
"""Longest wait of the engine's start for the first attachment."""
DRAIN_S = 0.01
"""Longest wait of a step for saves of preempted requests to leave their blocks."""
BY_LAYER_BYTES = 256 << 20
"""Restores of fewer bytes than this are nearly over when a step could begin: whole pages are faster."""


@dataclass(frozen=True)
class WorkerAttachment:
    """A client with this worker's memory registered."""

    client: CacheManagerClient
    registration: GpuRegistration

    @property
    def boot_id(self) -> str:
        """The agent's boot."""
        return self.client.boot_id

    def alive(self) -> bool:
        """Whether the agent's process exists and the client works."""
        return self.client.lost is None and self.client.peer_alive()

    def close(self) -> None:
        """Finish what runs, leave the agent."""
        self.client.close()


@dataclass(slots=True)
class RunningSave:
    """A save that has not ended."""

    save: Save
    client: CacheManagerClient
    handle: SaveHandle
    give_up_at: float
    after: StreamPoint | None = None


@dataclass
class Results:
    """What a step reports to the engine."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf:
    """Restores and saves of one worker.

    Args:
        config: the plugin's settings.
        instance: the engine incarnation.
        ranks: this worker's place.
        identify: works out the model's identity; may take minutes, runs on the attachment's thread.
        several_groups: block ids are not unique in the engine: failed loads are reported by request only.

    Attributes:
        instance: the engine incarnation.
    """

    def __init__(
        self,
        config: PluginConfig,
        instance: Instance,
        ranks: Ranks,
        identify: Callable[[Layout], Identity],
        *,
        several_groups: bool = False,
    ) -> None:
        self._config = config
        self.instance = instance
        self._ranks = ranks
        self._identify = identify
        self._several_groups = several_groups
        self._identity: Identity | None = None
        self._layout: Layout | None = None
        self._attachment: Attachment[WorkerAttachment] = Attachment(f"worker {ranks.tensor}", self._attach)
        self._adopted: WorkerAttachment | None = None
        # Taken once, by whoever uses the KV memory first: the attachment's thread, to prove the layout with random
        # bytes, or the engine, to compute.
        self._empty_cache = threading.Semaphore(1)
        self._unproven: WorkerAttachment | None = None
        # Stays attached, unused, so that the agent can tell why this engine's cache is off.
        self._disproven: WorkerAttachment | None = None
        self._off = ""
        self._free_blocks: StreamPoint | None = None
        self._landing: Landing | None = None
        self._landing_failed = ""
        self._lands = True
        self._restores = Restores()
        self._saves: dict[int, RunningSave] = {}
        self._held: set[str] = set()
        self._report = WorkerReport()
        self._invalid_blocks: set[int] = set()
        together.enter(self)

    # --- attachment

    def register(self, layout: Layout) -> None:
        """Attach with this worker's KV memory, in a thread of its own; wait for the first attempt.

        Raises:
            RuntimeError: there is no agent, and `orbitkv.on_missing` is "fail".
        """
        self._layout = layout
        self._attachment.start()
        if not self._attachment.wait_first(REGISTER_S):
            logger.warning(
                "OrbitKV: attaching takes long (the model's weights are read once); the engine starts meanwhile"
            )
        if not self._empty_cache.acquire(blocking=False) and not self._attachment.wait_first(2 * proof.PROOF_S):
            raise RuntimeError("OrbitKV: the proof of layout does not end; its blocks cannot be given to the engine")
        error = self._attachment.last_error
        if error is not None and self._config.on_missing == "fail":
            self._attachment.stop()
            raise RuntimeError(f"{error}. (orbitkv.on_missing=run lets the engine start without the agent.)")

    def turn_off(self, why: str) -> None:
        """This worker's memory cannot be served. It still answers for what the scheduler's half asks of it."""
        self._off = why
        logger.warning("OrbitKV is off for this engine, which serves on without it: %s", why)
        self._tell(Off(why, OffReason.LAYOUT_REFUSED))

    def _tell(self, off: Off) -> None:
        """Let the agent know, for those who look at the cache and not at this engine's log."""
        untold = tell_agent(engine_name(), StayOff(off.reason, str(off)), self._config)
        if untold:
            logger.info("OrbitKV: %s", untold)

    def _attach(self) -> WorkerAttachment:
        """Register and prove (attachment's thread)."""
        try:
            return self._make_attachment()
        except Off as off:
            self._tell(off)
            raise

    def _make_attachment(self) -> WorkerAttachment:
        layout = self._layout
        assert layout is not None
        if self._off:
            raise Off(self._off, OffReason.LAYOUT_REFUSED)
        if self._identity is None:
            try:
                self._identity = self._identify(layout)
            except IdentityRefusedError as error:
                raise Off(str(error), OffReason.MODEL_UNKNOWN) from error
        # A restore or save waits at most as long as a request is held for it.
        timeout_ms = max(100, min(self._config.timeout_ms, self._config.max_wait_ms))
        client = connect(self._config, f"vLLM worker {self._ranks.tensor} {self.instance}", timeout_ms)
        try:
            empty = self._empty_cache.acquire(blocking=False)
            registration = client.register_context_batch(
                instance=self.instance,
                ranks=self._ranks,
                model_identity=self._identity.digest,
                model=self._identity.description,
                groups=layout.groups,
                allocations=layout.allocations,
                gpu=layout.gpu,
                used=not empty,
                timeout_ms=REGISTER_S * 1000,
            )
            attached = WorkerAttachment(client, registration)
            if registration.proof_required:
                self._prove(attached, layout, empty=empty)
            return attached
        except OrbitKVError as error:
            client.close()
            if error.kind in (ErrorKind.INVALID, ErrorKind.UNSUPPORTED):
                raise Off(f"the agent refused this engine's memory: {error}", OffReason.LAYOUT_REFUSED) from error
            raise
        except BaseException:
            if self._disproven is None:
                client.close()
            raise

    def _prove(self, attached: WorkerAttachment, layout: Layout, *, empty: bool) -> None:
        if proof.proven_before(layout):
            attached.client.report_proof(attached.registration, True, "proven before in this process")
            return
        if not empty:
            self._unproven = attached  # by the first block that is computed
            return
        try:
            proof.prove_on_empty_cache(
                layout, attached.client, attached.registration, self.instance, self._ranks.tensor
            )
        except proof.LayoutDisprovenError as error:
            attached.client.report_proof(attached.registration, False, str(error))
            self._disproven = attached
            raise Off(f"proof of layout: {error}", OffReason.LAYOUT_REFUSED) from error
        except proof.ProofUnfinishedError as error:
            logger.warning("OrbitKV: proof of layout: %s; the first computed block will do", error)
            self._unproven = attached
            return
        proof.remember(layout)
        attached.client.report_proof(attached.registration, True)

    def shutdown(self) -> None:
        """Finish what runs, leave the agent."""
        together.leave(self)
        self._drop()
        self._attachment.stop()
        if self._disproven is not None:
            self._disproven.close()

    # --- step

    def handle_preemptions(self, step: StepMetadata) -> None:
        """Blocks of these requests are about to be overwritten: their saves leave them, or become void."""
        self._refresh()
        # Whoever had this step's blocks before may still be computing on them, but nobody after this point.
        self._free_blocks = self._point() if step.loads else None
        if not step.preempted or not guard("vllm-preempted-saves"):
            return
        deadline = time.monotonic() + DRAIN_S
        for running in list(self._saves.values()):
            if running.save.request_id in step.preempted and not running.handle.status.pages_released:
                self._leave_blocks(running, deadline)

    @staticmethod
    def _leave_blocks(running: RunningSave, deadline: float) -> None:
        client, handle = running.client, running.handle
        try:
            if client.cancel_save(handle):
                return
        except OrbitKVError:
            pass  # the client is over, and with it the save, unless its copy still runs
        if not client.wait_save_copied(handle, max(0.0, deadline - time.monotonic())):
            # This process copies by itself, and only reads these blocks; void, what it reads now is never visible.
            client.void_save(handle)

    def start_loads(self, step: StepMetadata) -> None:
        """Start this step's restores."""
        for load in step.loads:
            self._start(load, at_once=False)

    def start_at_once(self, load: Load, *, by_layer: bool = False) -> None:
        """Start a restore whose blocks were just allocated; the thread that steps calls, between two steps.

        `by_layer`: its request may begin before all of it is there (`take_restored`).
        """
        self._start(load, at_once=True, by_layer=by_layer and self._lands and not self._restores.untold)

    def _start(self, load: Load, *, at_once: bool, by_layer: bool = False) -> None:
        client, handle = None, None
        size = self._gpu_bytes(load)
        by_layer = by_layer and (size >= BY_LAYER_BYTES or not size)
        try:
            after = self._free_blocks
            if at_once:
                # All steps so far were handed to the GPU: nobody computes on these blocks after this point. No save
                # reads them either: a waiting request gets those of preempted ones in a later step only.
                self._refresh()
                after = self._point()
            client, handle = self._start_load(load, after, by_layer=by_layer)
        except Exception as error:
            logger.warning("OrbitKV: request %s is computed, its restore did not begin: %s", load.request_id, error)
        self._restores.add(load, client, handle, size=size, at_once=at_once, by_layer=by_layer)

    def _gpu_bytes(self, load: Load) -> int:
        """What the agent copies; 0 in host memory, where this process copies."""
        if self._layout is None or self._layout.gpu is None:
            return 0
        pages = sum(block >= 0 for block in load.blocks)
        return pages * sum(layer.block_bytes for group in self._layout.groups for layer in group.layers)

    def _start_load(
        self, load: Load, after: StreamPoint | None, *, by_layer: bool
    ) -> tuple[CacheManagerClient | None, RestoreHandle | None]:
        adopted = self._adopted
        if not load.leases or adopted is None:
            return None, None
        if load.boot_id != adopted.boot_id and guard("vllm-boot"):
            return None, None  # leases of another boot of the agent mean nothing to this one
        lease = load.leases[self._ranks.tensor]
        blocks = np.array(load.blocks, np.int64)
        handle = adopted.client.start_restore(adopted.registration, lease, [blocks], layer_order=by_layer, after=after)
        return adopted.client, handle

    def start_saves(self, step: StepMetadata) -> None:
        """Hand this step's saves over; the blocks hold their final bytes now."""
        self._land()
        if not step.saves:
            return
        # Who read what was not there computed what must not be kept.
        if self._landing_failed and guard("vllm-landed-only"):
            for save in step.saves:
                self._ended(save, kept=False)
            return
        self._refresh()
        adopted = self._adopted
        if adopted is not None and self._unproven is adopted:
            self._prove_by(step.saves[0], adopted)
            adopted = self._adopted
        if adopted is None:
            for save in step.saves:
                self._ended(save, kept=False)
            return
        client, registration = adopted.client, adopted.registration
        give_up_at = time.monotonic() + self._config.max_wait_ms / 1000
        handles = []
        computed = self._point()
        try:
            for save in step.saves:
                count = len(save.blocks)
                size = len(save.hashes) // count
                hashes = BlockHashes([save.hashes[i * size : (i + 1) * size] for i in range(count)])
                blocks = np.array(save.blocks, np.int64)
                handles.append(client.prepare_save(registration, [hashes], [blocks], after=computed))
            client.submit_saves(handles)
        except OrbitKVError as error:  # SaveNotSubmittedError: none of them was started
            logger.warning("OrbitKV: saves of this step are left out: %s", error)
            for save in step.saves:
                self._ended(save, kept=False)
            return
        for save, handle in zip(step.saves, handles, strict=True):
            self._saves[save.number] = RunningSave(save, client, handle, give_up_at, computed)

    def take_results(self, step: StepMetadata) -> Results:
        """Return which requests' loads and holds ended; see the connector's interface."""
        self._land()
        results = Results()
        now = time.monotonic()
        if self._restores:
            results.received = self._restores.take_done(computing=step.computing, at_once=False)
            for running in self._restores.take_failed():
                self._fail_load(running, results)
        if self._saves:
            for save in list(self._saves.values()):
                self._poll_save(save, now)
        self._held |= step.held
        if self._held:
            busy = {
                running.save.request_id for running in self._saves.values() if not running.handle.status.pages_released
            }
            if not guard("vllm-released-only"):
                busy = set()
            results.sent = self._held - busy
            self._held &= busy
        return results

    def take_invalid_blocks(self) -> set[int]:
        """Return blocks that should have been filled and were not, since the last call."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def take_report(self) -> WorkerReport | None:
        """Return what the scheduler's half has to know, since the last call."""
        self._report.loading = self._restores.at_once
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def take_restored(self, *, computing: bool, wait: bool = True, alone: str = "") -> set[str]:
        """Return which of the restores that were started at once have ended well and are to be reported now; or one
        that lands from now on, with the next step.

        Args:
            computing: the engine computes something now.
            wait: else wait for one that is about to end.
            alone: the only request that the engine has; its restore may land.
        """
        landing = self._restores.take_landing(alone) if alone else None
        if landing is not None and self._layout is not None:
            names = [layer.name for group in self._layout.groups for layer in group.layers]
            self._landing = Landing(landing, names)
            return {landing.load.request_id}
        return self._restores.take_done(computing=computing, at_once=True, wait=wait)

    # --- a restore that lands with the step

    @property
    def landing(self) -> str:
        """The request for whose restore the next step waits, layer by layer; "" when there is none."""
        return self._landing.request if self._landing is not None else ""

    def begin_landing(self, by_layer: Callable[[], bool], *, computing: bool) -> None:
        """That step begins; `by_layer`: whether it calls `wait_layer` before it reads a layer, if it is `computing`."""
        landing = self._landing
        if landing is not None:
            self._await(landing, lambda: landing.begin(by_layer=computing and by_layer()))

    def wait_layer(self, name: str) -> None:
        """The step is about to read a layer."""
        landing = self._landing
        if landing is not None:
            self._await(landing, lambda: landing.wait_layer(name))

    def take_landing_failed(self) -> str:
        """Return the request whose step read what was not in place, since the last call; "" when there is none."""
        failed, self._landing_failed = self._landing_failed, ""
        return failed

    def _land(self) -> None:
        """All of that step is with the GPU."""
        landing, self._landing = self._landing, None
        if landing is None:
            return
        self._await(landing, landing.end)
        if not landing.in_place:
            self._landing_failed = landing.request
        if landing.blind:
            self._lands = False
            logger.warning("OrbitKV: this engine does not say which layer it reads: restores end before requests begin")

    def _await(self, landing: Landing, wait: Callable[[], object]) -> None:
        try:
            wait()
        except Exception:
            if not guard("vllm-contained"):
                raise
            landing.in_place = False
            logger.exception("OrbitKV: waiting for a restore failed; its request is computed")

    # --- internals

    def _fail_load(self, running: Running, results: Results) -> None:
        request_id, handle = running.load.request_id, running.handle
        results.received.add(request_id)
        if handle is not None:
            logger.warning(
                "OrbitKV: the restore of request %s %s (%s); it is computed",
                request_id,
                handle.status.value,
                handle.error,
            )
        self._report.failed_loads.add(request_id)
        if self._several_groups:
            results.failed.add(request_id)
        else:
            self._invalid_blocks.update(block for block in running.load.blocks if block >= 0)

    def _poll_save(self, running: RunningSave, now: float) -> None:
        handle = running.handle
        status = handle.status
        if not status.final:
            # While the engine still computes the blocks there is nothing to give up.
            computed = running.after is None or running.after.reached()
            if now >= running.give_up_at and computed and not status.pages_released:
                self._cancelled(running.client.cancel_save, handle)
            return
        del self._saves[running.save.number]
        self._ended(running.save, kept=status is SaveStatus.COMMITTED and not handle.dropped)

    def _point(self) -> StreamPoint | None:
        """Where the engine's stream is now; None in host memory."""
        gpu = self._layout.gpu if self._layout is not None else None
        if gpu is None:
            return None
        import torch

        return gpu.point(torch.cuda.current_stream().cuda_stream)

    @staticmethod
    def _cancelled(cancel: Callable[[Any], bool], handle: Any) -> bool:
        try:
            return cancel(handle)
        except OrbitKVError:
            return False  # the client is over: the handle ends by itself

    def _ended(self, save: Save, *, kept: bool) -> None:
        self._report.ended[save.number] = 1
        if kept:
            self._report.kept[save.number] = 1

    def _prove_by(self, save: Save, adopted: WorkerAttachment) -> None:
        """Compare the first computed block, before anything of it is kept."""
        layout = self._layout
        assert layout is not None
        self._unproven = None
        try:
            for group in range(len(layout.groups)):
                proof.compare_block(layout, adopted.registration, group, save.blocks[0])
        except proof.LayoutDisprovenError as error:
            self._off = detail = f"proof of layout: {error}"
            logger.error("OrbitKV is off for this engine, which serves on without it: %s", detail)
            self._attachment.post(lambda: adopted.client.report_proof(adopted.registration, False, detail))
            self._attachment.renew(adopted, detail)
            self._drop()
            return
        proof.remember(layout)
        self._attachment.post(lambda: adopted.client.report_proof(adopted.registration, True, "by a computed block"))

    def _refresh(self) -> None:
        """Take what is attached now. Handles of a client that is over end by themselves."""
        if self._adopted is not self._attachment.published:
            self._drop()
            self._adopted = self._attachment.take()
        elif self._adopted is not None and self._adopted.client.lost is not None:
            self._attachment.renew(self._adopted, str(self._adopted.client.lost))
            self._drop()

    def _drop(self) -> None:
        if self._adopted is not None:
            self._attachment.give_back(self._adopted)
            self._adopted = None


def ranks_of(vllm_config: Any) -> Ranks:
    """Return this worker's place."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return Ranks(tensor=get_tensor_model_parallel_rank(), tensor_size=vllm_config.parallel_config.tensor_parallel_size)


def kv_layers(vllm_config: Any, names: Mapping[str, Any]) -> list[Any]:
    """Return the model's layers that have a KV cache here."""
    context = vllm_config.compilation_config.static_forward_context
    return [context[name] for name in names if name in context]
