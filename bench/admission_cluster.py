"""The figures of `bench.admission` that need the cluster: the start of a pod on a real node, and pods by the thousand.

`ORBITKV_BENCH_PODS`, `ORBITKV_BENCH_NODES`, `ORBITKV_BENCH_RUNS` and `ORBITKV_BENCH_PAIRS` make it smaller.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final

from kubernetes.client import CoreV1Api
from kubernetes.client.exceptions import ApiException

from bench.admission import alternating
from bench.admission_start import pod_start
from bench.figures import Figure, say
from bench.operator_cluster import LABEL, fake_nodes, make_nodes
from e2e.cluster.cluster import Cluster
from e2e.support.installation import Installation, installed
from e2e.support.target import Target, connect
from images import build
from orbitkv_crds import names, stamps
from orbitkv_operator.cluster.api import PODS, KubernetesApi, load_client

NODES: Final = int(os.environ.get("ORBITKV_BENCH_NODES", "1000"))
COUNT: Final = int(os.environ.get("ORBITKV_BENCH_PODS", "10000"))
RUNS: Final = int(os.environ.get("ORBITKV_BENCH_RUNS", "3"))
SENDERS: Final = 8
LOOK_SECONDS: Final = 0.5
LIMIT: Final = 900.0
ENVIRONMENT: Final = [{"name": "ORBITKV_OPERATOR_PATIENCE_SECONDS", "value": "7200"}]
"""The operator as users have it, not as tests do. KWOK's pods have no engines, which each would be told after five
minutes."""
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
        with installed(target, {"operator": {"env": ENVIRONMENT}}) as installation:
            api = KubernetesApi(load_client(str(target.kubeconfig)))
            engine = next(name for name in images if "/node-agent" in name)
            found = pod_start(target, api, installation, engine)
            return [*found, *_thousands(target, target.own, api, installation)]


# ----------------------------------------------------------------------------------------------------------- thousands


def _thousands(target: Target, cluster: Cluster, api: KubernetesApi, installation: Installation) -> list[Figure]:
    """Measure how fast pods by the thousand run, with the webhook and without."""
    ratios: list[float] = []
    with fake_nodes(cluster):
        make_nodes(target.kubectl, api, [f"bench-{number}" for number in range(NODES)])

        def measured(asked: bool = True) -> float:
            namespace = installation.make_namespace()
            target.kubectl.wait("serviceaccount", "default", lambda _: True, "its service account", namespace=namespace)
            # the apiserver learns a moment later whom it has to ask
            _wait(lambda: _is_asked(api, namespace) == asked, "the apiserver to know the webhook's configuration")
            took = _run_all(target, api, namespace)
            stamped = api.list_metadata(PODS, namespace, labels=STAMPED)
            injected = sum(stamps.ANNOTATION_INJECTED in it["metadata"].get("annotations", {}) for it in stamped)
            ratios.append(injected / COUNT)
            _remove(target, namespace)
            return COUNT / took

        def without() -> float:
            with _no_webhook(target):
                rate = measured(asked=False)
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


def _run_all(target: Target, api: KubernetesApi, namespace: str) -> float:
    """Make the pods and wait until all run; return the seconds."""

    def make(number: int) -> None:
        api.create(PODS, namespace, _pod(number))

    began = time.perf_counter()
    with ThreadPoolExecutor(SENDERS) as senders:
        for done in [senders.submit(make, number) for number in range(COUNT)]:
            done.result()
    client = CoreV1Api(load_client(str(target.kubeconfig)))
    waiting = "status.phase!=Running"
    # one of those that wait is enough to know
    _wait(lambda: not client.list_namespaced_pod(namespace, field_selector=waiting, limit=1).items, "all pods to run")
    return time.perf_counter() - began


def _pod(number: int) -> Object:
    """Return a pod as a Deployment of vLLM makes them, small enough for the nodes. It is scheduled as any other."""
    probe = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 10}
    resources = {"cpu": "500m", "memory": "2Gi"}
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.11.0",
        "args": ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len", "32768"],
        "ports": [{"containerPort": 8000, "name": "http"}],
        "env": [{"name": "HF_HOME", "value": "/models"}],
        "resources": {"limits": resources, "requests": resources},
        "readinessProbe": probe,
        "livenessProbe": probe | {"initialDelaySeconds": 120},
        "volumeMounts": [{"name": "models", "mountPath": "/models"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [
        {"name": "models", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    metadata = {
        "name": f"pod-{number}",
        "labels": {"app": "chat"},
        "annotations": {names.ANNOTATION_CACHE_NAMESPACE: "bench"},
    }
    spec = {
        "containers": [container],
        "volumes": volumes,
        "nodeSelector": {LABEL: "node"},
        "tolerations": [{"operator": "Exists"}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _is_asked(api: KubernetesApi, namespace: str) -> bool:
    """Whether the webhook is asked about a pod."""
    made = api.create(PODS, namespace, _pod(0), dry_run=True)
    return stamps.is_stamped(made["metadata"]["labels"])


def _remove(target: Target, namespace: str) -> None:
    client = CoreV1Api(load_client(str(target.kubeconfig)))

    def gone() -> bool:
        with suppress(ApiException):  # the apiserver gives a request a minute, and what it has not deleted then stays
            client.delete_collection_namespaced_pod(namespace, grace_period_seconds=0)
        return not client.list_namespaced_pod(namespace, limit=1).items

    _wait(gone, "all pods to be gone")


def _wait(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {LIMIT:g} s in vain for {what}")
        time.sleep(LOOK_SECONDS)


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
