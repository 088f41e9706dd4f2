"""Notices copies that take too long. It warns and counts; it never frees anything, because it cannot know."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, Protocol

from orbitkv_agent.loop import Loop

logger = logging.getLogger(__name__)

_REPEAT_S: Final = 60.0
_CHECKS: Final = 6


class Copy(Protocol):
    """A copy in flight; `started` in seconds of the loop's clock."""

    started: float
    warned: float | None


class Watchdog:
    """Warns of copies older than `warn_s`, then once a minute.

    Args:
        copies: those in flight, oldest first, several sequences of them.

    Attributes:
        stalled: how many are overdue, at the last look.
    """

    def __init__(self, loop: Loop, warn_s: float, copies: Iterable[Iterable[Copy]]) -> None:
        self.stalled = 0
        self._loop = loop
        self._warn_s = warn_s
        self._copies = list(copies)
        self._timer = loop.call_later(warn_s / _CHECKS, self._check)

    def close(self) -> None:
        """Stop looking."""
        self._timer.cancel()

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._warn_s / _CHECKS, self._check)
        self.look()

    def look(self) -> None:
        """Look now."""
        now = self._loop.now()
        stalled = 0
        for copies in self._copies:
            for copy in copies:
                age = now - copy.started
                if age < self._warn_s:
                    break
                stalled += 1
                if copy.warned is None or now - copy.warned >= _REPEAT_S:
                    copy.warned = now
                    logger.warning(
                        "%s is in flight for %.0f s; its pages stay held until its process reports or exits", copy, age
                    )
        self.stalled = stalled
