"""Reconciling a CacheNamespace: its status is all that the operator writes; agents read the spec themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from orbitkv_crds.guarantees import Claim, Decision, PoolLimits, decide
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_crds.meta import condition
from orbitkv_operator.cluster.api import CACHES, Manifest
from orbitkv_operator.engines.pods import EnginePods
from orbitkv_operator.events import Events
from orbitkv_operator.reconcile.cache_status import cache_status
from orbitkv_operator.reconcile.status_writer import FIGURES_AGAIN, StatusWriter
from orbitkv_operator.reports.store import ReportStore
from orbitkv_operator.view import Cache, View
from orbitkv_operator.work import FORGET

STALE_SECONDS: Final = 0.5
"""Age up to which a pool's decisions are good enough while changes come in quickly: what changes is looked at again
anyway, a second later."""


@dataclass(frozen=True)
class _Decided:
    changes: int
    at: float
    by_uid: dict[str, Decision]


@dataclass
class Decisions:
    """The pools' answers to their cache namespaces, worked out again only when something has changed. The lock guards
    `_known`; nothing waits under it."""

    view: View
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _known: dict[str, _Decided] = field(default_factory=dict)

    def about(self, uid: str, pool: ManagerPool) -> Decision | None:
        """Return a pool's decision on a cache namespace; None: it has not been heard of."""
        changes, now = self.view.changes, self.clock()
        with self._lock:
            known = self._known.get(pool.metadata.uid)
        if known is None or (known.changes != changes and (now - known.at > STALE_SECONDS or uid not in known.by_uid)):
            known = _Decided(changes, now, self._decide(pool))
            with self._lock:
                if len(self._known) > 1000:
                    self._known.clear()
                self._known[pool.metadata.uid] = known
        return known.by_uid.get(uid)

    def _decide(self, pool: ManagerPool) -> dict[str, Decision]:
        limits = PoolLimits(
            name=pool.name,
            capacity=pool.spec.memory.pool_bytes,
            max_quota_dram=pool.spec.max_quota_dram_bytes,
            allowed_namespaces=pool.spec.allowed_namespaces,
        )
        models = [cache.model for cache in self.view.caches(pool=pool.name) if cache.model is not None]
        claims = [Claim.of(model, self.view.namespace_labels(model.metadata.namespace)) for model in models]
        return decide(limits, claims)


@dataclass
class CacheReconciler:
    """Holds nothing about cache namespaces between two calls, and of pools what it has read last."""

    view: View
    decisions: Decisions
    reports: ReportStore
    status: StatusWriter
    events: Events
    pods: EnginePods
    _read: dict[str, tuple[Manifest, ManagerPool | None]] = field(default_factory=dict)
    """By name: what a pool was when it was read last, and what was read. Each item is set in one step."""

    def reconcile(self, namespace: str, name: str) -> float | None:
        """Bring the status up to date; return in how many seconds to look again, as `work.Handler`.

        Raises:
            ApiError: it could not be written.
        """
        cache = self.view.cache(namespace, name)
        if cache is None or cache.manifest["metadata"].get("deletionTimestamp"):
            self.status.forget(CACHES, namespace, name)
            return FORGET
        if cache.model is None:
            return self.status.write(CACHES, cache.manifest, _unreadable(cache))
        pool = self._pool(cache.pool)
        uid = cache.model.metadata.uid
        decision = None if pool is None else self.decisions.about(uid, pool)
        # where none has ever reported, nothing is known; where some did and have fallen silent, nothing is in use
        known = self.reports.heard(cache.pool) or (self.reports.settled and cache.model.status.tiers is not None)
        parts = self.reports.about(cache.pool, uid) if known else None
        # an operator that has begun to act hears of one agent after the other
        whole = (
            self.reports.settled
            or cache.model.status.tiers is None
            or self.status.has_written_figures(CACHES, namespace, name)
        )
        without = self.pods.without(f"{namespace}/{name}")
        visits = self.reports.visits_to(cache.pool, f"{namespace}/{name}")
        status = cache_status(cache.model, pool, decision, parts, without, visits, whole=whole).to_body()
        if decision is not None and not decision.accepted:
            self.events.post(cache.manifest, "Warning", decision.reason, decision.message)
        wait = self.status.write(CACHES, cache.manifest, status)
        if wait is None and parts:
            # figures drift with every report: they are looked at again when they may be written again
            return max(FIGURES_AGAIN, self.status.figures_due(CACHES, namespace, name))
        return wait

    def _pool(self, name: str) -> ManagerPool | None:
        raw = self.view.pool(name)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            self._read.pop(name, None)
            return None
        before, pool = self._read.get(name, (None, None))
        if before is not raw:  # the view has another object for each state of a pool
            try:
                pool = ManagerPool.model_validate(raw)
            except ValidationError:
                pool = None  # the pool's own status says so
            self._read[name] = raw, pool
        return pool


def _unreadable(cache: Cache) -> Manifest:
    generation = cache.manifest["metadata"].get("generation", 0)
    message = f"This operator cannot read the spec: {cache.problem}."
    before = {it["type"]: it for it in (cache.manifest.get("status") or {}).get("conditions") or ()}
    conditions = []
    for kind in ("Accepted", "Ready"):
        new = condition((), kind, False, "Unreadable", message, generation).to_body()
        if before.get(kind, {}).get("status") == "False":
            new["lastTransitionTime"] = before[kind]["lastTransitionTime"]
        conditions.append(new)
    return {"observedGeneration": generation, "conditions": conditions}
