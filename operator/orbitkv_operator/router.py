"""From something that happened to the keys that have to be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from orbitkv_crds import names
from orbitkv_operator.cluster.api import (
    CACHES,
    DAEMON_SETS,
    ENGINE_PODS,
    NAMESPACES,
    NODES,
    PODS,
    POOLS,
    RUNTIME_CLASSES,
    Manifest,
    Resource,
)
from orbitkv_operator.engines.pods import EnginePods
from orbitkv_operator.queue import Key, KeyedQueue
from orbitkv_operator.view import KINDS, Name, View, name_of

SETTLE_SECONDS: Final = 1.0
"""Events of pods and nodes, and of DaemonSets, which count their pods, come in bursts: they are looked at together."""
TOGETHER_SECONDS: Final = 0.3
"""So do cache namespaces when they are installed: a pool decides on all of them at one time."""


@dataclass
class Router:
    """From an event to what has to be looked at. Called from the watches' thread and from the audit."""

    view: View
    queue: KeyedQueue
    pods: EnginePods

    def everything(self) -> None:
        """Look at all that is known."""
        for pool in self.view.pools():
            self.queue.add(pool_key(pool["metadata"]["name"]))
        for cache in self.view.caches():
            self.queue.add(cache_key(*name_of(cache.manifest)))

    def changed(self, resource: Resource, manifest: Manifest, gone: bool) -> None:
        """An object has come, changed or gone."""
        if resource is ENGINE_PODS:
            if gone:
                self.gone(resource, name_of(manifest))
            else:
                self.pods.put(manifest)
                self.queue.add(pod_key(*name_of(manifest)), SETTLE_SECONDS)
        elif resource is RUNTIME_CLASSES:
            self._all_pools(SETTLE_SECONDS)
        elif resource not in KINDS:
            self._child(manifest, SETTLE_SECONDS if resource is DAEMON_SETS and not gone else 0.0)
        elif gone:
            if resource is PODS:
                self.view.put(resource, manifest)  # how it ended
            self.gone(resource, name_of(manifest))
        elif resource is PODS:
            if self.view.put(resource, manifest):
                self._child(manifest, SETTLE_SECONDS)
        else:
            matters = self.view.put(resource, manifest)
            self._concerns(resource, name_of(manifest), _pool_of(resource, manifest), matters)

    def gone(self, resource: Resource, name: Name) -> None:
        """An object is gone."""
        if resource is ENGINE_PODS:
            self.queue.add(pod_key(*name))
            ran_without = self.pods.drop(name).partition("/")
            if ran_without[2]:
                self.queue.add(cache_key(ran_without[0], ran_without[2]))
        elif resource is PODS:
            known = self.view.agent(name)
            if known is not None:
                self.view.drop(resource, name)
                self._child(known, SETTLE_SECONDS)
        elif resource is RUNTIME_CLASSES:
            self._all_pools(SETTLE_SECONDS)
        elif resource in KINDS:
            cache = self.view.cache(*name) if resource is CACHES else None
            self._concerns(resource, name, cache.pool if cache else "", self.view.drop(resource, name))
        else:  # what is left of a child is its name
            self.queue.add(pool_key(name[1].removeprefix(names.pool_object_name(""))))

    def _child(self, manifest: Manifest, delay: float) -> None:
        """Queue the pool that something belongs to."""
        pool = (manifest["metadata"].get("labels") or {}).get(names.LABEL_POOL)
        if pool:
            self.queue.add(pool_key(pool), delay)

    def _concerns(self, resource: Resource, name: Name, pool: str, matters: bool) -> None:
        """Queue the object itself and, if the change matters to others, these too. `pool`: whom a cache refers to."""
        if resource is POOLS:
            self.queue.add(pool_key(name[1]))
            if matters:
                self._all_pools()  # they may overlap no more, or anew
                self._caches_of(name[1])
        elif resource is CACHES:
            self.queue.add(cache_key(*name), TOGETHER_SECONDS)
            if matters:
                self.queue.add(pool_key(pool), TOGETHER_SECONDS)  # somebody may wait to delete it
                self._caches_of(pool)  # a guarantee may have become free
        elif resource is NODES and matters:
            self._all_pools(SETTLE_SECONDS)
        elif resource is NAMESPACES and matters:
            for concerned in {it.pool for it in self.view.caches() if name_of(it.manifest)[0] == name[1]}:
                self._caches_of(concerned)

    def _all_pools(self, delay: float = 0.0) -> None:
        for pool in self.view.pools():
            self.queue.add(pool_key(pool["metadata"]["name"]), delay)

    def _caches_of(self, pool: str) -> None:
        for cache in self.view.caches(pool=pool):
            self.queue.add(cache_key(*name_of(cache.manifest)), SETTLE_SECONDS)


def pool_key(name: str) -> Key:
    """Return the key of a pool."""
    return Key(POOLS.kind, name)


def cache_key(namespace: str, name: str) -> Key:
    """Return the key of a cache namespace."""
    return Key(CACHES.kind, name, namespace)


def pod_key(namespace: str, name: str) -> Key:
    """Return the key of an engine's pod."""
    return Key(ENGINE_PODS.kind, name, namespace)


def _pool_of(resource: Resource, manifest: Manifest) -> str:
    """Return the pool that a CacheNamespace refers to; of other kinds nothing."""
    if resource is not CACHES:
        return ""
    return str(((manifest.get("spec") or {}).get("poolRef") or {}).get("name") or "")
