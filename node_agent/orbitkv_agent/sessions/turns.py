"""Whose turn it is: a tenant with hundreds of sessions keeps others waiting no longer than one with a few.

In each round of the loop a tenant's sessions are served as they come, until that took a millisecond. Those that come
later wait for each other, with those that have more to do than fits into one turn, and one of them is served a round.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Loop

TENANT_ROUND_S: Final = 0.001


class TenantTurns:
    """The turns of one tenant's sessions. Used by the owner thread only."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._round = -1
        self._used_s = 0.0
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._called = False

    def now(self, who: Hashable, serve: Callable[[], None]) -> None:
        """Call `serve`, at once if its tenant has time left in this round, else in its turn."""
        loop = self._loop
        if self._round != loop.rounds:
            self._round, self._used_s = loop.rounds, 0.0
        if self._used_s < TENANT_ROUND_S or not guard("tenants-turns"):
            if self._waiting:
                self._waiting.pop(who, None)
            self._serve(serve)
        else:
            self.later(who, serve)

    def later(self, who: Hashable, serve: Callable[[], None]) -> None:
        """Call `serve` when everybody else who is ready has had a turn. Of one that waits the last word counts."""
        self._waiting[who] = serve
        self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._loop.soon(self._next)

    def _next(self) -> None:
        """Serve the one that has waited longest."""
        self._called = False
        if self._waiting:
            serve = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._serve(serve)
            finally:
                if self._waiting:
                    self._call()

    def _serve(self, serve: Callable[[], None]) -> None:
        clock = self._loop.now
        began = clock()
        try:
            serve()
        finally:
            self._used_s += clock() - began
