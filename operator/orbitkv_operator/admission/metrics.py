"""The webhook's metrics: one table, from which the documentation is made, and the registry behind `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from orbitkv_operator.audit import Watch
from orbitkv_operator.metrics import PREFIX, LastEvents, MetricRow

METRICS: Final = (
    MetricRow(
        "counter",
        "webhook_reviews_total",
        ("outcome",),
        "Objects that were looked at: pods `injected` or `skipped`, workloads whose annotations were `copied` to their "
        "templates, `left` as they are, `failed` (an error of the webhook's own), `malformed` (no review at all).",
    ),
    MetricRow("counter", "webhook_skips_total", ("reason",), "Pods that asked and start without the cache, by reason."),
    MetricRow("histogram", "webhook_review_duration_seconds", (), "Time from a review's last byte to its answer."),
    MetricRow(
        "gauge",
        "webhook_certificate_expiry_timestamp_seconds",
        (),
        "When the webhook's certificate expires (0: none yet).",
    ),
)
_BY_NAME: Final = {row.name: row for row in METRICS}
_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)


class WebhookMetrics:
    """Counts, and gives the registry that is served. Usable from all threads."""

    def __init__(self, watches: Callable[[], Iterable[Watch]]) -> None:
        self.registry = CollectorRegistry()
        row = _BY_NAME["webhook_reviews_total"]
        self._reviews = Counter(PREFIX + row.name, row.help, row.labels, registry=self.registry)
        row = _BY_NAME["webhook_skips_total"]
        self._skips = Counter(PREFIX + row.name, row.help, row.labels, registry=self.registry)
        row = _BY_NAME["webhook_review_duration_seconds"]
        self._duration = Histogram(PREFIX + row.name, row.help, buckets=_BUCKETS, registry=self.registry)
        row = _BY_NAME["webhook_certificate_expiry_timestamp_seconds"]
        self._expiry = Gauge(PREFIX + row.name, row.help, registry=self.registry)
        self.registry.register(LastEvents(watches))

    def reviewed(self, outcome: str, reason: str, seconds: float) -> None:
        """A review was answered; `reason` is that of a skip, else empty."""
        self._reviews.labels(outcome).inc()
        self._duration.observe(seconds)
        if reason and outcome == "skipped":
            self._skips.labels(reason).inc()

    def malformed(self) -> None:
        """Something came that was no review."""
        self._reviews.labels("malformed").inc()

    def certificate(self, expires: float) -> None:
        """There is a certificate that expires then (seconds since the epoch)."""
        self._expiry.set(expires)
