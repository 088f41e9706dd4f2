"""A restore whose request computes already: its step waits for the pages of each layer before it attends to them.

So the copy and the step go on side by side, where otherwise one follows the other. Only a restore of which all is with
the GPU lands like this, so that what a step waits for comes within milliseconds even if the agent's process is stopped.
It can still fail, if that process is killed. So `EarlyScheduler` lets one land only while the engine has nothing else
to do, schedules nothing more until that step is over, and takes the step back if not all was there when it was read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orbitkv.client import CacheManagerClient, RestoreHandle, RestoreStatus

from .restores import Running

logger = logging.getLogger("vllm.orbitkv")


class Landing:
    """One such restore, for the thread that steps the engine.

    Args:
        running: the restore.
        layers: names of the engine's layers, in the order in which they are copied.

    Attributes:
        request: whose it is.
        in_place: all that was read so far was in place before.
        blind: the step said nothing of some layers, so nobody knows whether they were in place when it read them.
    """

    def __init__(self, running: Running, layers: Sequence[str]) -> None:
        assert running.client is not None and running.handle is not None
        self._client: CacheManagerClient = running.client
        self._handle: RestoreHandle = running.handle
        self.request = running.load.request_id
        self._places = {name: place for place, name in enumerate(layers)}
        self._unseen = set(layers)
        self.in_place = True
        self.blind = False

    def begin(self, *, by_layer: bool) -> None:
        """The step begins. Where it does not name each layer before it reads it, all of them are waited for now."""
        if not by_layer:
            self._wait_for_all()
            self._unseen.clear()

    def wait_layer(self, name: str) -> None:
        """Wait until the pages of a layer are in place. One that is not known reads those of another: wait for all."""
        place = self._places.get(name)
        if place is None:
            self._wait_for_all()
            return
        self._unseen.discard(name)
        if not self._client.wait_layer(self._handle, place):
            self._missed()

    def end(self) -> None:
        """The step has been handed to the GPU: it read all that it was to read."""
        if self._unseen:
            self.blind = True
            self._missed()
        if self._client.wait_restore(self._handle) is not RestoreStatus.DONE:
            self._missed()

    def _wait_for_all(self) -> None:
        if self._client.wait_restore(self._handle) is not RestoreStatus.DONE:
            self._missed()

    def _missed(self) -> None:
        if self.in_place:
            logger.warning(
                "OrbitKV: request %s began before its restore was over, and that %s; it is computed",
                self.request,
                f"failed: {self._handle.error}" if self._handle.status.final else "was not waited for",
            )
        self.in_place = False
