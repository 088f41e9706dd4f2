"""An API in memory, and objects to put into it."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from orbitkv_crds import names
from orbitkv_crds.cachenamespace import CacheNamespace
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_operator.cluster.api import (
    CACHES,
    DAEMON_SETS,
    NODES,
    POD_MONITORS,
    PODS,
    POOLS,
    ApiError,
    Manifest,
    Resource,
)
from orbitkv_operator.placement import placement_of, wanted
from orbitkv_operator.settings import Settings

RELEASE = "orbitkv-system"
SETTINGS = Settings(namespace=RELEASE, pod_name="operator-1", pod_ip="10.0.0.9", agent_image="registry/agent:1")

Key = tuple[Resource, str, str]


class FakeStream:
    """A watch from a version on; what a test puts into it comes out."""

    def __init__(self, since: str) -> None:
        self.since = since
        self._lines: SimpleQueue[bytes | ApiError | None] = SimpleQueue()

    def send(self, kind: str, thing: Manifest) -> None:
        """An event."""
        self._lines.put(json.dumps({"type": kind, "object": thing}).encode())

    def cut_off(self, status: int = 0) -> None:
        """The connection is lost."""
        self._lines.put(ApiError(status, "cut off"))

    def __iter__(self) -> Iterator[bytes]:
        while (line := self._lines.get()) is not None:
            if isinstance(line, ApiError):
                raise line
            yield line

    def end(self) -> None:
        """It ends, as the apiserver ends them, or as whoever reads wants."""
        self._lines.put(None)


class FakeApi:
    """Objects by kind, namespace and name. `writes` has every change; `before` is called ahead of each request."""

    def __init__(self) -> None:
        self.objects: dict[Key, Manifest] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.absent: set[Resource] = {POD_MONITORS}
        self.version = 1, 34
        self.before: Callable[[str, Resource], None] = lambda verb, resource: None
        self.admit: Callable[[Manifest], Manifest] = lambda manifest: manifest
        """What webhooks make of an object in a dry run."""
        self.streams: list[FakeStream] = []
        """The watches that were opened."""
        self._numbers = itertools.count(1)

    def _put(self, resource: Resource, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        key = resource, metadata.get("namespace") or "", metadata["name"]
        known = self.objects.get(key)
        stored = copy.deepcopy(manifest)
        fresh: Manifest = {
            "uid": f"uid-{next(self._numbers)}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "generation": 1,
        }
        kept = known["metadata"] if known else fresh | {name: metadata[name] for name in fresh if name in metadata}
        stored["metadata"] |= {name: kept[name] for name in fresh}
        if known is not None and {**known, "metadata": 0, "status": 0} != {**stored, "metadata": 0, "status": 0}:
            stored["metadata"]["generation"] += 1
        if known is not None:
            stored["metadata"]["resourceVersion"] = known["metadata"]["resourceVersion"]
            if known == stored:
                return known
        stored["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.objects[key] = stored
        return stored

    def add(self, resource: Resource, manifest: Manifest) -> Manifest:
        """Put an object there, as a user would."""
        return self._put(resource, manifest)

    def _write(self, verb: str, resource: Resource, name: str) -> None:
        self.before(verb, resource)
        self.writes.append((verb, resource.kind, name))

    def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        self.before("get", resource)
        return copy.deepcopy(self.objects.get((resource, namespace or "", name)))

    def list_all(self, resource: Resource, namespace: str | None = None, *, labels: str = "") -> list[Manifest]:
        self.before("list", resource)
        demands = [demand.split("=") for demand in labels.split(",") if demand]
        return [
            copy.deepcopy(it)
            for (kind, where, _), it in self.objects.items()
            if kind is resource
            and (namespace is None or where == namespace)
            and all((it["metadata"].get("labels") or {}).get(key) == value for key, value in demands)
        ]

    def list_metadata(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Manifest]:
        without = fields.removeprefix("status.phase!=")  # the only one that is used
        return [
            {"metadata": it["metadata"]}
            for it in self.list_all(resource, namespace, labels=labels)
            if not fields or (it.get("status") or {}).get("phase") != without
        ]

    def apply(self, resource: Resource, manifest: Manifest, *, subresource: str | None = None) -> Manifest:
        metadata = manifest["metadata"]
        self._write("apply" if subresource is None else f"apply {subresource}", resource, metadata["name"])
        known = self.objects.get((resource, metadata.get("namespace") or "", metadata["name"]))
        if subresource:
            if known is None:
                raise ApiError(404, "not found")
            if metadata.get("uid", known["metadata"]["uid"]) != known["metadata"]["uid"]:
                raise ApiError(409, "another uid")
            return self._put(resource, known | {subresource: manifest[subresource]})
        if known is None:
            return self._put(resource, manifest)
        merged = known | {key: value for key, value in manifest.items() if key != "metadata"}
        merged["metadata"] = {**known["metadata"], **metadata}
        return self._put(resource, merged)

    def each_metadata(self, resource: Resource) -> Iterator[Manifest]:
        return iter(self.list_metadata(resource))

    def list_to_watch(self, resource: Resource, *, labels: str = "", fields: str = "") -> tuple[list[Manifest], str]:
        names = {it["metadata"]["uid"] for it in self.list_metadata(resource, labels=labels, fields=fields)}
        found = [it for it in self.list_all(resource) if it["metadata"]["uid"] in names]
        return found, str(next(self._numbers))

    def stream(
        self, resource: Resource, since: str, *, labels: str = "", fields: str = "", silence_seconds: float
    ) -> FakeStream:
        self.before("watch", resource)
        self.streams.append(FakeStream(since))
        return self.streams[-1]

    def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, *, dry_run: bool = False
    ) -> Manifest:
        metadata = manifest.get("metadata") or {}
        if dry_run:
            self.before("dry-run", resource)
            return self.admit(copy.deepcopy(manifest))
        self._write("create", resource, metadata.get("name", ""))
        if (resource, namespace or "", metadata.get("name", "")) in self.objects:
            raise ApiError(409, "exists")
        return self._put(resource, manifest) if metadata else manifest

    def replace(self, resource: Resource, namespace: str | None, manifest: Manifest) -> Manifest:
        name = manifest["metadata"]["name"]
        self._write("update", resource, name)
        known = self.objects.get((resource, namespace or "", name))
        if known is None or manifest["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
            raise ApiError(409, "changed meanwhile")
        return copy.deepcopy(self._put(resource, manifest))

    def delete(self, resource: Resource, namespace: str | None, name: str, *, uid: str) -> None:
        self._write("delete", resource, name)
        known = self.objects.get((resource, namespace or "", name))
        if known is not None and known["metadata"]["uid"] == uid:
            del self.objects[resource, namespace or "", name]

    def server_version(self) -> tuple[int, int]:
        return self.version

    def serves(self, resource: Resource) -> bool:
        self.before("discover", resource)
        return resource not in self.absent

    # ----------------------------------------------------------------------------------- what a cluster does by itself

    def run_daemon_sets(self, ready: Callable[[str], bool] = lambda image: True) -> None:
        """Make and remove pods as the DaemonSet controller does; those with an image that is `ready` become so."""
        nodes = self.list_all(NODES)
        for daemon_set in self.list_all(DAEMON_SETS):
            template, uid = daemon_set["spec"]["template"], daemon_set["metadata"]["uid"]
            pods = [
                it
                for it in self.list_all(PODS)
                if any(owner["uid"] == uid for owner in it["metadata"]["ownerReferences"])
            ]
            running = {it["spec"]["nodeName"] for it in pods}
            meant = wanted(nodes, placement_of(template["spec"]), running)
            for pod in pods:
                if pod["spec"]["nodeName"] not in meant:
                    del self.objects[PODS, RELEASE, pod["metadata"]["name"]]
            for node in set(meant) - running:
                self.add(PODS, pod_of(daemon_set, node, ready(template["spec"]["containers"][0]["image"])))


def node(
    name: str, labels: dict[str, str] | None = None, *, ready: bool = True, taints: list[Manifest] | None = None
) -> Manifest:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": {"taints": taints or []},
        "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


_pods = itertools.count(1)


def pod_of(daemon_set: Manifest, node_name: str, ready: bool = True) -> Manifest:
    template = daemon_set["spec"]["template"]
    name = f"{daemon_set['metadata']['name']}-{next(_pods):05}"
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": "2026-01-01T00:00:00Z"},
    ]
    state: Manifest = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    if not ready:
        state = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    return {
        "metadata": {
            "name": name,
            "namespace": RELEASE,
            "labels": template["metadata"]["labels"],
            "annotations": template["metadata"]["annotations"],
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [{"kind": "DaemonSet", "uid": daemon_set["metadata"]["uid"], "controller": True}],
        },
        "spec": {**template["spec"], "nodeName": node_name},
        "status": {
            "phase": "Running" if ready else "Pending",
            "startTime": "2026-01-01T00:00:00Z",
            "conditions": conditions,
            "containerStatuses": [{"name": "agent", "started": ready, "restartCount": 0, "state": state}],
        },
    }


def pool_body(
    name: str = "main", created: str = "2026-01-01T00:00:00Z", uid: str | None = None, **spec: Any
) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ManagerPool",
        "metadata": {"name": name, "uid": uid or f"uid-of-{name}", "creationTimestamp": created, "generation": 1},
        "spec": {"gpu": {"access": "none"}, "memory": {"pool": "1Gi"}, **spec},
    }


def pool(name: str = "main", created: str = "2026-01-01T00:00:00Z", **spec: Any) -> ManagerPool:
    return ManagerPool.model_validate(pool_body(name, created, **spec))


def cache_body(name: str = "one", namespace: str = "team", pool: str = "main", **spec: Any) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "CacheNamespace",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-of-{namespace}-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "generation": 1,
        },
        "spec": {"poolRef": {"name": pool}, **spec},
    }


def cache(name: str = "one", namespace: str = "team", **spec: Any) -> CacheNamespace:
    return CacheNamespace.model_validate(cache_body(name, namespace, **spec))


def condition_of(status: Manifest, kind: str) -> Manifest:
    return next(it for it in status["conditions"] if it["type"] == kind)


__all__ = [
    "CACHES",
    "POOLS",
    "RELEASE",
    "SETTINGS",
    "FakeApi",
    "cache",
    "cache_body",
    "condition_of",
    "node",
    "pod_of",
    "pool",
    "pool_body",
]
