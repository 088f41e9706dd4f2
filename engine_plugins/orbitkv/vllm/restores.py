"""The restores of a worker that were not reported yet, and when they are."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from orbitkv.client import CacheManagerClient, OrbitKVError, RestoreHandle, RestoreStatus

from .metadata import Load

GATHER_S = 0.1
"""Longest time that a finished restore waits for others to finish, while the engine computes for other requests."""
LOOK_S = 50e-6
MOMENT_S = 0.002
"""Longest wait for a restore that is about to end, while the engine computes nothing."""
LAST_S = 0.012
"""Longest wait for the last restore that runs, so that it need not wait itself for the step of the one before; one that
is late by less than MOMENT_S is waited for as well."""
GPU_BYTES_S = 55e9
"""About what a GPU's link carries: when a restore should end."""
BEGIN_S = 0.0005
"""About what passes until the first byte of a restore moves that has the link for itself."""
HAND_OVER_S = 0.005
"""Longest wait for all of a restore to be with the GPU, while the engine has nothing else to do."""
UNTOLD = 3
"""So many restores in a row that did not say it: none will."""


@dataclass(slots=True)
class Running:
    """A restore that was not reported yet. `handle` is None when it never began.

    Attributes:
        started: when it was started.
        gpu_s: how long its copy should take when no other runs, infinite where that is not known.
        at_once: the scheduler's half started it and asks for its end; else each step's results report it.
        by_layer: it is copied layer by layer, so that its request may begin before all of it is there.
        report_by: once it is done: how long it may wait to be reported together with others.
    """

    load: Load
    client: CacheManagerClient | None
    handle: RestoreHandle | None
    started: float
    gpu_s: float
    at_once: bool
    by_layer: bool = False
    report_by: float = 0.0

    @property
    def status(self) -> RestoreStatus:
        """How it stands."""
        return RestoreStatus.FAILED if self.handle is None else self.handle.status

    def given_up(self, now: float) -> bool:
        """Whether it did not begin in time and was withdrawn: no byte of it is copied any more."""
        if now < self.started + self.load.patience_s or self.client is None or self.handle is None:
            return False
        try:
            return self.client.cancel_restore(self.handle)
        except OrbitKVError:
            return False  # the client is over: the handle ends by itself


class Restores:
    """What runs, in the order in which it was started. Of the thread that steps the engine."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._link_free = 0.0  # since when no restore that was seen to end uses the GPU's link
        self._looked = 0.0  # what has ended since then was not seen yet
        self._untold = 0  # restores that ended with no word of when all of them was with the GPU, in a row

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._running)

    @property
    def at_once(self) -> bool:
        """Whether the scheduler's half has to ask for the end of one."""
        return any(running.at_once for running in self._running.values())

    def add(
        self,
        load: Load,
        client: CacheManagerClient | None,
        handle: RestoreHandle | None,
        *,
        size: int = 0,
        at_once: bool = False,
        by_layer: bool = False,
    ) -> None:
        """A restore was started. Of its size in bytes 0 means that nobody knows how long it takes."""
        gpu_s = size / GPU_BYTES_S if size and handle is not None else math.inf
        self._running[load.request_id] = Running(load, client, handle, time.monotonic(), gpu_s, at_once, by_layer)

    def take_failed(self) -> list[Running]:
        """Return those that failed or did not begin in time: their requests have everything to compute."""
        now = time.monotonic()
        failed = [
            running
            for running in self._running.values()
            if (status := running.status) is not RestoreStatus.DONE and (status.final or running.given_up(now))
        ]
        for running in failed:
            del self._running[running.load.request_id]
        return failed

    def take_done(self, *, computing: bool, at_once: bool, wait: bool = True) -> set[str]:
        """Return the requests whose restores ended well and are to be reported now.

        A request that joins running ones makes their step several times as long (it is not one CUDA graph any more), so
        those that are done go in together: each waits for others as long as it took itself, while the engine has other
        work. An engine without other work gets each at once; only the last one is waited for, if it comes within less
        than a step.

        Args:
            computing: the engine computes something now. Else a restore that is about to end is waited for.
            at_once: of those whose end the scheduler's half asks for, or of the others.
        """
        if not any(running.at_once is at_once for running in self._running.values()):
            return set()
        now = self._wait_a_moment() if wait and not computing else time.monotonic()
        done: list[Running] = []
        others: list[Running] = []
        for running in self._running.values():
            status = running.status
            if status is RestoreStatus.DONE:
                if not running.report_by:
                    self._note_telling(running)
                    running.report_by = now + min(now - running.started, GATHER_S)
                    self._link_free = min(max(self._due(running), self._looked), now)
                if running.at_once is at_once:
                    done.append(running)
            elif not status.final:
                others.append(running)
        self._looked = now
        if not done:
            return set()
        if computing and others and all(now < running.report_by for running in done):
            return set()
        if not computing and len(others) == 1 and -MOMENT_S < self._due(others[0]) - now < LAST_S:
            return set()
        for running in done:
            del self._running[running.load.request_id]
        return {running.load.request_id for running in done}

    def take_landing(self, request_id: str) -> Running | None:
        """Return the restore of this request, if it is the only one, is copied layer by layer, and all of it is with
        the GPU.

        For an engine that has nothing else to do: that is waited for.
        """
        running = self._running.get(request_id) if len(self._running) == 1 else None
        handle = running.handle if running is not None else None
        if running is None or handle is None or not running.by_layer:
            return None
        end = running.started + HAND_OVER_S
        while not handle.handed_over and not running.status.final and time.monotonic() < end:
            time.sleep(LOOK_S)
        if not handle.handed_over:
            return None
        self._looked, self._untold = time.monotonic(), 0
        del self._running[running.load.request_id]
        return running

    @property
    def untold(self) -> bool:
        """Whether the agent, or its GPU, does not say when all of a restore is with the GPU: none can land."""
        return self._untold >= UNTOLD

    def _note_telling(self, running: Running) -> None:
        """One that runs layer by layer was seen to end. By chance it ends before that is said, but seldom."""
        if running.by_layer and running.handle is not None:
            self._untold = 0 if running.handle.handed_over else self._untold + 1

    def _wait_a_moment(self) -> float:
        """Wait for a restore that is about to end, where the engine's loop would only sleep; return the time.

        Restores end one after another, in the order in which they began. A look that comes too soon costs a whole round
        of the loop.
        """
        now = time.monotonic()
        first = next((running for running in self._running.values() if not running.status.final), None)
        if first is None:
            return now
        due = self._due(first)
        end = now + MOMENT_S
        while -MOMENT_S / 2 < due - now < MOMENT_S and now < end and not first.status.final:
            self._looked = now
            time.sleep(LOOK_S)
            now = time.monotonic()
        return now

    def _due(self, first: Running) -> float:
        """When the first of those that were not seen to end should do so."""
        return max(first.started + BEGIN_S, self._link_free) + first.gpu_s
