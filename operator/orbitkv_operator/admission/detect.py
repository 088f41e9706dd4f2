"""Which container of a pod is the engine's, and which engine it seems to be.

That is all that is read of a command line: what the engine is told there is its own business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from orbitkv_crds.stamps import ANNOTATION_CONTAINER, Note
from orbitkv_operator.admission.asks import ENGINES, Ask

Container = Mapping[str, Any]

SIDECARS: Final = frozenset(
    {
        # service meshes, and what platforms add before us
        "istio-proxy",
        "linkerd-proxy",
        "consul-dataplane",
        "envoy-sidecar",
        "envoy",
        "kuma-sidecar",
        "queue-proxy",
        "dapr-sidecar",
        "daprd",
        "vault-agent",
        "cloud-sql-proxy",
        "gke-gcsfuse-sidecar",
        "aws-otel-collector",
        "datadog-agent",
        "fluent-bit",
        "fluentbit",
        "otc-container",
        "opentelemetry-auto-instrumentation",
        "tailscale",
        "oauth-proxy",
        "kube-rbac-proxy",
        "autoscaler",  # KubeRay's, in the head's pod
    }
)
"""Names of containers that others put beside an engine: one of these is meant only if it is named."""

_START: Final = {
    "vllm": re.compile(
        r"(?<![\w.-])vllm(\.exe)?['\"]?\s+(serve|bench|run-batch|chat|complete)\b"
        r"|vllm\.(entrypoints|v1|scripts)\b|\bdynamo\.vllm\b|\bvllm\s*\.\s*LLM\b|from\s+vllm\s+import"
    ),
    "sglang": re.compile(
        r"\bsglang\.(launch_server|srt|bench)|(?<![\w.-])sglang['\"]?\s+(serve|launch)\b|\bdynamo\.sglang\b"
        r"|import\s+sglang\b|from\s+sglang\b"
    ),
}
"""How an engine is started on a command line."""
_MENTION: Final = {name: re.compile(rf"(?<![a-z0-9]){name}(?![a-z0-9])") for name in ENGINES}
_SHARED: Final = frozenset({"cpu", "memory", "ephemeral-storage"})

STARTS, NAMED, MENTIONS, NOTHING = 3, 2, 1, 0
"""What speaks for a container: its command line starts an engine; its image is called after one; a word of its command
line is one."""


@dataclass(frozen=True)
class Target:
    """The container of the engine."""

    index: int
    """Its place in `spec.containers`."""
    name: str
    engine: str
    """Empty: it does not show."""
    plainly: bool = False
    """Whether it shows in what is started, or was said: not only in some word of the command line."""


def detect(spec: Mapping[str, Any], ask: Ask, injected: int | None = None) -> Target | Note | None:
    """Return the engine's container; a Note says why it cannot be told; None: there is no engine, and none was named.

    Args:
        spec: the pod's. Init, native sidecar and ephemeral containers are never the engine's.
        injected: place of the container that was chosen before, where the pod is looked at again.
    """
    containers: list[Container] = list(spec["containers"])
    if ask.container:
        return _named(containers, ask)
    if injected is not None:
        return _target(containers, injected, ask)
    candidates = [index for index, container in enumerate(containers) if container["name"] not in SIDECARS]
    if not candidates:
        return None if ask.by_default else _unclear(containers, "every container has the name of a known sidecar")
    strength = {index: _evidence(containers[index])[0] for index in candidates}
    best = max(strength.values())
    if best == NOTHING:
        if ask.by_default:
            return None
        if len(candidates) == 1:
            return _target(containers, candidates[0], ask)
        return _unclear(containers, "none of them mentions an engine in image, command or args")
    found = [index for index in candidates if strength[index] == best]
    if len(found) > 1:  # an exporter may be called after the engine that it watches: it asks for no accelerator
        found = [index for index in found if _accelerated(containers[index])] or found
    if len(found) > 1:
        names = ", ".join(containers[index]["name"] for index in found)
        return _unclear(containers, f"{names} all look like an engine")
    return _target(containers, found[0], ask)


def _named(containers: list[Container], ask: Ask) -> Target | Note:
    for index, container in enumerate(containers):
        if container["name"] == ask.container:
            return _target(containers, index, ask)
    return Note(
        "target-container-not-found",
        f"{ANNOTATION_CONTAINER} names {ask.container!r}; the pod's containers are {_names(containers)}. Init "
        "containers and native sidecars cannot be named.",
    )


def _unclear(containers: list[Container], why: str) -> Note:
    return Note(
        "target-container-not-found",
        f"The pod has the containers {_names(containers)}, and {why}. Name the engine's: {ANNOTATION_CONTAINER}: NAME.",
    )


def _names(containers: Iterable[Container]) -> str:
    return ", ".join(container["name"] for container in containers)


def _target(containers: list[Container], index: int, ask: Ask) -> Target:
    strength, engine = _evidence(containers[index])
    return Target(index, containers[index]["name"], ask.engine or engine, bool(ask.engine) or strength >= NAMED)


def _evidence(container: Container) -> tuple[int, str]:
    """Return what speaks for a container, and for which engine."""
    line = " ".join(_words(container))
    for engine, pattern in _START.items():
        if pattern.search(line):
            return STARTS, engine
    image = str(container.get("image") or "").lower().partition("@")[0].rpartition("/")[2]
    for engine, pattern in _MENTION.items():
        if pattern.search(image.replace("_", "-")):
            return NAMED, engine
    lowered = line.lower()
    for engine, pattern in _MENTION.items():
        if pattern.search(lowered):
            return MENTIONS, engine
    return NOTHING, ""


def _words(container: Container) -> Iterator[str]:
    yield from container.get("command") or ()
    yield from container.get("args") or ()


def _accelerated(container: Container) -> bool:
    resources = container.get("resources") or {}
    asked = {*(resources.get("limits") or {}), *(resources.get("requests") or {})}
    return bool(resources.get("claims")) or any(
        name not in _SHARED and not name.startswith("hugepages-") for name in asked
    )
