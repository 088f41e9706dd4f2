"""The figures of `bench.admission` that need the cluster: the start of a pod on a real node, and pods by the thousand.

The scheduler has its own limit of 50 requests a second, as in users' clusters: where pods reach that with the webhook
and without, the processor time of a pod (`kwok_10k_cpu_ms`) is what tells them apart.

`ORBITKV_BENCH_PODS`, `ORBITKV_BENCH_NODES`, `ORBITKV_BENCH_RUNS` and `ORBITKV_BENCH_PAIRS` make it smaller;
`ORBITKV_BENCH_PAYLOAD=imageVolume` has the thousands injected without an init container.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

from kubernetes.client import CoreV1Api
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from bench import processors
from bench.admission_start import pod_start
from bench.figures import Figure, say, told
from bench.operator_cluster import LABEL, PROGRESS_SECONDS, fake_nodes, make_nodes, wait
from e2e.cluster.cluster import Cluster
from e2e.support.installation import Installation, installed
from e2e.support.target import Target, connect
from images import build
from orbitkv_crds import names, stamps
from orbitkv_operator.audit import Watch
from orbitkv_operator.cluster.api import PODS, Api, KubernetesApi, Resource, load_client
from orbitkv_operator.engines.watch import PodWatch

NODES: Final = int(os.environ.get("ORBITKV_BENCH_NODES", "1000"))
COUNT: Final = int(os.environ.get("ORBITKV_BENCH_PODS", "10000"))
RUNS: Final = int(os.environ.get("ORBITKV_BENCH_RUNS", "3"))
PAYLOAD: Final = os.environ.get("ORBITKV_BENCH_PAYLOAD", "init")
WARM_UP: Final = min(COUNT, 500)
"""Pods of a run of each kind before those that count."""
SENDERS: Final = 8
UNQUIET: Final = 0.1
"""Processors kept busy by what is no part of a run, from which on its figures are not to be believed. (Interrupts,
which belong to no program, take up to half of that.)"""
ENVIRONMENT: Final = [{"name": "ORBITKV_OPERATOR_PATIENCE_SECONDS", "value": "7200"}]
"""The operator as users have it, not as tests do. KWOK's pods have no engines, which each would be told after five
minutes."""
SILENCE_SECONDS: Final = 120.0
"""Longer than from one bookmark of a watch to the next."""
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
        values = {"operator": {"env": ENVIRONMENT}, "injection": {"payload": {"mode": PAYLOAD}}}
        with installed(target, values) as installation:
            api = KubernetesApi(load_client(str(target.kubeconfig)))
            engine = next(name for name in images if "/node-agent" in name)
            # which shows both ways of the payload by itself
            found = told(pod_start(target, api, installation, engine)) if PAYLOAD == "init" else []
            return [*found, *told(_thousands(target, target.own, api, installation))]


# ----------------------------------------------------------------------------------------------------------- thousands


@dataclass(frozen=True)
class _Run:
    """What came of a run of all pods."""

    rate: float
    """Pods a second, from the first request until all run."""
    cpu: float
    """Milliseconds of processor a pod, of everything on the machine."""
    injected: float
    """Share of the pods that the webhook has stamped."""


def _thousands(target: Target, cluster: Cluster, api: KubernetesApi, installation: Installation) -> list[Figure]:
    """Measure how fast pods by the thousand run, with the webhook and without, in turn."""
    with_it: list[_Run] = []
    without: list[_Run] = []
    with fake_nodes(cluster):
        say(f"  {NODES} nodes")
        make_nodes(target.kubectl, api, [f"bench-{number}" for number in range(NODES)])
        for asked in (False, True):
            _turn(target, api, installation, asked, WARM_UP)
        say("  so far to warm up: this does not count")
        for number in range(RUNS):
            for asked in (False, True)[:: -1 if number % 2 else 1]:
                (with_it if asked else without).append(_turn(target, api, installation, asked, COUNT))
            say(f"  pair {number + 1} of {RUNS}: ratio {with_it[-1].rate / without[-1].rate:.3f}")
        memory = _memory(installation)

    def rate(runs: list[_Run]) -> float:
        return statistics.median(run.rate for run in runs)

    def cpu(runs: list[_Run]) -> float:
        return statistics.median(run.cpu for run in runs)

    injected = statistics.median(run.injected for run in with_it)
    return [
        Figure("kwok_10k_ratio", rate(with_it) / rate(without), "", bound=0.8, at_least=True),
        Figure("kwok_10k_rate", rate(with_it), "pods/s", baseline=rate(without)),
        Figure("kwok_10k_cpu_ms", cpu(with_it), "ms/pod", baseline=cpu(without)),
        Figure("injected_ratio", injected, "", bound=0.999, at_least=True),
        Figure("operator_mib", memory, "MiB", bound=500),
    ]


def _turn(target: Target, api: KubernetesApi, installation: Installation, asked: bool, count: int) -> _Run:
    """Run pods while the apiserver asks the webhook, or nobody."""
    with nullcontext() if asked else _no_webhook(target):
        return _run(target, api, installation, asked, count)


def _run(target: Target, api: KubernetesApi, installation: Installation, asked: bool, count: int) -> _Run:
    """Make so many pods, wait until all run, and remove them."""
    namespace = installation.make_namespace()
    target.kubectl.wait("serviceaccount", "default", lambda _: True, "its service account", namespace=namespace)
    # the apiserver learns a moment later whom it has to ask
    wait(lambda: _unlike(asked, api, namespace), "the apiserver to know the webhook's configuration")
    with _running(api, namespace, count) as missing:
        before, began = processors.used(), processors.now()
        _make_all(api, namespace, count)
        wait(missing, "all pods to run")
        ended, after = processors.now(), processors.used()
    took = ended.clock - began.clock
    disturbed = ended.everybody - began.everybody - processors.total(before, after, 1) / 1000
    found = [it["metadata"].get("annotations", {}) for it in api.list_metadata(PODS, namespace, labels=STAMPED)]
    injected = sum(stamps.ANNOTATION_INJECTED in annotations for annotations in found)
    which = "with the webhook" if asked else "without"
    say(f"  {which}: {count / took:.2f} pods/s; ms of processor a pod: {processors.between(before, after, count)}")
    if disturbed > UNQUIET * took:
        say(f"  not quiet: programs that are not there any more kept {disturbed / took:.2f} processors busy")
    _remove_all(CoreV1Api(load_client(str(target.kubeconfig))), namespace, count)
    return _Run(count / took, processors.total(before, after, count), injected / count)


def _make_all(api: KubernetesApi, namespace: str, count: int) -> None:
    said = time.monotonic()
    with ThreadPoolExecutor(SENDERS) as senders:
        requests = [senders.submit(api.create, PODS, namespace, _pod(number)) for number in range(count)]
        for number, request in enumerate(requests):
            request.result()
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                say(f"    {number + 1} of {count} pods are made")


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


def _unlike(asked: bool, api: KubernetesApi, namespace: str) -> str:
    """Return what becomes of a pod, if that is not as it is to be."""
    made = api.create(PODS, namespace, _pod(0), dry_run=True)
    stamp = stamps.read_injected(made["metadata"]["annotations"])
    found, wanted = stamp.payload if stamp else "left alone", PAYLOAD if asked else "left alone"
    return "" if found == wanted else f"payload: {found}"


@contextmanager
def _running(api: Api, namespace: str, wanted: int) -> Iterator[Callable[[], str]]:
    """Count a namespace's pods that run; give what tells how many are missing, or nothing.

    A watch shows each pod once. To ask for one that does not run, again and again, has the apiserver read thousands of
    pods from etcd each time: that took a third of the machine.
    """
    failures: list[str] = []
    running = Watch(PODS, fields=f"metadata.namespace={namespace},status.phase=Running")

    def missing() -> str:
        if failures:
            raise RuntimeError(failures[0])
        count = len(running.shown())
        return "" if count == wanted else f"{count} of {wanted} pods run"

    watch = PodWatch(api, running, _Nobody(), SILENCE_SECONDS, failures.append)
    watch.start()
    try:
        yield missing
    finally:
        watch.stop()


class _Nobody:
    """Whom changes concern: the watch itself keeps count."""

    def changed(self, resource: Resource, manifest: Object, gone: bool) -> None:
        """A pod has come, changed or gone."""

    def gone(self, resource: Resource, name: tuple[str, str]) -> None:
        """A pod is gone."""


def _remove_all(client: CoreV1Api, namespace: str, count: int) -> None:
    """Remove the pods, as many at a time as are made, and wait until none is left."""

    delete: Any = client.delete_namespaced_pod  # its types lack `_preload_content`

    def remove(number: int) -> None:
        with suppress(ApiException, HTTPError):  # what stays is seen below
            # the answer has the whole pod, of which nothing is made here
            delete(f"pod-{number}", namespace, grace_period_seconds=0, _preload_content=False).drain_conn()

    with ThreadPoolExecutor(SENDERS) as senders:
        list(senders.map(remove, range(count)))
    wait(lambda: _left(client, namespace), "all pods to be gone")


def _left(client: CoreV1Api, namespace: str) -> str:
    """Have pods deleted that are there still; return what is left."""
    if not client.list_namespaced_pod(namespace, limit=1).items:
        return ""
    # the apiserver gives a request a minute, and then ends it or its connection: what it has not deleted stays
    with suppress(ApiException, HTTPError):
        client.delete_collection_namespaced_pod(namespace, grace_period_seconds=0)
    return "pods are left"


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
