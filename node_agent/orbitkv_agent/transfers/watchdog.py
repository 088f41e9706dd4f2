"""Notices copies that take too long. It warns and counts; it never frees anything, because it cannot know."""

from __future__ import annotations

import itertools
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
    """

    def __init__(self, loop: Loop, warn_s: float, copies: Iterable[Iterable[Copy]]) -> None:
        self._loop = loop
        self._warn_s = warn_s
        self._copies = list(copies)
        self._timer = loop.call_later(warn_s / _CHECKS, self._check)

    @property
    def stalled(self) -> int:
        """How many copies are overdue now."""
        return len(self._overdue())

    def close(self) -> None:
        """Stop looking."""
        self._timer.cancel()

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._warn_s / _CHECKS, self._check)
        now = self._loop.now()
        for copy in self._overdue():
            if copy.warned is None or now - copy.warned >= _REPEAT_S:
                copy.warned = now
                logger.warning(
                    "%s is in flight for %.0f s; its pages stay held until its process reports or exits",
                    copy,
                    now - copy.started,
                )

    def _overdue(self) -> list[Copy]:
        latest = self._loop.now() - self._warn_s
        return [
            copy for copies in self._copies for copy in itertools.takewhile(lambda each: each.started <= latest, copies)
        ]
