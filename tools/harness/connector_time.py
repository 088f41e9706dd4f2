"""How much of a step the connector takes. Runs in the engine's process; sees both halves where they share it."""

import os
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


class ThreadClock:
    """A clock that stands still while the thread that made it could run and others have the processors.

    It runs on while the thread waits for something. Where the kernel keeps no such count, it is the usual clock.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def now(self) -> float:
        """Seconds since some moment."""
        waited = self._waited_ns()
        while True:
            now = time.perf_counter()
            before, waited = waited, self._waited_ns()
            if waited == before:
                return now - waited / 1e9

    def _waited_ns(self) -> int:
        return int(os.pread(self._file, 100, 0).split()[1]) if self._file >= 0 else 0


class Clock:
    """Adds up the time in the calls of a scheduler's connector, and of the worker's if it lives in this process.
    They are all made by the thread that made `thread`."""

    def __init__(self, scheduler_half: Any, thread: ThreadClock) -> None:
        self._seconds = 0.0
        self._thread = thread
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
            started = self._thread.now()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds += self._thread.now() - started

        return timed

    def take_ms(self) -> float:
        """Milliseconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds * 1000
