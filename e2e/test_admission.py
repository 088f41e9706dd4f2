"""Injection on a real cluster: what an annotated workload's pod finds when it runs, and pods that start without us.

What the webhook decides, and that it can hold up nothing, is tested without nodes in `chart/test_admission.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.support.engines import EnginePod
from e2e.support.installation import Installation, cache_object, unique
from e2e.support.kubectl import Kubectl, Object
from orbitkv_crds import names, stamps

NODE = "node-a"
RESOURCES: Object = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "2", "memory": "512Mi"}}
QUOTA: Object = {
    "requests.cpu": "50m",
    "requests.memory": "128Mi",
    "limits.cpu": "2",
    "limits.memory": "512Mi",
    "pods": 1,
}
"""Exactly what the engine's container takes: with more the pod would not be made."""


@pytest.fixture(scope="module")
def engine_image(images: list[str]) -> str:
    """The image of the stand-in for an engine: it has Python, numpy and msgspec."""
    return next(name for name in images if "/node-agent" in name)


def strict(image: str, name: str, **spec: object) -> Object:
    """A pod's spec as strict platforms want it: another user, nothing to write to, and all that it takes said."""
    context: Object = {
        "runAsNonRoot": True,
        "runAsUser": 1234,
        "runAsGroup": 1234,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container: Object = {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": RESOURCES,
        "securityContext": context,
        "env": [{"name": "PYTHONPATH", "value": "/the/users/own"}],
    }
    return {"containers": [container], "terminationGracePeriodSeconds": 0, **spec}


def deployment(name: str, namespace: str, ask: str, spec: Object) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace, "annotations": {names.ANNOTATION_CACHE_NAMESPACE: ask}},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": {"app": name}}, "spec": spec},
        },
    }


def running(kubectl: Kubectl, namespace: str, label: str) -> Object:
    """The one pod with a label, once it runs."""
    found: list[Object] = []

    def runs() -> bool:
        found[:] = kubectl.list_all("pods", namespace, label)
        return len(found) == 1 and found[0].get("status", {}).get("phase") == "Running"

    kubectl.until(runs, f"a pod {label} to run", timeout=90)
    return found[0]


@contextmanager
def without_webhook(kubectl: Kubectl, installation: Installation) -> Iterator[None]:
    """While no replica of the webhook runs."""

    def scale(replicas: int) -> None:
        where = f"--namespace={installation.namespace}"
        kubectl.run("scale", "deployment", names.WEBHOOK, f"--replicas={replicas}", where)
        kubectl.wait(
            "deployment",
            names.WEBHOOK,
            lambda it: it["status"].get("readyReplicas", 0) == replicas == it["status"].get("replicas", 0),
            f"{replicas} replicas of the webhook",
            namespace=installation.namespace,
            timeout=90,
        )

    found = kubectl.get("deployment", names.WEBHOOK, installation.namespace)
    assert found is not None
    scale(0)
    labels = "app.kubernetes.io/name=orbitkv,app.kubernetes.io/component=webhook"
    try:
        # they go on serving for a while, so that no request is lost when one is replaced
        kubectl.until(
            lambda: not kubectl.list_all("pods", installation.namespace, labels), "the webhook's pods to be gone"
        )
        yield
    finally:
        scale(found["spec"]["replicas"])


def test_annotated_workload_attaches_with_all_of_it_applied_at_once(
    kubectl: Kubectl, clean: Installation, engine_image: str
) -> None:
    """Workload, cache namespace and pool in one go, the workload first; a quota that leaves room for nothing more."""
    namespace = clean.make_namespace()
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "exact", "namespace": namespace},
        "spec": {"hard": QUOTA},
    }
    kubectl.apply(quota)
    pool = unique("pool")
    engine = deployment("engine", namespace, "chat", strict(engine_image, "main", nodeName=NODE))
    clean.make_pool(pool, ready=0, after=(engine, cache_object("chat", namespace, pool)))

    pod = running(kubectl, namespace, "app=engine")
    stamp = stamps.read_injected(pod["metadata"]["annotations"])
    assert stamp is not None and stamp.namespace == f"{namespace}/chat"
    assert pod["status"]["qosClass"] == "Burstable"
    inside = EnginePod(kubectl, pod["metadata"]["name"], namespace)
    program = "import orbitkv, os; print(orbitkv.__file__, os.environ['PYTHONPATH'])"
    found, path = kubectl.execute(inside.name, namespace, "python", "-c", program).split()
    assert found.startswith(names.PAYLOAD_PATH)
    assert path == f"{names.PAYLOAD_PATH}:/the/users/own"
    assert inside.run("save", cache=stamp.namespace, count=10, patience=60)["kept"] == 10

    restarts = [status["restartCount"] for status in pod["status"]["containerStatuses"]]
    assert restarts == [0]
    kubectl.run("annotate", "deployment", "engine", f"{names.ANNOTATION_CACHE_NAMESPACE}-", f"--namespace={namespace}")
    kubectl.wait_gone("pod", inside.name, namespace, timeout=90)
    assert not stamps.is_stamped(running(kubectl, namespace, "app=engine")["metadata"]["labels"])


@contextmanager
def payload(kubectl: Kubectl, installation: Installation, image: str) -> Iterator[None]:
    """While another image is the payload's."""
    where = f"--namespace={installation.namespace}"
    programs = ("operator", "webhook")

    def variable(program: str) -> str:
        return f"ORBITKV_{program.upper()}_PAYLOAD_IMAGE"

    def use(images: dict[str, str]) -> None:
        for program in programs:
            kubectl.run("set", "env", f"deployment/orbitkv-{program}", f"{variable(program)}={images[program]}", where)
        for program in programs:
            kubectl.run("rollout", "status", f"deployment/orbitkv-{program}", "--timeout=90s", where, timeout=100)

    before = {}
    for program in programs:
        found = kubectl.get("deployment", f"orbitkv-{program}", installation.namespace)
        assert found is not None
        env = found["spec"]["template"]["spec"]["containers"][0]["env"]
        before[program] = next(each["value"] for each in env if each["name"] == variable(program))
    try:
        use(dict.fromkeys(programs, image))
        yield
    finally:
        use(before)


def test_payload_that_no_node_can_pull_stops_injection_and_nothing_else(
    kubectl: Kubectl, clean: Installation, engine_image: str
) -> None:
    namespace = clean.make_namespace()
    with payload(kubectl, clean, "localhost/orbitkv/none:1"):
        pool = clean.make_pool()  # its agents are ready without the payload
        names_of_pods = iter(range(1000))

        def reason() -> str:
            name = f"engine-{next(names_of_pods)}"
            metadata: Object = {"name": name, "namespace": namespace}
            metadata["annotations"] = {names.ANNOTATION_CACHE_NAMESPACE: "chat"}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": strict(engine_image, "main")}
            command = ("create", "--dry-run=server", "-o", "json", "-f", "-")
            made = json.loads(kubectl.run(*command, stdin=json.dumps(pod)))
            note = stamps.read_skip(made["metadata"]["annotations"])
            return note.reason if note else ""

        kubectl.until(lambda: reason() == "payload-pull-failing", "the payload to be found missing", timeout=60)
        metadata: Object = {"name": "skipped", "namespace": namespace, "labels": {"app": "skipped"}}
        metadata["annotations"] = {names.ANNOTATION_CACHE_NAMESPACE: "chat"}
        spec = strict(engine_image, "main", nodeName=NODE)
        kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        assert running(kubectl, namespace, "app=skipped")
        described = kubectl.run("describe", "pod", "skipped", f"--namespace={namespace}")
        assert stamps.ANNOTATION_SKIP_REASON in described and "payload-pull-failing: " in described
        agents = {pod["metadata"]["uid"] for pod in clean.agents(pool).values()}
    kubectl.until(lambda: reason() == "", "pods to be injected again", timeout=60)

    def whole() -> bool:
        statuses = [it for pod in clean.agents(pool).values() for it in pod["status"].get("containerStatuses", ())]
        return len(statuses) == 2 * len(agents) and all(it["ready"] for it in statuses)

    kubectl.until(whole, "the agents' pods to have the payload", timeout=60)
    assert {pod["metadata"]["uid"] for pod in clean.agents(pool).values()} == agents, "no agent was replaced for it"


def test_pods_start_without_a_webhook_and_are_injected_once_it_is_back(
    kubectl: Kubectl, clean: Installation, engine_image: str
) -> None:
    namespace = clean.make_namespace()

    def make(name: str) -> Object:
        spec = strict(engine_image, "main", nodeName=NODE)
        metadata = {"name": name, "namespace": namespace, "labels": {"app": name}}
        metadata["annotations"] = {names.ANNOTATION_CACHE_NAMESPACE: "chat"}
        kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return running(kubectl, namespace, f"app={name}")

    with without_webhook(kubectl, clean):
        assert not stamps.is_stamped(make("missed")["metadata"]["labels"])
    assert stamps.is_stamped(make("seen")["metadata"]["labels"])
