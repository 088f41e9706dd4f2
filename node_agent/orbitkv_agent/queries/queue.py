"""Who is served next: queries that wait for a place, and queries that wait for bytes.

Both keep the order of arrival, except that nobody waits for a limit that is another one's: a session at its own limit
does not hold up other sessions, an instance at its own share does not hold up other instances, and neither does a
tenant hold up other tenants.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from orbitkv_agent.queries.shares import Shares


class _Waiter(Protocol):
    ticket: int


class _Owned(Hashable, Protocol):
    @property
    def tenant(self) -> str: ...


W = TypeVar("W", bound=_Waiter)
L = TypeVar("L", bound=Hashable)
P = TypeVar("P", bound=_Owned)


class Lanes(Generic[L, W]):
    """First in, first out, in lanes: the order is by ticket over all lanes, and a lane can be left out for a while."""

    def __init__(self) -> None:
        self._lanes: dict[L, deque[W]] = {}
        self._tickets = itertools.count(1)
        self.count = 0
        """How many wait."""

    def waits_in(self, lane: L) -> bool:
        """Whether somebody waits in `lane`."""
        return lane in self._lanes

    def append(self, lane: L, waiter: W) -> None:
        """Wait behind everybody else."""
        waiter.ticket = next(self._tickets)
        self._lanes.setdefault(lane, deque()).append(waiter)
        self.count += 1

    def remove(self, lane: L, waiter: W) -> None:
        """Wait no more. A waiter that is not there raises ValueError."""
        queue = self._lanes[lane]
        queue.remove(waiter)
        self.count -= 1
        if not queue:
            del self._lanes[lane]

    def first(self, without: Callable[[L], bool]) -> tuple[L, W] | None:
        """The one that waits longest in a lane that is not one of those `without`."""
        best: tuple[L, W] | None = None
        for lane, queue in self._lanes.items():
            if (best is None or queue[0].ticket < best[1].ticket) and not without(lane):
                best = (lane, queue[0])
        return best

    def __iter__(self) -> Iterator[W]:
        return iter([waiter for queue in self._lanes.values() for waiter in queue])


class Places(Generic[P]):
    """How many query operations are admitted, by session and in all.

    Args:
        lane_limit: most of one session.
        limit: most in all.
        shares: what each tenant has of them.
    """

    def __init__(self, lane_limit: int, limit: int, shares: Shares) -> None:
        self._lane_limit = lane_limit
        self._limit = limit
        self._shares = shares
        self._taken: dict[P, int] = {}
        self.taken = 0

    @property
    def full(self) -> bool:
        """Whether nobody gets a place now."""
        return self.taken >= self._limit

    def free(self, lane: P) -> bool:
        """Whether there is a place for this session."""
        return self.taken < self._limit and not self.lane_is_full(lane)

    def lane_is_full(self, lane: P) -> bool:
        """Whether this session, or its tenant, has all the places that it may have."""
        if self._taken.get(lane, 0) >= self._lane_limit:
            return True
        few = 2 * self.taken < self._limit  # then nobody has more than is left
        return not (few or self._shares.allows(lane.tenant, 1, self._limit - self.taken))

    def take(self, lane: P) -> None:
        """Take a free place."""
        self.taken += 1
        self._taken[lane] = self._taken.get(lane, 0) + 1
        self._shares.take(lane.tenant, 1)

    def give_back(self, lane: P) -> None:
        """Return a place."""
        self.taken -= 1
        self._shares.give_back(lane.tenant, 1)
        rest = self._taken[lane] - 1
        if rest:
            self._taken[lane] = rest
        else:
            del self._taken[lane]
