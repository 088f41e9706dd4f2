"""The webhook as a whole: its parts, and in which order they begin and end.

Every replica serves. Each keeps what it knows of the cluster by watches of its own, so that no review asks anybody; the
certificate, which the operator or cert-manager makes, and the operator's findings are read again every few seconds.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from orbitkv_crds import names
from orbitkv_operator.admission.decide import Rules
from orbitkv_operator.admission.findings import Findings
from orbitkv_operator.admission.metrics import WebhookMetrics
from orbitkv_operator.admission.review import Reviewer
from orbitkv_operator.admission.server import AdmissionServer
from orbitkv_operator.admission.settings import Settings
from orbitkv_operator.audit import Auditor, Watch
from orbitkv_operator.certificates import CertificateError, Serving, read
from orbitkv_operator.cluster.api import (
    CACHES,
    CONFIG_MAPS,
    NAMESPACES,
    POOLS,
    SECRETS,
    Api,
    ApiError,
    KubernetesApi,
    Manifest,
    Resource,
)
from orbitkv_operator.feed import Feed
from orbitkv_operator.reviews import Reviews
from orbitkv_operator.view import Name, View, name_of
from orbitkv_operator.web import HttpServer, metrics, probes

logger = logging.getLogger(__name__)

KINDS: Final = (NAMESPACES, POOLS, CACHES)
BEGIN_SECONDS: Final = 1.0
"""Rhythm in which what is missing at the start is looked for."""
FEED_SECONDS: Final = 60.0
CLUSTER_NAMESPACE: Final = "kube-system"
"""Its uid stands for the cluster's identity."""


@dataclass(frozen=True)
class Keeper:
    """Keeps what the watches show."""

    view: View

    def changed(self, resource: Resource, manifest: Manifest, gone: bool) -> None:
        """An object has come, changed or gone."""
        if gone:
            self.view.drop(resource, name_of(manifest))
        else:
            self.view.put(resource, manifest)

    def gone(self, resource: Resource, name: Name) -> None:
        """An object is gone."""
        self.view.drop(resource, name)


class Webhook:
    """Runs once: `run` returns when it has ended, `stop` ends it."""

    def __init__(self, settings: Settings, client: Any) -> None:
        self._settings = settings
        self._version = version("orbitkv")
        self._api: Api = KubernetesApi(client)
        self._stop = threading.Event()
        self._failure = ""
        self._waits_for = "starting"
        self._view = View()
        self._watches: list[Watch] = []
        self._findings = Findings()
        self._shown: Serving | None = None
        self._feed: Feed | None = None
        self._auditor: Auditor | None = None
        self._auditing: threading.Thread | None = None
        self._metrics = WebhookMetrics(lambda: self._watches)
        self._server = AdmissionServer(settings.port, Reviewer(self._view, self.rules), self._metrics)
        reviews = Reviews(self._api)
        self._http = [
            HttpServer(settings.probes_port, probes(self._not_live, lambda: self._waits_for), "probes"),
            HttpServer(settings.metrics_port, metrics(self._metrics.registry, reviews.may_read_metrics), "metrics"),
        ]

    def about(self) -> dict[str, Any]:
        """What the log says of it at its start."""
        return {"namespace": self._settings.namespace, "payload": self._settings.payload_image}

    def run(self) -> bool:
        """Run until `stop`, or until something fails; return whether it was `stop`."""
        for server in self._http:
            server.start()
        while not self._stop.is_set():
            self._waits_for = self._look()
            self._stop.wait(BEGIN_SECONDS if self._waits_for else self._settings.look_seconds)
        logger.info("stopping", extra={"reason": self._failure or "asked to"})
        self._server.close()
        if self._feed is not None:
            self._feed.stop()
        if self._auditor is not None and self._auditing is not None:
            self._auditor.stop()
            self._auditing.join(20)
        for server in self._http:
            server.close()
        return not self._failure

    def stop(self) -> None:
        """Have `run` end; callable from a signal handler."""
        self._stop.set()

    def rules(self) -> Rules:
        """Return what decisions depend on at present."""
        settings, findings = self._settings, self._findings
        cluster = self._view.namespace(CLUSTER_NAMESPACE)
        return Rules(
            version=self._version,
            payload_image=settings.payload_image,
            audience=names.engine_audience(cluster.uid if cluster else ""),
            pull_policy=settings.payload_pull_policy,
            pull_secrets=settings.payload_pull_secrets,
            payload_mode=settings.payload_mode,
            image_volumes=findings.image_volumes,
            pull_failing=findings.pull_failing if findings.payload_image == settings.payload_image else "",
            pod_security_default=settings.pod_security_default,
            lmcache=settings.lmcache,
            socket_volume=settings.socket_volume,
        )

    def _fail(self, reason: str) -> None:
        if not self._stop.is_set():
            logger.error("the webhook ends and is to be started again", extra={"reason": reason})
            self._failure = reason
        self._stop.set()

    # -------------------------------------------------------------------------------------------------------- looking

    def _look(self) -> str:
        """Read what is read again and again, and begin where that has not been done; return what is missing."""
        try:
            missing = self._watch() or self._certificate()
            self._findings = Findings.read(self._get(CONFIG_MAPS).get("data"))
        except ApiError as error:
            # what is known goes on being served; before that there is nothing to serve
            return self._waits_for and str(error)
        except OSError as error:
            self._fail(str(error))
            return str(error)
        if self._waits_for and not missing:
            logger.info("serving", extra={"port": self._server.port})
        return missing

    def _watch(self) -> str:
        """Know the cluster, and from then on keep watch; return what is missing."""
        if self._feed is not None:
            return ""
        missing = [kind.plural for kind in (POOLS, CACHES) if not self._api.serves(kind)]
        if missing:
            return f"the CRDs are not there yet: {', '.join(missing)}"
        for kind in KINDS:
            for manifest in self._api.list_all(kind):
                self._view.put(kind, manifest)
        self._watches = [Watch(kind) for kind in KINDS]
        keeper, settings = Keeper(self._view), self._settings
        self._feed = Feed(self._watches, settings.namespace, keeper, settings.silence_seconds, self._fail)
        self._auditor = Auditor(self._api, self._view, self._watches, keeper, settings.audit_seconds)
        self._auditing = threading.Thread(target=self._auditor.run, name="audit", daemon=True)
        self._feed.start()
        self._auditing.start()
        return ""

    def _certificate(self) -> str:
        try:
            found = read(self._get(SECRETS).get("data"))
            if found != self._shown:
                self._server.show(found)
                self._shown = found
                self._metrics.certificate(found.expires.timestamp())
        except (CertificateError, ssl.SSLError) as error:
            problem = f"Secret {names.WEBHOOK} is not usable ({error}); the operator or cert-manager makes it"
            if self._shown is None:
                return problem
            logger.warning("the certificate stays as it was", extra={"error": problem})
        return ""

    def _get(self, resource: Resource) -> Manifest:
        return self._api.get(resource, self._settings.namespace, names.WEBHOOK) or {}

    def _not_live(self) -> str:
        if self._feed is None or self._auditor is None:
            return ""
        if self._feed.stalled() > FEED_SECONDS:
            return "the watches' thread is stalled"
        return self._auditor.problem()
