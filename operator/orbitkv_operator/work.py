"""The threads that take keys from the queue and look after them."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from orbitkv_operator.cluster.api import ApiError
from orbitkv_operator.metrics import Metrics
from orbitkv_operator.queue import FIRST_BACKOFF, LONGEST_BACKOFF, Key, KeyedQueue

logger = logging.getLogger(__name__)

THREADS: Final = 2
STALLED_SECONDS: Final = 120.0
"""Longer than any look at an object takes, however slow the apiserver is."""
FORGET: Final = math.inf
"""Returned by what handles a key: the object is gone, and there is no need to look again."""

Handler = Callable[[Key], float | None]
"""Looks after a key; returns in how many seconds to look again at the latest (None: after the usual time)."""


@dataclass
class Workers:
    """Runs from `start` to `stop`."""

    queue: KeyedQueue
    handlers: Mapping[str, Handler]
    """By the keys' kind."""
    metrics: Metrics
    resync_seconds: float
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to take keys."""
        self._threads = [
            threading.Thread(target=self._run, name=f"worker-{number}", daemon=True) for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish what was begun, and end."""
        self.queue.close()
        for thread in self._threads:
            thread.join(20)

    def problem(self) -> str:
        """Return what is stalled, in words, or nothing."""
        if self.queue.longest_running() > STALLED_SECONDS:
            return "a look at an object does not end"
        if self._threads and self.queue.overdue() > STALLED_SECONDS:
            return "the queue is not worked on"
        return ""

    def _run(self) -> None:
        while (key := self.queue.take()) is not None:
            began = time.monotonic()
            try:
                again = self.handlers[key.kind](key)
            except ApiError as error:
                self._failed(key, error.reason, error.retry_after or 0.0, error)
            except Exception as error:
                logger.exception("a look at an object failed", extra={"object": str(key)})
                self._failed(key, "defect", 5.0, error)
            else:
                self.queue.done(key, last=again == FORGET)
                if again != FORGET:
                    usual = self.resync_seconds * random.uniform(0.8, 1.0)
                    self.queue.add(key, usual if again is None else min(again, usual))
            finally:
                self.metrics.reconciled(key.kind, began)

    def _failed(self, key: Key, reason: str, at_least: float, error: Exception) -> None:
        self.metrics.failed(key.kind, reason)
        delay = self.queue.failed(key, at_least)
        # A missing right and an apiserver that is away are reported once for all objects, where requests are made.
        if reason not in ("forbidden", "unreachable") and (delay <= FIRST_BACKOFF or delay >= LONGEST_BACKOFF):
            level = logging.INFO if reason == "conflict" else logging.WARNING
            logger.log(level, "a look at an object failed", extra={"object": str(key), "error": str(error)})
