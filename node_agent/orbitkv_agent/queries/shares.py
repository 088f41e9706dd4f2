"""What tenants have of something of which there is only so much: none may take so much that others get nothing.

While there are several, a tenant takes more only as long as it leaves at least as much free as it then has: the first
one gets half at most, the next one half of the rest, and there is always a rest for who comes. A tenant that is alone
may have everything.
"""

from __future__ import annotations

from collections.abc import Callable

from orbitkv_agent.guards import guard


class Shares:
    """What each tenant has. Used by the owner thread only.

    Args:
        several: whether there are several tenants.
    """

    def __init__(self, several: Callable[[], bool]) -> None:
        self._several = several
        self._of: dict[str, int] = {}

    def allows(self, tenant: str, more: int, free: int) -> bool:
        """Whether a tenant may take `more` of what is `free`; that it is there is the caller's to see."""
        enough = self._of.get(tenant, 0) + more <= free - more + 1  # of an odd number, the larger half
        return enough or not self._several() or not guard("tenants-share")

    def allows_ever(self, size: int, limit: int) -> bool:
        """Whether a tenant may have so much at one time, if nobody has anything of all that there is."""
        return 2 * size <= limit + 1 or not self._several()

    def take(self, tenant: str, size: int) -> None:
        """A tenant has so much more."""
        self._of[tenant] = self._of.get(tenant, 0) + size

    def give_back(self, tenant: str, size: int) -> None:
        """A tenant has so much less."""
        rest = self._of[tenant] - size
        assert rest >= 0, "more was given back than taken"
        if rest:
            self._of[tenant] = rest
        else:
            del self._of[tenant]
