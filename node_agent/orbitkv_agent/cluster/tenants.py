"""The cache namespaces of the agent's pool: which there are, whether the pool takes them, and who may use them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from orbitkv_agent.cluster.apiserver import Pod
from orbitkv_agent.cluster.watcher import Known
from orbitkv_agent.config import NamespaceSettings
from orbitkv_agent.loop import Loop, Timer
from orbitkv_agent.sessions.namespaces import Namespaces, key_of
from orbitkv_crds.cachenamespace import CacheNamespace
from orbitkv_crds.guarantees import Claim, Decision, PoolLimits, decide
from orbitkv_crds.live import LiveSettings
from orbitkv_crds.model import describe_errors
from orbitkv_crds.names import engine_audience

logger = logging.getLogger(__name__)

_TOGETHER_S: Final = 0.2
"""Changes that come within this time are acted on together."""
_KEPT: Final = ("name", "namespace", "uid", "generation", "creationTimestamp")


@dataclass(frozen=True)
class NamespaceInfo:
    """A namespace of the cluster."""

    name: str
    uid: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Unreadable:
    """A CacheNamespace that this release cannot read; its pages stay, and nobody may attach."""

    full_name: str
    why: str


Parsed = CacheNamespace | Unreadable


@dataclass(frozen=True)
class Tenant:
    """A cache namespace of this pool.

    Attributes:
        key: the name under which the store keeps its pages; contains the uid.
        decision: whether the pool takes it; a guarantee that does not fit leaves it without one.
    """

    key: str
    object: CacheNamespace
    decision: Decision
    settings: NamespaceSettings


def kept_cache_namespace(raw: dict[str, Any]) -> dict[str, Any]:
    """What matters of a CacheNamespace: its status does not."""
    metadata = {key: raw["metadata"][key] for key in _KEPT if key in raw["metadata"]}
    return {"apiVersion": raw.get("apiVersion"), "kind": raw.get("kind"), "metadata": metadata, "spec": raw.get("spec")}


def kept_namespace(raw: dict[str, Any]) -> dict[str, Any]:
    """What matters of a namespace."""
    metadata = raw["metadata"]
    return {"metadata": {"name": metadata["name"], "uid": metadata["uid"], "labels": metadata.get("labels") or {}}}


def parse_cache_namespace(kept: dict[str, Any]) -> Parsed:
    """Read a CacheNamespace. (Items of a list come without kind and version.)"""
    body = {key: value for key, value in kept.items() if value is not None}
    try:
        return CacheNamespace.model_validate(body)
    except ValidationError as error:
        metadata = kept["metadata"]
        return Unreadable(f"{metadata.get('namespace')}/{metadata.get('name')}", describe_errors(error))


def parse_namespace(kept: dict[str, Any]) -> NamespaceInfo:
    """Read a namespace."""
    metadata = kept["metadata"]
    return NamespaceInfo(metadata["name"], metadata["uid"], metadata["labels"])


class Tenants:
    """What is known of cache namespaces, and its effect on the store. Used by the owner thread only.

    Args:
        pool: name of the ManagerPool.
        pool_bytes: what it has on this node.
        namespaces: the store's cache namespaces; only those that an engine attached to are there.

    Attributes:
        changed: called after each change, before pages are dropped.
        live: the pool's settings that change while the agent runs.
    """

    def __init__(self, loop: Loop, pool: str, pool_bytes: int, namespaces: Namespaces) -> None:
        self.changed: Callable[[], None] = _nothing
        self.live = LiveSettings()
        self._loop = loop
        self._pool = pool
        self._pool_bytes = pool_bytes
        self._namespaces = namespaces
        self._objects: Known[Parsed] = Known({}, "")
        self._cluster: Known[NamespaceInfo] = Known({}, "")
        self._labels: dict[str, Mapping[str, str]] = {}
        self._audience: str | None = None
        self._by_name: dict[str, Tenant] = {}
        self._unreadable: dict[str, Unreadable] = {}
        self._claims: dict[str, tuple[CacheNamespace, Mapping[str, str] | None, Claim]] = {}
        self._timer: Timer | None = None

    # ------------------------------------------------------------------------------------------- questions

    @property
    def known(self) -> bool:
        """Whether complete lists are known, from the apiserver or from disk."""
        return bool(self._objects.source and self._cluster.source)

    @property
    def listed(self) -> bool:
        """Whether the apiserver has listed everything since the agent's start."""
        return self._objects.source == self._cluster.source == "list"

    @property
    def audience(self) -> str | None:
        """What engines' tokens are made for; None while the cluster is not known."""
        return self._audience

    @property
    def problems(self) -> list[tuple[str, str]]:
        """What people should know: (reason in one word, words)."""
        known = (self._objects, self._cluster)
        found = [("ApiserverUnreachable", each.problem) for each in known if each.problem]
        found += [("StateNotSaved", each.unsaved) for each in known if each.unsaved]
        unreadable = self._unreadable.values()
        return found + [("CacheNamespaceUnreadable", f"{each.full_name}: {each.why}") for each in unreadable]

    def __iter__(self) -> Any:
        return iter(self._by_name.values())

    def find(self, full_name: str) -> Tenant | None:
        """The cache namespace of that name (`namespace/name`)."""
        return self._by_name.get(full_name)

    def refusal(self, tenant: Tenant, pod: Pod) -> str | None:
        """Why a pod may not use a cache namespace, in words; None if it may."""
        it = tenant.object
        if not tenant.decision.served:
            decision = tenant.decision
            return f"the pool does not take CacheNamespace {it.full_name} ({decision.reason}): {decision.message}"
        labels = self._labels.get(pod.namespace)
        why = it.spec.access.refusal(it.metadata.namespace, pod.namespace, labels, pod.service_account)
        return None if why is None else f"CacheNamespace {it.full_name}: {why}"

    def why_absent(self, full_name: str) -> str:
        """Why there is no such cache namespace, in words."""
        if full_name in self._unreadable:
            return f"CacheNamespace {full_name} cannot be read by this agent: {self._unreadable[full_name].why}"
        return (
            f"there is no CacheNamespace {full_name!r} that refers to ManagerPool {self._pool}; make one, or correct "
            "orbitkv.cache_namespace (`namespace/name`)"
        )

    # --------------------------------------------------------------------------------------------- changes

    def use(self, tenant: Tenant) -> None:
        """An engine attaches: from now on the store knows the cache namespace."""
        self._namespaces.set(tenant.key, tenant.settings)

    def take_cache_namespaces(self, known: Known[Parsed]) -> None:
        """A complete list of the pool's CacheNamespaces has come."""
        self._objects = known
        self._update_soon()

    def take_namespaces(self, known: Known[NamespaceInfo]) -> None:
        """A complete list of the cluster's namespaces has come."""
        self._cluster = known
        self._labels = {each.name: each.labels for each in known.objects.values()}
        system = next((each.uid for each in known.objects.values() if each.name == "kube-system"), None)
        self._audience = None if system is None else engine_audience(system)
        self._update_soon()

    def take_live(self, live: LiveSettings) -> None:
        """The pool's settings changed."""
        self.live = live
        self._update_soon()

    def stop(self) -> None:
        """Act on no change any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _update_soon(self) -> None:
        if not self._by_name and self.known:
            self._update()  # the first list: engines may be waiting for it
        elif self._timer is None:
            self._timer = self._loop.call_later(_TOGETHER_S, self._update)

    def _update(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.known:
            return
        objects = self._objects.objects
        self._unreadable = {each.full_name: each for each in objects.values() if isinstance(each, Unreadable)}
        readable = {uid: each for uid, each in objects.items() if isinstance(each, CacheNamespace)}
        decisions = decide(
            PoolLimits(self._pool, self._pool_bytes, self.live.max_quota_dram, self.live.allowed_namespaces),
            self._claims_of(readable),
        )
        before = self._by_name
        self._by_name = {}
        for uid, each in readable.items():
            self._by_name[each.full_name] = self._tenant(each, decisions[uid], before.get(each.full_name))
        # Sessions of what is gone end first, so that nothing holds its pages but copies in flight.
        self.changed()
        alive = {key_of(*_place(each), uid) for uid, each in objects.items()}
        for key in [key for key, _ in self._namespaces if key not in alive]:
            logger.info("cache namespace is gone: its pages are dropped", extra={"cache_namespace": key})
            self._namespaces.drop(key)
        for tenant in self._by_name.values():
            if self._namespaces.has(tenant.key):
                self._namespaces.set(tenant.key, tenant.settings)

    def _claims_of(self, objects: Mapping[str, CacheNamespace]) -> list[Claim]:
        claims: dict[str, tuple[CacheNamespace, Mapping[str, str] | None, Claim]] = {}
        for uid, each in objects.items():
            labels = self._labels.get(each.metadata.namespace)
            known = self._claims.get(uid)
            if known is not None and known[0] is each and known[1] is labels:
                claims[uid] = known
            else:
                claims[uid] = (each, labels, Claim.of(each, labels))
        self._claims = claims
        return [claim for _, _, claim in claims.values()]

    def _tenant(self, it: CacheNamespace, decision: Decision, before: Tenant | None) -> Tenant:
        if before is not None and before.object is it and before.decision == decision:
            return before
        settings = NamespaceSettings(
            quota=decision.quota,
            guaranteed=it.spec.quota.guaranteed_dram_bytes if decision.accepted else 0,
            insert_class=it.spec.retention.insert_class,
            reset_generation=it.spec.reset_generation,
            options=it.spec.engine_options,
        )
        return Tenant(key_of(it.metadata.namespace, it.metadata.name, it.metadata.uid), it, decision, settings)


def _nothing() -> None:
    """Nobody listens."""


def _place(each: Parsed) -> tuple[str, str]:
    if isinstance(each, Unreadable):
        namespace, _, name = each.full_name.partition("/")
        return namespace, name
    return each.metadata.namespace, each.metadata.name
