"""Which cache namespaces a pool takes."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv_crds.access import AllowedNamespaces
from orbitkv_crds.cachenamespace import CacheNamespace
from orbitkv_crds.guarantees import Claim, Decision, PoolLimits, decide

GIB = 1 << 30


def pool(capacity: int = 8 * GIB, maximum: int | None = None, team: str | None = None) -> PoolLimits:
    """Limits in bytes; `team`: for namespaces with that label only."""
    selector = {"from": "Selector", "selector": {"matchLabels": {"team": team}}} if team else {}
    return PoolLimits("pool", capacity, maximum, AllowedNamespaces.model_validate(selector))


def claim(name: str, second: int, guaranteed: float = 0, quota: float | None = None, namespace: str = "a") -> Claim:
    """A claim in GiB; `second` is when it was made."""
    return Claim(
        namespace=namespace,
        name=name,
        uid=f"uid-{namespace}-{name}",
        created=f"2026-01-01T00:00:{second:02}Z",
        quota=None if quota is None else int(quota * GIB),
        guaranteed=int(guaranteed * GIB),
        namespace_labels={"team": namespace},
    )


def reasons(limits: PoolLimits, *claims: Claim) -> dict[str, str]:
    made = decide(limits, claims)
    return {each.name: made[each.uid].reason for each in claims}


def the(limits: PoolLimits, *claims: Claim) -> Decision:
    """The decision on the last claim."""
    return decide(limits, claims)[claims[-1].uid]


def test_guarantees_that_fit_exactly_are_accepted() -> None:
    assert reasons(pool(), claim("x", 1, 5), claim("y", 2, 3)) == {"x": "Accepted", "y": "Accepted"}


def test_youngest_guarantee_does_not_fit_and_does_once_an_older_one_goes() -> None:
    first, second, third = claim("x", 1, 4), claim("y", 2, 4), claim("z", 3, 1)
    assert reasons(pool(), third, second, first) == {"x": "Accepted", "y": "Accepted", "z": "GuaranteeExceedsPool"}
    assert reasons(pool(), third, second) == {"y": "Accepted", "z": "Accepted"}


def test_what_does_not_fit_leaves_room_for_a_younger_one() -> None:
    found = reasons(pool(), claim("x", 1, 5), claim("y", 2, 5), claim("z", 3, 3))
    assert found == {"x": "Accepted", "y": "GuaranteeExceedsPool", "z": "Accepted"}


def test_guarantee_that_does_not_fit_is_told_with_what_would() -> None:
    decision = the(pool(), claim("x", 1, 5), claim("y", 2, 4))
    assert decision.message == (
        "quota.guaranteedDram is 4Gi, but ManagerPool pool has 8Gi on each node, of which older CacheNamespaces are "
        "guaranteed 5Gi. Lower it to at most 3Gi, or enlarge the pool. Until then it has no guarantee."
    )
    assert decision.served
    assert not decision.accepted


def test_without_a_guarantee_a_full_pool_takes_it() -> None:
    assert the(pool(), claim("x", 1, 8), claim("y", 2)).accepted


def test_of_the_same_second_the_name_decides() -> None:
    one, other = claim("x", 1, 5), claim("y", 1, 5)
    assert reasons(pool(), other, one) == {"x": "Accepted", "y": "GuaranteeExceedsPool"}


def test_namespace_that_is_not_allowed_is_refused_and_takes_nothing() -> None:
    limits = pool(team="b")
    assert reasons(limits, claim("x", 1, 8), claim("y", 2, 8, namespace="b")) == {
        "x": "NamespaceNotAllowed",
        "y": "Accepted",
    }
    decision = the(limits, claim("x", 1, 8))
    assert decision.message.startswith(
        "The labels of namespace a do not match allowedNamespaces.selector of ManagerPool"
    )
    assert not decision.served


def test_quotas_of_one_namespace_fit_into_the_maximum_together() -> None:
    limits = pool(maximum=4 * GIB)
    found = reasons(limits, claim("x", 1, quota=3), claim("y", 2, quota=2), claim("z", 3, quota=4, namespace="b"))
    assert found == {"x": "Accepted", "y": "QuotaAboveMaximum", "z": "Accepted"}
    decision = the(limits, claim("x", 1, quota=3), claim("y", 2, quota=2))
    assert decision.message == (
        "ManagerPool pool allows namespace a 4Gi on each node in all (maxQuotaPerNamespace.dram), older "
        "CacheNamespaces there have 3Gi of it, and quota.dram is 2Gi. Set quota.dram to at most 1Gi, or raise the "
        "maximum."
    )
    assert not decision.served


def test_without_a_quota_the_ceiling_is_the_maximum() -> None:
    limits = pool(maximum=4 * GIB)
    assert the(limits, claim("x", 1)).quota == 4 * GIB
    assert the(pool(), claim("x", 1)).quota is None
    decision = the(limits, claim("x", 1, quota=1), claim("y", 2))
    assert decision.reason == "QuotaAboveMaximum"
    assert "without quota.dram this one asks for all of it. Set quota.dram to at most 3Gi" in decision.message


def test_guarantee_above_the_maximum_is_refused() -> None:
    decision = the(pool(maximum=4 * GIB), claim("x", 1, 5))
    assert decision.reason == "QuotaAboveMaximum"
    assert "quota.guaranteedDram is 5Gi. Set quota.guaranteedDram to at most 4Gi, or" in decision.message


def test_namespace_that_has_all_it_may_is_told_to_lower_an_older_quota() -> None:
    decision = the(pool(maximum=4 * GIB), claim("x", 1, quota=4), claim("y", 2, quota=1))
    assert "and quota.dram is 1Gi. Lower the quota of an older one, or raise the maximum." in decision.message


def test_claim_is_read_from_the_object() -> None:
    it = CacheNamespace.model_validate(
        {
            "metadata": {"namespace": "a", "name": "x", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"poolRef": {"name": "pool"}, "quota": {"dram": "2Gi", "guaranteedDram": "1.5Gi"}},
        }
    )
    assert Claim.of(it, {"team": "a"}) == Claim(
        namespace="a",
        name="x",
        uid="u",
        created="2026-01-01T00:00:00Z",
        quota=2 * GIB,
        guaranteed=3 * GIB // 2,
        namespace_labels={"team": "a"},
    )


claims = st.lists(
    st.builds(
        claim,
        name=st.sampled_from("abcdef"),
        second=st.integers(0, 3),
        guaranteed=st.integers(0, 9),
        quota=st.none() | st.integers(9, 12),
        namespace=st.sampled_from("abc"),
    ),
    unique_by=lambda it: it.uid,
    max_size=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(claims, st.none() | st.integers(1, 30), st.randoms(use_true_random=False))
def test_what_is_accepted_fits_whatever_the_order(made: list[Claim], maximum: int | None, order: random.Random) -> None:
    limits = pool(maximum=None if maximum is None else maximum * GIB)
    decisions = decide(limits, made)
    shuffled = list(made)
    order.shuffle(shuffled)
    assert decide(limits, shuffled) == decisions
    accepted = [each for each in made if decisions[each.uid].accepted]
    assert sum(each.guaranteed for each in accepted) <= limits.capacity
    if limits.max_quota_dram is not None:
        for namespace in "abc":
            served = [decisions[each.uid] for each in made if each.namespace == namespace]
            assert sum(each.quota or 0 for each in served if each.served) <= limits.max_quota_dram
    # nobody is refused because of a younger one
    for each in made:
        older = [
            other
            for other in made
            if (other.created, other.namespace, other.name) <= (each.created, each.namespace, each.name)
        ]
        assert decide(limits, older)[each.uid] == decisions[each.uid]
