"""The operator as a whole: its parts, and in which order they begin and end.

Every replica answers probes and competes for the Lease. The one that gets it waits for the CRDs, reads what is there,
and then watches, works and takes reports until it is stopped or loses the Lease; either way the process ends, and a new
one begins as a standby.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from orbitkv_crds.agent_api.reports_pb2 import Report
from orbitkv_operator.audit import Auditor, Watch
from orbitkv_operator.certificates import Serving
from orbitkv_operator.cluster.api import CACHES, ENGINE_PODS, POOLS, Api, ApiError, KubernetesApi
from orbitkv_operator.engines.missed import Sweep
from orbitkv_operator.engines.pods import EnginePods
from orbitkv_operator.engines.probe import Probe
from orbitkv_operator.engines.watch import PodWatch
from orbitkv_operator.events import Events
from orbitkv_operator.feed import Feed, make_watches
from orbitkv_operator.leader import Leader
from orbitkv_operator.metrics import Metrics
from orbitkv_operator.names import ENGINE_FIELDS, ENGINE_SELECTOR
from orbitkv_operator.queue import Key, KeyedQueue
from orbitkv_operator.reconcile.cache import CacheReconciler, Decisions
from orbitkv_operator.reconcile.payload import PayloadPulls
from orbitkv_operator.reconcile.pod import PodReconciler
from orbitkv_operator.reconcile.pool import PoolReconciler
from orbitkv_operator.reconcile.status_writer import StatusWriter
from orbitkv_operator.reconcile.system import CERTIFICATES, ENDPOINTS, KEYS, Owner, SystemReconciler
from orbitkv_operator.reconcile.webhook import WEBHOOK, WebhookReconciler
from orbitkv_operator.reports.server import ReportServer
from orbitkv_operator.reports.store import INTERVAL, ReportStore
from orbitkv_operator.reviews import Reviews
from orbitkv_operator.router import Router, cache_key, pod_key, pool_key
from orbitkv_operator.settings import Settings
from orbitkv_operator.view import KINDS, View
from orbitkv_operator.web import HttpServer, metrics, probes
from orbitkv_operator.work import Workers

logger = logging.getLogger(__name__)

CRD_SECONDS: Final = 2.0
"""Rhythm in which CRDs that are not there yet are looked for."""
PROBE: Final = Key("WebhookProbe", "probe")
SWEEP: Final = Key("PodSweep", "sweep")
SILENCE: Final = Key("Silence", "silence")
FEED_SECONDS: Final = 60.0
"""Time without a sign of the watches' thread after which it counts as stalled."""


class Operator:
    """Runs once: `run` returns when it has ended, `stop` ends it."""

    def __init__(self, settings: Settings, client: Any) -> None:
        self._settings = settings
        self._api: Api = KubernetesApi(client)
        self._stop = threading.Event()
        self._failure = ""
        self._waits_for = ""
        """Why this replica, although it has the Lease, does nothing yet."""
        self._watches: list[Watch] = []
        self._bundle = ""

        self._view = View()
        self._queue = KeyedQueue()
        self._pods = EnginePods()
        self._router = Router(self._view, self._queue, self._pods)
        self._metrics = Metrics(lambda: self._watches, self._pods.counts)
        self._store = ReportStore()
        reviews = Reviews(self._api)
        self._reports = ReportServer(settings.reports_port, settings.namespace, reviews, self._store, self._reported)
        owner = Owner(self._api, settings.namespace)
        self._workers = Workers(self._queue, self._handlers(owner), self._metrics, settings.resync_seconds)
        self._leader = Leader(
            # its own requests: they must fail well before the Lease runs out
            KubernetesApi(client, connect_seconds=2, read_seconds=4),
            settings,
            owner.references,
        )
        self._beginning: threading.Thread | None = None
        self._feed: Feed | None = None
        self._pod_watch: PodWatch | None = None
        self._auditor: Auditor | None = None
        self._http = [
            HttpServer(settings.probes_port, probes(self._not_live, self._not_ready), "probes"),
            HttpServer(settings.metrics_port, metrics(self._metrics.registry, reviews.may_read_metrics), "metrics"),
        ]

    def about(self) -> dict[str, Any]:
        """What the log says of it at its start."""
        probes, metrics = (server.port for server in self._http)
        return {"namespace": self._settings.namespace, "probes_port": probes, "metrics_port": metrics}

    def run(self) -> bool:
        """Run until `stop`, or until something fails; return whether it was `stop`."""
        for server in self._http:
            server.start()
        leading = threading.Thread(target=self._lead, name="leader", daemon=True)
        leading.start()
        self._stop.wait()
        logger.info("stopping", extra={"reason": self._failure or "asked to"})
        self._leader.stop()
        leading.join(20)
        if self._beginning is not None:
            self._beginning.join(20)
        if self._feed is not None:
            self._feed.stop()
        if self._pod_watch is not None:
            self._pod_watch.stop()
        if self._auditor is not None:
            self._auditor.stop()
        self._workers.stop()
        self._reports.close()
        self._leader.release()
        for server in self._http:
            server.close()
        return not self._failure

    def stop(self) -> None:
        """Have `run` end; callable from a signal handler."""
        self._stop.set()

    def _fail(self, reason: str) -> None:
        if not self._stop.is_set():
            logger.error("the operator ends and is to be started again", extra={"reason": reason})
            self._failure = reason
        self._stop.set()

    # ------------------------------------------------------------------------------------------------------- beginning

    def _lead(self) -> None:
        try:
            self._leader.run(self._acquired, lambda: self._fail("the Lease was lost"))
        except Exception as error:
            logger.exception("leader election failed")
            self._fail(f"leader election failed: {error!r}")

    def _acquired(self) -> None:
        """Begin to act, in a thread of its own: the Lease is renewed meanwhile."""
        self._beginning = threading.Thread(target=self._begin, name="begin", daemon=True)
        self._beginning.start()

    def _begin(self) -> None:
        while not self._stop.is_set():
            try:
                self._waits_for = self._try_to_begin()
            except ApiError as error:
                self._waits_for = str(error)
            except Exception as error:
                logger.exception("the operator cannot begin")
                self._fail(f"it cannot begin: {error!r}")
            if not self._waits_for:
                return
            self._stop.wait(CRD_SECONDS)

    def _try_to_begin(self) -> str:
        """Begin, or return what is missing."""
        missing = [kind.plural for kind in (POOLS, CACHES) if not self._api.serves(kind)]
        if missing:
            words = f"the CRDs are not there yet: {', '.join(missing)}"
            if self._waits_for != words:
                logger.warning("waiting for the CRDs; the chart brings them", extra={"missing": missing})
            return words
        watches = make_watches(self._api, self._settings.namespace)
        for watch in watches:  # what is decided about one object depends on all others: first know them
            if watch.resource in KINDS:
                for manifest in self._api.list_all(watch.resource, watch.namespace, labels=watch.labels):
                    self._view.put(watch.resource, manifest)
        if self._stop.is_set():
            return "stopping"
        engine_pods = Watch(ENGINE_PODS, None, ENGINE_SELECTOR, ENGINE_FIELDS)
        silence = self._settings.silence_seconds
        self._watches = [*watches, engine_pods]
        self._feed = Feed(watches, self._settings.namespace, self._router, silence, self._fail)
        self._pod_watch = PodWatch(self._api, engine_pods, self._router, silence, self._fail)
        self._auditor = Auditor(self._api, self._view, self._watches, self._router, self._settings.audit_seconds)
        self._feed.start()
        self._pod_watch.start()
        threading.Thread(target=self._auditor.run, name="audit", daemon=True).start()
        for key in (*KEYS, SILENCE):
            self._queue.add(key)
        if self._settings.webhook:
            self._queue.add(WEBHOOK)
            self._queue.add(PROBE)
            self._queue.add(SWEEP)
        self._router.everything()
        self._workers.start()
        logger.info("acting", extra={"pools": len(self._view.pools()), "cache_namespaces": len(self._view.caches())})
        return ""

    def _handlers(self, owner: Owner) -> dict[str, Any]:
        status = StatusWriter(self._api, facts_seconds=self._settings.status_seconds)
        events = Events(self._api, self._settings.pod_name)
        payloads = PayloadPulls(self._payload_changed)
        pools = PoolReconciler(
            self._api, self._view, self._settings, self._store, status, events, lambda: self._bundle, payloads
        )
        webhook = WebhookReconciler(self._api, self._settings, owner, payloads)
        caches = CacheReconciler(self._view, Decisions(self._view), self._store, status, events, self._pods)
        pods = PodReconciler(
            self._view, self._pods, self._store, events, self._without_changed, self._settings.patience_seconds
        )
        sweep = Sweep(
            self._api,
            self._settings.namespace,
            self._view,
            self._pods,
            events,
            self._without_changed,
            lmcache=self._settings.lmcache,
        )
        probe = Probe(self._api, self._settings.namespace, self._settings.agent_image, self._metrics.webhook_probed)
        system = SystemReconciler(self._api, self._settings, owner, self._serve, lambda: self._reports.port)
        return {
            POOLS.kind: lambda key: pools.reconcile(key.name),
            CACHES.kind: lambda key: caches.reconcile(key.namespace, key.name),
            CERTIFICATES.kind: system.reconcile,
            WEBHOOK.kind: webhook.reconcile,
            ENGINE_PODS.kind: lambda key: pods.reconcile(key.namespace, key.name),
            PROBE.kind: lambda key: _every(self._settings.probe_seconds, probe.run),
            SWEEP.kind: lambda key: _every(self._settings.sweep_seconds, sweep.run),
            SILENCE.kind: lambda key: _every(INTERVAL, self._fell_silent),
        }

    # -------------------------------------------------------------------------------------------------------- meanwhile

    def _serve(self, serving: Serving) -> None:
        """The certificate was read: show it, and give agents what they need to trust it."""
        self._metrics.certificate(serving.expires.timestamp())
        self._reports.show(serving)
        bundle = serving.bundle.decode("ascii")
        if bundle != self._bundle:
            self._bundle = bundle
            self._queue.add(ENDPOINTS)
            for pool in self._view.pools():
                self._queue.add(pool_key(pool["metadata"]["name"]))

    def _reported(self, before: Report | None, report: Report) -> None:
        """An agent has reported: what shows more than figures of it is looked at now. (Figures are looked at by
        themselves, as often as they may be written.)"""
        if before is None or _agent_changed(before, report):
            self._queue.add(pool_key(report.pool))
        changed = _uses(before) ^ _uses(report)
        for namespace, name, *_ in changed:
            if self._view.cache(namespace, name) is not None:
                self._queue.add(cache_key(namespace, name))
        for visitor in _visits_changed(before, report):
            self._queue.add(pod_key(*visitor))

    def _fell_silent(self) -> None:
        """What is shown of agents that report no more is to go."""
        for report in self._store.silent():
            logger.info("an agent has fallen silent", extra={"pool": report.pool, "node": report.node})
            self._queue.add(pool_key(report.pool))
            for part in report.cache_namespaces:
                self._queue.add(cache_key(part.namespace, part.name))
            for visit in report.pods:
                self._queue.add(pod_key(visit.namespace, visit.name))

    def _payload_changed(self) -> None:
        """Nodes fare otherwise with the payload than before: the webhook has to know."""
        if self._settings.webhook:
            self._queue.add(WEBHOOK)

    def _without_changed(self, cache: str) -> None:
        """Other pods run without a CacheNamespace than before: its status names them."""
        namespace, _, name = cache.partition("/")
        if name:  # a pod may ask for a cache in words that name none
            self._queue.add(cache_key(namespace, name))

    def _not_live(self) -> str:
        if self._feed is None:
            return ""  # a standby, or one that waits for the CRDs
        if self._feed.stalled() > FEED_SECONDS:
            return "the watches' thread is stalled"
        return self._workers.problem() or (self._auditor.problem() if self._auditor else "")

    def _not_ready(self) -> str:
        return self._waits_for


def _every(seconds: float, run: Callable[[], None]) -> float:
    run()
    return seconds


def _agent_changed(before: Report, report: Report) -> bool:
    """Return whether an agent says something else of itself than in its last report; of its figures only whether there
    is anything."""
    return (
        before.state != report.state
        or before.boot_id != report.boot_id
        or before.gpus != report.gpus
        or before.problems != report.problems
        or (before.dram.used_bytes > 0) != (report.dram.used_bytes > 0)
    )


def _uses(report: Report | None) -> set[tuple[str, str, str, bool, bool, bool, bool]]:
    """Return what an agent says of cache namespaces: (namespace, name, uid, whether in use), and of figures only
    whether there is anything: pages, tokens that were asked for, tokens that were found."""
    return {
        (
            part.namespace,
            part.name,
            part.uid,
            part.engines > 0,
            part.dram.used_bytes > 0,
            part.last_hour.requested_tokens > 0,
            part.last_hour.hit_tokens > 0,
        )
        for part in (report.cache_namespaces if report is not None else ())
    }


def _visits_changed(before: Report | None, report: Report) -> set[tuple[str, str]]:
    """Return the pods (namespace, name) of which an agent says something else than in its last report."""
    known = {it.uid: it for it in before.pods} if before is not None else {}
    now = {it.uid: it for it in report.pods}
    changed = [
        it
        for uid, it in now.items()
        if uid not in known or (known[uid].state, known[uid].reason) != (it.state, it.reason)
    ]
    gone = [it for uid, it in known.items() if uid not in now]
    return {(it.namespace, it.name) for it in (*changed, *gone)}
