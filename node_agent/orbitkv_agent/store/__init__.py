"""The page pool, the index and retention: DRAM pages and their keys, owned by the agent's one owner thread."""

from orbitkv_agent.store.access_log import Entries
from orbitkv_agent.store.arenas import Arena, ArenaPool, default_arena_bytes
from orbitkv_agent.store.cache import PageCache, Reservation
from orbitkv_agent.store.index import KeySpace
from orbitkv_agent.store.namespaces import RetentionClass
from orbitkv_agent.store.statistics import NamespaceStats, SizeClassStats, StoreStats

__all__ = [
    "Arena",
    "ArenaPool",
    "Entries",
    "KeySpace",
    "NamespaceStats",
    "PageCache",
    "Reservation",
    "RetentionClass",
    "SizeClassStats",
    "StoreStats",
    "default_arena_bytes",
]
