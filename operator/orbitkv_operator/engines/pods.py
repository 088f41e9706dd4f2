"""The pods that asked for a cache, as the watch and the sweep have shown them, and which of them run without it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from orbitkv_crds import names
from orbitkv_crds.stamps import Injected, Note, read_injected, read_skip
from orbitkv_operator.admission.asks import from_lmcache
from orbitkv_operator.cluster.api import Manifest
from orbitkv_operator.view import Name, name_of

_ENDED: Final = ("Succeeded", "Failed")


@dataclass(frozen=True)
class EnginePod:
    """What is kept of a pod: of thousands, no more than is used.

    Attributes:
        asked: the annotation `cache-namespace` as it is, or what LMCache's label makes one; "" if there is none.
        node: where it runs; "" while it is not scheduled.
        began, ready_since: seconds since the epoch: since when its first container runs (pulling images may have taken
            long), and since when it is ready; `ready_since` is None while it is not.
        over: it has ended or is going.
        injected, skipped: the webhook's stamps; None: it did not write that one.
    """

    namespace: str
    name: str
    uid: str
    asked: str
    node: str
    began: float
    ready_since: float | None
    over: bool
    injected: Injected | None
    skipped: Note | None

    @classmethod
    def of(cls, manifest: Manifest) -> EnginePod:
        """Read a pod."""
        metadata, status = manifest["metadata"], manifest.get("status") or {}
        annotations: Mapping[str, Any] = metadata.get("annotations") or {}
        labels: Mapping[str, Any] = metadata.get("labels") or {}
        ready: Mapping[str, Any] = next((it for it in status.get("conditions") or () if it["type"] == "Ready"), {})
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            asked=str(from_lmcache(labels, annotations)[0].get(names.ANNOTATION_CACHE_NAMESPACE) or ""),
            node=str((manifest.get("spec") or {}).get("nodeName") or ""),
            began=_seconds(min(_starts(status), default=metadata.get("creationTimestamp"))),
            ready_since=_seconds(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
            over=bool(metadata.get("deletionTimestamp")) or status.get("phase") in _ENDED,
            injected=read_injected(annotations),
            skipped=read_skip(annotations),
        )

    @property
    def full_name(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def cache(self) -> str:
        """The CacheNamespace that it is to use, `namespace/name`; "" if it does not say one."""
        if self.injected is not None:
            return self.injected.namespace
        return self.asked if "/" in self.asked or not self.asked else f"{self.namespace}/{self.asked}"

    @property
    def reference(self) -> Manifest:
        """As much of the object as an event needs."""
        metadata = {"name": self.name, "namespace": self.namespace, "uid": self.uid}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


@dataclass(frozen=True)
class Without:
    """A pod that asked for a cache and runs without it."""

    pod: str
    """`namespace/name`."""
    reason: str
    """In one word, in kebab-case."""
    message: str


@dataclass
class EnginePods:
    """Written by the watch, the sweep and by reconciling, read by reconciling. The lock guards everything; nothing
    waits under it."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pods: dict[Name, EnginePod] = field(default_factory=dict)
    _without: dict[Name, tuple[str, Without]] = field(default_factory=dict)
    """By pod: the CacheNamespace, and why it is not used."""

    def put(self, manifest: Manifest) -> None:
        """Keep a pod."""
        pod = EnginePod.of(manifest)
        with self._lock:
            self._pods[name_of(manifest)] = pod

    def drop(self, name: Name) -> str:
        """Forget a pod; return the CacheNamespace that it ran without, or ""."""
        with self._lock:
            self._pods.pop(name, None)
            return self._without.pop(name, ("", None))[0]

    def get(self, name: Name) -> EnginePod | None:
        """Return a pod."""
        with self._lock:
            return self._pods.get(name)

    def names(self) -> set[Name]:
        """Return all pods' names."""
        with self._lock:
            return set(self._pods)

    def runs_without(self, name: Name, cache: str, why: Without | None) -> set[str]:
        """Note that a pod runs without its cache, or (None) that it does not; return the CacheNamespaces that this
        concerns."""
        with self._lock:
            before = self._without.get(name)
            if why is None:
                self._without.pop(name, None)
                return {before[0]} if before is not None else set()
            if before == (cache, why):
                return set()
            self._without[name] = cache, why
            return {cache} | ({before[0]} if before is not None else set())

    def without(self, cache: str) -> list[Without]:
        """Return the pods that run without a CacheNamespace (`namespace/name`), by name."""
        with self._lock:
            found = [why for (of, why) in self._without.values() if of == cache]
        return sorted(found, key=lambda it: it.pod)

    def counts(self) -> dict[str, int]:
        """Return how many pods run without their cache, by reason."""
        with self._lock:
            return dict(Counter(why.reason for _, why in self._without.values()))

    def still_missed(self, names_: Iterable[Name]) -> set[str]:
        """Forget the pods of earlier sweeps that are not among `names_`; return the CacheNamespaces concerned."""
        kept = set(names_)
        with self._lock:
            gone = [name for name in self._without if name not in kept and name not in self._pods]
            return {self._without.pop(name)[0] for name in gone}


def _starts(status: Mapping[str, Any]) -> Iterator[str]:
    """Give when each container began that runs: times in one format, which sort as words."""
    for each in status.get("containerStatuses") or ():
        running = (each.get("state") or {}).get("running") or {}
        if running.get("startedAt"):
            yield running["startedAt"]


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
