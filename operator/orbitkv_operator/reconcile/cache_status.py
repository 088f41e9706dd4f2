"""The status of a CacheNamespace: a pure function of what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from orbitkv_crds.agent_api.reports_pb2 import VISIT_STATE_ATTACHED, PodVisit
from orbitkv_crds.agent_api.reports_pb2 import CacheNamespace as CacheReport
from orbitkv_crds.cachenamespace import (
    Attached,
    AttachedPod,
    CacheNamespace,
    CacheNamespaceStatus,
    CacheTier,
    CacheTiers,
    LastHour,
)
from orbitkv_crds.guarantees import Decision
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_crds.meta import condition, find_condition
from orbitkv_crds.quantity import rounded_size_text
from orbitkv_operator.engines.pods import Without

FIRST: Final = 10
"""Attached pods that are named."""
FIRST_WITHOUT: Final = 5
"""Pods that run without the cache and are named, with the reason."""
_LONGEST_REASON: Final = 400

Parts = Sequence[tuple[str, CacheReport]]
"""What agents say of the cache: (node, part of its report)."""
Visits = Sequence[tuple[str, PodVisit]]
"""What agents say of the pods that have a session in it: (node, visit)."""
_Part = tuple[bool | None, str, str]


def cache_status(
    cache: CacheNamespace,
    pool: ManagerPool | None,
    decision: Decision | None,
    parts: Parts | None,
    without: Sequence[Without] = (),
    visits: Visits = (),
    now: datetime | None = None,
    *,
    whole: bool = True,
) -> CacheNamespaceStatus:
    """Return the status.

    Args:
        pool: the pool that the cache refers to; None: there is none.
        decision: the pool's answer; None: without a pool there is none.
        parts: what agents say; None: not known at present, and what was known stays.
        without: pods that ask for it and run without.
        visits: the pods that are attached, as agents that know them by pod tell.
        whole: whether all agents had the time to say something. Before that no use and no figure goes.
    """
    generation, before = cache.metadata.generation, cache.status.conditions or []
    accepted, pool_ready = _accepted(cache, decision), _pool_ready(cache, pool)
    ready = next((part for part in (accepted, pool_ready) if part[0] is not True), None)
    conditions = [
        condition(before, "Accepted", *accepted, generation, now),
        condition(before, "PoolReady", *pool_ready, generation, now),
        condition(
            before,
            "Ready",
            *((True, "Ready", "Engines can attach.") if ready is None else (False, ready[1], ready[2])),
            generation,
            now,
        ),
    ]
    known = find_condition(before, "InUse")
    news = parts is not None and (whole or (known is not None and known.status != "True" and _engines(parts) > 0))
    if news or known is None:
        conditions.append(condition(before, "InUse", *_in_use(parts or (), without), generation, now))
    else:
        conditions.append(known)
    if parts is None or not whole:
        figures = {name: getattr(cache.status, name) for name in ("tiers", "attached", "last_hour")}
        return CacheNamespaceStatus(observed_generation=generation, conditions=conditions, **figures)
    return CacheNamespaceStatus(
        observed_generation=generation,
        conditions=conditions,
        tiers=CacheTiers(dram=CacheTier(used=rounded_size_text(sum(part.dram.used_bytes for _, part in parts)))),
        attached=_attached(parts, visits, len(without)),
        last_hour=_last_hour(parts),
    )


def _accepted(cache: CacheNamespace, decision: Decision | None) -> _Part:
    if decision is None:
        return None, "PoolNotFound", _no_pool(cache)
    return decision.accepted, decision.reason, decision.message


def _pool_ready(cache: CacheNamespace, pool: ManagerPool | None) -> _Part:
    if pool is None:
        return False, "PoolNotFound", _no_pool(cache)
    available = find_condition(pool.status.conditions or (), "Available")
    if available is None:
        return False, "PoolNew", f"ManagerPool {pool.name} is not set up yet."
    if available.status != "True":
        return False, "PoolNotAvailable", f"ManagerPool {pool.name} is not available: {available.message}"
    return True, "PoolAvailable", f"ManagerPool {pool.name} is available."


def _no_pool(cache: CacheNamespace) -> str:
    return (
        f"There is no ManagerPool {cache.spec.pool_ref.name}: make it, or make this CacheNamespace anew for another "
        "one (`kubectl get managerpools`)."
    )


def _engines(parts: Parts) -> int:
    """Return on how many nodes engines are attached."""
    return sum(part.engines > 0 for _, part in parts)


def _in_use(parts: Parts, without: Sequence[Without]) -> _Part:
    nodes = _engines(parts)
    if nodes:
        attached = f"Engines are attached on {nodes} {'node' if nodes == 1 else 'nodes'}."
        return True, "EnginesAttached", f"{attached} {_named(without)}".rstrip()
    if without:
        return False, "PodsWithoutCache", _named(without)
    return False, "Idle", "No engine is attached at present."


def _named(without: Sequence[Without]) -> str:
    """Return which pods run without the cache, the first of them with the reason; nothing if there are none."""
    if not without:
        return ""
    count = (
        "1 pod asks for it and runs without:"
        if len(without) == 1
        else f"{len(without)} pods ask for it and run without:"
    )
    first = [f"{it.pod} ({it.reason}: {it.message[:_LONGEST_REASON]})" for it in without[:FIRST_WITHOUT]]
    rest = f"; and {len(without) - FIRST_WITHOUT} more" if len(without) > FIRST_WITHOUT else ""
    return f"{count} {'; '.join(first)}{rest}"


def _attached(parts: Parts, visits: Visits, without: int) -> Attached:
    known = {(visit.namespace, visit.name): visit for _, visit in visits}
    on_their_way = {name for name, visit in known.items() if visit.state != VISIT_STATE_ATTACHED}
    pods = [
        AttachedPod(namespace=pod.namespace, name=pod.name, node=node, sessions=pod.sessions)
        for node, part in parts
        for pod in part.pods
        if (pod.namespace, pod.name) not in on_their_way
    ]
    pods.sort(key=lambda pod: (pod.namespace, pod.name))
    return Attached(
        pods=max(0, sum(part.attached_pods for _, part in parts) - len(on_their_way)),
        sessions=sum(part.sessions for _, part in parts),
        without=without,
        first=[_with_visit(pod, known.get((pod.namespace, pod.name))) for pod in pods[:FIRST]] or None,
    )


def _with_visit(pod: AttachedPod, visit: PodVisit | None) -> AttachedPod:
    if visit is None:
        return pod
    return pod.model_copy(
        update={
            "engine": visit.engine[:64] or None,
            "requested_tokens": visit.requested_tokens,
            "hit_tokens": visit.hit_tokens,
        }
    )


def _last_hour(parts: Parts) -> LastHour:
    requested = sum(part.last_hour.requested_tokens for _, part in parts)
    hit = sum(part.last_hour.hit_tokens for _, part in parts)
    return LastHour(
        hit_rate=f"{100 * hit / requested:.0f}%" if requested else None,
        requested_tokens=requested,
        hit_tokens=hit,
        computed_tokens=max(0, requested - hit),
    )
