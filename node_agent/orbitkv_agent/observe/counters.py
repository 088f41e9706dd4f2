"""The agent's counters: plain numbers that only grow. Used by the owner thread only."""

from __future__ import annotations

from collections import Counter, defaultdict

from orbitkv_agent.observe.demand import Demand
from orbitkv_agent.observe.histogram import Histogram


class Counters:
    """What happened since the start, under the names of the metrics (`docs/metrics.md`) without prefix and suffix.

    Sizes in bytes; durations in seconds; blocks are pages of one group, all shards together.
    """

    def __init__(self) -> None:
        self.cache_block_hits = 0
        self.cache_block_misses = 0
        self.demand: defaultdict[str, Demand] = defaultdict(Demand)
        """Tokens, by cache namespace."""
        self.query_budget_waits = 0
        self.query_budget_bypasses = 0
        """A younger query was answered before an older one that waits for its own instance's share."""
        self.query_coalesced_reads = 0
        self.query_unadmitted = 0
        self.query_oversized = 0
        self.leases_expired = 0
        self.save_bytes = 0
        self.load_bytes = 0
        self.load_failures = 0
        self.save_dropped: Counter[str] = Counter()
        """Pages, by reason."""
        self.plans_refused: Counter[str] = Counter()
        """Plans of saves and restores, by reason."""
        self.session_rejections: Counter[str] = Counter()
        self.layout_proofs: Counter[str] = Counter()
        self.save_duration = Histogram()
        """From the acceptance of a save to its commit."""
        self.load_duration = Histogram()
        """From the acceptance of a restore to its end."""
