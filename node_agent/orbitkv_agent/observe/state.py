"""The snapshot, read off the agent's parts."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from orbitkv.protocol.versions import RELEASE
from orbitkv_agent.observe.snapshot import (
    AgentPart,
    CachePart,
    InstanceRow,
    LeasePart,
    NamespaceRow,
    PoolPart,
    QueryPart,
    SessionPart,
    Snapshot,
    TransferPart,
)
from orbitkv_agent.queries.budget import Phase
from orbitkv_agent.sessions.namespaces import display_name
from orbitkv_agent.sessions.session import SessionState
from orbitkv_agent.store.statistics import StoreStats

if TYPE_CHECKING:
    from orbitkv_agent.agent import Agent
    from orbitkv_agent.sessions.instances import Instance


def make_snapshot(agent: Agent) -> Snapshot:
    """Read all figures. On the owner thread only."""
    store = agent.cache.stats()
    return Snapshot(
        agent=AgentPart(
            boot_id=agent.boot_id,
            release=RELEASE,
            mode=agent.device.name,
            pid=os.getpid(),
            socket_path=agent.config.socket_path,
            uptime_seconds=agent.loop.now() - agent.started,
            longest_turn_ms=agent.loop.longest_turn_s * 1000,
            draining=agent.draining,
        ),
        pool=PoolPart(
            capacity_bytes=store.capacity_bytes,
            used_bytes=store.used_bytes,
            largest_free_bytes=store.largest_free_bytes,
            prefaulted_bytes=sum(arena.size for arena in agent.cache.arenas if arena.ready),
            alloc_failures=store.arena_failures + store.total_by_key("dropped").get("pool_full", 0),
        ),
        cache=_cache(agent, store),
        query=_query(agent),
        leases=LeasePart(
            live=agent.queries.leases.live,
            pinned_pages=agent.queries.leases.pinned_pages,
            pinned_bytes=agent.queries.leases.pinned_bytes,
            expired=agent.counters.leases_expired,
        ),
        transfer=_transfer(agent),
        sessions=_sessions(agent),
        namespaces=[
            NamespaceRow(
                name=display_name(name),
                used_bytes=store.namespaces[name].used_bytes,
                quota_bytes=settings.quota_bytes,
                guaranteed_bytes=settings.guaranteed_bytes,
                insert_class=settings.insert_class,
                reset_generation=settings.reset_generation,
            )
            for name, settings in agent.namespaces
        ],
        instances=[_instance(agent, each) for each in agent.instances],
    )


def _cache(agent: Agent, store: StoreStats) -> CachePart:
    counters = agent.counters
    return CachePart(
        resident_bytes=store.used_bytes,
        resident_blocks=store.total_by_key("resident_blocks"),
        block_hits=counters.cache_block_hits,
        block_misses=counters.cache_block_misses,
        tier_block_requests={"dram": counters.cache_block_hits, "miss": counters.cache_block_misses},
        block_insertions=store.total("insertions"),
        block_evictions=store.total_by_key("evictions"),
        eviction_reclaimed_bytes=store.total("reclaimed_bytes"),
    )


def _query(agent: Agent) -> QueryPart:
    queries, counters, budget = agent.queries, agent.counters, agent.queries.budget
    return QueryPart(
        outstanding=queries.outstanding,
        unadmitted_now=queries.unadmitted,
        budget_bytes=budget.limit,
        reserved_bytes_by_phase={phase.label: budget.by_phase[phase] for phase in Phase},
        reserved_peak_bytes=budget.peak,
        instance_reserved_peak_bytes=budget.owner_peak,
        budget_waits=counters.query_budget_waits,
        budget_bypasses=counters.query_budget_bypasses,
        coalesced_reads=counters.query_coalesced_reads,
        unadmitted=counters.query_unadmitted,
        oversized=counters.query_oversized,
    )


def _transfer(agent: Agent) -> TransferPart:
    counters = agent.counters
    return TransferPart(
        saves_inflight=len(agent.saves),
        restores_inflight=len(agent.restores) + agent.restores.waiting,
        save_inflight_bytes=agent.saves.inflight_bytes,
        restore_inflight_bytes=agent.restores.inflight_bytes,
        staging_bytes=0,
        save_bytes=counters.save_bytes,
        load_bytes=counters.load_bytes,
        load_failures=counters.load_failures,
        save_dropped=dict(counters.save_dropped),
        plans_refused=dict(counters.plans_refused),
        save_duration=counters.save_duration.data(),
        load_duration=counters.load_duration.data(),
        copy_plans=dict(agent.device.copy_plans),
        gpu_context_bytes=dict(agent.device.context_bytes),
    )


def _sessions(agent: Agent) -> SessionPart:
    counters = agent.counters
    by_namespace = Counter(
        display_name(each.namespace)
        for each in agent.server.sessions
        if each.namespace is not None and each.state is SessionState.OPEN
    )
    return SessionPart(
        by_namespace=dict(by_namespace),
        registered_bytes={device: size for device, size in agent.membership.registered_bytes.items() if size},
        rejections=dict(counters.session_rejections),
        layout_proofs=dict(counters.layout_proofs),
        publish_stalled=agent.watchdog.stalled,
    )


def _instance(agent: Agent, instance: Instance) -> InstanceRow:
    return InstanceRow(
        engine=str(instance),
        cache_namespace=display_name(instance.namespace),
        model=instance.model,
        serving=instance.serving,
        missing=instance.missing,
        off=instance.off,
        page_bytes=sum(sum(group.shard_bytes) for group in instance.group_pages.values()) if instance.sealed else 0,
        leases=sum(len(each.leases) for each in instance.operations),
        restores=sum(each.registration.instance is instance for each in agent.restores),
        saves=instance.saves,
    )
