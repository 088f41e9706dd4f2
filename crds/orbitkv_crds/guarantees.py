"""Which cache namespaces a pool takes: one decision, made alike by the operator and by every agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from orbitkv_crds.access import AllowedNamespaces
from orbitkv_crds.cachenamespace import CacheNamespace
from orbitkv_crds.quantity import size_text

Reason = Literal["Accepted", "NamespaceNotAllowed", "QuotaAboveMaximum", "GuaranteeExceedsPool"]


@dataclass(frozen=True)
class PoolLimits:
    """What a pool has to give. Sizes in bytes, per node; `max_quota_dram` None: no limit."""

    name: str
    capacity: int
    max_quota_dram: int | None
    allowed_namespaces: AllowedNamespaces


@dataclass(frozen=True)
class Claim:
    """What a cache namespace asks for. Sizes in bytes, per node; `quota` None: whatever the pool allows.

    `created` is metadata.creationTimestamp. `namespace_labels` None: the namespace's labels are not known.
    """

    namespace: str
    name: str
    uid: str
    created: str
    quota: int | None
    guaranteed: int
    namespace_labels: Mapping[str, str] | None

    @classmethod
    def of(cls, it: CacheNamespace, namespace_labels: Mapping[str, str] | None) -> Self:
        """Return the claim of a CacheNamespace."""
        return cls(
            namespace=it.metadata.namespace,
            name=it.metadata.name,
            uid=it.metadata.uid,
            created=it.metadata.creation_timestamp,
            quota=it.spec.quota.dram_bytes,
            guaranteed=it.spec.quota.guaranteed_dram_bytes,
            namespace_labels=namespace_labels,
        )


@dataclass(frozen=True)
class Decision:
    """The answer to a claim. `quota` is the ceiling in force in bytes (None: none); meaningful if served."""

    reason: Reason
    message: str
    quota: int | None = None

    @property
    def accepted(self) -> bool:
        """Whether the pool takes the cache namespace."""
        return self.reason == "Accepted"

    @property
    def served(self) -> bool:
        """Whether engines may attach. Too large a guarantee is not given, but does not take the cache away."""
        return self.reason in ("Accepted", "GuaranteeExceedsPool")


def decide(pool: PoolLimits, claims: Iterable[Claim]) -> dict[str, Decision]:
    """Return the decision on each claim, by uid.

    Oldest first, and of the same second by name. What is refused takes nothing, so that a younger one which fits is
    accepted. Without a quota of its own, a cache namespace of a pool with a maximum claims the whole maximum.
    """
    decisions: dict[str, Decision] = {}
    guaranteed = 0
    quotas: dict[str, int] = defaultdict(int)
    for claim in sorted(claims, key=lambda it: (it.created, it.namespace, it.name, it.uid)):
        decision = _decide(pool, claim, guaranteed, quotas[claim.namespace])
        decisions[claim.uid] = decision
        if decision.accepted:
            guaranteed += claim.guaranteed
        if decision.served:
            quotas[claim.namespace] += decision.quota or 0
    return decisions


def _decide(pool: PoolLimits, claim: Claim, guaranteed: int, quotas: int) -> Decision:
    """Decide on one claim; `guaranteed` is what the older ones have, `quotas` what those of its namespace have."""
    if not pool.allowed_namespaces.admits(claim.namespace_labels):
        return Decision(
            "NamespaceNotAllowed",
            f"The labels of namespace {claim.namespace} do not match allowedNamespaces.selector of ManagerPool "
            f"{pool.name}. Label the namespace as it asks, or use another pool.",
        )
    maximum = pool.max_quota_dram
    quota = claim.quota if claim.quota is not None or maximum is None else maximum
    if maximum is not None and quota is not None and quotas + max(quota, claim.guaranteed) > maximum:
        return Decision("QuotaAboveMaximum", _above_maximum(pool.name, maximum, claim, quotas))
    if claim.guaranteed and guaranteed + claim.guaranteed > pool.capacity:
        older = f", of which older CacheNamespaces are guaranteed {size_text(guaranteed)}" if guaranteed else ""
        return Decision(
            "GuaranteeExceedsPool",
            f"quota.guaranteedDram is {size_text(claim.guaranteed)}, but ManagerPool {pool.name} has "
            f"{size_text(pool.capacity)} on each node{older}. Lower it to at most "
            f"{size_text(max(0, pool.capacity - guaranteed))}, or enlarge the pool. Until then it has no guarantee.",
            quota,
        )
    return Decision("Accepted", f"ManagerPool {pool.name} takes it.", quota)


def _above_maximum(pool: str, maximum: int, claim: Claim, quotas: int) -> str:
    """Say what is too much; `quotas` is what the older ones of the namespace have."""
    left = max(0, maximum - quotas)
    field = "quota.dram"
    if claim.quota is not None:
        asked = f"quota.dram is {size_text(claim.quota)}"
    elif claim.guaranteed > maximum:
        field = "quota.guaranteedDram"
        asked = f"quota.guaranteedDram is {size_text(claim.guaranteed)}"
    else:
        asked = "without quota.dram this one asks for all of it"
    older = f", older CacheNamespaces there have {size_text(quotas)} of it" if quotas else ""
    advice = f"Set {field} to at most {size_text(left)}" if left else "Lower the quota of an older one"
    return (
        f"ManagerPool {pool} allows namespace {claim.namespace} {size_text(maximum)} on each node in all "
        f"(maxQuotaPerNamespace.dram){older}, and {asked}. {advice}, or raise the maximum."
    )
