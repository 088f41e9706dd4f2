"""OrbitKV installed on a cluster by its chart, and the pools and namespaces that tests make on it."""

import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from e2e.support.helm import HelmError
from e2e.support.kubectl import KubectlError, Object, has_condition
from e2e.support.target import Target

RELEASE = "orbitkv"
OWN_NAMESPACE = "orbitkv-system"
FOREIGN_NAMESPACE = "orbitkv-test-system"
GROUP = "orbitkv.io"
VERSION = "v1alpha1"
HASTY = [
    {"name": f"ORBITKV_OPERATOR_{name}_SECONDS", "value": str(seconds)}
    for name, seconds in {"PROBE": 5, "SWEEP": 5, "PATIENCE": 10, "STATUS": 1, "CHECK": 3}.items()
]
"""What the operator is to do within minutes, it does within seconds in tests."""
SMALL: dict[str, Any] = {"operator": {"env": HASTY, "replicas": 1}, "webhook": {"replicas": 1}}
"""Values of the chart for most tests: this machine takes seconds to start each pod with Python."""
PRIVILEGED = {f"pod-security.kubernetes.io/{mode}": "privileged" for mode in ("enforce", "audit", "warn")}


def unique(what: str = "") -> str:
    """A name that no other test has."""
    return "-".join(["orbitkv-test", *([what] if what else []), secrets.token_hex(3)])


def namespace_object(name: str, labels: dict[str, str] | None = None) -> Object:
    """A Namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}}


def fake_node_object(name: str, labels: dict[str, str] | None = None) -> Object:
    """A Node whose kubelet KWOK plays (Cluster.start_kwok): pods that tolerate its taint "run"."""
    size = {"cpu": "8", "memory": "32Gi", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, **(labels or {})},
        },
        "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": size, "capacity": size},
    }


def pool_object(name: str, memory: str = "64Mi", **spec: Any) -> Object:
    """A ManagerPool in host mode. `spec` adds to its spec or replaces parts of it."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "ManagerPool",
        "metadata": {"name": name},
        "spec": {"gpu": {"access": "none"}, "memory": {"pool": memory}, **spec},
    }


def cache_object(name: str, namespace: str, pool: str, **spec: Any) -> Object:
    """A CacheNamespace. `spec` adds to its spec or replaces parts of it."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "CacheNamespace",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"poolRef": {"name": pool}, **spec},
    }


@dataclass
class Installation:
    """OrbitKV, installed in `namespace`. Pools made with `make_pool` are deleted by `clean_up`."""

    target: Target
    namespace: str
    _pools: list[str] = field(default_factory=list)
    _namespaces: list[str] = field(default_factory=list)

    def make_namespace(self, labels: dict[str, str] | None = None) -> str:
        """Makes a namespace for pods and CacheNamespaces, deleted by `clean_up`; returns its name."""
        name = unique()
        self._namespaces.append(name)
        self.target.kubectl.apply(namespace_object(name, labels))
        return name

    def make_pool(
        self,
        name: str | None = None,
        *,
        ready: float = 90,
        after: Iterable[Object] = (),
        before: Iterable[Object] = (),
        **spec: Any,
    ) -> str:
        """Makes a pool and waits until it is Ready, `ready` seconds at most (0: not at all); returns its name.

        It is applied in one go with other objects: after those in `after`, before those in `before`. `spec` is passed
        to `pool_object`.
        """
        name = name or unique("pool")
        self._pools.append(name)
        self.target.kubectl.apply(*after, pool_object(name, **spec), *before)
        if ready:
            self.wait_ready("managerpool", name, timeout=ready)
        return name

    def make_cache(self, namespace: str, pool: str, name: str | None = None, *, ready: float = 60, **spec: Any) -> str:
        """Makes a CacheNamespace and waits until it is Ready, as `make_pool` does."""
        name = name or unique("cache")
        self.target.kubectl.apply(cache_object(name, namespace, pool, **spec))
        if ready:
            self.wait_ready("cachenamespace", name, namespace, timeout=ready)
        return name

    def wait_ready(self, kind: str, name: str, namespace: str | None = None, *, timeout: float = 90) -> Object:
        """Waits for an object's Ready condition and returns the object."""
        return self.target.kubectl.wait(
            kind, name, has_condition("Ready"), f"{kind} {name} to be Ready", namespace=namespace, timeout=timeout
        )

    def agents(self, pool: str) -> dict[str, Object]:
        """The agents' pods of a pool that have a node and are not being deleted: node name to pod."""
        children = self.target.kubectl.get("daemonset", f"orbitkv-{pool}", self.namespace)
        if children is None:
            return {}
        labels = children["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pods = self.target.kubectl.list_all("pods", self.namespace, selector)
        there = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and "nodeName" in pod["spec"]]
        return {pod["spec"]["nodeName"]: pod for pod in there}

    def operators(self) -> list[Object]:
        """The operator's pods that are not being deleted."""
        deployment = self.target.kubectl.get("deployment", "orbitkv-operator", self.namespace)
        if deployment is None:
            return []
        labels = deployment["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pods = self.target.kubectl.list_all("pods", self.namespace, selector)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def leader(self) -> str:
        """The name of the operator's pod that acts; empty if none does."""
        lease = self.target.kubectl.get("lease", "orbitkv-operator", self.namespace)
        holder = str((lease or {"spec": {}})["spec"].get("holderIdentity") or "")
        names = [str(pod["metadata"]["name"]) for pod in self.operators()]
        return next((name for name in names if name in holder), "")

    def operator_logs(self) -> str:
        """What all of the operator's pods have logged."""
        names = [pod["metadata"]["name"] for pod in self.operators()]
        return "\n".join(self.target.kubectl.logs(name, self.namespace) for name in names)

    def part(self) -> "Installation":
        """The same installation with nothing made on it yet, so that `clean_up` of the one leaves the other's."""
        return Installation(self.target, self.namespace)

    def clean_up(self) -> None:
        """Deletes what tests made, CacheNamespaces first, and waits until pools and agents are gone.

        Namespaces go by themselves meanwhile: no other test has their names.
        """
        kubectl = self.target.kubectl
        for namespace in self._namespaces:
            with suppress(KubectlError):  # the kind may have gone with the test
                kubectl.run("delete", "cachenamespaces", "--all", f"--namespace={namespace}", "--wait=false")
        for namespace in self._namespaces:
            kubectl.delete("namespace", namespace, wait=0)
        for pool in self._pools:
            with suppress(KubectlError):
                # without it the pool is kept until the operator has counted that no cache namespace refers to it
                kubectl.run("annotate", "managerpool", pool, "--overwrite", f"{GROUP}/confirm-delete=true")
                kubectl.delete("managerpool", pool)
        for pool in self._pools:
            kubectl.wait_gone("daemonset", f"orbitkv-{pool}", self.namespace)
            labels = f"{GROUP}/pool={pool}"
            kubectl.until(
                lambda labels=labels: not kubectl.list_all("pods", self.namespace, labels),  # type: ignore[misc]
                f"the agents of {pool} to be gone",
            )
        self._pools.clear()
        self._namespaces.clear()


def remove_everything(target: Target, namespace: str = OWN_NAMESPACE) -> None:
    """Removes OrbitKV from the project's own cluster: objects, release, CRDs and namespace, whatever state it is in."""
    kubectl = target.kubectl
    for kind in ("cachenamespaces", "managerpools"):
        with suppress(KubectlError):
            every = ["--all-namespaces"] if kind == "cachenamespaces" else []
            kubectl.run("annotate", "managerpools", "--all", "--overwrite", f"{GROUP}/confirm-delete=true")
            kubectl.run("delete", f"{kind}.{GROUP}", "--all", *every, "--timeout=60s", timeout=90)
    for release in target.helm[3].releases(namespace):
        with suppress(HelmError):
            target.helm[3].uninstall(release, namespace)
    with suppress(KubectlError):  # the webhook's would serve for some more seconds
        kubectl.run("delete", "pods", "--all", f"--namespace={namespace}", "--grace-period=1", "--wait=false")
    for name in ("managerpools", "cachenamespaces"):
        kubectl.delete("crd", f"{name}.{GROUP}")
    kubectl.delete("namespace", namespace, wait=90)


@contextmanager
def installed(target: Target, values: dict[str, Any], helm: int = 3) -> Iterator[Installation]:
    """Installs OrbitKV with values of the chart, and removes it and all that tests made.

    Where it is installed on a cluster of somebody else's, that installation is used, and left alone.
    """
    kubectl = target.kubectl
    if target.own is None and kubectl.get("deployment", "orbitkv-operator", OWN_NAMESPACE) is not None:
        there = Installation(target, OWN_NAMESPACE)
        try:
            yield there
        finally:
            there.clean_up()
        return
    namespace = OWN_NAMESPACE if target.own is not None else FOREIGN_NAMESPACE
    if target.own is not None:
        remove_everything(target, namespace)
    installation = Installation(target, namespace)
    kubectl.apply(namespace_object(namespace, PRIVILEGED))
    try:
        try:
            chosen = {"images": {"registry": target.registry}, "operator": {"env": HASTY}, **values}
            target.helm[helm].install(RELEASE, namespace, chosen)
        except HelmError as error:
            # asked now, as all of it is removed before a failure is looked into
            pods = kubectl.run("describe", "pods", f"--namespace={namespace}")
            raise HelmError(f"{error}\n{pods[-6000:]}\n{installation.operator_logs()[-3000:]}") from None
        yield installation
    finally:
        installation.clean_up()
        if target.own is not None:
            remove_everything(target, namespace)
        else:
            target.helm[helm].uninstall(RELEASE, namespace)
            kubectl.delete("namespace", namespace)


class Installations:
    """The installation of a test run: kept from module to module as long as they want the same values of the chart."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._values: dict[str, Any] = {}
        self._open = ExitStack()
        self._there: Installation | None = None

    def get(self, values: dict[str, Any]) -> Installation:
        """OrbitKV, installed with these values; another installation is removed first."""
        if self._there is not None and values == self._values:
            return self._there
        self.end()
        self._there, self._values = self._open.enter_context(installed(self._target, values)), values
        return self._there

    def end(self) -> None:
        """Removes it, if it is there."""
        self._there = None
        self._open.close()

    def forget(self) -> None:
        """Leaves it as it is: the cluster went, and it with the cluster."""
        self._there = None
        self._open.pop_all()
