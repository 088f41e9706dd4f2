"""The last report of every agent, and sums over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from orbitkv_crds.agent_api.reports_pb2 import CacheNamespace as CacheReport
from orbitkv_crds.agent_api.reports_pb2 import PodVisit, Report

INTERVAL: Final = 15.0
FRESH: Final = 3 * INTERVAL
"""Age at which an agent's word counts no more."""


@dataclass(frozen=True)
class Sums:
    """What agents together have."""

    nodes: int
    capacity: int
    used: int


@dataclass
class ReportStore:
    """Written by the report server, read by reconciling. The lock guards `_reports`; nothing waits under it.

    After a start nothing is known yet: until every agent had the time to report, `settled` is false, and figures in a
    status stay as they are.
    """

    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reports: dict[tuple[str, str], tuple[float, Report]] = field(default_factory=dict)
    _visits: dict[str, tuple[str, str, PodVisit]] = field(default_factory=dict)
    """By uid of the pod: pool and node of the agent that spoke of it last, and what it said."""
    _since: float | None = None

    def start(self) -> None:
        """Reports can come in from now on."""
        self._since = self.clock()

    @property
    def settled(self) -> bool:
        """Whether an agent that has not reported by now does not report."""
        return self._since is not None and self.clock() - self._since > FRESH

    def put(self, report: Report) -> Report | None:
        """Keep a report; return the one before it. An older one of the same run of an agent is dropped."""
        key = report.pool, report.node
        with self._lock:
            before = self._reports.get(key, (0.0, None))[1]
            if before is not None and before.boot_id == report.boot_id and before.sequence >= report.sequence:
                return before
            self._reports[key] = self.clock(), report
            if before is not None:
                self._forget_visits(before)
            for visit in report.pods:
                self._visits[visit.uid] = report.pool, report.node, visit
            return before

    def visit(self, uid: str) -> tuple[str, PodVisit] | None:
        """Return what the agent of a pod's node says of it, with the node's name; None: nothing at present."""
        now = self.clock()
        with self._lock:
            pool, node, visit = self._visits.get(uid, ("", "", None))
            at, _ = self._reports.get((pool, node), (0.0, None))
            return None if visit is None or now - at > FRESH else (node, visit)

    def of_node(self, node: str) -> list[Report]:
        """Return the fresh reports of agents on a node."""
        now = self.clock()
        with self._lock:
            found = [report for (_, name), (at, report) in self._reports.items() if name == node and now - at <= FRESH]
        return sorted(found, key=lambda report: report.pool)

    def _forget_visits(self, report: Report) -> None:
        for visit in report.pods:
            pool, node, _ = self._visits.get(visit.uid, ("", "", None))
            if (pool, node) == (report.pool, report.node):
                del self._visits[visit.uid]

    def of_pool(self, pool: str) -> list[Report]:
        """Return the reports of a pool's agents that are fresh, by node; others are forgotten."""
        now = self.clock()
        with self._lock:
            for key in [key for key, (at, _) in self._reports.items() if now - at > FRESH]:
                self._forget_visits(self._reports.pop(key)[1])
            return [report for (name, _), (_, report) in sorted(self._reports.items()) if name == pool]


def dram(reports: Iterable[Report]) -> Sums:
    """Return capacity and use of the memory tier."""
    reports = list(reports)
    return Sums(len(reports), sum(it.dram.capacity_bytes for it in reports), sum(it.dram.used_bytes for it in reports))


def about(reports: Iterable[Report], uid: str) -> list[tuple[str, CacheReport]]:
    """Return what each agent says of one cache namespace: (node, its part of the report)."""
    return [(report.node, part) for report in reports for part in report.cache_namespaces if part.uid == uid]


def visits_to(reports: Iterable[Report], cache: str) -> list[tuple[str, PodVisit]]:
    """Return what agents say of the pods with a session in a cache namespace (`namespace/name`): (node, visit)."""
    return [
        (it.node, visit) for it in reports for visit in it.pods if visit.cache_namespace == cache and visit.sessions
    ]
