"""The agent's side of a cluster: its parts, put together, and their start and end."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Protocol

from orbitkv_agent.cluster.admission import TokenAdmission
from orbitkv_agent.cluster.apiserver import ApiError, Apiserver, Listing
from orbitkv_agent.cluster.live import LiveFile
from orbitkv_agent.cluster.metrics_gate import MetricsGate
from orbitkv_agent.cluster.report import awaited, make_report
from orbitkv_agent.cluster.reports import Reporter
from orbitkv_agent.cluster.reviews import Reviews
from orbitkv_agent.cluster.settings import ClusterSettings
from orbitkv_agent.cluster.state_file import StateFile
from orbitkv_agent.cluster.tenants import (
    NamespaceInfo,
    Parsed,
    Tenants,
    kept_cache_namespace,
    kept_namespace,
    parse_cache_namespace,
    parse_namespace,
)
from orbitkv_agent.cluster.watcher import Watcher
from orbitkv_agent.observe.demand import LastHour
from orbitkv_agent.sessions.errors import Refused

if TYPE_CHECKING:
    from orbitkv_agent.agent import Agent
    from orbitkv_agent.sessions.session import Session
    from orbitkv_crds.agent_api.reports_pb2 import Report
    from orbitkv_crds.live import LiveSettings

logger = logging.getLogger(__name__)

_MINUTE_S: Final = 60.0
_LOOK_S: Final = 1.0
"""A change that people wait for is reported this soon: where agents are many, the next report may be a minute away."""
_END_S: Final = 5.0
"""Longest wait for the threads at the end."""


class _Threaded(Protocol):
    def stop(self) -> None:
        """Tell the thread to end."""

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""


class ClusterError(OSError):
    """The agent cannot work in this cluster; the message says why."""


class Cluster:
    """Made and used by the owner thread; its threads are started by `start` and ended by `stop`.

    Raises:
        ClusterError: there is no way to the apiserver.

    Attributes:
        admission: decides who may attach.
        metrics_gate: decides who may read metrics.
    """

    def __init__(self, agent: Agent, settings: ClusterSettings) -> None:
        self._agent = agent
        self._settings = settings
        loop = agent.loop
        try:
            self._apiserver = Apiserver(settings.kubeconfig)
        except ApiError as error:
            raise ClusterError(f"cluster: {error}") from None
        self._tenants = Tenants(loop, settings.pool, agent.config.pool_bytes, agent.namespaces)
        self._reviews = Reviews(self._apiserver.review_token, post=loop.post, clock=loop.now)
        self.admission = TokenAdmission(loop, self._reviews, self._tenants, settings.node_name, self._expel)
        self._tenants.changed = self.admission.tenants_changed
        self.metrics_gate = MetricsGate(self._apiserver.may_get)
        self._live = LiveFile(settings.live_path, loop, self._take_live)
        self._cache_namespaces: Watcher[Parsed] = Watcher(
            Listing(self._apiserver, settings.pool),
            StateFile(settings.state_path, "cache-namespaces.json", settings.pool),
            kept_cache_namespace,
            parse_cache_namespace,
            post=loop.post,
            deliver=self._tenants.take_cache_namespaces,
        )
        self._namespaces: Watcher[NamespaceInfo] = Watcher(
            Listing(self._apiserver, None),
            StateFile(settings.state_path, "namespaces.json", settings.pool),
            kept_namespace,
            parse_namespace,
            post=loop.post,
            deliver=self._tenants.take_namespaces,
        )
        self._reporter = None
        if settings.reports_address != "off":
            self._reporter = Reporter(settings, self._report, loop.post)
        self._last_hour = LastHour(agent.counters.demand)
        self._sequence = 0
        self._awaited: object = None

    def start(self) -> None:
        """Begin to watch, to review, to report."""
        self._live.start()
        self._reviews.start()
        self._cache_namespaces.start()
        self._namespaces.start()
        self.admission.start()
        self._count_minutes()
        if self._reporter is not None:
            self._reporter.start()
            self._look(self._reporter)

    def stop(self) -> None:
        """End the threads. (One that waits for the apiserver is left to end by itself.)"""
        self._live.stop()
        self._tenants.stop()
        self.admission.stop()
        threads: list[_Threaded] = [self._reviews, self._cache_namespaces, self._namespaces]
        if self._reporter is not None:
            threads.append(self._reporter)
        for each in threads:
            each.stop()
        deadline = time.monotonic() + _END_S
        for each in threads:
            each.join(max(0.0, deadline - time.monotonic()))
        self._apiserver.close()

    @property
    def not_ready(self) -> str:
        """Why engines cannot attach, for people; "" when they can."""
        if not self._tenants.known:
            return "the pool's CacheNamespaces are not known yet: the apiserver has not answered, and none are on disk"
        return ""

    @property
    def problems(self) -> list[tuple[str, str]]:
        """What people should know: (reason in one word, words)."""
        found = self._tenants.problems
        if self._live.problem:
            found.append(("LiveSettingsInvalid", self._live.problem))
        if self._agent.memory_problem:
            found.append(("MemoryNotPinned", self._agent.memory_problem))
        return found

    def _expel(self, session: Session, error: Refused) -> None:
        self._agent.revoke(session, error)

    def _take_live(self, live: LiveSettings) -> None:
        agent = self._agent
        pool = agent.config.pool_bytes
        limit = pool * live.query_budget_percent // 100
        agent.queries.set_budget(limit, limit if live.instance_budget is None else live.instance_budget)
        logging.getLogger().setLevel(live.log_level.upper())
        self._tenants.take_live(live)

    def _count_minutes(self) -> None:
        demand = self._agent.counters.demand
        for name in [name for name in demand if not self._agent.namespaces.has(name)]:
            del demand[name]  # of a cache namespace that is gone
        self._last_hour.minute_passed()
        self._agent.loop.call_later(_MINUTE_S, self._count_minutes)

    def _look(self, reporter: Reporter) -> None:
        now = awaited(self._agent, self.admission, self.not_ready, self._live.digest, self.problems)
        if now != self._awaited:
            self._awaited = now
            reporter.soon()
        self._agent.loop.call_later(_LOOK_S, lambda: self._look(reporter))

    def _report(self) -> Report:
        self._sequence += 1
        return make_report(
            self._agent,
            self._settings,
            self._tenants,
            self.admission,
            self._last_hour,
            self._sequence,
            self.not_ready,
            self._live.digest,
            self.problems,
        )
