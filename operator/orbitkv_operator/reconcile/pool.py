"""Reconciling a ManagerPool: look, decide, write. Right at any time and on any state, however often it is called."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from orbitkv_crds import names
from orbitkv_crds.agent_api.reports_pb2 import Report
from orbitkv_crds.agent_memory import agent_memory
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_crds.meta import condition
from orbitkv_crds.model import describe_errors
from orbitkv_crds.quantity import parse_quantity, rounded_size_text
from orbitkv_operator import dra, gpu, rollout
from orbitkv_operator.builders import agents
from orbitkv_operator.builders.agents import Context
from orbitkv_operator.builders.children import CHILD_KINDS, Child, children
from orbitkv_operator.cluster.api import (
    CLAIM_TEMPLATES,
    CONFIG_MAPS,
    DAEMON_SETS,
    POD_MONITORS,
    PODS,
    POOLS,
    RUNTIME_CLASSES,
    Api,
    Manifest,
    Resource,
)
from orbitkv_operator.cluster.compare import covers
from orbitkv_operator.dra import Dra, Obstacle
from orbitkv_operator.events import Events
from orbitkv_operator.gpu import Route
from orbitkv_operator.health import node_of, observe, with_reported
from orbitkv_operator.names import AGENT_LABELS
from orbitkv_operator.overlap import Candidate, Overlap, overlaps
from orbitkv_operator.placement import matching, placement_of
from orbitkv_operator.placement import wanted as wanted_nodes
from orbitkv_operator.reconcile.ownership import Owner, owner_of
from orbitkv_operator.reconcile.payload import PayloadPulls, pulls, with_image
from orbitkv_operator.reconcile.pool_status import Blocked, PoolFacts, pool_status
from orbitkv_operator.reconcile.status_writer import FIGURES_AGAIN, StatusWriter
from orbitkv_operator.reports.store import INTERVAL, ReportStore, Sums, dram
from orbitkv_operator.settings import Settings
from orbitkv_operator.view import View
from orbitkv_operator.work import FORGET

logger = logging.getLogger(__name__)

KIND_SECONDS: Final = 60.0
"""How long it is remembered whether the API has a kind that not every cluster has."""


@dataclass(frozen=True)
class Seen:
    """What was looked at for one pool."""

    live: Mapping[Resource, Manifest | None]
    """Its objects by kind; kinds that the API does not have are left out."""
    pods: list[Manifest]
    nodes: Mapping[str, Manifest]
    others: list[Candidate]
    """Other pools that can be served."""
    runtime_class: Manifest | None = None
    """The RuntimeClass that the pool would use, if it is there."""
    evicted: Sequence[Manifest] = ()
    """Its agents' pods that were evicted last, which are gone."""
    dra: Dra | None = None
    """What was found of Dynamic Resource Allocation; None: the pool does not ask for it."""


@dataclass(frozen=True)
class Plan:
    """What is to be written for a pool, in this order."""

    apply: tuple[tuple[Resource, Manifest], ...]
    delete: tuple[tuple[Resource, str, str], ...]
    """Objects that are not wanted any more: kind, name, uid."""
    facts: PoolFacts


def candidate(pool: ManagerPool) -> Candidate:
    """Return a pool as it takes part in overlaps."""
    metadata = pool.metadata
    return Candidate(metadata.name, metadata.uid, metadata.creation_timestamp, agents.placement_for(pool))


def plan(
    pool: ManagerPool,
    seen: Seen,
    context: Context,
    *,
    cache_namespaces: int,
    reports: ReportStore,
    whole: bool = True,
    now: datetime | None = None,
) -> Plan:
    """Decide what is to be done: a pure function of what was seen.

    Args:
        whole: whether the agents' figures are to be shown; else those that the status has stay.
    """
    name, uid = pool.metadata.name, pool.metadata.uid
    owners = {resource: owner_of(live, name, uid) for resource, live in seen.live.items()}
    shared = overlaps(candidate(pool), seen.others, seen.nodes.values())
    meant = matching(seen.nodes.values(), agents.placement_for(pool))
    meant_nodes = [seen.nodes[node] for node in meant]
    route = gpu.find_route(pool, seen.runtime_class, meant_nodes, seen.dra, context.namespace)
    if isinstance(route, Route):
        context = replace(context, route=route)
    blocked = _blocked(pool, seen, owners, route)
    waiting = _waiting(seen, owners)

    daemon_set = seen.live.get(DAEMON_SETS) if owners.get(DAEMON_SETS) in (Owner.OURS, Owner.ORPHAN) else None
    present = placement_of(daemon_set["spec"]["template"]["spec"]) if daemon_set else None
    placement = _placement(pool, shared, present)
    wanted_children = [] if blocked or waiting else children(pool, context, seen.live.keys(), placement)
    in_force = (present if blocked else placement) or None
    pods = _own_pods(seen.pods, daemon_set)
    running = {node_of(pod) for pod in pods}
    wanted = wanted_nodes(seen.nodes.values(), in_force, running) if in_force is not None else []

    since = datetime.fromisoformat(daemon_set["metadata"]["creationTimestamp"]) if daemon_set else None
    observed = observe(pool, pods, seen.nodes, wanted, since, now, _own_pods(seen.evicted, daemon_set))
    max_unavailable = _max_unavailable(pool, len(wanted))
    steps = rollout.plan(
        observed.agents,
        wanted,
        observed.down,
        agents.template_hash(pool, context),
        max_unavailable=max_unavailable,
        paused=pool.spec.update_strategy.paused or blocked is not None or bool(waiting) or daemon_set is None,
    )
    told = _of_present_pods(reports.of_pool(name), pods)
    unhealthy = with_reported(observed.unhealthy, told, wanted)
    blind = [it.name for it in unhealthy if it.reason == gpu.NO_GPU]
    facts = PoolFacts(
        wanted=wanted,
        rollout=steps,
        max_unavailable=max_unavailable,
        unhealthy=unhealthy,
        route=route.name if isinstance(route, Route) else None,
        gpus=gpu.judge(route, wanted, steps.serving, blind, seen.nodes, told) if isinstance(route, Route) else None,
        settled=reports.settled,
        overlaps=shared,
        blocked=blocked,
        waiting=waiting,
        cache_namespaces=cache_namespaces,
        dram=_dram(pool, reports) if whole else None,
    )
    return Plan(_to_apply(wanted_children, seen.live), _to_delete(wanted_children, seen.live, owners), facts)


def _placement(pool: ManagerPool, shared: list[Overlap], present: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return where agents may run: as the spec says, but for the younger of two pools where they were until now."""
    if not any(overlap.other_is_older for overlap in shared):
        return agents.placement_for(pool)
    return present


def _blocked(
    pool: ManagerPool, seen: Seen, owners: Mapping[Resource, Owner], route: Route | Obstacle
) -> Blocked | None:
    if isinstance(route, Obstacle):
        return Blocked("GPUAccess", route.reason, route.message)
    for resource, owner in owners.items():
        if owner is Owner.OTHER:
            name = names.pool_object_name(pool.metadata.name)
            return Blocked(
                "ConfigValid",
                "NameTaken",
                f"{resource.kind} {name} is there already and does not belong to this pool, so it is left alone. "
                "Delete it, or make a pool with another name.",
            )
    limit = agents.resources(pool)["limits"]["memory"]
    if parse_quantity(limit) <= pool.spec.memory.pool_bytes:
        needed = agent_memory(pool.spec.memory.pool_bytes)
        return Blocked(
            "ConfigValid",
            "MemoryBelowPool",
            f"spec.resources.limits.memory is {limit}, but memory.pool alone is {pool.spec.memory.pool}: an agent "
            f"would be killed when it takes it. Allow {rounded_size_text(needed)}, or leave it out to have it worked "
            "out.",
        )
    return None


def _waiting(seen: Seen, owners: Mapping[Resource, Owner]) -> str:
    """Return what must end first: objects of an earlier pool of this name, which are being removed."""
    for resource, owner in owners.items():
        metadata = (seen.live[resource] or {}).get("metadata", {})
        if owner is Owner.FORMER or (owner is Owner.OURS and metadata.get("deletionTimestamp")):
            return f"{resource.kind} {metadata['name']} is being removed; it is made anew afterwards."
    return ""


def _own_pods(pods: Sequence[Manifest], daemon_set: Manifest | None) -> list[Manifest]:
    """Return the pods of the DaemonSet: others with our labels are none of our business."""
    if daemon_set is None:
        return []
    uid = daemon_set["metadata"]["uid"]
    return [pod for pod in pods if any(it["uid"] == uid for it in pod["metadata"].get("ownerReferences") or ())]


def _of_present_pods(reports: Sequence[Report], pods: Sequence[Manifest]) -> list[Report]:
    """Return the reports of agents that are there: what the one before saw, by another way to the GPUs perhaps, says
    nothing of the present one."""
    there = {pod["metadata"]["uid"] for pod in pods}
    return [report for report in reports if report.pod_uid in there]


def _max_unavailable(pool: ManagerPool, desired: int) -> int:
    value = pool.spec.update_strategy.max_unavailable
    if isinstance(value, int):
        return value
    return max(1, -(-desired * int(value.removesuffix("%")) // 100))


def _dram(pool: ManagerPool, store: ReportStore) -> Sums | None:
    """Return the sums over all agents; None: not known, as none has ever reported, or may have had no time to."""
    reports = store.of_pool(pool.name)
    return dram(reports) if reports or (store.settled and pool.status.tiers is not None) else None


def _to_apply(wanted: list[Child], live: Mapping[Resource, Manifest | None]) -> tuple[tuple[Resource, Manifest], ...]:
    return tuple(
        (child.resource, child.manifest)
        for child in wanted
        if child.manifest is not None and not _as_applied(live[child.resource], child.manifest)
    )


def _as_applied(live: Manifest | None, wanted: Manifest) -> bool:
    return live is not None and covers(live, wanted)


def _to_delete(
    wanted: list[Child], live: Mapping[Resource, Manifest | None], owners: Mapping[Resource, Owner]
) -> tuple[tuple[Resource, str, str], ...]:
    return tuple(
        (child.resource, found["metadata"]["name"], found["metadata"]["uid"])
        for child in wanted
        if child.manifest is None
        and owners[child.resource] is Owner.OURS
        and (found := live[child.resource]) is not None
        and not found["metadata"].get("deletionTimestamp")
    )


@dataclass
class PoolReconciler:
    """Asks the API, has `plan` decide, and writes. Holds nothing about pools between two calls."""

    api: Api
    view: View
    settings: Settings
    reports: ReportStore
    status: StatusWriter
    events: Events
    ca_bundle: Callable[[], str]
    """The certificates for agents; empty while they are not known."""
    payloads: PayloadPulls = field(default_factory=PayloadPulls)
    """Told how the nodes of each pool fare with the payload."""
    _kinds: dict[Resource, tuple[float, bool]] = field(default_factory=dict)

    def reconcile(self, name: str) -> float | None:
        """Bring a pool to what its spec says; return in how many seconds to look again, as `work.Handler`.

        Raises:
            ApiError: a request failed; what was done so far is right, and the rest is to be tried again.
        """
        raw = self.api.get(POOLS, None, name)
        if raw is None:
            before = self.view.pool(name)
            if before is not None:
                self.status.forget(POOLS, "", name)
                self.view.drop(POOLS, ("", name))
            self.view.forget_evicted(name)
            self.payloads.forget(name)
            return FORGET
        self.view.put(POOLS, raw)
        if raw["metadata"].get("deletionTimestamp"):
            return FORGET  # its objects go with it
        try:
            pool = ManagerPool.model_validate(raw)
        except ValidationError as error:
            return self.status.write(POOLS, raw, _unreadable(raw, describe_errors(error)))

        seen = self._look(pool)
        self.payloads.note(name, pulls(seen.pods, self.settings.payload_image))
        found = self._plan(pool, seen)
        if found.facts.rollout.replace:
            # What the watch has shown may be a moment old: before an agent goes, look how many are there now.
            found = self._plan(pool, replace(seen, pods=self._list_pods(name)))
        for resource, manifest in found.apply:
            self.api.apply(resource, manifest)
            logger.info("applied", extra={"pool": name, "kind": resource.kind, "object": manifest["metadata"]["name"]})
        for resource, child, uid in found.delete:
            self.api.delete(resource, self.settings.namespace, child, uid=uid)
            logger.info("deleted", extra={"pool": name, "kind": resource.kind, "object": child})
        for agent in found.facts.rollout.replace:
            self.api.delete(PODS, self.settings.namespace, agent.name, uid=agent.uid)
            logger.info("replacing an agent", extra={"pool": name, "node": agent.node, "pod": agent.name})
        status = pool_status(pool, found.facts)
        wait = self.status.write(POOLS, raw, status.to_body())
        self._tell(raw, found.facts)
        for pod in with_image(seen.pods, self.settings.payload_image):
            self.api.apply(PODS, pod)
            logger.info("another payload is pulled", extra={"pool": name, "pod": pod["metadata"]["name"]})
        return min(it for it in (wait, self._again(pool, found.facts)) if it is not None)

    def _again(self, pool: ManagerPool, facts: PoolFacts) -> float:
        """Return in how many seconds to look again at what no watch tells of; at a thousand nodes a look takes half a
        second."""
        if facts.waiting:
            return 2.0
        seen = facts.gpus is not None and facts.gpus[0] is True and facts.settled
        if not seen or facts.unhealthy or facts.blocked is not None or len(facts.rollout.serving) < len(facts.wanted):
            return INTERVAL  # what is wrong may be something else after a while
        if gpu.involves_dra(pool):
            return gpu.LOOK_AGAIN_SECONDS
        return max(FIGURES_AGAIN, self.status.figures_due(POOLS, "", pool.name))

    def _look(self, pool: ManagerPool) -> Seen:
        namespace, child = self.settings.namespace, names.pool_object_name(pool.metadata.name)
        kinds = (*CHILD_KINDS, CLAIM_TEMPLATES) if gpu.involves_dra(pool) else CHILD_KINDS
        live = {resource: self.api.get(resource, namespace, child) for resource in kinds if self._serves(resource)}
        others = []
        for raw in self.view.pools():
            try:
                other = ManagerPool.model_validate(raw)
            except ValidationError:
                continue  # it is told itself
            if not other.metadata.deletion_timestamp and other.metadata.uid != pool.metadata.uid:
                others.append(candidate(other))
        runtime_class = None
        if gpu.asks_for_runtime_class(pool):
            runtime_class = self.api.get(RUNTIME_CLASSES, None, gpu.runtime_class_name(pool))
        found = None
        if pool.spec.gpu.access == "dra":
            labels = self.view.namespace_labels(namespace) or {}
            found = dra.look(self.api, namespace, labels, live.get(CLAIM_TEMPLATES))
        evicted = self.view.evicted(pool.name)
        return Seen(live, self.view.agents(pool.name), self.view.nodes(), others, runtime_class, evicted, found)

    def _list_pods(self, pool: str) -> list[Manifest]:
        selector = ",".join(f"{key}={value}" for key, value in (AGENT_LABELS | {names.LABEL_POOL: pool}).items())
        return self.api.list_all(PODS, self.settings.namespace, labels=selector)

    def _plan(self, pool: ManagerPool, seen: Seen) -> Plan:
        context = Context(self.settings, self.ca_bundle() or _present_bundle(seen.live))
        caches = len(self.view.caches(pool=pool.name))
        # an operator that has begun to act hears of one agent after the other
        whole = (
            self.reports.settled or pool.status.tiers is None or self.status.has_written_figures(POOLS, "", pool.name)
        )
        return plan(pool, seen, context, cache_namespaces=caches, reports=self.reports, whole=whole)

    def _serves(self, resource: Resource) -> bool:
        if resource not in (POD_MONITORS, CLAIM_TEMPLATES):
            return True
        now = time.monotonic()
        at, served = self._kinds.get(resource, (-KIND_SECONDS, False))
        if now - at >= KIND_SECONDS:
            served = self.api.serves(resource)
            self._kinds[resource] = now, served
        return served

    def _tell(self, raw: Manifest, facts: PoolFacts) -> None:
        """Post events on what has just been done and on what is wrong."""
        for agent in facts.rollout.replace:
            message = f"Replacing the agent on node {agent.node}, as the spec has changed."
            self.events.post(raw, "Normal", "ReplacingAgent", message, "Replace")
        for node in facts.unhealthy[:10]:
            self.events.post(raw, "Warning", node.reason, f"{node.name}: {node.message}", "Observe")
        for overlap in facts.overlaps:
            nodes = ", ".join(overlap.nodes[:10])
            message = f"ManagerPool {overlap.other} wants the same nodes: {nodes}."
            self.events.post(raw, "Warning", "NodesOverlap", message)
        if facts.blocked is not None:
            self.events.post(raw, "Warning", facts.blocked.reason, facts.blocked.message)


def _present_bundle(live: Mapping[Resource, Manifest | None]) -> str:
    """Return the certificates that agents have now: they stay until others are known."""
    found = live.get(CONFIG_MAPS)
    return str(((found or {}).get("data") or {}).get(names.CA_CERTIFICATE, ""))


def _unreadable(raw: Manifest, problem: str) -> dict[str, Any]:
    """Return the status of a pool that an older or newer schema let through; the rest of it stays."""
    status = dict(raw.get("status") or {})
    generation = raw["metadata"].get("generation", 0)
    message = f"This operator cannot read the spec, and leaves everything as it is: {problem}."
    kept = [it for it in status.get("conditions") or () if it["type"] not in ("ConfigValid", "Ready")]
    same = {it["type"]: it for it in status.get("conditions") or ()}
    for kind in ("ConfigValid", "Ready"):
        new = condition((), kind, False, "Unreadable", message, generation).to_body()
        if same.get(kind, {}).get("status") == "False":
            new["lastTransitionTime"] = same[kind]["lastTransitionTime"]
        kept.append(new)
    return status | {"observedGeneration": generation, "conditions": kept}
