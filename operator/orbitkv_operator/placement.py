"""Which nodes a pod template may run on: the rules of the DaemonSet controller, on plain objects."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

from orbitkv_operator.cluster.api import Manifest

FIELDS: Final = ("nodeSelector", "affinity", "tolerations")
"""Fields of a pod's spec that say where it may run, and nothing about what it does there."""

_ALL: Final = ("NoSchedule", "NoExecute")


def _exists(key: str, effect: str) -> Manifest:
    return {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": effect}


_TOLERATED: Final = (
    _exists("not-ready", "NoExecute"),
    _exists("unreachable", "NoExecute"),
    _exists("disk-pressure", "NoSchedule"),
    _exists("memory-pressure", "NoSchedule"),
    _exists("pid-pressure", "NoSchedule"),
    _exists("unschedulable", "NoSchedule"),
)
"""What the DaemonSet controller adds to each of its pods."""
_DOWN: Final = (_exists("not-ready", "NoSchedule"), _exists("unreachable", "NoSchedule"))
"""Taints of nodes that come back."""


def placement_of(pod_spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a pod's spec that says where it may run."""
    return {field: pod_spec[field] for field in FIELDS if field in pod_spec}


def matching(nodes: Iterable[Manifest], placement: Mapping[str, Any]) -> list[str]:
    """Return the names of the nodes that `placement` is meant for, sorted, whether they are ready at present or not."""
    return sorted(node["metadata"]["name"] for node in nodes if _wants(node, placement, (*_TOLERATED, *_DOWN), _ALL))


def wanted(nodes: Iterable[Manifest], placement: Mapping[str, Any], running: Container[str]) -> list[str]:
    """Return the names of the nodes that should have a pod of a DaemonSet with `placement`, sorted.

    As the DaemonSet controller has it, a node that is not ready gets no new pod, and keeps the one that it has.

    Args:
        running: nodes that have one.
    """
    return sorted(
        node["metadata"]["name"]
        for node in nodes
        if _wants(node, placement, _TOLERATED, _ALL)
        or (node["metadata"]["name"] in running and _wants(node, placement, _TOLERATED, ("NoExecute",)))
    )


def _wants(
    node: Manifest, placement: Mapping[str, Any], tolerated: Iterable[Mapping[str, Any]], effects: Container[str]
) -> bool:
    """Return whether labels and taints (those with one of `effects`) let pods with `placement` onto a node."""
    labels: dict[str, str] = node["metadata"].get("labels") or {}
    selector = placement.get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    affinity = (placement.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required and not any(_term_holds(term, node, labels) for term in required.get("nodeSelectorTerms") or ()):
        return False
    tolerations = [*tolerated, *(placement.get("tolerations") or ())]
    taints = (node.get("spec") or {}).get("taints") or ()
    return all(
        any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in taints
        if taint["effect"] in effects
    )


def _term_holds(term: Mapping[str, Any], node: Manifest, labels: Mapping[str, str]) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False  # as in Kubernetes: an empty term matches nothing
    name = {"metadata.name": node["metadata"]["name"]}
    return all(_requirement_holds(it, labels) for it in expressions) and all(
        _requirement_holds(it, name) for it in fields
    )


def _requirement_holds(requirement: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    present, value = requirement["key"] in labels, labels.get(requirement["key"], "")
    values = requirement.get("values") or []
    match requirement["operator"]:
        case "In":
            return present and value in values
        case "NotIn":
            return not present or value not in values
        case "Exists":
            return present
        case "DoesNotExist":
            return not present
        case "Gt" | "Lt" as operator:
            try:
                number, bound = int(value), int(values[0])
            except (ValueError, IndexError):
                return False
            return number > bound if operator == "Gt" else number < bound
    return False


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    key = toleration.get("key")
    if key and key != taint["key"]:
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(key) and (toleration.get("value") or "") == (taint.get("value") or "")
