"""What a report says, read off the agent's parts on the owner thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.versions import RELEASE
from orbitkv_agent.cluster.visits import Seen, State
from orbitkv_agent.observe.demand import LastHour
from orbitkv_agent.sessions.session import SessionState
from orbitkv_crds.agent_api import reports_pb2 as pb

if TYPE_CHECKING:
    from orbitkv_agent.agent import Agent
    from orbitkv_agent.cluster.admission import TokenAdmission
    from orbitkv_agent.cluster.settings import ClusterSettings
    from orbitkv_agent.cluster.tenants import Tenants

_PODS: Final = 10
_WORDS: Final = 1000
_STATES: Final = {
    State.CONNECTED: pb.VISIT_STATE_CONNECTED,
    State.ATTACHED: pb.VISIT_STATE_ATTACHED,
    State.REFUSED: pb.VISIT_STATE_REFUSED,
    State.OFF: pb.VISIT_STATE_OFF,
    State.LEFT: pb.VISIT_STATE_LEFT,
}


def make_report(
    agent: Agent,
    settings: ClusterSettings,
    tenants: Tenants,
    admission: TokenAdmission,
    last_hour: LastHour,
    sequence: int,
    not_ready: str,
    live_digest: str,
    problems: Sequence[tuple[str, str]],
) -> pb.Report:
    """Return the agent's state. Of cache namespaces only those that an engine attached to since the agent's start."""
    store = agent.cache.stats()
    sessions = Counter(
        each.namespace
        for each in agent.server.sessions
        if each.namespace is not None and each.state is SessionState.OPEN and not each.administrator
    )
    engines = Counter(each.namespace for each in agent.instances if each.sealed)
    state = (
        pb.AGENT_STATE_DRAINING if agent.draining else pb.AGENT_STATE_STARTING if not_ready else pb.AGENT_STATE_SERVING
    )
    report = pb.Report(
        pool=settings.pool,
        node=settings.node_name,
        pod_name=settings.pod_name,
        pod_uid=settings.pod_uid,
        boot_id=agent.boot_id,
        sequence=sequence,
        release=RELEASE,
        state=state,
        dram=pb.Tier(capacity_bytes=store.capacity_bytes, used_bytes=store.used_bytes),
        cache_namespaces_synced=tenants.listed,
        live_settings_digest=live_digest,
        problems=[pb.Problem(reason=reason, message=words[:_WORDS]) for reason, words in problems],
        pods=[_visit(seen) for seen in admission.visits.seen(agent.instances, agent.loop.now())],
        refusals=dict(agent.counters.session_rejections),
        gpus=agent.gpu_count,
    )
    for tenant in tenants:
        if not agent.namespaces.has(tenant.key):
            continue
        it = tenant.object
        pods = admission.pods_of(tenant.key)
        asked, found = last_hour.of(tenant.key)
        known = store.namespaces.get(tenant.key)
        report.cache_namespaces.append(
            pb.CacheNamespace(
                namespace=it.metadata.namespace,
                name=it.metadata.name,
                uid=it.metadata.uid,
                observed_generation=it.metadata.generation,
                reset_generation=tenant.settings.reset_generation,
                dram=pb.Tier(used_bytes=0 if known is None else known.used_bytes),
                sessions=sessions[tenant.key],
                engines=engines[tenant.key],
                attached_pods=len(pods),
                pods=[
                    pb.Pod(namespace=pod.namespace, name=pod.name, uid=pod.uid, sessions=count)
                    for pod, count in sorted(pods.items(), key=lambda each: (each[0].namespace, each[0].name))[:_PODS]
                ],
                last_hour=pb.LastHour(requested_tokens=asked, hit_tokens=found),
                decision=tenant.decision.reason,
            )
        )
    return report


def awaited(
    agent: Agent, admission: TokenAdmission, not_ready: str, live_digest: str, problems: Sequence[tuple[str, str]]
) -> object:
    """Return what people may wait to see in a status: equal as long as nothing of it has changed. It costs far less
    than a report."""
    return (
        agent.draining,
        bool(not_ready),
        agent.gpu_count,
        live_digest,
        [reason for reason, _ in problems],  # their words may differ each time
        [(each.namespace, each.name, each.sealed, each.off) for each in agent.instances],
        admission.visits.words(),
    )


def _visit(seen: Seen) -> pb.PodVisit:
    visit, word = seen.visit, seen.word
    return pb.PodVisit(
        namespace=visit.pod.namespace,
        name=visit.pod.name,
        uid=visit.pod.uid,
        cache_namespace=visit.cache_namespace,
        state=_STATES[word.state],
        reason=word.reason,
        message=word.message,
        engine=visit.engine,
        sessions=len(visit.sessions),
        engines=seen.engines,
        requested_tokens=seen.asked,
        hit_tokens=seen.found,
        age_seconds=int(seen.age),
    )
