"""vLLM's own scheduler, told of restores that ended right before it schedules.

Otherwise it hears of them with the output of a step, and where the engine computes nothing else vLLM sleeps for a
millisecond between that and the step in which the restored request begins.

With `orbitkv.overlap`, and where the engine has nothing else to do, a request begins before all of its restore is
there, and its step waits for each layer (`landing.py`). Until that step is over nothing else is scheduled. If not all
was in place when it was read, all that the step computed is dropped, its blocks leave the prefix cache, and its
requests are scheduled anew.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from orbitkv.guards import guard

from .connector import OrbitKVConnector

logger = logging.getLogger("vllm.orbitkv")


class EarlyScheduler(Scheduler):
    """For `--scheduler-cls`. It is the asynchronous one where the engine schedules asynchronously.

    Of use where scheduler and worker share a process, as on one GPU. Elsewhere, with another connector, and after
    anything went wrong here, it is vLLM's scheduler and no more.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> EarlyScheduler:
        """Make the one of vLLM's two that this engine needs."""
        asynchronous = cls is EarlyScheduler and vllm_config.scheduler_config.async_scheduling
        return object.__new__(EarlyAsyncScheduler if asynchronous else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._landing_step: Any = None
        """The output of `schedule` for a step that waits for a restore, until that step is over."""
        self._landing_request = ""
        self._landing_blocks: set[int] = set()
        """All blocks of that request, and of those that are scheduled with it."""
        if isinstance(self.connector, OrbitKVConnector) and can_take_back():
            self.connector.let_land()

    @functools.wraps(Scheduler.schedule)
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Take the restores that ended, then schedule as vLLM does."""
        connector = self.connector
        if not isinstance(connector, OrbitKVConnector):
            return super().schedule(*args, **kwargs)
        if connector.hears_early:
            self._take_restored(connector)
        output = super().schedule(*args, **kwargs)
        if landing := connector.landing:
            self._landing_step, self._landing_request = output, landing
            blocks = [self.kv_cache_manager.get_block_ids(each) for each in {landing, *output.num_scheduled_tokens}]
            self._landing_blocks = {block for groups in blocks for group in groups for block in group}
        return output

    @functools.wraps(Scheduler.has_requests)
    def has_requests(self) -> bool:
        """While a restore lands: nothing that could be scheduled now."""
        return self._landing_step is None and super().has_requests()

    @functools.wraps(Scheduler.update_from_output)
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Drop what a step computed from pages that were not there; otherwise as vLLM does."""
        if scheduler_output is self._landing_step:
            self._landing_step = None
            connector = self.connector
            failed = isinstance(connector, OrbitKVConnector) and connector.take_landing_failed()
            if failed and guard("vllm-landed-only"):
                self._take_back()
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_back(self) -> None:
        """Preempt all that runs, as a reset of the prefix cache does, and forget the blocks of the step."""
        self.kv_cache_manager.evict_blocks(self._landing_blocks)
        now = time.monotonic()
        while self.running:
            self._preempt_request(self.running.pop(), now, drop_stale_output=True)
        self.prev_step_scheduled_req_ids.clear()
        request = self.requests.get(self._landing_request)
        if request is None or request.is_finished() or not request.num_computed_tokens:
            return
        request.num_computed_tokens = 0  # it was not scheduled: go on as vLLM does where a load failed
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.failed_recving_kv_req_ids.add(request.request_id)
        else:
            self.kv_cache_manager.free(request)

    def _take_restored(self, connector: OrbitKVConnector) -> None:
        restored: set[str] = set()
        try:
            running, waiting = self.get_request_counts()
            alone = [*self.waiting, *self.kv_holding_waiting][0].request_id if (running, waiting) == (0, 1) else ""
            restored = connector.take_restored(computing=bool(running), others_wait=bool(self.waiting), alone=alone)
            if restored:
                self._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=restored))
        except Exception:
            if not guard("vllm-contained"):
                raise
            logger.exception("OrbitKV: vLLM is told of restores with the steps' outputs from now on")
            connector.hear_late(restored - getattr(self, "finished_recving_kv_req_ids", set()))


class EarlyAsyncScheduler(EarlyScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def can_take_back() -> bool:
    """Whether this vLLM has what it takes to drop a step's results."""
    preempt = getattr(Scheduler, "_preempt_request", None)
    return (
        hasattr(KVCacheManager, "evict_blocks")
        and preempt is not None
        and "drop_stale_output" in inspect.signature(preempt).parameters
    )
