"""The agent's metrics: one table, and a collector that renders a snapshot with it.

Nothing counts here. The owner thread counts, `Agent.snapshot()` tells, and this module gives the numbers their names.
The same table makes the documentation (`docs/metrics.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from orbitkv_agent.observe.snapshot import (
    PHASES,
    PLAN_REFUSAL_REASONS,
    PROOF_OUTCOMES,
    REJECTION_REASONS,
    RETENTION_CLASSES,
    SAVE_DROP_REASONS,
    TIERS,
    HistogramData,
    Snapshot,
)

PREFIX: Final = "orbitkv_"
OTHER: Final = "other"
"""Label value for what is not among a label's known values."""
MAX_LABEL_VALUES: Final = 200
"""Most series of a metric whose label values are not known beforehand (cache namespaces, devices)."""

Labels = tuple[str, ...]
Reading = float | Mapping[Any, float] | HistogramData
"""A value, or values by label value (by `Labels` where there are several labels)."""


class MetricRow(NamedTuple):
    """One metric."""

    area: str
    kind: Literal["gauge", "counter", "histogram"]
    name: str
    """Without prefix; a counter's with `_total`."""
    help: str
    read: Callable[[Snapshot], Reading]
    labels: Labels = ()
    known: tuple[str, ...] = ()
    """Values that the one label can have: each is always exported. Empty: whatever there is."""


METRICS: Final = (
    MetricRow("pool", "gauge", "pool_capacity_bytes", "Size of the page pool.", lambda s: s["pool"]["capacity_bytes"]),
    MetricRow(
        "pool", "gauge", "pool_used_bytes", "Memory of the pool that is in use.", lambda s: s["pool"]["used_bytes"]
    ),
    MetricRow(
        "pool",
        "gauge",
        "pool_largest_free_bytes",
        "Largest free piece of the pool; far below the free memory means fragmentation.",
        lambda s: s["pool"]["largest_free_bytes"],
    ),
    MetricRow(
        "pool",
        "counter",
        "pool_alloc_failures_total",
        "Allocations that found no room, even after eviction.",
        lambda s: s["pool"]["alloc_failures"],
    ),
    MetricRow(
        "cache",
        "gauge",
        "cache_resident_bytes",
        "Memory taken by stored pages.",
        lambda s: s["cache"]["resident_bytes"],
    ),
    MetricRow(
        "cache",
        "gauge",
        "cache_resident_blocks",
        "Stored blocks by retention class.",
        lambda s: s["cache"]["resident_blocks"],
        ("class",),
        RETENTION_CLASSES,
    ),
    MetricRow(
        "cache",
        "counter",
        "cache_block_hits_total",
        "Blocks that were asked for and could be leased.",
        lambda s: s["cache"]["block_hits"],
    ),
    MetricRow(
        "cache",
        "counter",
        "cache_block_misses_total",
        "Blocks that were asked for and could not.",
        lambda s: s["cache"]["block_misses"],
    ),
    MetricRow(
        "cache",
        "counter",
        "cache_tier_block_requests_total",
        "Blocks that were asked for, by where they were found.",
        lambda s: s["cache"]["tier_block_requests"],
        ("tier",),
        TIERS,
    ),
    MetricRow(
        "cache",
        "counter",
        "cache_block_insertions_total",
        "Blocks that became visible.",
        lambda s: s["cache"]["block_insertions"],
    ),
    MetricRow(
        "cache",
        "counter",
        "cache_block_evictions_total",
        "Blocks that were evicted, by retention class.",
        lambda s: s["cache"]["block_evictions"],
        ("class",),
        RETENTION_CLASSES,
    ),
    MetricRow(
        "cache",
        "counter",
        "cache_eviction_reclaimed_bytes_total",
        "Memory that evictions made free.",
        lambda s: s["cache"]["eviction_reclaimed_bytes"],
    ),
    MetricRow(
        "query",
        "gauge",
        "query_reserved_bytes_by_phase",
        "Bytes of the query budget that are reserved, by phase.",
        lambda s: s["query"]["reserved_bytes_by_phase"],
        ("phase",),
        PHASES,
    ),
    MetricRow(
        "query",
        "counter",
        "query_budget_waits_total",
        "Queries that had to wait for the byte budget.",
        lambda s: s["query"]["budget_waits"],
    ),
    MetricRow(
        "query",
        "counter",
        "query_budget_bypasses_total",
        "Queries that were answered before an older one that waits for its own engine's or tenant's share.",
        lambda s: s["query"]["budget_bypasses"],
    ),
    MetricRow(
        "query",
        "counter",
        "query_coalesced_reads_total",
        "Reads that a query shared with another one.",
        lambda s: s["query"]["coalesced_reads"],
    ),
    MetricRow(
        "query",
        "counter",
        "query_unadmitted_total",
        "Queries that came while too many were open, and waited for admission.",
        lambda s: s["query"]["unadmitted"],
    ),
    MetricRow(
        "query",
        "counter",
        "query_oversized_total",
        "Queries for more bytes than an engine may ever have at one time.",
        lambda s: s["query"]["oversized"],
    ),
    MetricRow(
        "query",
        "gauge",
        "query_reserved_peak_bytes",
        "Most bytes that were reserved at one time since the start.",
        lambda s: s["query"]["reserved_peak_bytes"],
    ),
    MetricRow(
        "query",
        "gauge",
        "query_instance_reserved_peak_bytes",
        "The same for the engine that reserved the most.",
        lambda s: s["query"]["instance_reserved_peak_bytes"],
    ),
    MetricRow(
        "leases",
        "gauge",
        "pinned_for_load_pages",
        "Pages that cannot be evicted, because an engine was promised them.",
        lambda s: s["leases"]["pinned_pages"],
    ),
    MetricRow(
        "leases", "gauge", "pinned_for_load_bytes", "Memory of those pages.", lambda s: s["leases"]["pinned_bytes"]
    ),
    MetricRow(
        "leases",
        "counter",
        "leases_expired_total",
        "Leases that returned because the engine did not use them in time.",
        lambda s: s["leases"]["expired"],
    ),
    MetricRow(
        "transfer", "counter", "save_bytes_total", "Bytes that were stored.", lambda s: s["transfer"]["save_bytes"]
    ),
    MetricRow(
        "transfer", "counter", "load_bytes_total", "Bytes that were given back.", lambda s: s["transfer"]["load_bytes"]
    ),
    MetricRow(
        "transfer",
        "counter",
        "load_failures_total",
        "Restores that failed; the engine computed instead.",
        lambda s: s["transfer"]["load_failures"],
    ),
    MetricRow(
        "transfer",
        "counter",
        "save_dropped_total",
        "Pages that were offered and not kept, by reason.",
        lambda s: s["transfer"]["save_dropped"],
        ("reason",),
        SAVE_DROP_REASONS,
    ),
    MetricRow(
        "transfer",
        "counter",
        "plans_refused_total",
        "Saves and restores that were refused before anything was copied, by reason.",
        lambda s: s["transfer"]["plans_refused"],
        ("reason",),
        PLAN_REFUSAL_REASONS,
    ),
    MetricRow(
        "transfer",
        "gauge",
        "save_inflight_bytes",
        "Bytes of saves that are being copied.",
        lambda s: s["transfer"]["save_inflight_bytes"],
    ),
    MetricRow(
        "transfer",
        "gauge",
        "restore_inflight_bytes",
        "Bytes of restores that are being copied.",
        lambda s: s["transfer"]["restore_inflight_bytes"],
    ),
    MetricRow(
        "transfer", "gauge", "staging_bytes", "Memory of copies in between.", lambda s: s["transfer"]["staging_bytes"]
    ),
    MetricRow(
        "transfer",
        "gauge",
        "copy_plan",
        "1 for the way in which bytes are copied on a device.",
        lambda s: {(device, plan): 1 for device, plan in s["transfer"]["copy_plans"].items()},
        ("device", "plan"),
    ),
    MetricRow(
        "transfer",
        "gauge",
        "gpu_context_bytes",
        "GPU memory that the agent itself takes (none in host mode).",
        lambda s: s["transfer"]["gpu_context_bytes"],
        ("device",),
    ),
    MetricRow(
        "transfer",
        "histogram",
        "save_duration_seconds",
        "From the acceptance of a save to its commit.",
        lambda s: s["transfer"]["save_duration"],
    ),
    MetricRow(
        "transfer",
        "histogram",
        "load_duration_seconds",
        "From the acceptance of a restore to its end.",
        lambda s: s["transfer"]["load_duration"],
    ),
    MetricRow(
        "sessions",
        "gauge",
        "sessions",
        "Open connections by cache namespace (those that have any).",
        lambda s: s["sessions"]["by_namespace"],
        ("cache_namespace",),
    ),
    MetricRow(
        "sessions",
        "gauge",
        "registered_gpu_bytes",
        "Engine memory that is registered, by device (in host mode: memory of CPU engines).",
        lambda s: s["sessions"]["registered_bytes"],
        ("device",),
    ),
    MetricRow(
        "sessions",
        "counter",
        "session_rejections_total",
        "Connections that were refused or closed by the agent, by reason.",
        lambda s: s["sessions"]["rejections"],
        ("reason",),
        REJECTION_REASONS,
    ),
    MetricRow(
        "sessions",
        "counter",
        "layout_proofs_total",
        "Proofs that an engine's memory is laid out as it says, by outcome.",
        lambda s: s["sessions"]["layout_proofs"],
        ("outcome",),
        PROOF_OUTCOMES,
    ),
    MetricRow(
        "sessions",
        "gauge",
        "publish_stalled",
        "Copies that have been in flight for too long.",
        lambda s: s["sessions"]["publish_stalled"],
    ),
)


class SnapshotCollector(Collector):
    """Renders a fresh snapshot at every scrape.

    Args:
        snapshot: returns it; what it raises ends the scrape.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Return nothing: then registering the collector takes no snapshot."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return all metrics; a metric without series is there with its name and help."""
        snapshot = self._snapshot()
        return [_family(row, row.read(snapshot)) for row in METRICS]


def make_registry(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """Return the one registry of the agent, on top of `snapshot`."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    return registry


def _family(row: MetricRow, reading: Reading) -> Metric:
    name = PREFIX + row.name
    if row.kind == "histogram":
        histogram = HistogramMetricFamily(name, row.help)
        data: HistogramData = reading  # type: ignore[assignment]  # the table pairs kind and reading
        histogram.add_metric([], _cumulative(data), data["sum"])
        return histogram
    family = (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(name, row.help, labels=row.labels)
    for labels, value in _series(row, reading).items():
        family.add_metric(labels, value)
    return family


def _series(row: MetricRow, reading: Reading) -> dict[Labels, float]:
    """Return the values by label values, never more than the label may have."""
    if not isinstance(reading, Mapping):
        return {(): reading}
    series: dict[Labels, float] = {(value,): 0.0 for value in row.known}
    for key, value in reading.items():
        labels = (key,) if isinstance(key, str) else key
        if labels not in series and (row.known or len(series) >= MAX_LABEL_VALUES):
            labels = (OTHER,) * len(row.labels)
        series[labels] = series.get(labels, 0.0) + value  # type: ignore[operator]  # no histogram has labels
    return series


def _cumulative(data: HistogramData) -> list[tuple[str, float]]:
    buckets = []
    total = 0
    for bound, count in zip([*map(str, data["bounds"]), "+Inf"], data["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
