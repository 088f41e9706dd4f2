"""The operator's metrics: one table, from which the documentation is made, and the registry behind `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orbitkv_operator.audit import Watch

PREFIX: Final = "orbitkv_"


class MetricRow(NamedTuple):
    """One metric."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    """Without prefix; a counter's with `_total`."""
    labels: tuple[str, ...]
    help: str


METRICS: Final = (
    MetricRow("histogram", "reconcile_duration_seconds", ("kind",), "Time that one look at an object took, by kind."),
    MetricRow(
        "counter",
        "reconcile_failures_total",
        ("kind", "reason"),
        "Looks at an object that failed and are tried again, by kind and reason (forbidden, conflict, unreachable...).",
    ),
    MetricRow(
        "gauge",
        "certificate_expiry_timestamp_seconds",
        (),
        "When the report server's certificate expires (0: none yet).",
    ),
    MetricRow(
        "gauge",
        "webhook_probe_success",
        (),
        "Whether the webhook saw the last pod that was made in a dry run to try it (1 or 0). Only the replica that "
        "acts tries it.",
    ),
    MetricRow("gauge", "webhook_probe_timestamp_seconds", (), "When the webhook was last tried."),
    MetricRow(
        "gauge",
        "pods_without_cache",
        ("reason",),
        "Pods that ask for a cache and run without it, by reason. Only the replica that acts counts them.",
    ),
    MetricRow(
        "gauge",
        "last_event_timestamp_seconds",
        ("watch",),
        "When a watch last showed something. A quiet kind is no problem: liveness holds lists against it.",
    ),
)
_BY_NAME: Final = {row.name: row for row in METRICS}
_BUCKETS: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counts, and gives the registry that is served. Usable from all threads."""

    def __init__(
        self, watches: Callable[[], Iterable[Watch]], without_cache: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self.registry = CollectorRegistry()
        row = _BY_NAME["reconcile_duration_seconds"]
        self._duration = Histogram(PREFIX + row.name, row.help, row.labels, buckets=_BUCKETS, registry=self.registry)
        row = _BY_NAME["reconcile_failures_total"]
        self._failures = Counter(PREFIX + row.name, row.help, row.labels, registry=self.registry)
        row = _BY_NAME["certificate_expiry_timestamp_seconds"]
        self._expiry = Gauge(PREFIX + row.name, row.help, registry=self.registry)
        self._probes = _Probes()
        self.registry.register(self._probes)
        self.registry.register(_WithoutCache(without_cache))
        self.registry.register(LastEvents(watches))

    def reconciled(self, kind: str, began: float) -> None:
        """A look at an object that began at `began` (monotonic seconds) has ended."""
        self._duration.labels(kind).observe(time.monotonic() - began)

    def failed(self, kind: str, reason: str) -> None:
        """A look at an object failed."""
        self._failures.labels(kind, reason).inc()

    def certificate(self, expires: float) -> None:
        """The report server has a certificate that expires then (seconds since the epoch)."""
        self._expiry.set(expires)

    def webhook_probed(self, answers: bool) -> None:
        """The webhook was tried just now."""
        self._probes.last = answers, time.time()


class _Probes(Collector):
    def __init__(self) -> None:
        self.last: tuple[bool, float] | None = None
        """The last answer, and when it came (seconds since the epoch); None: this replica has not asked."""

    def collect(self) -> Iterable[Metric]:
        """Give the last probe's outcome and time; nothing where there was none."""
        if self.last is None:
            return
        values = {"webhook_probe_success": float(self.last[0]), "webhook_probe_timestamp_seconds": self.last[1]}
        for name, value in values.items():
            yield GaugeMetricFamily(PREFIX + name, _BY_NAME[name].help, value)


class _WithoutCache(Collector):
    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Give the number of pods by reason."""
        row = _BY_NAME["pods_without_cache"]
        family = GaugeMetricFamily(PREFIX + row.name, row.help, labels=row.labels)
        for reason, count in sorted(self._counts().items()):
            family.add_metric([reason], count)
        yield family


class LastEvents(Collector):
    """When each watch last showed something."""

    def __init__(self, watches: Callable[[], Iterable[Watch]]) -> None:
        self._watches = watches

    def collect(self) -> Iterable[Metric]:
        """Give the time of each watch's last event; of those that have had one."""
        row = _BY_NAME["last_event_timestamp_seconds"]
        family = GaugeMetricFamily(PREFIX + row.name, row.help, labels=row.labels)
        for watch in self._watches():
            if watch.last_event is not None:
                family.add_metric([watch.resource.label], watch.last_event)
        yield family
