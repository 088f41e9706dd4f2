"""Cache namespaces as the store sees them: their limits, their counters and their orders of last use."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from orbitkv_agent.store.access_log import AccessLog


class RetentionClass(IntEnum):
    """Evicted in this order. NONE: no page of the entry was committed yet."""

    NONE = 0
    RECLAIMABLE = 1
    PROBATIONARY = 2
    RETAINED = 3


EVICTION_ORDER = (RetentionClass.RECLAIMABLE, RetentionClass.PROBATIONARY, RetentionClass.RETAINED)

# The same as plain numbers: comparing an array with a member of an enumeration takes several times as long.
NONE = int(RetentionClass.NONE)
RETAINED = int(RetentionClass.RETAINED)


@dataclass
class NamespaceCounters:
    """What happened in a namespace since the start, in entries and bytes; lists are indexed by RetentionClass."""

    insertions: int = 0
    evictions: list[int] = field(default_factory=lambda: [0] * len(RetentionClass))
    reclaimed_bytes: int = 0
    dropped_pool_full: int = 0
    dropped_quota: int = 0

    def add(self, other: NamespaceCounters) -> None:
        """Count what happened in another namespace here, too."""
        self.insertions += other.insertions
        self.evictions = [mine + its for mine, its in zip(self.evictions, other.evictions, strict=True)]
        self.reclaimed_bytes += other.reclaimed_bytes
        self.dropped_pool_full += other.dropped_pool_full
        self.dropped_quota += other.dropped_quota


class Namespace:
    """One cache namespace (tenant).

    `used_bytes` counts pages at padded size, from their reservation to their release. `quota_bytes` bounds it (None:
    the pool does). `guaranteed_bytes` of it are never evicted for another namespace. `insert_class` is what fresh
    entries get. Entries of a lower `reset_generation` than the current one are gone. `key_spaces` and `groups` say how
    many its models have.
    """

    def __init__(self, namespace_id: int, name: str, last_ticks: npt.NDArray[np.int64]) -> None:
        self.id = namespace_id
        self.name = name
        self.quota_bytes: int | None = None
        self.guaranteed_bytes = 0
        self.insert_class = RetentionClass.PROBATIONARY
        self.reset_generation = 0
        self.used_bytes = 0
        self.pages = 0
        self.key_spaces = 0
        self.groups = 0
        self.counters = NamespaceCounters()
        self._logs = [AccessLog(last_ticks) for _ in RetentionClass]

    def log(self, retention: int) -> AccessLog:
        """Order of last use of this namespace's entries of one class; its `live` is the number of these entries."""
        return self._logs[retention]

    @property
    def excess_bytes(self) -> int:
        """Bytes in use beyond the guarantee: what other namespaces may claim."""
        return max(0, self.used_bytes - self.guaranteed_bytes)

    @property
    def over_quota_bytes(self) -> int:
        """Bytes in use beyond the quota, after it was lowered."""
        return 0 if self.quota_bytes is None else max(0, self.used_bytes - self.quota_bytes)

    @property
    def entries(self) -> int:
        """Entries with at least one committed page."""
        return sum(self._logs[retention].live for retention in EVICTION_ORDER)
