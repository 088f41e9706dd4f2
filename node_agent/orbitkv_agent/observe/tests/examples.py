"""A snapshot of an agent at work, for the tests of what renders it."""

from __future__ import annotations

from orbitkv_agent.observe.histogram import Histogram
from orbitkv_agent.observe.snapshot import Snapshot

GIB = 1 << 30
MIB = 1 << 20


def example_snapshot() -> Snapshot:
    """Return one in which every number is different from zero where it can be."""
    saves, loads = Histogram(), Histogram()
    for seconds in (0.0004, 0.001, 0.02, 70.0):
        saves.observe(seconds)
    return {
        "agent": {
            "boot_id": "b00t",
            "release": "0.1.0",
            "mode": "host",
            "pid": 4711,
            "socket_path": "/tmp/orbitkv-50055.sock",
            "uptime_seconds": 3725.4,
            "longest_turn_ms": 1.2,
            "draining": False,
        },
        "pool": {
            "capacity_bytes": 4 * GIB,
            "used_bytes": GIB,
            "largest_free_bytes": 2 * GIB,
            "prefaulted_bytes": 4 * GIB,
            "alloc_failures": 3,
        },
        "cache": {
            "resident_bytes": 900 * MIB,
            "resident_blocks": {"probationary": 400, "retained": 50},
            "block_hits": 300,
            "block_misses": 100,
            "tier_block_requests": {"dram": 300, "miss": 100},
            "block_insertions": 500,
            "block_evictions": {"probationary": 50},
            "eviction_reclaimed_bytes": 100 * MIB,
        },
        "query": {
            "outstanding": 5,
            "unadmitted_now": 2,
            "budget_bytes": 3 * GIB,
            "reserved_bytes_by_phase": {"ready": 64 * MIB, "restoring": 32 * MIB},
            "reserved_peak_bytes": 512 * MIB,
            "instance_reserved_peak_bytes": 256 * MIB,
            "budget_waits": 4,
            "budget_bypasses": 1,
            "coalesced_reads": 0,
            "unadmitted": 7,
            "oversized": 1,
        },
        "leases": {"live": 3, "pinned_pages": 32, "pinned_bytes": 64 * MIB, "expired": 2},
        "transfer": {
            "saves_inflight": 1,
            "restores_inflight": 2,
            "save_inflight_bytes": 16 * MIB,
            "restore_inflight_bytes": 32 * MIB,
            "staging_bytes": 0,
            "save_bytes": 1000 * MIB,
            "load_bytes": 600 * MIB,
            "load_failures": 1,
            "save_dropped": {"pool-full": 9},
            "plans_refused": {"bounds": 2},
            "save_duration": saves.data(),
            "load_duration": loads.data(),
            "copy_plans": {"host": "client"},
            "gpu_context_bytes": {},
        },
        "sessions": {
            "by_namespace": {"": 2, "team-a/qwen": 4},
            "registered_bytes": {"host": 2 * GIB},
            "rejections": {"version-mismatch": 1},
            "layout_proofs": {"proven": 2},
            "publish_stalled": 0,
        },
        "namespaces": [
            {
                "name": "",
                "used_bytes": 100 * MIB,
                "quota_bytes": None,
                "guaranteed_bytes": 0,
                "insert_class": "probationary",
                "reset_generation": 0,
            },
            {
                "name": "team-a/qwen",
                "used_bytes": 800 * MIB,
                "quota_bytes": 1600 * MIB,
                "guaranteed_bytes": 256 * MIB,
                "insert_class": "retained",
                "reset_generation": 3,
            },
        ],
        "instances": [
            {
                "engine": "vllm-1/abc",
                "cache_namespace": "team-a/qwen",
                "model": "Qwen3-8B bf16",
                "serving": True,
                "missing": "",
                "off": "",
                "page_bytes": 2 * MIB,
                "leases": 3,
                "restores": 2,
                "saves": 1,
            },
            {
                "engine": "vllm-2/def",
                "cache_namespace": "",
                "model": "Qwen3-8B bf16",
                "serving": False,
                "missing": "workers [1] of 2",
                "off": "",
                "page_bytes": 0,
                "leases": 0,
                "restores": 0,
                "saves": 0,
            },
            {
                "engine": "vllm-3/ghi",
                "cache_namespace": "",
                "model": "Gemma 3",
                "serving": False,
                "missing": "",
                "off": "layout mismatch in layer 0",
                "page_bytes": 64 << 10,
                "leases": 0,
                "restores": 0,
                "saves": 0,
            },
        ],
    }
