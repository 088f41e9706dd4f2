"""What agents' pods and their nodes say about themselves, put into words for the pool's status."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from orbitkv_crds import names
from orbitkv_crds.agent_api.reports_pb2 import Report
from orbitkv_crds.managerpool import ManagerPool, UnhealthyNode
from orbitkv_operator.cluster.api import Manifest
from orbitkv_operator.rollout import Agent, Health
from orbitkv_operator.view import EVICTED

PATIENCE: Final = timedelta(seconds=60)
"""How long an agent may take for something before it counts as a problem."""
REMEMBERED: Final = timedelta(minutes=10)
"""How long a kill for memory, or an eviction, is shown after the agent runs again."""
IMAGE_PROBLEMS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
"""Why a container waits, where its image cannot be had."""
_LONGEST: Final = 1024


@dataclass(frozen=True)
class Problem:
    """Why an agent does not serve, or did not lately."""

    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """What is known of the pods and nodes of a pool at one moment."""

    agents: tuple[Agent, ...]
    down: frozenset[str]
    """Nodes that are not ready themselves."""
    unhealthy: tuple[UnhealthyNode, ...]
    """All of them, by node."""


def read_agent(pod: Manifest) -> Agent:
    """Return what the rollout needs to know of a pod."""
    metadata = pod["metadata"]
    if metadata.get("deletionTimestamp") or _phase(pod) in ("Failed", "Succeeded"):
        health = Health.GOING
    else:
        health = Health.READY if _serves(pod) else Health.NOT_READY
    template = (metadata.get("annotations") or {}).get(names.ANNOTATION_TEMPLATE_HASH, "")
    return Agent(metadata["name"], metadata["uid"], node_of(pod), template, health)


def node_of(pod: Manifest) -> str:
    """Return the node that a DaemonSet's pod runs on, or is made for; empty if it cannot be told."""
    if pod["spec"].get("nodeName"):
        return str(pod["spec"]["nodeName"])
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    for term in affinity.get("nodeSelectorTerms") or ():
        for field in term.get("matchFields") or ():
            if field["key"] == "metadata.name" and field["operator"] == "In":
                return str(field["values"][0])
    return ""


def is_down(node: Manifest) -> bool:
    """Return whether a node is not ready."""
    return _condition(node, "Ready").get("status") != "True"


def observe(
    pool: ManagerPool,
    pods: Iterable[Manifest],
    nodes: Mapping[str, Manifest],
    wanted: Iterable[str],
    since: datetime | None,
    now: datetime | None = None,
    evicted: Iterable[Manifest] = (),
) -> Observed:
    """Look at the pods of a pool.

    Args:
        evicted: those that were evicted last, one a node: another one has taken their place at once.
        nodes: all nodes by name.
        wanted: names of those that should have an agent.
        since: when the DaemonSet was made; None: there is none yet.
    """
    moment = now or datetime.now(UTC)
    pods = [pod for pod in pods if node_of(pod)]
    by_node: dict[str, list[Manifest]] = {}
    for pod in pods:
        by_node.setdefault(node_of(pod), []).append(pod)
    down = frozenset(name for name in wanted if name in nodes and is_down(nodes[name]))
    thrown_out = {node_of(pod): pod for pod in evicted}
    unhealthy = []
    for name in sorted(wanted):
        latest = _latest(by_node.get(name, []))
        found = _problem_on(pool, name, latest, name in down, since, moment)
        if found is None and name in thrown_out:
            found = _eviction(thrown_out[name], latest, moment)
        if found is not None:
            pod_name = latest["metadata"]["name"] if latest else None
            unhealthy.append(
                UnhealthyNode(name=name, pod=pod_name, reason=found.reason, message=found.message[:_LONGEST])
            )
    return Observed(tuple(read_agent(pod) for pod in pods), down, tuple(unhealthy))


def with_reported(
    unhealthy: Sequence[UnhealthyNode], reports: Iterable[Report], wanted: Container[str]
) -> tuple[UnhealthyNode, ...]:
    """Return the unhealthy nodes, and those whose agents report a problem although their pods look well."""
    found = {it.name: it for it in unhealthy}
    for report in reports:
        if report.problems and report.node in wanted and report.node not in found:
            first = report.problems[0]
            found[report.node] = UnhealthyNode(
                name=report.node,
                pod=report.pod_name or None,
                reason=first.reason[:128] or "Problem",
                message=first.message[:_LONGEST],
            )
    return tuple(found[name] for name in sorted(found))


def _problem_on(
    pool: ManagerPool, node: str, pod: Manifest | None, down: bool, since: datetime | None, now: datetime
) -> Problem | None:
    if down:
        return Problem("NodeNotReady", f"Node {node} is not ready itself: see `kubectl describe node {node}`.")
    if pod is None:
        if since is None or now - since < PATIENCE / 2:
            return None
        daemon_set = names.pool_object_name(pool.metadata.name)
        return Problem(
            "NoPod",
            f"DaemonSet {daemon_set} has made no pod for this node: its events say why (`kubectl describe daemonset "
            f"{daemon_set}`).",
        )
    return problem(pool, pod, now)


def problem(pool: ManagerPool, pod: Manifest, now: datetime) -> Problem | None:
    """Return what is wrong with an agent's pod; None: nothing, or it is just starting or going."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    logs = f"`kubectl logs {metadata['name']}`"
    if deleted := metadata.get("deletionTimestamp"):
        # the timestamp is when the grace period is over
        if now - _time(deleted) < PATIENCE:
            return None
        return Problem(
            "StuckTerminating", "The agent was asked to go and its pod is still there: see its node's kubelet."
        )
    if _phase(pod) == "Failed" or status.get("reason") == EVICTED:
        reason = str(status.get("reason") or "Failed")
        return Problem(reason, f"The agent's pod ended: {_sentence(status.get('message') or 'no reason is given')}")
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return Problem("Unschedulable", _why_unschedulable(pool, str(scheduled.get("message") or "")))
    container = _agent_status(pod)
    found = _container_problem(pool, pod, container, now) if container else None
    if found is not None or _serves(pod):
        return found
    if not container.get("started"):
        since = _time(status.get("startTime") or metadata["creationTimestamp"])
        if now - since < 10 * PATIENCE:
            return None
        return Problem("StillStarting", f"The agent has not come up yet: see {logs}.")
    if now - _time(_condition(pod, "Ready").get("lastTransitionTime")) < PATIENCE:
        return None
    return Problem("NotReady", f"The agent runs and is not ready: see {logs}.")


def _eviction(pod: Manifest, latest: Manifest | None, now: datetime) -> Problem | None:
    """Return what an agent's pod was evicted for; None: long ago, or the pod in its place is made otherwise."""
    when = _condition(pod, "DisruptionTarget") or _condition(pod, "Ready")
    otherwise = latest is not None and read_agent(latest).template != read_agent(pod).template
    if otherwise or now - _time(when.get("lastTransitionTime")) > REMEMBERED:
        return None
    again = " It runs again." if latest is not None and _serves(latest) else ""
    said = _sentence(pod["status"].get("message") or "no reason is given")
    return Problem(EVICTED, f"The node's kubelet ended the agent for want of room: {said}{again}")


def _container_problem(pool: ManagerPool, pod: Manifest, container: Manifest, now: datetime) -> Problem | None:
    waiting: dict[str, Any] = (container.get("state") or {}).get("waiting") or {}
    reason, words = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in IMAGE_PROBLEMS:
        image = next((it["image"] for it in pod["spec"]["containers"] if it["name"] == container["name"]), "")
        return Problem(
            reason,
            f"Image {image} cannot be had: {_sentence(words or reason)} Check spec.image of ManagerPool "
            f"{pool.metadata.name}, and spec.imagePullSecrets if it needs a login.",
        )
    ended = _last_end(container)
    restarts = container.get("restartCount", 0)
    serves = _serves(pod)
    if ended.get("reason") == "OOMKilled":
        if serves and now - _time(ended.get("finishedAt")) > REMEMBERED:
            return None
        limit = _memory_limit(pod, container["name"])
        again = "It runs again." if serves else f"Restarts so far: {restarts}."
        return Problem(
            "OOMKilled",
            f"The agent was killed because it used all the memory that its limit allows ({limit}, of which "
            f"{pool.spec.memory.pool} are memory.pool). {again} Raise spec.resources.limits.memory, or lower "
            "spec.memory.pool.",
        )
    if ended.get("exitCode") == names.AGENT_SEES_NO_GPU and not serves:
        last = str(ended.get("message") or "").strip().rpartition("\n")[2]
        return Problem("NoGPU", f"The agent sees no GPU, and ends. It said: {_sentence(last)} See condition GPUAccess.")
    if reason == "CrashLoopBackOff" or (ended and not serves and restarts > 1):
        code, last = ended.get("exitCode", "unknown"), str(ended.get("message") or "").strip().rpartition("\n")[2]
        said = f" It said: {_sentence(last)}" if last else ""
        return Problem(
            "CrashLoopBackOff",
            f"The agent ends right after its start (exit code {code}, {restarts} restarts).{said} "
            f"See `kubectl logs --previous {pod['metadata']['name']}`.",
        )
    if reason.endswith("Error"):
        return Problem(reason, f"The agent's container cannot be made: {_sentence(words or reason)}")
    return None


def _why_unschedulable(pool: ManagerPool, message: str) -> str:
    said = f"No room for the agent on this node: {_sentence(message or 'the scheduler gives no reason')}"
    if "Insufficient memory" in message:
        return f"{said} Lower spec.memory.pool ({pool.spec.memory.pool}), or free memory on the node."
    if "anti-affinity" in message:
        return f"{said} There is an agent of another pool on it: a node has one."
    return said


def _latest(pods: list[Manifest]) -> Manifest | None:
    """Return the pod that counts: not one that is going if there is another, then the youngest."""

    def order(pod: Manifest) -> tuple[bool, bool, str]:
        metadata = pod["metadata"]
        return not metadata.get("deletionTimestamp"), _phase(pod) != "Failed", metadata["creationTimestamp"]

    return max(pods, key=order, default=None)


def _phase(pod: Manifest) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def _condition(thing: Manifest, kind: str) -> dict[str, Any]:
    conditions: Iterator[dict[str, Any]] = iter((thing.get("status") or {}).get("conditions") or ())
    return next((it for it in conditions if it["type"] == kind), {})


def _agent_status(pod: Manifest) -> dict[str, Any]:
    """Return the status of the agent's container: the others of its pod are no reason to do without it."""
    statuses: Iterable[dict[str, Any]] = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((it for it in statuses if it["name"] == names.AGENT_CONTAINER), {})


def _serves(pod: Manifest) -> bool:
    """Whether the agent is ready, whatever the rest of its pod is."""
    return _condition(pod, "Ready").get("status") == "True" or bool(_agent_status(pod).get("ready"))


def _last_end(container: Manifest) -> dict[str, Any]:
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        if state.get("terminated"):
            return dict(state["terminated"])
    return {}


def _memory_limit(pod: Manifest, container: str) -> str:
    for it in pod["spec"]["containers"]:
        if it["name"] == container:
            return str(((it.get("resources") or {}).get("limits") or {}).get("memory", "none"))
    return "none"


def _time(text: str | None) -> datetime:
    return datetime.fromisoformat(text) if text else datetime.now(UTC)


def _sentence(words: str) -> str:
    """Return words that others wrote as one line that ends with a full stop."""
    line = " ".join(words.split())[:600]
    return line if line.endswith((".", "!", "?")) else f"{line}."
