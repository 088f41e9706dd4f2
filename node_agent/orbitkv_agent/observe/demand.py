"""What the engines of each cache namespace asked for, in tokens, and how much of it was there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from orbitkv_agent.sessions.layout import GroupPages

_BUCKETS: Final = 60
"""Minutes of the last hour."""


class Demand:
    """Of one cache namespace, since the agent's start; or of one engine in it, which counts for both.

    Attributes:
        asked: tokens that engines asked for.
        found: those among them whose pages were promised.
    """

    __slots__ = ("_whole", "asked", "found")

    def __init__(self, whole: Demand | None = None) -> None:
        self.asked = 0
        self.found = 0
        self._whole = whole

    def count(self, groups: Mapping[int, GroupPages], asked: int, found: int) -> None:
        """Count the pages of one query, of all groups together, as tokens: each group has pages for every token."""
        first = next(iter(groups.values()))
        tokens = first.block_tokens
        self._add(asked // len(groups) * tokens, found // len(groups) * tokens)

    def _add(self, asked: int, found: int) -> None:
        self.asked += asked
        self.found += found
        if self._whole is not None:
            self._whole._add(asked, found)


class LastHour:
    """Sums over the last hour, by cache namespace, to the minute. Used by the owner thread only."""

    def __init__(self, demand: dict[str, Demand]) -> None:
        self._demand = demand
        self._minutes: deque[dict[str, tuple[int, int]]] = deque(maxlen=_BUCKETS)

    def minute_passed(self) -> None:
        """To be called once a minute."""
        self._minutes.append({name: (each.asked, each.found) for name, each in self._demand.items()})

    def of(self, name: str) -> tuple[int, int]:
        """Tokens asked for and found in the last hour."""
        now = self._demand.get(name)
        if now is None:
            return 0, 0
        asked, found = self._minutes[0].get(name, (0, 0)) if len(self._minutes) == _BUCKETS else (0, 0)
        return now.asked - asked, now.found - found
