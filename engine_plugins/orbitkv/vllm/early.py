"""vLLM's own scheduler, told of restores that ended right before it schedules.

Otherwise it hears of them with the output of a step, and where the engine computes nothing else vLLM sleeps for a
millisecond between that and the step in which the restored request begins.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

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

    @functools.wraps(Scheduler.schedule)
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Take the restores that ended, then schedule as vLLM does."""
        connector = self.connector
        if isinstance(connector, OrbitKVConnector) and connector.hears_early:
            self._take_restored(connector)
        return super().schedule(*args, **kwargs)

    def _take_restored(self, connector: OrbitKVConnector) -> None:
        restored: set[str] = set()
        try:
            restored = connector.take_restored(computing=bool(self.running), others_wait=bool(self.waiting))
            if restored:
                self._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=restored))
        except Exception:
            if not guard("vllm-contained"):
                raise
            logger.exception("OrbitKV: vLLM is told of restores with the steps' outputs from now on")
            connector.hear_late(restored - getattr(self, "finished_recving_kv_req_ids", set()))


class EarlyAsyncScheduler(EarlyScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""
