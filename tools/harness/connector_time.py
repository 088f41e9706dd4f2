"""How much of a step the connector takes. Runs in the engine's process; sees both halves where they share it."""

import time
from collections.abc import Callable
from typing import Any

SCHEDULER = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_block_frees",
    "has_pending_push_work",
    "take_events",
)
WORKER = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)


class Clock:
    """Adds up the time in the calls of a scheduler's connector, and of the worker's if it lives in this process."""

    def __init__(self, scheduler_half: Any) -> None:
        self._seconds = 0.0
        if scheduler_half is None:
            return
        self._watch(scheduler_half, SCHEDULER)
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():
            self._watch(get_kv_transfer_group(), WORKER)

    def _watch(self, half: Any, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(half, name, self._timed(getattr(half, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - started

        return timed

    def take_ms(self) -> float:
        """Milliseconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds * 1000
