"""What the operator costs where a thousand nodes report: to itself, and to the apiserver.

Nodes are played by KWOK and agents by `bench.operator_agents`; operator and apiserver are real, and the operator runs
in a pod, installed by the chart. One pool, as many CacheNamespaces as nodes, each in use on ten of them.
`ORBITKV_BENCH_NODES` makes it smaller and `ORBITKV_BENCH_SECONDS` the time of rest shorter than ten minutes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench import operator_cluster as on
from bench.figures import Figure, percentile, say
from bench.operator_agents import Agent, Cache, Fleet
from e2e.cluster.cluster import Cluster
from e2e.support.installation import Installation, cache_object, installed
from e2e.support.kubectl import has_condition
from e2e.support.target import Target, connect
from images import build
from orbitkv_crds import names
from orbitkv_operator.cluster.api import (
    CACHES,
    CONFIG_MAPS,
    DAEMON_SETS,
    ENDPOINT_SLICES,
    PODS,
    KubernetesApi,
    Manifest,
    load_client,
)

NODES: Final = int(os.environ.get("ORBITKV_BENCH_NODES", "1000"))
REST: Final = float(os.environ.get("ORBITKV_BENCH_SECONDS", "600"))
POOL: Final = "bench"
BASELINE: Final = "bench-baseline"
CACHES_A_NODE: Final = min(10, NODES)
NAMESPACES: Final = 10
WATCHED: Final = 20
"""CacheNamespaces whose engines go and come while it is waited for."""
WRITES_A_SECOND: Final = 3
"""Statuses that the operator writes in all: so long do the first ones of all objects take."""
RECONCILED: Final = ("ManagerPool", "CacheNamespace")


def run() -> list[Figure]:
    """Measure on the project's own cluster; nothing, and it is said, where that does not run."""
    if Cluster.found() is None:
        say("  without a cluster (make cluster) there is nothing to measure")
        return []
    with connect() as target:
        assert target.own is not None
        build.build()
        build.load(target.own)
        # as it is by default; the webhook only stands by here, and what it asks counts as well
        with installed(target, {"operator": {"env": []}}) as installation, on.fake_nodes(target.own):
            return _Bench(target, target.own, installation).run()


@dataclass
class _Bench:
    """One run, and what its steps hand on."""

    target: Target
    cluster: Cluster
    installation: Installation

    def __post_init__(self) -> None:
        self.kubectl = self.target.kubectl
        self.namespace = self.installation.namespace
        self.client: Any = load_client(str(self.target.kubeconfig))
        self.api = KubernetesApi(self.client)
        self.nodes = [f"bench-{number}" for number in range(NODES)]
        self.caches: list[Cache] = []
        self.began = time.monotonic()

    def run(self) -> list[Figure]:
        """All steps, in order."""
        self.say(f"{NODES} nodes")
        on.make_nodes(self.kubectl, self.api, self.nodes)
        found = self.agents_created()
        self.say(f"{NODES} CacheNamespaces")
        self.make_caches()
        fleet = self.fleet()
        statuses = on.Statuses(self.client)
        statuses.start()
        try:
            found.append(self.first_reports(fleet))
            self.settle()
            found += self.rest(fleet, statuses)
            found.append(self.condition(fleet, statuses))
            found += self.churn(fleet)
            say(f"    {fleet.pushed} reports were taken, {how_others_fared(fleet)}")
        finally:
            statuses.stop()
            fleet.close()
        found += self.reconciles()
        replicas = on.memory(self.installation)
        say(f"    memory of the replicas: {', '.join(f'{each:.0f} MiB' for each in replicas.values())}")
        found.append(Figure("operator_mib", max(replicas.values()), "MiB", bound=500))
        self.say("everything goes")
        self.remove()
        return found

    def remove(self) -> None:
        """Remove the pool while its nodes are still played: without them a thousand pods go slowly."""
        for namespace in sorted({cache.namespace for cache in self.caches}):
            self.kubectl.run(
                "delete", "cachenamespaces", "--all", f"--namespace={namespace}", "--wait=false", timeout=300
            )
        self.kubectl.run("annotate", "managerpool", POOL, f"{names.ANNOTATION_CONFIRM_DELETE}=true", "--overwrite")
        self.kubectl.delete("managerpool", POOL)
        on.wait(lambda: self.left(f"{names.LABEL_POOL}={POOL}"), "the pool's pods to be gone", interval=2)

    def say(self, what: str) -> None:
        """Progress, with the time since the start."""
        say(f"  {time.monotonic() - self.began:5.0f} s: {what}")

    # ---------------------------------------------------------------------------------------------------------- agents

    def agents_created(self) -> list[Figure]:
        """Time how long the pool's agents take to be there, and the same DaemonSet made by kubectl; leave the pool."""
        nowhere = {"nodeSelector": {on.LABEL: "nowhere"}}
        self.installation.make_pool(POOL, ready=0, **self.pool() | nowhere)
        daemon_set = self.kubectl.wait(
            "daemonset", names.pool_object_name(POOL), lambda _: True, "the pool's DaemonSet", namespace=self.namespace
        )
        self.say("the DaemonSet made by kubectl")
        self.kubectl.apply(baseline(daemon_set))
        created = on.until_daemon_set(self.api, self.namespace, BASELINE, "currentNumberScheduled", NODES)
        ready = created + on.until_daemon_set(self.api, self.namespace, BASELINE, "numberReady", NODES)
        self.say(f"created in {created:.1f} s, ready in {ready:.1f} s; they go")
        self.kubectl.delete("daemonset", BASELINE, self.namespace, wait=0)
        self.kubectl.delete("managerpool", POOL)
        self.kubectl.wait_gone("daemonset", names.pool_object_name(POOL), self.namespace)
        on.wait(lambda: self.left(f"{names.LABEL_POOL}={BASELINE}"), "the DaemonSet's pods to be gone", interval=2)
        self.say("the pool")
        began = on.usage(self.cluster, self.installation)
        self.installation.make_pool(POOL, ready=0, **self.pool())
        child = names.pool_object_name(POOL)
        made = on.wait(lambda: self.without(child), f"DaemonSet {child}", interval=0.05)
        mine = made + on.until_daemon_set(self.api, self.namespace, child, "currentNumberScheduled", NODES)
        mine_ready = mine + on.until_daemon_set(self.api, self.namespace, child, "numberReady", NODES)
        operator, apiserver = on.cores(began, on.usage(self.cluster, self.installation))
        self.say(
            f"DaemonSet after {made:.1f} s, created in {mine:.1f} s, ready in {mine_ready:.1f} s, meanwhile "
            f"{operator:.2f} cores of operator and {apiserver:.2f} of apiserver"
        )
        return [
            Figure("all_agents_created_s", mine, "s", baseline=created, bound=1.2 * created),
            Figure("all_agents_ready_s", mine_ready, "s", baseline=ready),
        ]

    def pool(self) -> Manifest:
        """Return what the pool's spec says."""
        return {
            "memory": "128Gi",
            "gpu": {"access": "defaultRuntime"},
            "nodeSelector": {on.LABEL: "node"},
            "tolerations": [{"operator": "Exists"}],
            "updateStrategy": {"maxUnavailable": "10%"},
        }

    def without(self, daemon_set: str) -> str:
        """Return that there is no such DaemonSet, in words; nothing if there is one."""
        return "" if self.api.get(DAEMON_SETS, self.namespace, daemon_set) else f"there is no {daemon_set}"

    def left(self, labels: str) -> str:
        """Return how many pods of the release namespace have labels, in words; nothing if none has."""
        found = self.api.list_metadata(PODS, self.namespace, labels=labels)
        return f"{len(found)} pods are left" if found else ""

    def agents(self, nodes: Sequence[str]) -> list[Agent]:
        """Return the agents of these nodes, each with a token of its pod."""
        from kubernetes.client import (
            AuthenticationV1TokenRequest,
            CoreV1Api,
            V1BoundObjectReference,
            V1TokenRequestSpec,
        )

        core, wanted = CoreV1Api(self.client), set(nodes)
        pods = [
            pod
            for pod in self.api.list_all(PODS, self.namespace, labels=f"{names.LABEL_POOL}={POOL}")
            if pod["spec"].get("nodeName") in wanted and not pod["metadata"].get("deletionTimestamp")
        ]

        def token(pod: Manifest) -> str:
            metadata = pod["metadata"]
            spec = V1TokenRequestSpec(
                audiences=[names.REPORTS_AUDIENCE],
                expiration_seconds=7200,
                bound_object_ref=V1BoundObjectReference(
                    api_version="v1", kind="Pod", name=metadata["name"], uid=metadata["uid"]
                ),
            )
            made: Any = core.create_namespaced_service_account_token(
                names.pool_object_name(POOL), self.namespace, AuthenticationV1TokenRequest(spec=spec)
            )
            return str(made.status.token)

        tokens = on.in_parallel([lambda pod=pod: token(pod) for pod in pods])  # type: ignore[misc]
        return [
            Agent(
                pod["spec"]["nodeName"],
                pod["metadata"]["name"],
                pod["metadata"]["uid"],
                token,
                self.caches_on(int(pod["spec"]["nodeName"].rpartition("-")[2])),
                on.GPUS,
            )
            for pod, token in zip(pods, tokens, strict=True)
        ]

    def fleet(self) -> Fleet:
        """Return agents that report to the operator that acts."""
        config = self.api.get(CONFIG_MAPS, self.namespace, names.pool_object_name(POOL))
        slices = self.api.get(ENDPOINT_SLICES, self.namespace, names.REPORTS_SERVICE)
        assert config is not None and slices is not None
        address = f"{slices['endpoints'][0]['addresses'][0]}:{slices['ports'][0]['port']}"
        authority = config["data"][names.CA_CERTIFICATE].encode()
        return Fleet(address, names.reports_server_name(self.namespace), authority, POOL)

    # ---------------------------------------------------------------------------------------------------------- caches

    def make_caches(self) -> None:
        """Make one CacheNamespace a node."""
        spaces = [self.installation.make_namespace() for _ in range(NAMESPACES)]

        def make(number: int) -> Cache:
            namespace, name = spaces[number % NAMESPACES], f"cache-{number}"
            made = self.api.create(CACHES, namespace, cache_object(name, namespace, POOL))
            return Cache(namespace, name, made["metadata"]["uid"])

        self.caches = on.in_parallel([lambda number=number: make(number) for number in range(NODES)])  # type: ignore[misc]

    def caches_on(self, node: int) -> list[Cache]:
        """Return the CacheNamespaces that engines on a node use."""
        return [self.caches[(node + step) % NODES] for step in range(CACHES_A_NODE)]

    def first_reports(self, fleet: Fleet) -> Figure:
        """Time how long it takes until all agents are heard of, which begin within 15 s."""
        agents = self.agents(self.nodes)
        self.say("all agents report")
        began = on.usage(self.cluster, self.installation)
        fleet.start(agents)
        taken = self.heard_of(fleet)
        operator, apiserver = on.cores(began, on.usage(self.cluster, self.installation))
        self.say(
            f"all are heard of after {taken:.0f} s, {how_others_fared(fleet)}; meanwhile {operator:.2f} cores of "
            f"operator and {apiserver:.2f} of apiserver"
        )
        return Figure("first_reports_s", taken, "s")

    def heard_of(self, fleet: Fleet) -> float:
        """Wait until each agent has had a report taken; return the seconds that it took."""
        return on.wait(lambda: f"{fleet.silent()} agents are silent" if fleet.silent() else "", "all agents to report")

    def settle(self) -> None:
        """Wait until everything has been said once: the pool's status, and that of each cache."""
        self.say("the pool's status")
        self.kubectl.wait("managerpool", POOL, has_condition("Ready"), "the pool to be Ready", timeout=on.LIMIT)

        def unsaid() -> str:
            without = [it for it in self.api.list_all(CACHES) if not _settled(it)]
            return f"{len(without)} CacheNamespaces have no status yet" if without else ""

        self.say("the statuses of all CacheNamespaces")
        on.wait(unsaid, "all statuses", 2 * NODES / WRITES_A_SECOND + 120, interval=5)

    # --------------------------------------------------------------------------------------------------------- figures

    def rest(self, fleet: Fleet, statuses: on.Statuses) -> list[Figure]:
        """Count what is used and asked while nothing happens but reports."""
        self.say(f"rest, {REST:.0f} s")
        audit, pushed, began = on.AuditLog(self.cluster.control_plane.audit_log), fleet.pushed, time.time()
        since, before = time.monotonic(), on.usage(self.cluster, self.installation)
        on.wait(
            lambda: f"{fleet.pushed - pushed} reports" if time.monotonic() < since + REST else "", "the end", REST + 60
        )
        after = on.usage(self.cluster, self.installation)
        operator, apiserver = on.cores(before, after)
        each = {name: (after.operator[name] - used) / (after.at - before.at) for name, used in before.operator.items()}
        requests = audit.requests(self.namespace, REST, began)
        intervals = statuses.intervals(since)
        self.say(
            f"{(fleet.pushed - pushed) / REST:.1f} reports a second; cores of the replicas: "
            f"{', '.join(f'{used:.3f}' for used in each.values())}"
        )
        say_requests(requests, REST)
        found = [
            Figure("operator_cpu_rest", operator, "cores", bound=0.1),
            Figure("api_requests_rest_per_s", sum(requests.values()) / REST, "requests/s", bound=5),
            Figure("apiserver_cpu_rest", apiserver, "cores"),
        ]
        if intervals:
            found.append(Figure("figure_interval_p99_s", percentile(intervals, 99), "s"))
        return found

    def condition(self, fleet: Fleet, statuses: on.Statuses) -> Figure:
        """Time how long it takes until a changed condition is in the status, among all others."""
        self.say("engines go and come")
        uids, slowest = {cache.uid for cache in self.caches[:: max(1, NODES // WATCHED)][:WATCHED]}, 0.0
        for attached, status in ((False, "False"), (True, "True")):
            fleet.set_engines(uids, attached)
            slowest = max(
                slowest,
                on.wait(
                    lambda status=status: (
                        f"{len(uids - statuses.seen(uids, status))} are left"  # type: ignore[misc]
                        if uids - statuses.seen(uids, status)
                        else ""
                    ),
                    "InUse to change",
                    interval=0.1,
                ),
            )
        return Figure("condition_s", slowest, "s", bound=30)

    def churn(self, fleet: Fleet) -> list[Figure]:
        """Replace a tenth of the nodes, and count what it costs until all are served again."""
        count = max(1, NODES // 10)
        gone, come = self.nodes[:count], [f"bench-{NODES + number}" for number in range(count)]
        self.say(f"{count} nodes are replaced")
        before = on.usage(self.cluster, self.installation)
        self.kubectl.run("delete", "node", *gone, "--wait=false", timeout=on.LIMIT)
        fleet.stop(gone)
        on.make_nodes(self.kubectl, self.api, come)
        child = names.pool_object_name(POOL)
        on.until_daemon_set(self.api, self.namespace, child, "desiredNumberScheduled", NODES)
        on.until_daemon_set(self.api, self.namespace, child, "numberReady", NODES)
        fleet.start(self.agents(come))
        self.heard_of(fleet)
        self.kubectl.wait("managerpool", POOL, has_condition("Ready"), "the pool to be Ready", timeout=on.LIMIT)
        after = on.usage(self.cluster, self.installation)
        operator, apiserver = on.cores(before, after)
        self.say(f"all is served again after {after.at - before.at:.0f} s")
        return [
            Figure("operator_cpu_churn", operator, "cores"),
            Figure("churn_s", after.at - before.at, "s"),
            Figure("apiserver_cpu_churn", apiserver, "cores"),
        ]

    def reconciles(self) -> list[Figure]:
        """Read how long the operator's looks at objects took, in all of the run."""
        by_kind = {kind: it for kind, it in on.reconciles(self.installation).items() if kind in RECONCILED}
        every: Counter[float] = Counter()
        for buckets in by_kind.values():
            every.update(buckets)
        say(f"    looks: {', '.join(f'{max(it.values()):.0f} at a {kind}' for kind, it in by_kind.items())}")
        pools = by_kind.get("ManagerPool", {})
        return [
            Figure("reconcile_p50_ms", 1000 * on.quantile(every, 0.5), "ms"),
            Figure("reconcile_p99_ms", 1000 * on.quantile(every, 0.99), "ms", bound=1000),
            Figure("reconcile_pool_p99_ms", 1000 * on.quantile(pools, 0.99), "ms"),
        ]


def how_others_fared(fleet: Fleet) -> str:
    """Return how many reports were not taken, in words."""
    failed = f"{fleet.failed} failed ({fleet.problem})" if fleet.failed else "none failed"
    return f"{failed}, {fleet.sent_away} came again as the operator was busy"


def _settled(cache: Manifest) -> bool:
    """Whether a CacheNamespace has been taken, and its figures said."""
    status = cache.get("status") or {}
    conditions = {it["type"]: it["status"] for it in status.get("conditions") or ()}
    return conditions.get("Ready") == conditions.get("InUse") == "True" and bool(status.get("tiers"))


def baseline(daemon_set: Manifest) -> Manifest:
    """Return the same DaemonSet for kubectl: under another name, nobody's, and on the bench's nodes."""
    labels = {
        names.LABEL_POOL: BASELINE,
        "app.kubernetes.io/managed-by": "bench",
        "app.kubernetes.io/instance": BASELINE,
    }
    spec = daemon_set["spec"]
    template = spec["template"]
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": BASELINE, "namespace": daemon_set["metadata"]["namespace"], "labels": labels},
        "spec": {
            "selector": {"matchLabels": spec["selector"]["matchLabels"] | {names.LABEL_POOL: BASELINE}},
            "updateStrategy": spec["updateStrategy"],
            "template": {
                "metadata": {
                    "labels": template["metadata"]["labels"] | labels,
                    "annotations": template["metadata"]["annotations"],
                },
                "spec": template["spec"] | {"nodeSelector": {on.LABEL: "node"}},
            },
        },
    }


def say_requests(requests: Counter[tuple[str, str, str]], seconds: float) -> None:
    """Say who asked for what, the most first."""
    for (account, verb, what), count in requests.most_common(12):
        say(f"    {count / seconds:6.2f}/s  {account} {verb} {what}")
