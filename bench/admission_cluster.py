"""The figures of `bench.admission` that need the cluster: the start of a pod on a real node, and pods by the thousand.

`ORBITKV_BENCH_PODS`, `ORBITKV_BENCH_NODES`, `ORBITKV_BENCH_RUNS` and `ORBITKV_BENCH_PAIRS` make it smaller.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final

from bench.admission import alternating
from bench.figures import Figure, say
from e2e.cluster.cluster import Cluster
from e2e.support.installation import Installation, fake_node_object, installed
from e2e.support.target import Target, connect
from images import build
from orbitkv_crds import names, stamps
from orbitkv_operator.cluster.api import PODS, KubernetesApi, load_client

NODES: Final = int(os.environ.get("ORBITKV_BENCH_NODES", "1000"))
COUNT: Final = int(os.environ.get("ORBITKV_BENCH_PODS", "10000"))
RUNS: Final = int(os.environ.get("ORBITKV_BENCH_RUNS", "3"))
PAIRS: Final = int(os.environ.get("ORBITKV_BENCH_PAIRS", "10"))
SENDERS: Final = 8
NODE: Final = "node-a"
LIMIT: Final = 900.0
FAKE: Final = {"orbitkv-bench": "node"}
CONFIGURATION: Final = "mutatingwebhookconfiguration"
STAMPED: Final = f"{names.LABEL_CACHE}={stamps.LABEL_VALUE}"

Object = dict[str, Any]


def run() -> list[Figure]:
    """Measure on the project's own cluster; nothing, and it is said, where that does not run."""
    if Cluster.found() is None:
        say("  without a cluster (make cluster) the figures of pods are left out")
        return []
    with connect() as target:
        assert target.own is not None
        images = build.build()
        build.load(target.own)
        with installed(target, {}) as installation:
            engine = next(name for name in images if "/node-agent" in name)
            found = [_pod_start(target, installation, engine)]
            return [*found, *_thousands(target, target.own, installation)]


# ------------------------------------------------------------------------------------------------------------ one pod


def _pod_start(target: Target, installation: Installation, image: str) -> Figure:
    """Measure what injection adds to the time from the request to a running container; images are on the node."""
    api, namespace = _api(target), installation.make_namespace()

    def start(annotations: dict[str, str]) -> float:
        container = {"name": "engine", "image": image, "imagePullPolicy": "Never", "command": ["sleep", "infinity"]}
        spec = {"containers": [container], "nodeName": NODE, "terminationGracePeriodSeconds": 0}
        began = time.perf_counter()
        pod = api.create(PODS, namespace, _pod(f"start-{time.monotonic_ns()}", annotations, spec))
        name = pod["metadata"]["name"]
        if annotations and not stamps.is_stamped(pod["metadata"].get("labels", {})):
            raise RuntimeError("the webhook did not see the pod: nothing can be measured")
        while True:
            found = api.get(PODS, namespace, name) or {}
            if found.get("status", {}).get("phase") == "Running":
                break
            if time.perf_counter() - began > 60:
                raise RuntimeError(f"pod {name} does not start: {found.get('status')}")
            time.sleep(0.02)
        took = time.perf_counter() - began
        api.delete(PODS, namespace, name, uid=pod["metadata"]["uid"])
        target.kubectl.wait_gone("pod", name, namespace)
        return took

    ask = {names.ANNOTATION_CACHE_NAMESPACE: "bench"}
    start(ask), start({})
    injected, plain = alternating(lambda: start(ask), lambda: start({}), PAIRS)
    return Figure("pod_start_added_s", injected - plain, "s", bound=1.0)


def _pod(name: str, annotations: dict[str, str], spec: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"automountServiceAccountToken": False, **spec},
    }


def _api(target: Target) -> KubernetesApi:
    return KubernetesApi(load_client(str(target.kubeconfig)))


# ----------------------------------------------------------------------------------------------------------- thousands


def _thousands(target: Target, cluster: Cluster, installation: Installation) -> list[Figure]:
    """Measure how fast pods by the thousand run, with the webhook and without."""
    api, ratios = _api(target), []
    with _fake_nodes(target, cluster) as nodes:

        def measured() -> float:
            namespace = installation.make_namespace()
            took = _run_all(target, api, namespace, nodes)
            stamped = api.list_metadata(PODS, namespace, labels=STAMPED)
            injected = sum(stamps.ANNOTATION_INJECTED in it["metadata"].get("annotations", {}) for it in stamped)
            ratios.append(injected / COUNT)
            _remove(target, namespace)
            return COUNT / took

        def without() -> float:
            with _no_webhook(target):
                rate = measured()
            ratios.pop()
            return rate

        with_it, without_it = alternating(measured, without, RUNS)
        memory = _memory(installation)
    return [
        Figure("kwok_10k_ratio", with_it / without_it, "", bound=0.8, at_least=True),
        Figure("kwok_10k_rate", with_it, "pods/s", baseline=without_it),
        Figure("injected_ratio", statistics.median(ratios), "", bound=0.999, at_least=True),
        Figure("operator_mib", memory, "MiB", bound=500),
    ]


def _run_all(target: Target, api: KubernetesApi, namespace: str, nodes: list[str]) -> float:
    """Make the pods and wait until all run; return the seconds."""
    ask = {names.ANNOTATION_CACHE_NAMESPACE: "bench"}
    container = {"name": "engine", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "a/b"]}

    def make(number: int) -> None:
        spec = {
            "containers": [container],
            "nodeName": nodes[number % len(nodes)],
            "tolerations": [{"operator": "Exists"}],
        }
        api.create(PODS, namespace, _pod(f"pod-{number}", ask, spec))

    target.kubectl.wait("serviceaccount", "default", lambda _: True, "its service account", namespace=namespace)
    began = time.perf_counter()
    with ThreadPoolExecutor(SENDERS) as senders:
        for done in [senders.submit(make, number) for number in range(COUNT)]:
            done.result()
    _wait(lambda: _none(target, namespace, "fieldSelector=status.phase!%3DRunning"), "all pods to run")
    return time.perf_counter() - began


def _none(target: Target, namespace: str, query: str) -> bool:
    """Whether no pod is found; one is enough to know otherwise."""
    found = target.kubectl.run("get", "--raw", f"/api/v1/namespaces/{namespace}/pods?limit=1&{query}")
    return not json.loads(found)["items"]


def _remove(target: Target, namespace: str) -> None:
    from kubernetes.client import CoreV1Api
    from kubernetes.client.exceptions import ApiException

    client = CoreV1Api(load_client(str(target.kubeconfig)))

    def gone() -> bool:
        with suppress(ApiException):  # the apiserver gives a request a minute, and what it has not deleted then stays
            client.delete_collection_namespaced_pod(namespace, grace_period_seconds=0)
        return _none(target, namespace, "")

    _wait(gone, "all pods to be gone")


def _wait(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {LIMIT:g} s in vain for {what}")
        time.sleep(0.25)


@contextmanager
def _no_webhook(target: Target) -> Iterator[None]:
    """While the apiserver asks nobody."""
    kubectl = target.kubectl
    found = kubectl.get(CONFIGURATION, names.WEBHOOK)
    assert found is not None
    kubectl.delete(CONFIGURATION, names.WEBHOOK)
    try:
        yield
    finally:
        metadata = {
            key: found["metadata"][key] for key in ("name", "labels", "annotations") if key in found["metadata"]
        }
        kubectl.create(found | {"metadata": metadata})


@contextmanager
def _fake_nodes(target: Target, cluster: Cluster) -> Iterator[list[str]]:
    """Nodes that KWOK plays."""
    cluster.start_kwok()
    found = [f"bench-{number}" for number in range(NODES)]
    try:
        target.kubectl.run(
            *("apply", "--server-side", "-f", "-"),
            stdin=json.dumps(
                {"apiVersion": "v1", "kind": "List", "items": [fake_node_object(name, FAKE) for name in found]}
            ),
            timeout=LIMIT,
        )
        ready = ("--selector=orbitkv-bench=node", "--for=condition=Ready", f"--timeout={LIMIT:.0f}s")
        target.kubectl.run("wait", "node", *ready, timeout=LIMIT)
        yield found
    finally:
        target.kubectl.run("delete", "nodes", "--selector=orbitkv-bench=node", "--wait=false", timeout=LIMIT)
        cluster.stop_kwok()


def _memory(installation: Installation) -> float:
    """Return the most memory that any replica of the operator has taken, in MiB."""
    most = 0.0
    for pod in installation.operators():
        status = installation.target.kubectl.execute(
            pod["metadata"]["name"], installation.namespace, "cat", "/proc/1/status"
        )
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        most = max(most, int(line.split()[1]) / 1024)
    return most
