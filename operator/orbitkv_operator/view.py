"""What the watches have shown of pools, cache namespaces, nodes, namespaces and agents' pods.

A pool is read again from the API when it is reconciled; from here comes what it is seen together with. Of what there
may be thousands of, no more is kept than is used.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pydantic import ValidationError

from orbitkv_crds import names
from orbitkv_crds.cachenamespace import CacheNamespace
from orbitkv_crds.model import describe_errors
from orbitkv_crds.stamps import PREFIX
from orbitkv_operator import gpu
from orbitkv_operator.cluster.api import CACHES, NAMESPACES, NODES, PODS, POOLS, Manifest, Resource
from orbitkv_operator.names import AGENT_LABELS

Name = tuple[str, str]
"""(namespace, name); no namespace for cluster-wide kinds."""

KINDS: Final = (POOLS, CACHES, NODES, NAMESPACES, PODS)
EVICTED: Final = "Evicted"
"""What a pod's status says once its node's kubelet has ended it for want of room."""
_DECISIVE: Final = (POOLS, CACHES, NAMESPACES)
"""Kinds of which it depends which claims a pool accepts."""
_STAYS_ON_PODS: Final = (
    "name",
    "namespace",
    "uid",
    "labels",
    "creationTimestamp",
    "deletionTimestamp",
    "ownerReferences",
)


class Observer(Protocol):
    """Learns of changes in the cluster."""

    def changed(self, resource: Resource, manifest: Manifest, gone: bool) -> None:
        """An object has come, changed or gone."""

    def gone(self, resource: Resource, name: Name) -> None:
        """An object is gone."""


def name_of(manifest: Manifest) -> Name:
    """Return under which name an object is kept here."""
    metadata = manifest["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


@dataclass(frozen=True)
class Cache:
    """A CacheNamespace as it was seen last."""

    manifest: Manifest
    model: CacheNamespace | None
    """None: it cannot be read."""
    problem: str
    """Why it cannot be read."""

    @classmethod
    def of(cls, manifest: Manifest) -> Cache:
        """Read an object."""
        try:
            return cls(manifest, CacheNamespace.model_validate(manifest), "")
        except ValidationError as error:
            return cls(manifest, None, describe_errors(error))

    @property
    def pool(self) -> str:
        """Name of the pool that it refers to."""
        reference = (self.manifest.get("spec") or {}).get("poolRef") or {}
        return str(reference.get("name") or "")


@dataclass(frozen=True)
class Namespace:
    """What is kept of a Namespace."""

    uid: str
    labels: dict[str, str]
    annotations: dict[str, str]
    """Ours only."""


@dataclass
class View:
    """Written by the watches and by reconciling, read by reconciling. The lock guards everything; nothing waits
    under it. What is handed out is never changed afterwards."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _objects: dict[Resource, dict[Name, Any]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    _evicted: dict[Name, Manifest] = field(default_factory=dict)
    """By pool and node: the agent's pod that was evicted last. It is gone from the cluster within a second."""
    _changes: int = 0
    """Raised by every change that may alter which claims a pool accepts."""

    def put(self, resource: Resource, manifest: Manifest) -> bool:
        """Keep an object; return whether what matters of it differs from what was known."""
        name, kept = name_of(manifest), _keep(resource, manifest)
        with self._lock:
            before = self._objects[resource].get(name)
            self._objects[resource][name] = kept
            if resource is PODS and kept["status"].get("reason") == EVICTED and "nodeName" in kept["spec"]:
                self._evicted[kept["metadata"]["labels"].get(names.LABEL_POOL, ""), kept["spec"]["nodeName"]] = kept
            differs = before is None or _essence(resource, before) != _essence(resource, kept)
            self._changes += differs and resource in _DECISIVE
            return differs

    def drop(self, resource: Resource, name: Name) -> bool:
        """Forget an object; return whether it was known."""
        with self._lock:
            known = self._objects[resource].pop(name, None) is not None
            self._changes += known and resource in _DECISIVE
            return known

    def names(self, resource: Resource) -> set[Name]:
        """Return the names of all objects of a kind; of kinds that are not kept here there are none."""
        with self._lock:
            return set(self._objects.get(resource, ()))

    @property
    def changes(self) -> int:
        """A number that differs whenever something has changed that decisions depend on."""
        with self._lock:
            return self._changes

    def pools(self) -> list[Manifest]:
        """Return all pools."""
        with self._lock:
            return list(self._objects[POOLS].values())

    def pool(self, name: str) -> Manifest | None:
        """Return a pool."""
        with self._lock:
            found: Manifest | None = self._objects[POOLS].get(("", name))
            return found

    def cache(self, namespace: str, name: str) -> Cache | None:
        """Return a CacheNamespace."""
        with self._lock:
            found: Cache | None = self._objects[CACHES].get((namespace, name))
            return found

    def caches(self, pool: str | None = None) -> list[Cache]:
        """Return the CacheNamespaces that refer to a pool, or all."""
        with self._lock:
            found = list(self._objects[CACHES].values())
        return [cache for cache in found if pool is None or cache.pool == pool]

    def nodes(self) -> dict[str, Manifest]:
        """Return all nodes by name: labels, taints, whether they are ready, and what they say of GPUs."""
        with self._lock:
            return {name: node for (_, name), node in self._objects[NODES].items()}

    def agent(self, name: Name) -> Manifest | None:
        """Return an agent's pod, as `agents` does."""
        with self._lock:
            found: Manifest | None = self._objects[PODS].get(name)
            return found

    def agents(self, pool: str) -> list[Manifest]:
        """Return the pods of a pool's agents, with as much of them as `kept_of_agent` says."""
        wanted = AGENT_LABELS | {names.LABEL_POOL: pool}
        with self._lock:
            found = list(self._objects[PODS].values())
        return [pod for pod in found if wanted.items() <= pod["metadata"]["labels"].items()]

    def evicted(self, pool: str) -> list[Manifest]:
        """Return the pods of a pool's agents that were evicted last, one a node, as they were then."""
        with self._lock:
            return [pod for (of, _), pod in self._evicted.items() if of == pool]

    def forget_evicted(self, pool: str) -> None:
        """A pool is gone."""
        with self._lock:
            self._evicted = {name: pod for name, pod in self._evicted.items() if name[0] != pool}

    def namespace_labels(self, name: str) -> dict[str, str] | None:
        """Return the labels of a namespace; None: it is not known."""
        found = self.namespace(name)
        return None if found is None else found.labels

    def namespace_annotations(self, name: str) -> dict[str, str]:
        """Return the annotations of a namespace that are ours."""
        found = self.namespace(name)
        return {} if found is None else found.annotations

    def namespace(self, name: str) -> Namespace | None:
        """Return a namespace; None: it is not known."""
        with self._lock:
            found: Namespace | None = self._objects[NAMESPACES].get(("", name))
            return found


def kept_of_agent(pod: Manifest) -> Manifest:
    """Return what is kept of an agent's pod: who and where it is, its images and limits, and its status."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    mark = (metadata.get("annotations") or {}).get(names.ANNOTATION_TEMPLATE_HASH)
    containers = [
        {field: it[field] for field in ("name", "image", "resources") if field in it}
        for it in spec.get("containers") or ()
    ]
    kept = {field: metadata[field] for field in _STAYS_ON_PODS if field in metadata}
    place = (
        "nodeName" if spec.get("nodeName") else "affinity"
    )  # a pod that waits says in the affinity where it is to go
    return {
        "metadata": kept
        | {
            "labels": dict(metadata.get("labels") or {}),
            "annotations": {names.ANNOTATION_TEMPLATE_HASH: mark} if mark else {},
        },
        "spec": {"containers": containers} | ({place: spec[place]} if place in spec else {}),
        "status": pod.get("status") or {},
    }


def _keep(resource: Resource, manifest: Manifest) -> Any:
    """Return what is kept of an object."""
    metadata = manifest["metadata"]
    if resource is PODS:
        return kept_of_agent(manifest)
    if resource is NAMESPACES:
        annotations = metadata.get("annotations") or {}
        ours = {key: value for key, value in annotations.items() if key.startswith(PREFIX)}
        return Namespace(metadata.get("uid") or "", dict(metadata.get("labels") or {}), ours)
    if resource is NODES:
        ready = [
            {"type": it["type"], "status": it["status"]}
            for it in (manifest.get("status") or {}).get("conditions") or ()
            if it["type"] == "Ready"
        ]
        return {
            "metadata": {"name": metadata["name"], "labels": dict(metadata.get("labels") or {})},
            "spec": {"taints": [dict(it) for it in (manifest.get("spec") or {}).get("taints") or ()]},
            "status": {"conditions": ready, **_gpu_facts(manifest.get("status") or {})},
        }
    kept = {**manifest, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}
    return Cache.of(kept) if resource is CACHES else kept


def _gpu_facts(status: Manifest) -> Manifest:
    """Return what a node's status says of GPUs: how many it offers, and the names of its runtime's handlers."""
    offered = (status.get("allocatable") or {}).get(gpu.RESOURCE)
    handlers = [{"name": it.get("name") or ""} for it in status.get("runtimeHandlers") or ()]
    facts = {"allocatable": {gpu.RESOURCE: offered} if offered is not None else None, "runtimeHandlers": handlers}
    return {name: value for name, value in facts.items() if value}


def _essence(resource: Resource, kept: Any) -> Any:
    """Return the part of an object whose change concerns other objects too."""
    if resource in (NODES, NAMESPACES, PODS):
        return kept
    manifest = kept.manifest if resource is CACHES else kept
    metadata = manifest["metadata"]
    essence = (metadata.get("uid"), metadata.get("generation"), metadata.get("deletionTimestamp"))
    if resource is POOLS:  # cache namespaces show whether their pool is available
        conditions = (manifest.get("status") or {}).get("conditions") or ()
        return *essence, [(it["type"], it["status"], it["reason"]) for it in conditions]
    return essence
