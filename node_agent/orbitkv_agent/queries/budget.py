"""Bytes that queries, leases and restores may hold together, each instance alone, and those of each tenant."""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum

from orbitkv_agent.guards import guard
from orbitkv_agent.queries.shares import Shares


class Phase(IntEnum):
    """What reserved bytes are waiting for."""

    PREPARING = 0
    READY = 1
    RESTORING = 2

    @property
    def label(self) -> str:
        """Its name in the metrics."""
        return self.name.lower()


class Charge:
    """Bytes reserved for one owner, of a tenant. Released exactly once."""

    __slots__ = ("budget", "bytes", "owner", "phase", "released", "tenant")

    def __init__(self, budget: ByteBudget, owner: Hashable, tenant: str, size: int) -> None:
        self.budget = budget
        self.owner = owner
        self.tenant = tenant
        self.bytes = size
        self.phase = Phase.PREPARING
        self.released = False

    def move(self, phase: Phase) -> None:
        """Account the bytes to another phase."""
        assert not self.released, "a charge was moved after its release"
        by_phase = self.budget.by_phase
        by_phase[self.phase] -= self.bytes
        by_phase[phase] += self.bytes
        self.phase = phase

    def release(self) -> None:
        """Give the bytes back."""
        assert not self.released, "a charge was released twice"
        self.released = True
        self.budget._release(self)


class ByteBudget:
    """Reserved bytes, in all and by owner.

    Args:
        limit: most bytes in all.
        owner_limit: most bytes for one owner (an instance).
        shares: what each tenant has of them.

    Attributes:
        reserved: bytes in all.
        by_phase: the same, by what they wait for; indexed by `Phase`.
        peak, owner_peak: the most that was ever reserved, in all and by one owner.
    """

    def __init__(self, limit: int, owner_limit: int, shares: Shares) -> None:
        self.limit = limit
        self.owner_limit = min(owner_limit, limit)
        self.reserved = 0
        self.by_phase = [0] * len(Phase)
        self.peak = 0
        self.owner_peak = 0
        self._by_owner: dict[Hashable, int] = {}
        self._shares = shares

    def set_limits(self, limit: int, owner_limit: int) -> None:
        """Change the limits. What is reserved beyond lowered ones stays until it is released."""
        self.limit = limit
        self.owner_limit = min(owner_limit, limit)

    def oversized(self, size: int) -> bool:
        """Whether `size` bytes never fit, whoever returns what."""
        return size > self.owner_limit or not self._shares.allows_ever(size, self.limit)

    def is_full(self, size: int) -> bool:
        """Whether `size` more bytes exceed the limit in all now."""
        return self.reserved + size > self.limit and guard("budget-limit")

    def fits(self, owner: Hashable, tenant: str, size: int) -> bool:
        """Whether `size` more bytes exceed neither the limit in all, nor the owner's own, nor its tenant's share."""
        return (
            self.reserved + size <= self.limit
            and self._by_owner.get(owner, 0) + size <= self.owner_limit
            and self.shared(tenant, size)
        ) or not guard("budget-limit")

    def shared(self, tenant: str, size: int) -> bool:
        """Whether `size` more bytes leave enough for other tenants."""
        few = 2 * (self.reserved + size) <= self.limit  # then nobody has more than is left
        return few or self._shares.allows(tenant, size, self.limit - self.reserved)

    def charge(self, owner: Hashable, tenant: str, size: int) -> Charge:
        """Reserve bytes that fit, in phase PREPARING. The caller has asked `fits`."""
        self._shares.take(tenant, size)
        self.reserved += size
        self.by_phase[Phase.PREPARING] += size
        mine = self._by_owner[owner] = self._by_owner.get(owner, 0) + size
        if self.reserved > self.limit or mine > self.owner_limit:
            assert not guard("budget-limit"), "the query budget, in all or of an instance, is exceeded"
        self.peak = max(self.peak, self.reserved)
        self.owner_peak = max(self.owner_peak, mine)
        return Charge(self, owner, tenant, size)

    def of(self, owner: Hashable) -> int:
        """Bytes reserved for one owner."""
        return self._by_owner.get(owner, 0)

    def _release(self, charge: Charge) -> None:
        self._shares.give_back(charge.tenant, charge.bytes)
        self.reserved -= charge.bytes
        self.by_phase[charge.phase] -= charge.bytes
        rest = self._by_owner[charge.owner] = self._by_owner[charge.owner] - charge.bytes
        assert self.reserved >= 0, "more was released than charged"
        assert rest >= 0, "more was released than charged to this owner"
        if not rest:
            del self._by_owner[charge.owner]
