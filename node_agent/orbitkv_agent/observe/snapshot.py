"""What the agent tells about itself: one JSON-able object, made by the owner thread.

`Agent.snapshot()` fills it. Two readers render it: `observe.metrics` (Prometheus) and `observe.status` (the table of
`orbitkv-agent status`, whose `--json` prints it as it is). Counters only grow while the agent lives; everything else is
the value at this moment. Sizes are bytes, durations seconds. No hash, token, key or request id may appear here.

A counter by label (`dict[str, int]`) may leave out labels that never happened. Label values outside the tuples below
are counted under "other" in the metrics, so that no client can make the agent export endless series.
"""

from __future__ import annotations

from typing import Final, TypedDict

PHASES: Final = ("warming", "preloading", "prepared", "preparing", "ready", "restoring")
"""Phases that reserve bytes of the query budget."""
TIERS: Final = ("dram", "ssd", "peer", "miss")
"""Where a requested block was found."""
RETENTION_CLASSES: Final = ("reclaimable", "probationary", "retained")
"""Retention classes of stored blocks."""
SAVE_DROP_REASONS: Final = (
    "pool-full",
    "quota",
    "unproven",
    "not-serving",
    "too-many-models",
    "draining",
    "failed",
    "aborted",
)
"""Why pages of a save were not kept."""
PLAN_REFUSAL_REASONS: Final = ("bounds", "duplicate", "count", "group", "stale", "busy", "unsupported")
"""Why a save or restore plan was refused before anything was submitted."""
REJECTION_REASONS: Final = (
    "too-many-connections",
    "too-many-reviews",
    "user-denied",
    "token-missing",
    "token-invalid",
    "token-audience",
    "token-unbound",
    "token-node",
    "token-unexpected",
    "apiserver-unavailable",
    "access-denied",
    "cache-namespace-not-found",
    "cache-namespace-replaced",
    "version-mismatch",
    "hello-timeout",
    "bad-frame",
    "not-reading",
    "too-much-held",
    "draining",
)
"""Why a connection did not become a session, or was closed by the agent."""
PROOF_OUTCOMES: Final = ("proven", "mismatch", "known")
"""How a proof of layout ended; "known": this geometry was proven before in the same process."""


class HistogramData(TypedDict):
    """A histogram of durations (`observe.histogram.Histogram.data`)."""

    bounds: list[float]
    """Upper bounds in seconds, ascending, without infinity."""
    counts: list[int]
    """Observations per bucket, not cumulative; one more than `bounds`: the last is everything above."""
    sum: float
    """Sum of all observations in seconds."""


class AgentPart(TypedDict):
    """Who answers."""

    boot_id: str
    release: str
    mode: str
    pid: int
    socket_path: str
    uptime_seconds: float
    longest_turn_ms: float
    """Most processor time that the owner thread spent on one request or timer."""
    draining: bool


class PoolPart(TypedDict):
    """The page pool."""

    capacity_bytes: int
    used_bytes: int
    largest_free_bytes: int
    prefaulted_bytes: int
    alloc_failures: int


class CachePart(TypedDict):
    """What is stored, and how asking for it went (counted in blocks)."""

    resident_bytes: int
    resident_blocks: dict[str, int]
    """By retention class."""
    block_hits: int
    block_misses: int
    tier_block_requests: dict[str, int]
    """By tier; they add up to hits and misses."""
    block_insertions: int
    block_evictions: dict[str, int]
    """By retention class."""
    eviction_reclaimed_bytes: int


class QueryPart(TypedDict):
    """Query operations and their byte budget."""

    outstanding: int
    """Operations that are not retired, admitted or not."""
    unadmitted_now: int
    """Those among them that wait for admission."""
    budget_bytes: int
    reserved_bytes_by_phase: dict[str, int]
    reserved_peak_bytes: int
    instance_reserved_peak_bytes: int
    budget_waits: int
    budget_bypasses: int
    coalesced_reads: int
    unadmitted: int
    oversized: int


class LeasePart(TypedDict):
    """Leases that were promised and neither consumed nor returned."""

    live: int
    pinned_pages: int
    pinned_bytes: int
    expired: int


class TransferPart(TypedDict):
    """Saves and restores."""

    saves_inflight: int
    restores_inflight: int
    save_inflight_bytes: int
    restore_inflight_bytes: int
    staging_bytes: int
    save_bytes: int
    load_bytes: int
    load_failures: int
    save_dropped: dict[str, int]
    """Pages, by reason (`SAVE_DROP_REASONS`)."""
    plans_refused: dict[str, int]
    """Plans, by reason (`PLAN_REFUSAL_REASONS`)."""
    save_duration: HistogramData
    load_duration: HistogramData
    copy_plans: dict[str, str]
    """The way bytes are copied, by device: "client" in host mode, where the plugin copies; on a GPU one call for many
    pages ("batch-pages") or segments ("batch-segments") or, with older drivers, a call each ("single-...")."""
    gpu_context_bytes: dict[str, int]
    """GPU memory that the agent's own context takes, by device; empty in host mode."""


class SessionPart(TypedDict):
    """Connections and registrations."""

    by_namespace: dict[str, int]
    """Open sessions by cache namespace (attached ones only)."""
    registered_bytes: dict[str, int]
    """Bytes of engine memory that are registered, by device."""
    rejections: dict[str, int]
    """By reason (`REJECTION_REASONS`)."""
    layout_proofs: dict[str, int]
    """By outcome (`PROOF_OUTCOMES`)."""
    publish_stalled: int
    """Saves and restores that the watchdog finds overdue."""


class NamespaceRow(TypedDict):
    """One cache namespace. The unnamed one is ""."""

    name: str
    used_bytes: int
    quota_bytes: int | None
    guaranteed_bytes: int
    insert_class: str
    reset_generation: int


class InstanceRow(TypedDict):
    """One engine incarnation."""

    engine: str
    """Engine id and nonce, as `str(Instance)` gives it."""
    cache_namespace: str
    model: str
    serving: bool
    missing: str
    """What it still lacks before it can hit, in words; "" when it serves."""
    off: str
    """Why it never will; "" otherwise."""
    page_bytes: int
    """What one block takes in the pool, all groups and workers together; 0 while workers are missing."""
    leases: int
    restores: int
    saves: int


class Snapshot(TypedDict):
    """The whole."""

    agent: AgentPart
    pool: PoolPart
    cache: CachePart
    query: QueryPart
    leases: LeasePart
    transfer: TransferPart
    sessions: SessionPart
    namespaces: list[NamespaceRow]
    instances: list[InstanceRow]
