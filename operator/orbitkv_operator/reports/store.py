"""The last report of every agent, and sums over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from orbitkv_crds.agent_api.reports_pb2 import CacheNamespace as CacheReport
from orbitkv_crds.agent_api.reports_pb2 import PodVisit, Report

INTERVAL: Final = 15.0
"""Seconds between two reports of an agent, give or take a fifth, as long as agents are few."""
LONGEST_INTERVAL: Final = 90.0
"""The same where they are many. What people wait for is reported at once in any case."""
A_SECOND: Final = 11.0
"""Reports that are taken in a second before agents are asked to send fewer: each costs about 3 ms."""
FRESH: Final = 3 * INTERVAL
"""Time after a start before which it is not said that an agent does not report."""


_Agent = tuple[str, str]
"""Pool and node."""
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Sums:
    """What agents together have."""

    nodes: int
    capacity: int
    used: int


@dataclass
class ReportStore:
    """Written by the report server, read by reconciling. The lock guards all reports and what was found in them;
    nothing waits under it.

    After a start nothing is known yet: until every agent had the time to report, `settled` is false, and figures in a
    status stay as they are. What is asked of one cache namespace or pod is found without looking at all reports.
    """

    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reports: dict[_Agent, tuple[float, Report]] = field(default_factory=dict)
    """The last report of each agent, and until when it counts: for three times the interval that it was told then."""
    _agents: dict[str, set[_Agent]] = field(default_factory=dict)
    """By pool, and by node: whose reports there are."""
    _nodes: dict[str, set[_Agent]] = field(default_factory=dict)
    _parts: dict[str, dict[_Agent, CacheReport]] = field(default_factory=dict)
    """By uid of the cache namespace: what each agent says of it."""
    _visits: dict[str, tuple[_Agent, PodVisit]] = field(default_factory=dict)
    """By uid of the pod: the agent that spoke of it last, and what it said."""
    _visitors: dict[str, set[str]] = field(default_factory=dict)
    """By cache namespace (`namespace/name`): uids of the pods that agents speak of."""
    _since: float | None = None
    _newest: float = 0.0
    """When an agent was first heard of, the last of them."""
    _settled: bool = False

    def start(self) -> None:
        """Reports can come in from now on."""
        self._since = self.clock()

    @property
    def settled(self) -> bool:
        """Whether an agent that has not reported by now does not report."""
        if not self._settled and self._since is not None:
            now = self.clock()
            # where agents are many they report seldom, and every moment another one is heard of for the first time
            heard = now - self._newest > INTERVAL or now - self._since > 3 * LONGEST_INTERVAL
            self._settled = now - self._since > FRESH and heard
        return self._settled

    @property
    def interval(self) -> float:
        """Seconds after which an agent is to report again."""
        return min(LONGEST_INTERVAL, max(INTERVAL, len(self._reports) / A_SECOND))

    def put(self, report: Report) -> Report | None:
        """Keep a report; return the one before it. An older one of the same run of an agent is dropped."""
        agent = report.pool, report.node
        with self._lock:
            before = self._reports.get(agent, (0.0, None))[1]
            if before is not None and before.boot_id == report.boot_id and before.sequence >= report.sequence:
                return before
            self._forget(agent)
            if before is None:
                self._newest = self.clock()
            self._reports[agent] = self.clock() + 3 * self.interval, report
            self._agents.setdefault(report.pool, set()).add(agent)
            self._nodes.setdefault(report.node, set()).add(agent)
            for part in report.cache_namespaces:
                self._parts.setdefault(part.uid, {})[agent] = part
            for visit in report.pods:
                known = self._visits.get(visit.uid)
                if known is not None:
                    _discard(self._visitors, known[1].cache_namespace, visit.uid)
                self._visits[visit.uid] = agent, visit
                self._visitors.setdefault(visit.cache_namespace, set()).add(visit.uid)
            return before

    def silent(self) -> list[Report]:
        """Forget the reports of agents that have fallen silent, and return them."""
        with self._lock:
            found = [agent for agent in self._reports if not self._fresh(agent)]
            gone = [self._reports[agent][1] for agent in found]
            for agent in found:
                self._forget(agent)
        return gone

    def heard(self, pool: str) -> bool:
        """Return whether an agent of a pool has reported lately."""
        with self._lock:
            return any(map(self._fresh, self._agents.get(pool, ())))

    def visit(self, uid: str) -> tuple[str, PodVisit] | None:
        """Return what the agent of a pod's node says of it, with the node's name; None: nothing at present."""
        with self._lock:
            known = self._visits.get(uid)
            return None if known is None or not self._fresh(known[0]) else (known[0][1], known[1])

    def of_node(self, node: str) -> list[Report]:
        """Return the fresh reports of agents on a node, by pool."""
        with self._lock:
            return [self._reports[agent][1] for agent in sorted(self._nodes.get(node, ())) if self._fresh(agent)]

    def of_pool(self, pool: str) -> list[Report]:
        """Return the fresh reports of a pool's agents, by node."""
        with self._lock:
            return [self._reports[agent][1] for agent in sorted(self._agents.get(pool, ())) if self._fresh(agent)]

    def about(self, pool: str, uid: str) -> list[tuple[str, CacheReport]]:
        """Return what the agents of a pool say of one cache namespace: (node, its part of the report), by node."""
        with self._lock:
            known = sorted(self._parts.get(uid, {}).items(), key=lambda each: each[0])
            return [(agent[1], part) for agent, part in known if agent[0] == pool and self._fresh(agent)]

    def visits_to(self, pool: str, cache: str) -> list[tuple[str, PodVisit]]:
        """Return what the agents of a pool say of the pods with a session in a cache namespace (`namespace/name`):
        (node, visit), by node."""
        with self._lock:
            known = [self._visits[uid] for uid in self._visitors.get(cache, ())]
            found = [
                (agent[1], visit)
                for agent, visit in known
                if visit.sessions and agent[0] == pool and self._fresh(agent)
            ]
        return sorted(found, key=lambda each: (each[0], each[1].uid))

    def _fresh(self, agent: _Agent) -> bool:
        return self.clock() <= self._reports[agent][0]

    def _forget(self, agent: _Agent) -> None:
        """Take out the report of an agent, if there is one, and all that was found in it."""
        _, report = self._reports.pop(agent, (0.0, None))
        if report is None:
            return
        _discard(self._agents, report.pool, agent)
        _discard(self._nodes, report.node, agent)
        for part in report.cache_namespaces:
            parts = self._parts.get(part.uid, {})
            parts.pop(agent, None)
            if not parts:
                self._parts.pop(part.uid, None)
        for visit in report.pods:
            known = self._visits.get(visit.uid)
            if known is not None and known[0] == agent:
                del self._visits[visit.uid]
                _discard(self._visitors, known[1].cache_namespace, visit.uid)


def _discard(sets: dict[str, set[_Item]], key: str, item: _Item) -> None:
    """Take an item out of a set; an empty one goes too."""
    found = sets.get(key)
    if found is not None:
        found.discard(item)
        if not found:
            del sets[key]


def dram(reports: Iterable[Report]) -> Sums:
    """Return capacity and use of the memory tier."""
    reports = list(reports)
    return Sums(len(reports), sum(it.dram.capacity_bytes for it in reports), sum(it.dram.used_bytes for it in reports))
