"""`OrbitKVConnector`: vLLM's interface, passed on to the half of its role.

vLLM makes the class twice, once in the scheduler and once in each worker; only the half that is needed is imported and
made. Nothing that goes wrong in a half is raised into the engine's loop: it is logged, counted, and answered with what
means "no cache", so that a request never fails because of it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from orbitkv.config import PluginConfig
from orbitkv.guards import guard
from orbitkv.injection import StayOff, is_injected, stay_off
from orbitkv.protocol.messages import Instance
from orbitkv.protocol.reasons import OffReason

from .injected import engine_name
from .metadata import StepMetadata
from .plugin import make_known
from .served import off_reasons
from .stats import OrbitKVPromMetrics, OrbitKVStats

if TYPE_CHECKING:
    from .scheduler import SchedulerHalf
    from .worker import WorkerHalf

logger = logging.getLogger("vllm.orbitkv")

BLOCK_OUTERMOST = "BLNHC"
"""The layout in which a page is one piece of GPU memory, and each layer one piece of it."""

F = TypeVar("F", bound=Callable[..., Any])


def contained(answer: Callable[[], Any]) -> Callable[[F], F]:
    """What a method raises stays in here; the engine gets `answer()`, and a request that is named loses the cache."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def call(self: OrbitKVConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                if not guard("vllm-contained"):
                    raise
                self.failed(method.__name__, args)
                return answer()

        return call  # type: ignore[return-value]

    return wrap


def _nothing() -> None:
    return None


class OrbitKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV pages in host memory of the node and gives them back; see the documentation of OrbitKV.

    Raises:
        ConfigError: a setting is wrong; the message names it.
        RuntimeError: there is no agent, and `orbitkv.on_missing` is "fail".
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._errors = 0
        transfer = vllm_config.kv_transfer_config
        try:
            config = settings_of(vllm_config)
            reasons = off_reasons(vllm_config, kv_cache_config)
            if reasons and guard("vllm-whole-model"):
                self._serve_without("; ".join(reasons), role)
                return
            # vLLM gives every configuration a new instance id when it is made, so a restarted engine has another one,
            # and hands the configuration as it is to all processes of the engine.
            instance = Instance(transfer.engine_id, vllm_config.instance_id)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = self._make_scheduler(config, instance)
            else:
                self._worker = self._make_worker(config, instance)
        except Exception as error:
            if not is_injected():
                raise
            self._failed_to_start(error)

    @staticmethod
    def _serve_without(why: str, role: KVConnectorRole) -> None:
        if is_injected() and role == KVConnectorRole.SCHEDULER:
            stay_off(logger, engine_name(), StayOff(OffReason.FEATURE_NOT_SERVED, why))
        else:
            logger.warning("OrbitKV is off for this engine, which serves on without it. %s", why)

    @staticmethod
    def _failed_to_start(error: Exception) -> None:
        """The engine of somebody who only annotated a pod starts, whatever happens here."""
        logger.debug("OrbitKV: the connector failed to start", exc_info=error)
        stay_off(
            logger, engine_name(), StayOff(OffReason.PLUGIN_ERROR, f"the connector failed: {error!r}; please report it")
        )

    def _make_scheduler(self, config: PluginConfig, instance: Instance) -> SchedulerHalf:
        from .scheduler import SchedulerHalf

        vllm_config, transfer = self._vllm_config, self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "OrbitKV: kv_load_failure_policy is %r: a failed load would fail its request. Set it to 'recompute'",
                transfer.kv_load_failure_policy,
            )
        events = None
        if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
            from .events import CacheEvents

            events = CacheEvents(vllm_config.cache_config.block_size)
        gate = not drains_restored_first(vllm_config.scheduler_config.get_scheduler_cls())
        logger.info(
            "OrbitKV: admission: %s",
            "other lookups wait while a restored request has not begun to compute"
            if gate
            else "this vLLM schedules restored requests first, restores run side by side",
        )
        half = SchedulerHalf(
            config,
            instance,
            block_tokens=vllm_config.cache_config.block_size,
            workers=vllm_config.parallel_config.world_size,
            may_load=transfer.is_kv_consumer,
            may_save=transfer.is_kv_producer,
            gate=gate,
            events=events,
        )
        half.start()
        return half

    def _make_worker(self, config: PluginConfig, instance: Instance) -> WorkerHalf:
        from .identity import model_identity
        from .worker import WorkerHalf, kv_layers, ranks_of

        vllm_config, groups = self._vllm_config, self._kv_cache_config.kv_cache_groups
        names = {name: None for group in groups for name in group.layer_names}
        return WorkerHalf(
            config,
            instance,
            ranks_of(vllm_config),
            lambda layout: model_identity(
                vllm_config,
                fingerprint=config.model_fingerprint,
                layout_digest=layout.digest,
                environ=os.environ,
                layers=kv_layers(vllm_config, names),
            ),
            several_groups=len(groups) > 1,
        )

    def failed(self, method: str, args: tuple[Any, ...]) -> None:
        """A method raised: log it, count it, leave the request alone from now on."""
        self._errors += 1
        logger.exception("OrbitKV: %s failed; the engine goes on without it", method)
        half = self._scheduler
        if half is None:
            return
        half.stats.add("errors")
        request_id = getattr(args[0], "request_id", None) if args else None
        if request_id is not None:
            half.forget(request_id)

    # --- what vLLM asks about us

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss, no more."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On GPUs, ask for the layout in which a page is one piece, unless told to take what comes."""
        config = settings_of(vllm_config)
        if config.kv_layout != "auto" or config.mode == "save_only":
            return None
        from vllm.platforms import current_platform

        return BLOCK_OUTERMOST if current_platform.is_cuda() else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OrbitKVStats:
        """Stats from what another process sent."""
        return OrbitKVStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OrbitKVPromMetrics:
        """The metrics `vllm:orbitkv_*`."""
        return OrbitKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The scheduler's cache manager is there."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_cache_manager(kv_cache_manager)

    @contained(_nothing)
    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own that can be restored, and whether asynchronously; (None, False): ask again."""
        # Called for every waiting request in every step: contained in place, which saves a call.
        half = self._scheduler
        if half is None:
            return 0, False
        try:
            return half.get_num_new_matched_tokens(request, num_computed_tokens)
        except Exception:
            if not guard("vllm-contained"):
                raise
            self.failed("get_num_new_matched_tokens", (request,))
            return 0, False

    @contained(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated, and `num_external_tokens` are for us to fill in."""
        half = self._scheduler
        if half is None:
            return
        ids = blocks.get_block_ids()[0] if num_external_tokens else []
        try:
            half.update_state_after_alloc(request, ids, num_external_tokens)
        except Exception:
            if num_external_tokens and guard("vllm-contained"):
                half.fail_load(request.request_id, ids, num_external_tokens)
            raise

    @contained(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers do in this step."""
        half = self._scheduler
        return half.build_step_metadata(scheduler_output) if half is not None else StepMetadata()

    @contained(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did."""
        if self._scheduler is not None:
            self._scheduler.update_connector_output(connector_output)

    @property
    def hears_early(self) -> bool:
        """Whether `EarlyScheduler` is to ask for restores that ended before it schedules a step."""
        return self._scheduler is not None and self._scheduler.hears_early

    def take_restored(self, *, computing: bool, others_wait: bool, alone: str) -> set[str]:
        """The requests whose restores ended, for `EarlyScheduler`. Not contained: it turns to `hear_late`.

        Args:
            computing: there are running requests.
            others_wait: other requests wait to be scheduled.
            alone: the only request that there is; "" when there is none, or more.
        """
        assert self._scheduler is not None
        return self._scheduler.take_restored(computing=computing, others_wait=others_wait, alone=alone)

    def let_land(self) -> None:
        """`EarlyScheduler` can take a step back: requests may begin while their restores land, where that is wanted."""
        if self._scheduler is not None:
            self._scheduler.lands = self._scheduler.link.config.overlap == "on"

    @property
    def landing(self) -> str:
        """The request for whose restore the step that is scheduled now waits, layer by layer; "" when there is none."""
        return self._scheduler.landing if self._scheduler is not None else ""

    def take_landing_failed(self) -> bool:
        """Return whether a step read what was not in place, since the last call."""
        return self._scheduler is not None and self._scheduler.take_landing_failed()

    def hear_late(self, restored: set[str]) -> None:
        """Report restores with the steps' outputs from now on, and these, which were taken, with the next."""
        if self._scheduler is not None:
            self._scheduler.stats.add("errors")
            self._scheduler.hear_late(restored)

    @contained(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; hold its blocks?"""
        half = self._scheduler
        return (half.request_finished(request) if half is not None else False), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for all KV cache groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    @contained(bool)
    def has_pending_block_frees(self) -> bool:
        """Whether blocks come back soon without a preemption."""
        half = self._scheduler
        return half.has_pending_block_frees() if half is not None else False

    @contained(bool)
    def has_pending_push_work(self) -> bool:
        """Whether the engine is to go on stepping, though no request needs it."""
        return self._scheduler is not None and self._scheduler.has_pending_saves()

    @contained(bool)
    def reset_cache(self) -> bool | None:
        """Forget what was stored; false while anything is under way."""
        half = self._scheduler
        return half.reset_cache() if half is not None else True

    @contained(tuple)
    def take_events(self) -> Iterable[Any]:
        """KV events since the last call."""
        half = self._scheduler
        return half.take_events() if half is not None else ()

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV memory is there. The one place that may end the engine's start (`orbitkv.on_missing`)."""
        if self._worker is None:
            return
        from .layout import LayoutRefusedError, read_layout

        config = self._kv_cache_config
        try:
            layout = read_layout(kv_caches, config.kv_cache_groups, config.num_blocks)
        except LayoutRefusedError as error:
            self._worker.turn_off(str(error))
            return
        except Exception as error:
            if not is_injected():
                raise
            self._failed_to_start(error)
            self._worker.turn_off(f"reading the layout failed: {error!r}")
            return
        self._worker.register(layout)

    @contained(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks of preempted requests are about to be overwritten."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.handle_preemptions(kv_connector_metadata)

    @contained(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's restores."""
        step = self._connector_metadata
        if isinstance(step, StepMetadata) and self._worker is not None:
            self._worker.start_loads(step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and self._worker.landing:
            computing = isinstance(connector_metadata, StepMetadata) and connector_metadata.computing
            self._worker.begin_landing(names_layers, computing=computing)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The step is about to read a layer: wait for a restore that lands with it. Others ended before it began."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are saved whole, after the step."""

    @contained(_nothing)
    def wait_for_save(self) -> None:
        """Hand this step's saves over; nothing is waited for."""
        step = self._connector_metadata
        if isinstance(step, StepMetadata) and self._worker is not None:
            self._worker.start_saves(step)

    @contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Which requests' restores and holds ended."""
        step = self._connector_metadata
        if not isinstance(step, StepMetadata) or self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.take_results(step)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As `get_transfer_results`, for callers of the older interface."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    @contained(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute after all."""
        return self._worker.take_invalid_blocks() if self._worker is not None else set()

    @contained(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's half has to know."""
        return self._worker.take_report() if self._worker is not None else None

    # --- both

    @contained(_nothing)
    def get_kv_connector_stats(self) -> OrbitKVStats | None:
        """Numbers since the last call. The scheduler counts for the workers too, but for their errors."""
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        errors, self._errors = self._errors, 0
        return OrbitKVStats(data={"errors": errors}) if errors else None

    @contained(_nothing)
    def shutdown(self) -> None:
        """Finish what runs, leave the agent."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


def names_layers() -> bool:
    """Whether the step that begins calls `wait_for_layer_load` before it reads a layer: one that replays one CUDA graph
    as a whole calls nothing."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return is_forward_context_available() and get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.FULL


def settings_of(vllm_config: Any) -> PluginConfig:
    """The plugin's settings for an engine.

    Raises:
        ConfigError: one is wrong.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return PluginConfig.load(extra, os.environ, injected=is_injected())


def drains_restored_first(scheduler_class: type) -> bool:
    """Whether this vLLM's scheduler keeps requests that hold blocks in a queue of their own and takes them first.

    vLLM 0.32 and later do: a restored request is never stuck behind one that waits for blocks.
    """
    schedule: Any = inspect.unwrap(getattr(scheduler_class, "schedule", _nothing))
    return "kv_holding_waiting" in schedule.__code__.co_names if hasattr(schedule, "__code__") else False


make_known()
