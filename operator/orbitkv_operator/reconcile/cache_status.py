"""The status of a CacheNamespace: a pure function of what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

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

FIRST: Final = 10
"""Attached pods that are named."""

Parts = Sequence[tuple[str, CacheReport]]
"""What agents say of the cache: (node, part of its report)."""
_Part = tuple[bool | None, str, str]


def cache_status(
    cache: CacheNamespace,
    pool: ManagerPool | None,
    decision: Decision | None,
    parts: Parts | None,
    now: datetime | None = None,
) -> CacheNamespaceStatus:
    """Return the status.

    Args:
        pool: the pool that the cache refers to; None: there is none.
        decision: the pool's answer; None: without a pool there is none.
        parts: what agents say; None: not known at present, and what was known stays.
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
    if parts is not None or known is None:
        conditions.append(condition(before, "InUse", *_in_use(parts or ()), generation, now))
    else:
        conditions.append(known)
    if parts is None:
        figures = {name: getattr(cache.status, name) for name in ("tiers", "attached", "last_hour")}
        return CacheNamespaceStatus(observed_generation=generation, conditions=conditions, **figures)
    return CacheNamespaceStatus(
        observed_generation=generation,
        conditions=conditions,
        tiers=CacheTiers(dram=CacheTier(used=rounded_size_text(sum(part.dram.used_bytes for _, part in parts)))),
        attached=_attached(parts),
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


def _in_use(parts: Parts) -> _Part:
    nodes = sum(part.engines > 0 for _, part in parts)
    if nodes:
        return True, "EnginesAttached", f"Engines are attached on {nodes} {'node' if nodes == 1 else 'nodes'}."
    return False, "Idle", "No engine is attached at present."


def _attached(parts: Parts) -> Attached:
    pods = [
        AttachedPod(namespace=pod.namespace, name=pod.name, node=node, sessions=pod.sessions)
        for node, part in parts
        for pod in part.pods
    ]
    pods.sort(key=lambda pod: (pod.namespace, pod.name))
    return Attached(
        pods=sum(part.attached_pods for _, part in parts),
        sessions=sum(part.sessions for _, part in parts),
        first=pods[:FIRST] or None,
    )


def _last_hour(parts: Parts) -> LastHour:
    requested = sum(part.last_hour.requested_tokens for _, part in parts)
    hit = sum(part.last_hour.hit_tokens for _, part in parts)
    return LastHour(
        hit_rate=f"{100 * hit / requested:.0f}%" if requested else None, requested_tokens=requested, hit_tokens=hit
    )
