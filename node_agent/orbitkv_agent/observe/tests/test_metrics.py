"""The exposition, read back with Prometheus's own parser."""

from __future__ import annotations

import math

import msgspec
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from orbitkv_agent.observe.histogram import Histogram
from orbitkv_agent.observe.metrics import MAX_LABEL_VALUES, METRICS, make_registry
from orbitkv_agent.observe.snapshot import Snapshot
from orbitkv_agent.observe.tests.examples import GIB, MIB, example_snapshot

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

PROMISED = [
    "pool_capacity_bytes",
    "pool_used_bytes",
    "pool_largest_free_bytes",
    "pool_alloc_failures_total",
    "cache_resident_bytes",
    "cache_resident_blocks",
    "cache_block_hits_total",
    "cache_block_misses_total",
    "cache_tier_block_requests_total",
    "cache_block_insertions_total",
    "cache_block_evictions_total",
    "cache_eviction_reclaimed_bytes_total",
    "query_reserved_bytes_by_phase",
    "query_budget_waits_total",
    "query_budget_bypasses_total",
    "query_coalesced_reads_total",
    "query_unadmitted_total",
    "query_oversized_total",
    "query_reserved_peak_bytes",
    "query_instance_reserved_peak_bytes",
    "pinned_for_load_pages",
    "pinned_for_load_bytes",
    "leases_expired_total",
    "save_bytes_total",
    "load_bytes_total",
    "load_failures_total",
    "save_dropped_total",
    "plans_refused_total",
    "save_inflight_bytes",
    "restore_inflight_bytes",
    "staging_bytes",
    "copy_plan",
    "gpu_context_bytes",
    "save_duration_seconds",
    "load_duration_seconds",
    "sessions",
    "registered_gpu_bytes",
    "session_rejections_total",
    "layout_proofs_total",
    "publish_stalled",
]
"""What dashboards may rely on. Renaming one of these breaks its users."""


def exposition(snapshot: Snapshot) -> str:
    return generate_latest(make_registry(lambda: snapshot)).decode()


def series(snapshot: Snapshot) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(exposition(snapshot)):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def value(snapshot: Snapshot, name: str, **labels: str) -> float:
    return series(snapshot)["orbitkv_" + name, frozenset(labels.items())]


def test_every_promised_metric_is_there_with_its_help_and_nothing_else() -> None:
    lines = exposition(example_snapshot()).splitlines()
    helped = {line.split()[2].removeprefix("orbitkv_") for line in lines if line.startswith("# HELP ")}

    assert helped == set(PROMISED)
    assert [row.name for row in METRICS] == PROMISED


def test_openmetrics_can_be_made_of_the_same_table() -> None:
    text = generate_openmetrics(make_registry(example_snapshot)).decode()  # type: ignore[no-untyped-call]
    assert len(list(parse_openmetrics(text))) == len(PROMISED)  # type: ignore[no-untyped-call]


def test_values_are_those_of_the_snapshot() -> None:
    snapshot = example_snapshot()

    assert value(snapshot, "pool_used_bytes") == GIB
    assert value(snapshot, "cache_resident_blocks", **{"class": "retained"}) == 50
    assert value(snapshot, "cache_tier_block_requests_total", tier="dram") == 300
    assert value(snapshot, "query_reserved_bytes_by_phase", phase="restoring") == 32 * MIB
    assert value(snapshot, "pinned_for_load_pages") == 32
    assert value(snapshot, "save_dropped_total", reason="pool-full") == 9
    assert value(snapshot, "copy_plan", device="host", plan="client") == 1
    assert value(snapshot, "sessions", cache_namespace="team-a/qwen") == 4


def test_known_label_values_are_there_before_anything_happened() -> None:
    snapshot = example_snapshot()

    assert value(snapshot, "cache_tier_block_requests_total", tier="ssd") == 0
    assert value(snapshot, "query_reserved_bytes_by_phase", phase="preparing") == 0
    assert value(snapshot, "session_rejections_total", reason="bad-frame") == 0


def test_unknown_label_values_are_counted_together_as_other() -> None:
    snapshot = example_snapshot()
    snapshot["sessions"]["rejections"] = {"version-mismatch": 1, "sent-by-a-client-1": 2, "sent-by-a-client-2": 3}

    assert value(snapshot, "session_rejections_total", reason="other") == 5
    assert not any("sent-by-a-client" in str(labels) for _, labels in series(snapshot))


def test_namespaces_and_devices_cannot_make_endless_series() -> None:
    snapshot = example_snapshot()
    snapshot["sessions"]["by_namespace"] = {f"team-{number}": 1 for number in range(MAX_LABEL_VALUES + 50)}

    sessions = {labels: n for (name, labels), n in series(snapshot).items() if name == "orbitkv_sessions"}

    assert len(sessions) == MAX_LABEL_VALUES + 1
    assert sessions[frozenset({("cache_namespace", "other")})] == 50


def test_histogram_is_cumulative_and_its_bounds_belong_to_the_bucket_below() -> None:
    snapshot = example_snapshot()

    def bucket(bound: str) -> float:
        return value(snapshot, "save_duration_seconds_bucket", le=bound)

    assert [bucket("0.0005"), bucket("0.001"), bucket("0.025"), bucket("30.0"), bucket("+Inf")] == [1, 2, 3, 3, 4]
    assert value(snapshot, "save_duration_seconds_count") == 4
    assert math.isclose(value(snapshot, "save_duration_seconds_sum"), 70.0214)
    assert value(snapshot, "load_duration_seconds_count") == 0


def test_a_snapshot_keeps_its_histogram_when_more_is_observed() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    before = histogram.data()
    histogram.observe(2.0)

    assert before == {"bounds": [1.0], "counts": [1, 0], "sum": 0.5}
    assert histogram.data()["counts"] == [1, 1]


def test_example_has_the_shape_that_the_agent_promises() -> None:
    assert msgspec.convert(example_snapshot(), Snapshot) == example_snapshot()
