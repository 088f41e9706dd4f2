"""The express: small restores, submitted by the owner thread itself on a stream of their own.

A thread that is woken up, and planning on it while the owner thread wants the interpreter too, take as long as half of
such a copy. One thread sleeps until each has ended; the GPU says so earlier, in the copy's word.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from orbitkv.cuda import CudaError, Driver
from orbitkv_agent.devices.cuda.lanes import PLAN_PAGES, CopyJob

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 36 << 20
"""Larger copies are a lane's."""
IN_FLIGHT: Final = 4
"""Copies at most, so that the owner never waits for room with the driver, and others keep most of the bandwidth."""


class Express:
    """Small copies to one GPU. Used by the owner thread only. The context is current to whoever calls, and to who makes
    it.

    Args:
        driver: the CUDA driver.
        context: of the GPU.
        post: has a callback called on the owner thread.
        lost: called on the owner thread when the GPU fails so that it cannot be known whether copies have ended.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        name: str,
        *,
        post: Callable[[Callable[[], None]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._driver = driver
        self._context = context
        self._name = name
        self._post = post
        self._lost = lost
        self._stream = driver.make_stream()
        self._events: list[int] = []
        self._in_flight = 0
        self._flying: queue.SimpleQueue[tuple[CopyJob, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._land_all, name=name, daemon=True)
        self._thread.start()

    def take(self, job: CopyJob) -> bool:
        """Submit a copy if it is one for the express; false when it is not, and then a lane has to take it."""
        if job.layered or self._in_flight >= IN_FLIGHT or not 0 < job.left <= MOST_BYTES or job.pages > PLAN_PAGES:
            return False
        if len(job.plan_all(MOST_BYTES).chunks) != 1:  # in more pieces than one call takes
            return False
        self._in_flight += 1
        try:
            event = self._events.pop() if self._events else self._driver.make_event()
            job.submit(self._driver, self._stream, to_device=True, soon=True)
            self._driver.record(event, self._stream)
        except CudaError as error:
            self._fail(error)
        else:
            self._flying.put((job, event))
        return True

    def close(self) -> None:
        """Wait for the copies that were submitted, and end the thread."""
        self._flying.put(None)
        self._thread.join()
        for event in self._events:
            self._driver.drop_event(event)
        self._driver.drop_stream(self._stream)

    def _ended(self, job: CopyJob, event: int) -> None:
        self._in_flight -= 1
        self._events.append(event)
        job.ended(job.error)

    def _fail(self, error: Exception) -> None:
        why = str(error)
        logger.critical("%s: the GPU failed, copies on it may or may not have ended: %s", self._name, why)
        self._post(lambda: self._lost(why))

    # --------------------------------------------------------------------------- the thread that knows of ends

    def _land_all(self) -> None:
        try:
            self._driver.set_current(self._context)
            while (flying := self._flying.get()) is not None:
                self._land(*flying)
        except Exception as error:
            self._fail(error)

    def _land(self, job: CopyJob, event: int) -> None:
        self._driver.wait(event)
        if job.landed is not None and not job.error:
            job.landed()
        self._post(lambda: self._ended(job, event))
