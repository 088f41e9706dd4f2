"""The status of a ManagerPool: a pure function of what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from orbitkv_crds.managerpool import (
    ManagerPool,
    ManagerPoolStatus,
    NodeCounts,
    PoolTier,
    PoolTiers,
    UnhealthyNode,
)
from orbitkv_crds.meta import Condition, condition
from orbitkv_crds.quantity import rounded_size_text
from orbitkv_operator.gpu import Verdict
from orbitkv_operator.overlap import Overlap
from orbitkv_operator.reports.store import Sums
from orbitkv_operator.rollout import Rollout

FIRST: Final = 10
"""Nodes that are named one by one."""


@dataclass(frozen=True)
class Blocked:
    """Why a pool's agents are left as they are: the condition that says so, its reason and message."""

    condition: str
    reason: str
    message: str


@dataclass(frozen=True)
class PoolFacts:
    """What a pool's status is made of."""

    wanted: Sequence[str]
    """Nodes that should have an agent, sorted."""
    rollout: Rollout
    max_unavailable: int
    unhealthy: Sequence[UnhealthyNode]
    overlaps: Sequence[Overlap]
    blocked: Blocked | None
    waiting: str
    """What has to end before the pool's objects can be made, in words; empty: nothing."""
    cache_namespaces: int
    dram: Sums | None
    """None: not known at present."""
    route: str | None
    """The way to the GPUs; None: there is none, and agents that run stay on the one that they have."""
    gpus: Verdict | None
    """What agents see of GPUs; None: there is no way to them."""
    settled: bool
    """Whether agents have had the time to report since this operator acts."""


def pool_status(pool: ManagerPool, facts: PoolFacts, now: datetime | None = None) -> ManagerPoolStatus:
    """Return the status; figures that are not known stay as they were."""
    before = pool.status.conditions or []
    held = next((it for it in facts.overlaps if it.other_is_older), None)
    access = _gpu_access(pool, facts)
    valid = _config_valid(pool, facts)
    available = _available(facts)
    progressing = _progressing(pool, facts)
    ready = _ready(facts, access, valid if held or not facts.overlaps else None, available, progressing)
    parts = {
        "Ready": ready,
        "Available": available,
        "Progressing": progressing,
        "ConfigValid": valid,
        "GPUAccess": access,
    }
    conditions: list[Condition] = [
        condition(before, kind, *part, pool.metadata.generation, now) for kind, part in parts.items()
    ]
    tiers = pool.status.tiers
    if facts.dram is not None:
        tiers = PoolTiers(
            dram=PoolTier(capacity=rounded_size_text(facts.dram.capacity), used=rounded_size_text(facts.dram.used))
        )
    return ManagerPoolStatus(
        observed_generation=pool.metadata.generation,
        gpu_route=facts.route or pool.status.gpu_route,
        cache_namespaces=facts.cache_namespaces,
        nodes=NodeCounts(
            desired=len(facts.wanted),
            ready=facts.rollout.ready,
            updated=facts.rollout.updated,
            unhealthy=len(facts.unhealthy),
        ),
        unhealthy_nodes=list(facts.unhealthy[:FIRST]) or None,
        tiers=tiers,
        conditions=conditions,
    )


_Part = tuple[bool | None, str, str]
"""Status, reason and message of a condition."""
_TRUTH: Final[dict[str, bool | None]] = {"True": True, "False": False, "Unknown": None}


def _gpu_access(pool: ManagerPool, facts: PoolFacts) -> _Part:
    if facts.gpus is None:
        blocked = facts.blocked
        assert blocked is not None
        return False, blocked.reason, blocked.message
    if facts.gpus[0] is None and not facts.settled:
        # an operator that has just begun to act does not know, and takes the word of the one before it
        before = next((it for it in pool.status.conditions or () if it.type == "GPUAccess"), None)
        if before is not None and before.observed_generation == pool.metadata.generation:
            return _TRUTH[before.status], before.reason, before.message
    return facts.gpus


def _config_valid(pool: ManagerPool, facts: PoolFacts) -> _Part:
    if facts.blocked is not None and facts.blocked.condition == "ConfigValid":
        return False, facts.blocked.reason, facts.blocked.message
    if not facts.overlaps:
        return True, "Valid", "The spec can be acted on."
    sentences = []
    for overlap in facts.overlaps:
        older, younger = (overlap.other, pool.name) if overlap.other_is_older else (pool.name, overlap.other)
        sentences.append(
            f"ManagerPools {older} and {younger} both want {_names('node', overlap.nodes)}. {older} is the older and "
            f"serves; {younger} keeps the placement it had until this is resolved."
        )
    return (
        False,
        "NodesOverlap",
        f"{' '.join(sentences)} Change nodeSelector or affinity of one, so that each node has one.",
    )


def _available(facts: PoolFacts) -> _Part:
    desired, ready = len(facts.wanted), facts.rollout.ready
    if not desired:
        if facts.blocked is not None or facts.overlaps:
            return False, "NoAgents", "This pool has no agents: see the other conditions."
        return (
            False,
            "NoNodes",
            "No node is matched by nodeSelector, affinity and tolerations: see `kubectl get nodes --show-labels`.",
        )
    message = f"{ready} of {desired} nodes have a ready agent."
    if ready and ready >= desired - facts.max_unavailable:
        return True, "AgentsReady", message
    return False, "AgentsNotReady", f"{message}{_first_problem(facts)}"


def _progressing(pool: ManagerPool, facts: PoolFacts) -> _Part:
    desired, outdated = len(facts.wanted), facts.rollout.outdated
    if facts.waiting:
        return True, "Waiting", facts.waiting
    if facts.blocked is not None:
        return False, "Blocked", f"Agents are left as they are: see condition {facts.blocked.condition}."
    if outdated and pool.spec.update_strategy.paused:
        return (
            False,
            "Paused",
            f"{_names('node', outdated)} {'has' if len(outdated) == 1 else 'have'} an agent of an earlier spec: set "
            "updateStrategy.paused to false to have it replaced.",
        )
    known = {*outdated, *facts.rollout.serving}
    failing = [it for it in facts.unhealthy if it.name not in known and it.reason != "NodeNotReady"]
    if outdated and not facts.rollout.replace and failing:
        return (
            False,
            "Stalled",
            f"{_names('node', outdated)} must wait, as new agents do not become ready. {failing[0].name}: "
            f"{failing[0].message}",
        )
    if outdated:
        return (
            True,
            "RollingOut",
            f"{facts.rollout.updated} of {desired} agents are as the spec says; others are being replaced, at most "
            f"{facts.max_unavailable} at a time.",
        )
    if facts.rollout.ready < desired:
        if failing:
            return False, "Stalled", f"Agents do not become ready.{_first_problem(facts)}"
        return True, "Starting", f"{facts.rollout.ready} of {desired} nodes have a ready agent; others are starting."
    return False, "Complete", "All agents are as the spec says."


def _ready(facts: PoolFacts, access: _Part, valid: _Part | None, available: _Part, progressing: _Part) -> _Part:
    no_access, waits = (access, None) if access[0] is False else (None, access)
    for part in (no_access, valid, available, waits):
        if part is not None and part[0] is not True:
            return False, part[1], part[2]
    if progressing[0] is not False or progressing[1] == "Stalled":
        return False, progressing[1], progressing[2]
    if facts.rollout.ready < len(facts.wanted):
        return False, "AgentsNotReady", f"{available[2]}{_first_problem(facts)}"
    return True, "Ready", available[2]


def _first_problem(facts: PoolFacts) -> str:
    return f" {facts.unhealthy[0].name}: {facts.unhealthy[0].message}" if facts.unhealthy else ""


def _names(what: str, names: Sequence[str]) -> str:
    """Return `node a`, `nodes a, b`, or `nodes a, b (and 7 more)`."""
    more = f" (and {len(names) - FIRST} more)" if len(names) > FIRST else ""
    return f"{what}{'' if len(names) == 1 else 's'} {', '.join(names[:FIRST])}{more}"
