"""The cluster as the command sees it, with the rights of whoever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orbitkv_crds import names
from orbitkv_operator.cluster.api import CACHES, DEPLOYMENTS, PODS, POOLS, Api, ApiError, Manifest, Resource
from orbitkv_operator.names import AGENT_LABELS

_OPERATOR_LABELS: Final = "app.kubernetes.io/name=orbitkv,app.kubernetes.io/component=operator"


class Cluster:
    """Reads each thing once: a command lives for seconds.

    All methods raise ApiError: the API cannot be asked, or refuses (403: with the rights of whoever asks).

    Args:
        system: the namespace of OrbitKV's installation; "" looks for it.
    """

    def __init__(self, api: Api, system: str = "") -> None:
        self.api = api
        self._system = system
        self._lists: dict[tuple[Resource, str, str], list[Manifest]] = {}

    def system(self) -> str:
        """Return the namespace of OrbitKV's installation, or "" if there is none."""
        if not self._system:
            found = self.all(DEPLOYMENTS, "", _OPERATOR_LABELS)
            self._system = str(found[0]["metadata"]["namespace"]) if found else ""
        return self._system

    def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        """Return an object, or None if there is none."""
        return self.api.get(resource, namespace, name)

    def get_or_unknown(self, resource: Resource, namespace: str | None, name: str) -> tuple[Manifest | None, bool]:
        """Return an object, or None, and whether one's rights reach to it."""
        try:
            return self.get(resource, namespace, name), True
        except ApiError as error:
            if error.status != 403:
                raise
            return None, False

    def all(self, resource: Resource, namespace: str = "", labels: str = "") -> list[Manifest]:
        """Return all objects in a namespace ("": in all) that a label selector names."""
        key = resource, namespace, labels
        if key not in self._lists:
            self._lists[key] = self.api.list_all(resource, namespace or None, labels=labels)
        return self._lists[key]

    def pools(self) -> list[Manifest]:
        """Return all pools; none where the API does not have the kind."""
        return self.all(POOLS) if self.api.serves(POOLS) else []

    def caches(self) -> list[Manifest]:
        """Return all CacheNamespaces; none where the API does not have the kind."""
        return self.all(CACHES) if self.api.serves(CACHES) else []

    def agents(self) -> list[Manifest]:
        """Return the agents' pods that are not going."""
        selector = ",".join(f"{key}={value}" for key, value in AGENT_LABELS.items())
        pods = self.all(PODS, self.system(), selector)
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def condition(thing: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition of an object's status; empty if there is none of that type."""
    conditions: list[Mapping[str, Any]] = (thing.get("status") or {}).get("conditions") or []
    return next((it for it in conditions if it["type"] == kind), {})


def is_ready(pod: Manifest) -> bool:
    """Whether a pod is ready."""
    return condition(pod, "Ready").get("status") == "True"


def full_name(manifest: Manifest) -> str:
    """Return `namespace/name`, or the name of what has no namespace."""
    metadata = manifest["metadata"]
    return "/".join(filter(None, (metadata.get("namespace"), metadata["name"])))


def pool_of(manifest: Manifest) -> str:
    """Return the pool that a CacheNamespace refers to, or that an agent's pod belongs to."""
    label = (manifest["metadata"].get("labels") or {}).get(names.LABEL_POOL)
    return str(label or ((manifest.get("spec") or {}).get("poolRef") or {}).get("name") or "")
