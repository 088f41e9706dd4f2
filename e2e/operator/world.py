"""A control plane with two nodes on paper, and operators as processes that reach it through a proxy that can fail.

The apiserver, the DaemonSet controller and the garbage collector are real; what kubelets would do to agents' pods is
one thread here: it calls them ready. So everything that the operator does is real, and a rollout takes a second.
"""

from __future__ import annotations

import base64
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import programs
from e2e.cluster.control_plane import ControlPlane, standalone
from e2e.support.kubectl import Kubectl
from e2e.support.proxy import FaultProxy
from orbitkv_crds import names, schema
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_crds.names import pool_object_name
from orbitkv_operator import rights
from orbitkv_operator.builders import agents
from orbitkv_operator.builders.agents import Context
from orbitkv_operator.builders.children import CHILD_KINDS, children
from orbitkv_operator.cluster.api import (
    CACHES,
    LEASES,
    NODES,
    POD_MONITORS,
    PODS,
    POOLS,
    SECRETS,
    ApiError,
    KubernetesApi,
    Manifest,
    load_client,
)
from orbitkv_operator.cluster.compare import covers
from orbitkv_operator.main import main
from orbitkv_operator.settings import Settings

RELEASE = "orbitkv-system"
IMAGE = "registry/agent:1"
NODE_NAMES = ("node-a", "node-b")
KEPT_TAINT = "orbitkv-test/kept"
KEPT = 16
"""Nodes for pools that stay: eleven in the long form of the tests, and some for tests that are repeated."""
"""Nodes for pools that stay until the end: each has a taint that only its pool tolerates."""
USER = f"system:serviceaccount:{RELEASE}:{names.OPERATOR}"
FAST = {"LEASE_SECONDS": "3", "RENEW_SECONDS": "2", "RETRY_SECONDS": "0.3"}
"""A Lease that another replica takes over within seconds."""


@dataclass
class World:
    """What tests use. `api` is the administrator's way in, past the proxy."""

    plane: ControlPlane
    api: KubernetesApi
    kubectl: Kubectl
    proxy: FaultProxy
    folder: Path
    kubeconfig: Path
    """The operators' way in: through the proxy, with the rights of the chart."""
    replicas: dict[str, Replica] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    """Pools that stay until the end, with cache namespaces of their names."""
    grown: float = 0.0
    """When the test had ended that made the last of them."""
    noted: list[tuple[float, dict[str, str]]] = field(default_factory=list)
    """What belonged to them had which version at what time: at the end of each test."""
    _count: int = 0

    # ------------------------------------------------------------------------------------------ operators

    def start(self, **settings: str) -> Replica:
        """Start an operator; it is stopped at the end of the test."""
        self._count += 1
        replica = Replica(f"operator-{self._count}", self.folder, self.kubeconfig, settings)
        self.replicas[replica.name] = replica
        replica.start()
        return replica

    def leader(self) -> Replica | None:
        """Return the replica that has the Lease and lives."""
        lease = self.api.get(LEASES, RELEASE, names.OPERATOR)
        replica = self.replicas.get(((lease or {}).get("spec") or {}).get("holderIdentity") or "")
        return replica if replica is not None and replica.alive() else None

    def wait_leader(self, timeout: float = 60) -> Replica:
        """Wait until a replica acts."""
        wait(lambda: self.leader() is not None, "an operator to act", timeout)
        found = self.leader()
        assert found is not None
        return found

    def kill_leader(self) -> None:
        """Kill the replica that acts, and have the next one act at once instead of when the Lease runs out."""
        leader = self.leader()
        if leader is None:
            return
        leader.kill()
        lease = self.api.get(LEASES, RELEASE, names.OPERATOR)
        if lease is not None:
            lease["spec"]["holderIdentity"] = ""
            with suppress(ApiError):  # a standby was quicker
                self.api.replace(LEASES, RELEASE, lease)

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Start each operator again that has ended, as a Deployment does."""
        stop = threading.Event()

        def revive() -> None:
            while not stop.wait(0.2):
                for replica in self.replicas.values():
                    if not replica.alive():
                        replica.start()

        thread = threading.Thread(target=revive, name="revive")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def stop_all(self) -> None:
        """Stop all operators."""
        for replica in self.replicas.values():
            replica.stop()
        self.replicas.clear()

    # ------------------------------------------------------------------------------------------ objects

    def pool(self, name: str, **spec: Any) -> None:
        """Make a pool, or change its spec."""
        body = {"gpu": {"access": "none"}, "memory": {"pool": "64Mi"}, **spec}
        self.kubectl.apply(
            {"apiVersion": names.API_VERSION, "kind": "ManagerPool", "metadata": {"name": name}, "spec": body}
        )

    def cache(self, name: str, pool: str, **spec: Any) -> None:
        """Make a cache namespace in the namespace `default`, or change its spec."""
        body = {"poolRef": {"name": pool}, **spec}
        metadata = {"name": name, "namespace": "default"}
        self.kubectl.apply(
            {"apiVersion": names.API_VERSION, "kind": "CacheNamespace", "metadata": metadata, "spec": body}
        )

    def next_kept(self) -> tuple[str, dict[str, Any]]:
        """Return the name of a pool that stays when its test ends, and the spec that gives it a node of its own."""
        assert len(self.kept) < KEPT, "no node is left for another pool that stays"
        name = f"kept-{len(self.kept)}"
        self.kept.append(name)
        toleration = {"key": KEPT_TAINT, "operator": "Equal", "value": name, "effect": "NoSchedule"}
        return name, {"nodeSelector": {"zone": name}, "tolerations": [toleration]}

    def note_versions(self) -> None:
        """Note the versions of what belongs to kept pools."""
        self.noted.append((time.monotonic(), self.kept_versions()))

    def kept_versions(self) -> dict[str, str]:
        """Return the resourceVersion of all that belongs to kept pools."""
        names = [*self.kept, *map(pool_object_name, self.kept)]
        return {what: version for what, version in self.versions().items() if what.rpartition("/")[2] in names}

    def observed(self, cache: str) -> bool:
        """Whether the status of a cache namespace is about its newest spec."""
        found = self.api.get(CACHES, "default", cache) or {"metadata": {"generation": 0}}
        return bool((found.get("status") or {}).get("observedGeneration") == found["metadata"]["generation"])

    def pods(self, pool: str) -> dict[str, str]:
        """Return the uid of each node's agent."""
        found = self.api.list_all(PODS, RELEASE, labels=f"{names.LABEL_POOL}={pool}")
        return {agents_node(pod): pod["metadata"]["uid"] for pod in found}

    def off(self, pool: str) -> str:
        """Return what of a pool is not yet as it should be, in words; empty: it has converged."""
        raw = self.api.get(POOLS, None, pool)
        if raw is None:
            return self.left_over(pool)
        model = ManagerPool.model_validate(raw)
        for child in children(model, self.context(), self.served(), agents.placement_for(model)):
            live = self.api.get(child.resource, RELEASE, pool_object_name(pool))
            if child.manifest is None:
                if live is not None:
                    return f"{child.resource.kind} is still there"
            elif not covers(live, child.manifest):
                return f"{child.resource.kind} is not what the builder makes"
        wanted = agents.template_hash(model, self.context())
        found = self.api.list_all(PODS, RELEASE, labels=f"{names.LABEL_POOL}={pool}")
        old = [it for it in found if it["metadata"]["annotations"][names.ANNOTATION_TEMPLATE_HASH] != wanted]
        if old:
            return f"{len(old)} agents are of an earlier template"
        status = raw.get("status") or {}
        if status.get("observedGeneration") != raw["metadata"]["generation"]:
            return "observedGeneration is not the generation"
        ready = next(it for it in status["conditions"] if it["type"] == "Ready")
        return "" if ready["status"] == "True" else f"Ready is not True: {ready['message']}"

    def left_over(self, pool: str) -> str:
        """Return what is left of a deleted pool."""
        name = pool_object_name(pool)
        left = [kind.kind for kind in self.served() if self.api.get(kind, RELEASE, name) is not None]
        return f"left: {', '.join(left)}" if left else ""

    def wait_converged(self, pool: str, timeout: float = 90) -> None:
        """Wait until a pool's objects are the builders' output and its status says so; or all of them are gone."""
        wait(lambda: not self.off(pool), lambda: f"pool {pool} to converge: {self.off(pool)}", timeout)

    def context(self) -> Context:
        """Return what the operators' builders see."""
        secret = self.api.get(SECRETS, RELEASE, names.CERTIFICATES_SECRET)
        bundle = decode((secret or {}).get("data", {}).get("ca.crt", ""))
        return Context(Settings(namespace=RELEASE, pod_name="x", agent_image=IMAGE), bundle)

    def served(self) -> set[Any]:
        """Return the kinds of children that this cluster has."""
        return {kind for kind in CHILD_KINDS if kind is not POD_MONITORS}

    def versions(self) -> dict[str, str]:
        """Return the resourceVersion of everything that operators write, but for the Lease that they renew."""
        kinds = [*self.served(), POOLS, CACHES, SECRETS]
        return {
            f"{kind.kind} {it['metadata'].get('namespace', '')}/{it['metadata']['name']}": it["metadata"][
                "resourceVersion"
            ]
            for kind in kinds
            for it in self.api.list_metadata(kind)
        }

    def requests(self) -> list[dict[str, Any]]:
        """Return what the operators have asked for, from the apiserver's audit log."""
        with self.plane.audit_log.open() as file:
            lines = [json.loads(line) for line in file]
        return [line for line in lines if line["user"]["username"] == USER]


_PROCESSES = multiprocessing.get_context("forkserver")
"""Operators are forked from a process that has imported everything: each starts in an instant."""
_PROCESSES.set_forkserver_preload(["e2e.operator.world", "orbitkv_operator.operator", "orbitkv_operator.main"])


def operate(environment: dict[str, str], log: str) -> None:
    """Be an operator, with these variables, until the end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the tests
    os.environ.update(environment)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.exit(main([]))


@dataclass
class Replica:
    """An operator as a process."""

    name: str
    folder: Path
    kubeconfig: Path
    settings: dict[str, str]
    process: Any = None
    probes: int = 0

    @property
    def log(self) -> Path:
        """Where it writes."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start it, again too."""
        values = {
            "NAMESPACE": RELEASE,
            "POD_NAME": self.name,
            "POD_IP": "10.0.0.1",  # nobody is there; agents would report to it
            "AGENT_IMAGE": IMAGE,
            "METRICS_PORT": "0",
            "PROBES_PORT": "0",
            "REPORTS_PORT": "0",
            **FAST,
            **self.settings,
        }
        environment = {f"ORBITKV_OPERATOR_{name}": value for name, value in values.items()}
        environment["KUBECONFIG"] = str(self.kubeconfig)
        self.process = _PROCESSES.Process(target=operate, args=(environment, str(self.log)), daemon=True)
        self.process.start()
        self.probes = 0

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and bool(self.process.is_alive())

    def exit_code(self) -> int | None:
        """Return how the process has ended; None: it runs."""
        return None if self.process is None else self.process.exitcode

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def stop(self) -> None:
        """Ask it to end, and wait."""
        if self.process is not None:
            self.process.terminate()
            self.process.join(30)
            if self.alive():
                self.kill()

    def entries(self) -> list[dict[str, Any]]:
        """Return what it has logged."""
        found: list[dict[str, Any]] = []
        if not self.log.exists():
            return found
        for line in self.log.read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def probe(self, path: str) -> tuple[int, str]:
        """Ask /livez or /readyz; 0: nobody answers."""
        if not self.probes:
            started = [it for it in self.entries() if it["event"] == "starting"]
            self.probes = started[-1]["probes_port"] if started else 0
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.probes}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""


def wait(holds: Callable[[], bool], what: str | Callable[[], str], timeout: float = 60) -> None:
    """Wait until `holds`; else fail with what was waited for."""
    deadline = time.monotonic() + timeout
    while True:
        with suppress(ApiError):  # the apiserver may be away
            if holds():
                return
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what if isinstance(what, str) else what()}")
        time.sleep(0.2)


def agents_node(pod: Manifest) -> str:
    """Return the node that a DaemonSet's pod is made for."""
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return str(affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])


def decode(text: str) -> str:
    """Return what base64 stands for."""
    return base64.b64decode(text).decode()


@contextmanager
def running(folder: Path) -> Iterator[World]:
    """Run a control plane with nodes, roles and CRDs, and a proxy in front of it."""
    built = programs.ensure(programs.CLUSTER[:1])
    with standalone(built["kube-apiserver"], folder) as plane:
        kubectl = Kubectl(built["kubectl"], plane.kubeconfig)
        api = KubernetesApi(client(plane.kubeconfig))
        manager = plane.kubeconfig_for("controller-manager", "system:kube-controller-manager", "system:masters")
        plane.processes.start(
            "controller-manager",
            [
                built["kube-controller-manager"],
                f"--kubeconfig={manager}",
                f"--service-account-private-key-file={plane.authority.folder / 'service-accounts.key'}",
                f"--root-ca-file={plane.authority.certificate}",
                "--leader-elect=false",
                "--secure-port=0",
                "--controllers=daemonset-controller,garbage-collector-controller,namespace-controller",
            ],
        )
        prepare(kubectl, api)
        token = kubectl.run("create", "token", names.OPERATOR, f"--namespace={RELEASE}", "--duration=24h").strip()
        stop = threading.Event()
        kubelets = threading.Thread(target=call_ready, args=(api, stop), name="kubelets")
        with FaultProxy(plane.url, plane.authority.certificate) as proxy:
            kubelets.start()
            try:
                yield World(
                    plane, api, kubectl, proxy, folder, token_config(folder / "operator.kubeconfig", proxy.url, token)
                )
            finally:
                stop.set()
                kubelets.join()
                plane.processes.stop("controller-manager", signal.SIGKILL)


def client(kubeconfig: Path) -> Any:
    """Return a client for the cluster that a kubeconfig names."""
    return load_client(str(kubeconfig))


def token_config(path: Path, server: str, token: str) -> Path:
    """Write a kubeconfig with a token."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))
    return path


def prepare(kubectl: Kubectl, api: KubernetesApi) -> None:
    """Make what the chart and a cluster bring: nodes, CRDs, the PriorityClass, and the operator with its rights."""
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": RELEASE}})
    kubectl.run(
        "apply",
        "--server-side",
        "-f",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": schema.crds()}),
    )
    kubectl.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": names.AGENT_PRIORITY_CLASS},
            "value": 1000,
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": names.OPERATOR, "namespace": RELEASE}},
        *roles(),
    )
    kept = [f"kept-{number}" for number in range(KEPT)]
    for name in (*NODE_NAMES, *kept):
        labels = {"kubernetes.io/hostname": name, "zone": name if name in kept else name[-1], "here": "yes"}
        kubectl.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
        ready = [{"type": "Ready", "status": "True", "reason": "Test", "message": "on paper"}]
        kubectl.patch("node", name, {"status": {"conditions": ready}}, subresource="status")
        taint = {"key": KEPT_TAINT, "value": name, "effect": "NoSchedule"}
        kubectl.patch("node", name, {"spec": {"taints": [taint] if name in kept else None}})
    wait(lambda: len(api.list_all(NODES)) == len(NODE_NAMES) + KEPT, "the nodes", 20)


def roles() -> list[Manifest]:
    """Return the rights of the operator, as the chart gives them."""
    subject = [{"kind": "ServiceAccount", "name": names.OPERATOR, "namespace": RELEASE}]
    found = []
    for kind, rules in (("ClusterRole", rights.CLUSTER_RULES), ("Role", rights.NAMESPACE_RULES)):
        metadata = {"name": names.OPERATOR} | ({"namespace": RELEASE} if kind == "Role" else {})
        group = "rbac.authorization.k8s.io"
        found.append(
            {
                "apiVersion": f"{group}/v1",
                "kind": kind,
                "metadata": metadata,
                "rules": [rule.as_policy_rule() for rule in rules],
            }
        )
        found.append(
            {
                "apiVersion": f"{group}/v1",
                "kind": f"{kind}Binding",
                "metadata": metadata,
                "roleRef": {"apiGroup": group, "kind": kind, "name": names.OPERATOR},
                "subjects": subject,
            }
        )
    return found


def call_ready(api: KubernetesApi, stop: threading.Event) -> None:
    """Call each agent's pod ready, until `stop`; those with a bad image stay as they are."""
    while not stop.wait(0.3):
        with suppress(ApiError):
            for pod in api.list_all(PODS, RELEASE):
                conditions = (pod.get("status") or {}).get("conditions") or ()
                if any(it["type"] == "Ready" and it["status"] == "True" for it in conditions):
                    continue
                metadata = {key: pod["metadata"][key] for key in ("name", "namespace")}
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                ready = [{"type": "Ready", "status": "True", "lastTransitionTime": now}]
                body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"conditions": ready}}
                with suppress(ApiError):
                    api.apply(PODS, body, subresource="status")
