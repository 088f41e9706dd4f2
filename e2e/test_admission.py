"""Injection on a real cluster: what an annotated workload's pod finds when it runs.

What the webhook decides, and that it can hold up nothing, is tested without nodes in `chart/test_admission.py`; pods
that start without it, in `test_use.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from e2e.support.engines import PROGRAM, PYTHON, EnginePod, heard, held_pod, let_go
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


ORDER = """
workload-0 cache-0 cache-1 workload-1 workload-2 cache-3
pool cache-2 workload-3 workload-4 cache-4 cache-5 workload-5
"""
"""Workloads, the cache namespace of each, and their pool, as they stand in one file: in every order of three things."""


def test_annotated_workloads_attach_with_all_of_it_applied_at_once_in_any_order(
    kubectl: Kubectl, clean: Installation, engine_image: str
) -> None:
    """The first has a quota that leaves room for nothing more, and its path from a ConfigMap."""
    namespace, beside = clean.make_namespace(), clean.make_namespace()
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "exact", "namespace": namespace},
        "spec": {"hard": QUOTA},
    }
    paths = {"metadata": {"name": "paths", "namespace": namespace}, "data": {"own": "/the/users/own"}}
    kubectl.apply(quota, {"apiVersion": "v1", "kind": "ConfigMap", **paths})
    pool = unique("pool")
    first = strict(engine_image, "main", nodeName=NODE)
    source = {"configMapKeyRef": {"name": "paths", "key": "own"}}
    first["containers"][0]["env"] = [{"name": "PYTHONPATH", "valueFrom": source}]
    made = {
        "workload-0": deployment("engine", namespace, "chat", first),
        "cache-0": cache_object("chat", namespace, pool),
    }
    numbers = range(1, 6)
    for number in numbers:
        name = f"engine-{number}"
        spec = strict(engine_image, "main", nodeName=NODE)
        options = json.dumps({"cache": f"{beside}/{name}", "count": 8, "patience": 90})
        spec["containers"][0]["command"] = [PYTHON, "-c", PROGRAM, "hold", options]
        made[f"workload-{number}"] = deployment(name, beside, name, spec)
        made[f"cache-{number}"] = cache_object(name, beside, pool)
    earlier, later = ([made[each] for each in part.split()] for part in ORDER.split("pool"))
    clean.make_pool(pool, ready=0, after=earlier, before=later)

    pod = running(kubectl, namespace, "app=engine")
    stamp = stamps.read_injected(pod["metadata"]["annotations"])
    assert stamp is not None and stamp.namespace == f"{namespace}/chat"
    assert pod["status"]["qosClass"] == "Burstable"
    inside = EnginePod(kubectl, pod["metadata"]["name"], namespace)
    program = "import orbitkv, os; print(orbitkv.__file__, os.environ['PYTHONPATH'])"
    place, path = kubectl.execute(inside.name, namespace, PYTHON, "-c", program).split()
    assert place.startswith(names.PAYLOAD_PATH)
    assert path == f"{names.PAYLOAD_PATH}:/the/users/own"
    assert inside.run("save", cache=stamp.namespace, count=10, patience=60)["kept"] == 10

    for number in numbers:
        found = running(kubectl, beside, f"app=engine-{number}")
        EnginePod(kubectl, found["metadata"]["name"], beside).wait_said("hits")
    pods = [each for where in (namespace, beside) for each in kubectl.list_all("pods", where)]
    assert [each["restartCount"] for pod in pods for each in pod["status"]["containerStatuses"]] == [0] * 6
    kubectl.run("annotate", "deployment", "engine", f"{names.ANNOTATION_CACHE_NAMESPACE}-", f"--namespace={namespace}")
    kubectl.wait_gone("pod", inside.name, namespace, timeout=90)
    assert not stamps.is_stamped(running(kubectl, namespace, "app=engine")["metadata"]["labels"])


def test_an_injected_pod_starts_whatever_went_meanwhile_says_so_once_and_attaches_when_it_is_back(
    kubectl: Kubectl, clean: Installation, engine_image: str
) -> None:
    """Its CacheNamespace went after it was admitted, and of the other one the node's agent."""
    namespace = clean.make_namespace()
    pool = clean.make_pool()
    kubectl.apply(cache_object("cache", namespace, pool))
    clean.wait_ready("cachenamespace", "cache", namespace)
    kubectl.apply(held_pod(engine_image, "cache", namespace, NODE, "cache"))
    pod = kubectl.get("pod", "cache", namespace)
    assert pod is not None
    stamp = stamps.read_injected(pod["metadata"]["annotations"])
    assert stamp is not None and not stamp.info
    kubectl.delete("cachenamespace", "cache", namespace)
    let_go(kubectl, "cache", namespace)

    def computes(name: str, *, attached: bool) -> bool:
        said = heard(kubectl, name, namespace)[1]
        return len(said) > 3 and said[-1]["attached"] == attached and said[-1]["computed"] > said[-2]["computed"]

    kubectl.until(lambda: computes("cache", attached=False), "it to compute without its cache", timeout=30)
    words = heard(kubectl, "cache", namespace)[0]
    assert sum("cache-namespace-not-found: " in each for each in words) == len(words) == 1, words
    kubectl.apply(cache_object("cache", namespace, pool))
    kubectl.until(lambda: computes("cache", attached=True), "it to attach", timeout=60)

    kubectl.patch("managerpool", pool, {"spec": {"nodeSelector": {"orbitkv-test/nowhere": "true"}}})
    kubectl.until(lambda: not clean.agents(pool), "the agents to go", timeout=90)
    kubectl.apply(held_pod(engine_image, "agent", namespace, NODE, "cache"))
    let_go(kubectl, "agent", namespace)
    kubectl.until(lambda: computes("agent", attached=False), "it to compute without an agent", timeout=30)
    words = heard(kubectl, "agent", namespace)[0]
    assert sum("no OrbitKV agent at /run/orbitkv/agent.sock" in each for each in words) == len(words) == 1, words
    kubectl.until(lambda: computes("cache", attached=False), "the other one to go on without it", timeout=30)
    kubectl.patch("managerpool", pool, {"spec": {"nodeSelector": None}})
    for name in ("cache", "agent"):
        kubectl.until(lambda: computes(name, attached=True), f"{name} to attach", timeout=90)  # noqa: B023
        found = kubectl.get("pod", name, namespace)
        assert found is not None and [each["restartCount"] for each in found["status"]["containerStatuses"]] == [0]


@contextmanager
def payload(kubectl: Kubectl, installation: Installation) -> Iterator[Callable[..., None]]:
    """Gives what changes the payload's `image` and `mode` (without one: as it was); in the end they are as before."""
    where = f"--namespace={installation.namespace}"
    before = {
        program: kubectl.get("deployment", f"orbitkv-{program}", installation.namespace)
        for program in ("operator", "webhook")
    }

    def use(**changed: str) -> None:
        for program, found in before.items():
            assert found is not None
            prefix = f"ORBITKV_{program.upper()}_PAYLOAD_"
            variables = {
                each["name"]: each.get("value") for each in found["spec"]["template"]["spec"]["containers"][0]["env"]
            }
            wanted = {name: changed.get(name, variables[prefix + name.upper()]) for name in ("image", "mode")}
            values = [f"{prefix}{name.upper()}={value}" for name, value in wanted.items()]
            kubectl.run("set", "env", f"deployment/orbitkv-{program}", *values, where)
        for program in before:
            kubectl.run("rollout", "status", f"deployment/orbitkv-{program}", "--timeout=90s", where, timeout=100)

    try:
        yield use
    finally:
        use()


def test_payload_that_no_node_can_pull_stops_injection_and_an_image_volume_brings_it_too(
    kubectl: Kubectl, clean: Installation, engine_image: str
) -> None:
    namespace = clean.make_namespace()
    names_of_pods = iter(range(1000))

    def asking(name: str) -> Object:
        metadata: Object = {"name": name, "namespace": namespace, "labels": {"app": name}}
        metadata["annotations"] = {names.ANNOTATION_CACHE_NAMESPACE: "chat"}
        spec = strict(engine_image, "main", nodeName=NODE)
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def told() -> str:
        """Why a pod would be skipped, or how it would get the payload."""
        command = ("create", "--dry-run=server", "-o", "json", "-f", "-")
        made = json.loads(kubectl.run(*command, stdin=json.dumps(asking(f"engine-{next(names_of_pods)}"))))
        annotations = made["metadata"].get("annotations", {})
        note, stamp = stamps.read_skip(annotations), stamps.read_injected(annotations)
        return note.reason if note else stamp.payload if stamp else ""

    with payload(kubectl, clean) as use:
        use(image="localhost/orbitkv/none:1")
        pool = clean.make_pool()  # its agents are ready without the payload
        kubectl.apply(cache_object("chat", namespace, pool))
        kubectl.until(lambda: told() == "payload-pull-failing", "the payload to be found missing", timeout=60)
        kubectl.apply(asking("skipped"))
        assert running(kubectl, namespace, "app=skipped")
        described = kubectl.run("describe", "pod", "skipped", f"--namespace={namespace}")
        assert stamps.ANNOTATION_SKIP_REASON in described and "payload-pull-failing: " in described
        agents = {pod["metadata"]["uid"] for pod in clean.agents(pool).values()}

        use(mode="imageVolume")
        kubectl.until(lambda: told() == "imageVolume", "pods to be injected again, by image volume", timeout=60)
        kubectl.apply(asking("by-image"))
        assert "initContainers" not in running(kubectl, namespace, "app=by-image")["spec"]
        engine = EnginePod(kubectl, "by-image", namespace)
        place = kubectl.execute(engine.name, namespace, PYTHON, "-c", "import orbitkv; print(orbitkv.__file__)")
        assert place.startswith(f"{names.PAYLOAD_PATH}/{names.PAYLOAD_IMAGE_FOLDER}/orbitkv/")
        assert engine.run("save", cache=f"{namespace}/chat", count=10, patience=60)["kept"] == 10
    kubectl.until(lambda: told() == "init", "the payload to be copied again", timeout=60)

    def whole() -> bool:
        statuses = [it for pod in clean.agents(pool).values() for it in pod["status"].get("containerStatuses", ())]
        return len(statuses) == 2 * len(agents) and all(it["ready"] for it in statuses)

    kubectl.until(whole, "the agents' pods to have the payload", timeout=60)
    assert {pod["metadata"]["uid"] for pod in clean.agents(pool).values()} == agents, "no agent was replaced for it"
