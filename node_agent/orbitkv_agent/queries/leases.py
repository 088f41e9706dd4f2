"""Leases: the promise that the pages of one shard stay until they are restored or given back."""

from __future__ import annotations

import itertools
import secrets
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.messages import LeasedPages
from orbitkv_agent.guards import guard
from orbitkv_agent.store.index import entries_of

if TYPE_CHECKING:
    from orbitkv_agent.queries.budget import Charge
    from orbitkv_agent.queries.operations import QueryOperation
    from orbitkv_agent.store.cache import PageCache
    from orbitkv_agent.store.index import Run


GroupPlaces = tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.uint64]]
"""Of pages of one group: its number, and (pages,) arena ids and byte offsets."""


def handle_numbers() -> itertools.count[int]:
    """Numbers for handles of this boot: no handle of an earlier agent is one of them.

    Each boot counts from a random one of 2^46 starting points, which are 65,536 numbers apart.
    """
    return itertools.count((secrets.randbits(46) if guard("boot-ids") else 0) << 16 | 1)


class PinnedPages:
    """Pages of one answer, pinned once for the leases of all shards.

    Attributes:
        pages: what is leased, by group.
        count: pages of one shard, all groups together.
    """

    __slots__ = ("_cache", "_holders", "_places", "_runs", "_used", "count", "pages")

    def __init__(self, cache: PageCache, pages: list[LeasedPages], runs: list[Run], holders: int) -> None:
        self.pages = pages
        self.count = sum([each.count for each in pages])
        self._cache = cache
        self._runs = runs
        self._holders = holders
        self._used = False
        self._places: dict[int, list[GroupPlaces]] = {}
        for run in runs:
            cache.pin(run)

    def use(self) -> None:
        """A request takes them: they become recent and worth keeping, once for all shards."""
        if not self._used:
            self._used = True
            for run in self._runs:
                self._cache.demand_hit(entries_of(run))

    def places(self, shard: int) -> list[GroupPlaces]:
        """Where the pages of one shard lie, a group at a time. They stay there while they are pinned."""
        known = self._places.get(shard)
        if known is None:
            known = self._places[shard] = [
                (leased.group, *self._cache.places(run, shard))
                for leased, run in zip(self.pages, self._runs, strict=True)
            ]
        return known

    def let_go(self) -> None:
        """One holder less; the last one unpins."""
        self._holders -= 1
        assert self._holders >= 0, "pages were unpinned twice"
        if not self._holders:
            for run in self._runs:
                self._cache.unpin(run)


class LeaseState(Enum):
    """LIVE can be consumed or returned; CONSUMED belongs to a restore; ENDED holds nothing."""

    LIVE = "live"
    CONSUMED = "consumed"
    ENDED = "ended"


class Lease:
    """Pages of one shard, held for one query operation. Ends exactly once.

    Attributes:
        number: the handle that the client uses.
        shard: rank order.
    """

    __slots__ = ("charge", "number", "operation", "pages", "shard", "state")

    def __init__(self, number: int, operation: QueryOperation, shard: int, pages: PinnedPages, charge: Charge) -> None:
        self.number = number
        self.operation = operation
        self.shard = shard
        self.pages = pages
        self.charge = charge
        self.state = LeaseState.LIVE

    @property
    def live(self) -> bool:
        """Whether it can still be consumed."""
        return self.state is LeaseState.LIVE

    def end(self) -> None:
        """Give pages and bytes back."""
        assert self.state is not LeaseState.ENDED, "a lease ended twice"
        self.state = LeaseState.ENDED
        self.pages.let_go()
        if not self.charge.released:
            self.charge.release()


class Leases:
    """All leases that have not ended, and what they pin.

    Attributes:
        numbers: the next one is that of a new lease.
        live: leases that were neither consumed nor returned.
    """

    def __init__(self) -> None:
        self.numbers: Final = handle_numbers()
        self._leases: dict[int, Lease] = {}
        self.live = 0
        self.pinned_pages = 0
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._leases)

    def find(self, number: int) -> Lease | None:
        """The lease of that number, if it has not ended."""
        return self._leases.get(number)

    def grant(self, number: int, operation: QueryOperation, shard: int, pages: PinnedPages, charge: Charge) -> None:
        """Make a lease on pages that are pinned and bytes that are charged."""
        lease = Lease(number, operation, shard, pages, charge)
        self._leases[number] = lease
        operation.leases[lease] = None
        self.live += 1
        self.pinned_pages += pages.count
        self.pinned_bytes += charge.bytes

    def consume(self, lease: Lease) -> None:
        """Bind a live lease to a restore."""
        assert lease.live, "a lease was consumed twice"
        lease.state = LeaseState.CONSUMED
        self.live -= 1

    def end(self, lease: Lease) -> None:
        """End a lease, used or not."""
        if lease.live:
            self.live -= 1
        lease.end()
        del self._leases[lease.number]
        del lease.operation.leases[lease]
        self.pinned_pages -= lease.pages.count
        self.pinned_bytes -= lease.charge.bytes
