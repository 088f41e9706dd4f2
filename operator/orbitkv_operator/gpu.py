"""The ways to the GPUs: what agents need for each, what of it is looked up first, and what agents then see of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orbitkv_crds.agent_api.reports_pb2 import Report
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_operator.cluster.api import Manifest
from orbitkv_operator.dra import Dra, Obstacle

RESOURCE: Final = "nvidia.com/gpu"
"""Under which nodes offer their GPUs."""
RUNTIME_CLASS: Final = "nvidia"
ALL_GPUS: Final = "all"
ALL_GPUS_BY_CDI: Final = "management.nvidia.com/gpu=all"
"""The device of the Container Device Interface that stands for all GPUs of a node, for programs that manage them."""
LOOK_AGAIN_SECONDS: Final = 40.0
"""How often is looked up again what no watch tells of, while all is well."""
NO_GPU: Final = "NoGPU"
"""Reason of a node whose agent sees no GPU."""
FIRST: Final = 10

AWAY: Final = (
    ("nvidia.com/gpu-driver-upgrade-state", ("pod-deletion-required", "drain-required", "pod-restart-required")),
    ("nvidia.com/mig.config.state", ("pending", "rebooting")),
)
"""Labels of nodes, and their values while an agent is in the way of another driver or another partition into MIG."""


@dataclass(frozen=True)
class Route:
    """A way to the GPUs.

    Attributes:
        name: as in `status.gpuRoute`.
        runtime_class: RuntimeClass of the pods; empty: the node's default.
        visible: value of NVIDIA_VISIBLE_DEVICES; empty: not set.
        privileged: whether the container has the node's own devices.
        claims: whether the pods have a claim with admin access (dra.py).
    """

    name: str
    runtime_class: str = ""
    visible: str = ""
    privileged: bool = False
    claims: bool = False


HOST: Final = Route("none")


def runtime_class_name(pool: ManagerPool) -> str:
    """Return the RuntimeClass that a pool would use."""
    return pool.spec.gpu.runtime_class_name or RUNTIME_CLASS


def asks_for_runtime_class(pool: ManagerPool) -> bool:
    """Return whether it matters if the RuntimeClass exists."""
    return pool.spec.gpu.access in ("auto", "runtimeClass", "runtimeClassCDI")


def involves_dra(pool: ManagerPool) -> bool:
    """Return whether a pool's agents have claims, or are to have them, or had them until now."""
    return pool.spec.gpu.access == "dra" or pool.status.gpu_route == "dra"


def find_route(
    pool: ManagerPool, runtime_class: Manifest | None, nodes: Iterable[Manifest], dra: Dra | None, namespace: str
) -> Route | Obstacle:
    """Decide how a pool's agents get at GPUs.

    Args:
        runtime_class: the RuntimeClass that `runtime_class_name` names; None: there is none.
        nodes: those that the pool is meant for.
        dra: what was found of Dynamic Resource Allocation; None: it was not looked for.
        namespace: the release namespace.
    """
    access: str = pool.spec.gpu.access
    name = runtime_class_name(pool)
    if access == "none":
        return HOST
    if access == "dra":
        missing = (dra or Dra(served=False)).missing((node["metadata"]["name"] for node in nodes), namespace)
        if missing:
            return Obstacle(missing[0].reason, " ".join(it.message for it in missing))
        return Route(access, claims=True)
    if access == "auto":
        # what was chosen stays: a RuntimeClass that comes or goes must not replace every agent
        before = pool.status.gpu_route
        chosen = before if before in ("runtimeClass", "defaultRuntime") else None
        access = chosen or ("defaultRuntime" if runtime_class is None else "runtimeClass")
    if access == "defaultRuntime":
        return Route(access, visible=ALL_GPUS)
    if access == "privileged":
        return Route(access, visible=ALL_GPUS, privileged=True)
    if runtime_class is None:
        return Obstacle(
            "RuntimeClassNotFound",
            f"There is no RuntimeClass {name}, which gpu.access {pool.spec.gpu.access} needs. NVIDIA's GPU operator "
            "makes it; or name yours in gpu.runtimeClassName, or set gpu.access to defaultRuntime where NVIDIA's "
            "runtime is the nodes' default.",
        )
    handler = str(runtime_class.get("handler") or "")
    without = sorted(node["metadata"]["name"] for node in nodes if _lacks(node, handler))
    if without:
        return Obstacle(
            "HandlerNotFound",
            f"RuntimeClass {name} stands for the handler {handler}, which the container runtime of {_listed(without)} "
            "does not have: configure it there (nvidia-ctk runtime configure), or leave these nodes out by "
            "nodeSelector.",
        )
    return Route(access, runtime_class=name, visible=ALL_GPUS_BY_CDI if access == "runtimeClassCDI" else ALL_GPUS)


def _lacks(node: Manifest, handler: str) -> bool:
    """Return whether a node says which handlers it has, and this is none of them."""
    handlers = [it.get("name", "") for it in (node.get("status") or {}).get("runtimeHandlers") or ()]
    return bool(handlers) and handler not in handlers


def devices_offered(node: Manifest) -> int | None:
    """Return how many GPUs a node offers; None: it does not say."""
    value = ((node.get("status") or {}).get("allocatable") or {}).get(RESOURCE)
    try:
        return None if value is None else int(value)
    except ValueError:
        return None


Verdict = tuple[bool | None, str, str]
"""Status, reason and message of the condition GPUAccess."""


def judge(
    route: Route,
    wanted: Sequence[str],
    serving: Iterable[str],
    blind: Sequence[str],
    nodes: Mapping[str, Manifest],
    reports: Iterable[Report],
) -> Verdict:
    """Say what agents see of GPUs.

    Args:
        wanted: nodes that are to have an agent.
        serving: nodes whose agent is ready.
        blind: nodes whose agent ended because it saw no GPU.
        nodes: all nodes by name.
    """
    if route == HOST:
        return True, "NotNeeded", "Host mode (gpu.access: none): agents serve engines on CPUs and need no GPU."
    if not wanted:
        return (
            False,
            "NoGPUNodes",
            "No node is matched. Without nodeSelector these are the nodes with the label nvidia.com/gpu.present: "
            '"true", which NVIDIA\'s GPU feature discovery sets; never those whose driver or MIG is being changed.',
        )
    way = f"runtimeClass {route.runtime_class}" if route.runtime_class else route.name
    if blind:
        return (
            False,
            "NoGPU",
            f"By way of {way} the agents of {_listed(blind)} see no GPU. {_HINTS[route.name]}",
        )
    seen = {report.node: report.gpus for report in reports if report.HasField("gpus")}
    differing = []
    for name in wanted:
        offered = devices_offered(nodes[name]) if name in nodes else None
        if name in seen and offered is not None and offered != seen[name]:
            differing.append(f"{name} offers {offered} and its agent sees {seen[name]}")
    if differing:
        more = f" (and {len(differing) - FIRST} more)" if len(differing) > FIRST else ""
        return (
            False,
            "DevicesDiffer",
            f"Agents must see every GPU of their node. {'; '.join(differing[:FIRST])}{more}. {_HINTS[route.name]}",
        )
    silent = [name for name in serving if name not in seen]
    if silent or not seen:
        return None, "Waiting", "Not all agents have reported yet which GPUs they see."
    count = sum(seen[name] for name in wanted if name in seen)
    return True, "DevicesSeen", f"The agents see {count} GPUs on {len(seen)} nodes, by way of {way}."


_HINTS: Final = {
    "runtimeClass": "See NVIDIA's container toolkit there; in its CDI mode, set gpu.access to runtimeClassCDI.",
    "runtimeClassCDI": "There must be a CDI specification of management.nvidia.com/gpu (nvidia-ctk cdi generate).",
    "defaultRuntime": "NVIDIA's runtime must be the default of containerd or CRI-O there; else make a RuntimeClass.",
    "dra": "See the pods of NVIDIA's DRA driver there, and the ResourceClaims of the agents' pods.",
    "privileged": "The driver's devices and libraries must be on the node itself.",
}


def keep_off(affinity: dict[str, Any]) -> dict[str, Any]:
    """Return an affinity that also keeps agents off nodes whose driver or MIG is being changed."""
    needed = [{"key": key, "operator": "NotIn", "values": list(values)} for key, values in AWAY]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    node = dict(affinity.get("nodeAffinity") or {})
    given = (node.get(required) or {}).get("nodeSelectorTerms") or ()
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *needed]}
        for term in given
        if term.get("matchExpressions") or term.get("matchFields")  # an empty term matches nothing, and must go on so
    ]
    node[required] = {"nodeSelectorTerms": terms if given else [{"matchExpressions": needed}]}
    return affinity | {"nodeAffinity": node}


def _listed(names: Sequence[str]) -> str:
    more = f" (and {len(names) - FIRST} more)" if len(names) > FIRST else ""
    return f"node{'' if len(names) == 1 else 's'} {', '.join(names[:FIRST])}{more}"
