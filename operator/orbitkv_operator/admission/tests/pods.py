"""Pods and surroundings for tests and benches: the table of templates, a world, and how a patch is applied."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orbitkv_crds.stamps import PREFIX
from orbitkv_operator.admission.decide import Rules
from orbitkv_operator.view import Cache

Object = dict[str, Any]

RULES = Rules("0.1.0", "registry/payload:1", "orbitkv.io/uid-of-cluster")
NAMESPACE = "team"


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    pod: Object
    """Asks for the CacheNamespace `chat`."""
    chosen: str
    engine: str
    default: str
    args: str

    def asking(self, **annotations: str) -> Object:
        """The pod with further annotations under `orbitkv.io/`."""
        found = copy.deepcopy(self.pod)
        found["metadata"]["annotations"] |= {PREFIX + key.replace("_", "-"): it for key, it in annotations.items()}
        return found

    def silent(self) -> Object:
        """The pod with nothing but what chooses its container: it is left to the namespace's default."""
        found = copy.deepcopy(self.pod)
        del found["metadata"]["annotations"][PREFIX + "cache-namespace"]
        return found


@functools.cache
def table() -> tuple[Row, ...]:
    """The rows, in the order of the file."""
    rows = yaml.load(Path(__file__).with_name("templates.yaml").read_text(), yaml.CSafeLoader)
    return tuple(_row(each) for each in rows)


def _row(row: Object) -> Row:
    containers = [{"name": name, **fields} for name, fields in row["containers"].items()]
    ask = {"cache-namespace": "chat", **row.get("ask", {})}
    annotations = {PREFIX + key: value for key, value in ask.items()}
    pod = make_pod(containers, annotations, **row.get("pod", {}))
    return Row(row["name"], pod, row["chosen"], row["engine"], row["default"], row["args"])


def make_pod(containers: list[Object], annotations: Mapping[str, str] | None = None, **spec: Any) -> Object:
    """A pod as the apiserver sends it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "engine-", "annotations": dict(annotations or {}), "labels": {"app": "engine"}},
        "spec": {"serviceAccountName": "default", "containers": containers, **spec},
    }


@dataclass
class FakeWorld:
    """A world as data."""

    labels: dict[str, dict[str, str]] = field(default_factory=lambda: {NAMESPACE: {}})
    annotations: dict[str, dict[str, str]] = field(default_factory=dict)
    caches: dict[str, Object] = field(default_factory=dict)
    pools: dict[str, Object] = field(default_factory=dict)

    def namespace_labels(self, name: str) -> Mapping[str, str] | None:
        return self.labels.get(name)

    def namespace_annotations(self, name: str) -> Mapping[str, str]:
        return self.annotations.get(name, {})

    def cache(self, namespace: str, name: str) -> Cache | None:
        found = self.caches.get(f"{namespace}/{name}")
        return None if found is None else Cache.of(found)

    def pool(self, name: str) -> Object | None:
        return self.pools.get(name)


def patched(thing: Object, patch: list[Object]) -> Object:
    """The object after a patch of operations as we make them: "add" and "remove"."""
    changed = copy.deepcopy(thing)
    for operation in patch:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].removeprefix("/").split("/")
        ]
        where: Any = changed
        for part in parents:
            where = where[int(part)] if isinstance(where, list) else where[part]
        assert isinstance(where, dict), operation
        if operation["op"] == "remove":
            del where[last]
        else:
            assert operation["op"] == "add", operation
            where[last] = copy.deepcopy(operation["value"])
    return changed
