"""What `orbitkv doctor` finds."""

from __future__ import annotations

import base64
import copy
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_crds.schema import crds
from orbitkv_crds.stamps import ANNOTATION_INJECTED, ANNOTATION_SKIP_REASON, Injected
from orbitkv_operator.certificates import renewed
from orbitkv_operator.cli.cluster import Cluster
from orbitkv_operator.cli.doctor import examine
from orbitkv_operator.cli.findings import Finding, Level
from orbitkv_operator.cli.main import OK, PROBLEMS, USAGE, main, run_doctor
from orbitkv_operator.cluster.api import (
    CACHES,
    CRDS,
    DAEMON_SETS,
    DEPLOYMENTS,
    LEASES,
    NAMESPACES,
    NODES,
    POOLS,
    RUNTIME_CLASSES,
    SECRETS,
    WEBHOOKS,
    ApiError,
    Manifest,
)
from orbitkv_operator.tests.fakes import RELEASE, FakeApi, cache_body, node, pool_body

DEFINITIONS = crds()
SINCE = "2026-01-01T00:00:00Z"


def deployment(name: str, component: str, ready: int = 2, env: list[Manifest] | None = None) -> Manifest:
    labels = {
        "app.kubernetes.io/name": "orbitkv",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "orbitkv",
    }
    container = {"name": component, "image": "localhost/orbitkv/operator:0.1.0", "env": env or []}
    return {
        "metadata": {"name": name, "namespace": RELEASE, "labels": labels},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
        "status": {"readyReplicas": ready},
    }


def ready(kind: str = "Ready", status: str = "True", reason: str = "Ready", message: str = "") -> Manifest:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": SINCE}


def webhook(pod: Manifest) -> Manifest:
    """What the webhook does, as far as it matters here."""
    stamp = Injected("0.1.0", "team/one", "engine", "vllm", "init").write()
    pod["metadata"]["labels"] |= {names.LABEL_CACHE: "true"}
    pod["metadata"]["annotations"] |= {ANNOTATION_INJECTED: stamp}
    return pod


class World:
    """A cluster where all is well."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.api.admit = webhook
        self.add(DEPLOYMENTS, deployment(names.OPERATOR, "operator"))
        self.add(DEPLOYMENTS, deployment(names.WEBHOOK, "webhook"))
        hooks = [{"name": "pods.orbitkv.io", "clientConfig": {"caBundle": "eA=="}}]
        self.add(WEBHOOKS, {"metadata": {"name": names.WEBHOOK}, "webhooks": hooks})
        self.namespace(RELEASE, "privileged")
        self.namespace("team")
        self.lease(0)
        for name in (names.CERTIFICATES_SECRET, names.WEBHOOK):
            self.secret(name)
        self.pool(ready())
        self.cache(ready())
        for definition in DEFINITIONS:
            self.add(CRDS, definition)

    def add(self, resource: Any, manifest: Manifest) -> None:
        self.api.add(resource, manifest)

    def namespace(self, name: str, enforced: str = "") -> None:
        labels = {"pod-security.kubernetes.io/enforce": enforced} if enforced else {}
        self.add(NAMESPACES, {"metadata": {"name": name, "labels": labels}})

    def lease(self, seconds_ago: float, holder: str = "operator-1") -> None:
        renewed = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed}
        self.add(LEASES, {"metadata": {"name": names.OPERATOR, "namespace": RELEASE}, "spec": spec})

    def secret(self, name: str, now: datetime | None = None) -> None:
        data = renewed(None, ("orbitkv",), now or datetime.now(UTC))
        assert data is not None
        self.add(SECRETS, {"metadata": {"name": name, "namespace": RELEASE}, "data": data})

    def pool(self, *conditions: Manifest, unhealthy: list[Manifest] | None = None, **spec: Any) -> None:
        status = {"observedGeneration": 9, "nodes": {"desired": 2}, "conditions": list(conditions)}
        status |= {"unhealthyNodes": unhealthy} if unhealthy else {}
        self.add(POOLS, pool_body(**spec) | {"status": status})

    def cache(self, *conditions: Manifest, name: str = "one", pool: str = "main", **status: Any) -> None:
        self.add(CACHES, cache_body(name, pool=pool) | {"status": {"conditions": list(conditions), **status}})

    def drop(self, resource: Any, name: str, namespace: str = "") -> None:
        del self.api.objects[resource, namespace, name]

    def examine(self) -> list[Finding]:
        return examine(Cluster(self.api))

    def wrong(self) -> list[Finding]:
        return [it for it in self.examine() if it.level in (Level.PROBLEM, Level.WARNING)]


@pytest.fixture
def world() -> World:
    return World()


def test_healthy_cluster_has_nothing_wrong(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.wrong() == []
    assert run_doctor(world.api, "", False) == OK
    assert "0 problems, 0 warnings" in capsys.readouterr().out
    assert not [write for write in world.api.writes if write[0] != "create"]


def by_csi(world: World, nodes: int | None = None, ready: int = 0) -> None:
    """Pods get the agent's folder by the driver, which is to run on so many nodes; None: it is not there."""
    variable = {"name": "ORBITKV_WEBHOOK_SOCKET_VOLUME", "value": "csi"}
    world.add(DEPLOYMENTS, deployment(names.WEBHOOK, "webhook", env=[variable]))
    if nodes is not None:
        status = {"desiredNumberScheduled": nodes, "numberReady": ready}
        world.add(DAEMON_SETS, {"metadata": {"name": names.CSI, "namespace": RELEASE}, "spec": {}, "status": status})


def test_driver_that_is_on_all_its_nodes_is_fine(world: World) -> None:
    by_csi(world, 3, ready=3)
    assert world.wrong() == []
    assert any(it.about == "CSI driver" and "all 3" in it.message for it in world.examine())


Change = Callable[[World], None]


def _refuse_by_pod_security(world: World) -> None:
    def refuse(pod: Manifest) -> Manifest:
        if pod["metadata"]["namespace"] == "team":
            raise ApiError(403, 'pods "x" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes')
        return webhook(pod)

    world.api.admit = refuse


def _skip(world: World) -> None:
    def skip(pod: Manifest) -> Manifest:
        webhook(pod)
        del pod["metadata"]["annotations"][ANNOTATION_INJECTED]
        pod["metadata"]["annotations"][ANNOTATION_SKIP_REASON] = "pod-security-forbids-hostpath: baseline."
        return pod

    world.api.admit = skip


def _silent(world: World) -> None:
    world.api.admit = lambda pod: pod


def _old_definition(world: World) -> None:
    definition = copy.deepcopy(next(it for it in DEFINITIONS if it["spec"]["names"]["kind"] == "CacheNamespace"))
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del schema["status"]["properties"]["lastHour"]
    world.add(CRDS, definition)


def _pull_secret(world: World) -> None:
    world.add(
        DEPLOYMENTS,
        deployment(names.WEBHOOK, "webhook", env=[{"name": "ORBITKV_WEBHOOK_PAYLOAD_PULL_SECRETS", "value": "a"}]),
    )


@pytest.mark.parametrize(
    ("change", "about", "words", "fix"),
    [
        (lambda w: setattr(w.api, "version", (1, 30)), "Kubernetes", "1.30 is older", "Upgrade"),
        (lambda w: w.api.absent.add(CACHES), "CacheNamespace", "does not have this kind", "helm upgrade"),
        (_old_definition, "CustomResourceDefinition", "lacks status.lastHour", "Upgrade the chart"),
        (lambda w: w.drop(DEPLOYMENTS, names.OPERATOR, RELEASE), "Operator", "not installed", "helm upgrade"),
        (
            lambda w: w.add(DEPLOYMENTS, deployment(names.OPERATOR, "operator", 0)),
            "Operator",
            "0 of 2 pods ready",
            "describe",
        ),
        (
            lambda w: w.add(DEPLOYMENTS, deployment(names.OPERATOR, "operator", 1)),
            "Operator",
            "1 of 2 pods ready",
            "describe",
        ),
        (lambda w: w.lease(600), "Operator", "None of its replicas acts", "logs"),
        (lambda w: w.lease(0, ""), "Operator", "None of its replicas acts", "logs"),
        (lambda w: w.namespace(RELEASE, "baseline"), f"Namespace {RELEASE}", "enforces baseline", "kubectl label"),
        (lambda w: w.namespace(RELEASE), f"Namespace {RELEASE}", "no Pod Security label", "kubectl label"),
        (lambda w: w.drop(SECRETS, names.CERTIFICATES_SECRET, RELEASE), "Secret", "Agents cannot report", "logs"),
        (
            lambda w: w.secret(names.WEBHOOK, datetime.now(UTC) - timedelta(days=400)),
            "Secret",
            "pods start without the cache",
            "logs",
        ),
        (lambda w: w.drop(WEBHOOKS, names.WEBHOOK), "Webhook", "no MutatingWebhookConfiguration", "helm upgrade"),
        (
            lambda w: w.add(WEBHOOKS, {"metadata": {"name": names.WEBHOOK}, "webhooks": [{"clientConfig": {}}]}),
            "Webhook",
            "no caBundle",
            "logs",
        ),
        (_silent, "Webhook", "does not answer", "10250"),
        (by_csi, "CSI driver", "cannot start", "helm upgrade"),
        (lambda w: by_csi(w, 3, 1), "CSI driver", "ready on 1 of 3 nodes", "describe pods"),
        (lambda w: by_csi(w, 0), "CSI driver", "is for no node", "nodeSelector"),
        (lambda w: w.drop(POOLS, "main"), "ManagerPools", "There is none", "kubectl apply"),
        (
            lambda w: w.pool(
                ready("ConfigValid", "False", "NodesOverlap", "two pools"), ready("Ready", "False", "NodesOverlap")
            ),
            "ManagerPool main",
            "NodesOverlap: two pools.",
            "describe",
        ),
        (
            lambda w: w.pool(ready(status="False", reason="NoNodes", message="No node has the labels")),
            "ManagerPool main",
            "NoNodes",
            "describe",
        ),
        (
            lambda w: w.pool(ready(), unhealthy=[{"name": "node-b", "reason": "OOMKilled", "message": "too little"}]),
            "ManagerPool main, node node-b",
            "OOMKilled: too little.",
            "describe",
        ),
        (
            lambda w: w.pool(ready(), imagePullSecrets=[{"name": "login"}]),
            "Secret",
            "does not exist",
            "docker-registry",
        ),
        (
            lambda w: w.cache(ready(), name="lost", pool="gone"),
            "CacheNamespace team/lost",
            "gone, which does not",
            "Make",
        ),
        (
            lambda w: w.cache(ready(status="False", reason="QuotaAboveMaximum", message="too much")),
            "CacheNamespace team/one",
            "QuotaAboveMaximum: too much.",
            "describe",
        ),
        (
            lambda w: w.cache(
                ready(),
                ready("InUse", "False", "PodsWithoutCache", "1 pod asks for it and runs without: team/a"),
                attached={"without": 1},
            ),
            "CacheNamespace team/one",
            "team/a",
            "orbitkv explain pod",
        ),
        (_refuse_by_pod_security, "Namespace team", "Pod Security forbids", "kubectl label namespace team"),
        (_skip, "Namespace team", "pod-security-forbids-hostpath", "Correct"),
        (_pull_secret, "Namespace team", "Secret a, which is not", "docker-registry"),
    ],
)
def test_each_fault_is_named_with_its_fix(world: World, change: Change, about: str, words: str, fix: str) -> None:
    change(world)
    found = [it for it in world.wrong() if it.about.startswith(about) and words in it.message]
    assert found, world.wrong()
    assert fix in found[0].fix


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ({}, "No node has the label nvidia.com/gpu.present"),
        ({"access": "runtimeClass"}, "There is no RuntimeClass nvidia"),
        ({"access": "runtimeClassCDI", "runtimeClassName": "other"}, "There is no RuntimeClass other"),
        ({"access": "dra"}, "There is no DeviceClass gpu.nvidia.com"),
    ],
)
def test_what_gpus_need_is_looked_for(world: World, gpu: Manifest, words: str) -> None:
    world.pool(ready(), gpu=gpu)
    world.add(NODES, node("a"))
    assert any(words in it.message for it in world.wrong())


def test_pool_for_gpus_is_fine_where_all_is_there(world: World) -> None:
    world.pool(ready(), gpu={"access": "runtimeClass"})
    world.add(NODES, node("a", {"nvidia.com/gpu.present": "true"}))
    world.add(RUNTIME_CLASSES, {"metadata": {"name": "nvidia"}})
    assert world.wrong() == []


def test_only_a_pools_own_nodes_have_to_have_what_it_needs(world: World) -> None:
    world.pool(ready(), gpu={"access": "runtimeClass"}, nodeSelector={"zone": "a"})
    world.add(RUNTIME_CLASSES, {"metadata": {"name": "nvidia"}, "handler": "nvidia"})
    for name, handler in (("a", "nvidia"), ("b", "runc")):
        made = node(name, {"zone": name})
        made["status"]["runtimeHandlers"] = [{"name": handler}]
        world.add(NODES, made)
    assert world.wrong() == []
    world.pool(ready(), gpu={"access": "runtimeClass"}, nodeSelector={"zone": "b"})
    (found,) = world.wrong()
    assert "HandlerNotFound" in found.message and "node b" in found.message


def test_without_the_webhook_the_agents_folder_is_tried(world: World) -> None:
    world.drop(DEPLOYMENTS, names.WEBHOOK, RELEASE)
    sent: list[Manifest] = []

    def see(pod: Manifest) -> Manifest:
        sent.append(pod)
        return pod

    world.api.admit = see
    assert world.wrong() == []
    (pod,) = sent
    assert pod["spec"]["volumes"][0]["hostPath"]["path"] == names.SOCKET_DIRECTORY


def test_what_ones_rights_do_not_reach_is_said_and_the_rest_is_looked_at(world: World) -> None:
    def refuses(verb: str, resource: Any) -> None:
        if resource is SECRETS:
            raise ApiError(403, "secrets is forbidden")

    world.api.before = refuses
    world.lease(600)
    found = world.examine()
    assert any(it.about == "Certificates" and "Your rights" in it.message for it in found)
    assert any("None of its replicas acts" in it.message for it in found)


def test_apiserver_that_does_not_answer_is_an_error_in_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(verb: str, resource: Any) -> None:
        raise ApiError(0, "no answer from the apiserver")

    world.api.before = away
    monkeypatch.setattr("orbitkv_operator.cli.main._connect", lambda kubeconfig: world.api)
    assert main(["doctor"]) == USAGE
    assert capsys.readouterr().err == "orbitkv: no answer from the apiserver\n"


def test_json_has_every_finding_and_the_exit_code_says_whether_there_is_a_problem(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.lease(600)
    assert run_doctor(world.api, "", True) == PROBLEMS
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is False and found["counts"]["problem"] == 1
    assert {"level", "about", "message", "fix"} == found["findings"][0].keys()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["explain", "pod", "name-only"],
        ["explain", "pod", "team-a/pod", "-n", "team-b"],
        ["explain", "node", "x/y"],
        ["cure"],
    ],
)
def test_wrong_command_line_is_told_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == USAGE and error.count("\n") == 1 and "--help" in error


def test_no_cluster_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "config"
    broken.write_text(base64.b64encode(b"nothing").decode())
    assert main(["doctor", "--kubeconfig", str(broken)]) == USAGE
    assert "no cluster can be reached" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ nodes' memory


def sized(name: str, **allocatable: str) -> Manifest:
    made = node(name)
    made["status"]["allocatable"] = {key.replace("_", "-"): value for key, value in allocatable.items()}
    return made


def test_nodes_that_are_too_small_for_the_pool_are_named(world: World) -> None:
    world.pool(ready(), memory={"pool": "64Gi"})
    world.add(NODES, sized("large", memory="128Gi"))
    assert not world.wrong()
    world.add(NODES, sized("small", memory="64Gi"))
    (found,) = world.wrong()
    assert found.about == "ManagerPool main" and "small (64Gi)" in found.message and "large" not in found.message
    assert "memory.pool" in found.fix


def test_nodes_outside_of_the_pool_may_be_small(world: World) -> None:
    world.pool(ready(), memory={"pool": "64Gi"}, nodeSelector={"zone": "a"})
    world.add(NODES, sized("small", memory="1Gi"))
    assert not world.wrong()


def test_memory_that_is_set_aside_as_hugepages_is_said(world: World) -> None:
    world.add(NODES, sized("a", memory="128Gi", hugepages_1Gi="32Gi", hugepages_2Mi="0"))
    world.add(NODES, sized("b", memory="128Gi", hugepages_1Gi="0", hugepages_2Mi="0"))
    (found,) = [it for it in world.examine() if "hugepages" in it.message]
    assert found.level is Level.INFO and "a (32Gi)" in found.message and "b (" not in found.message


def test_agent_that_cannot_pin_its_memory_is_shown_with_the_limit_that_it_has(world: World) -> None:
    words = "memory for pages could not be pinned: out of memory (its limit for locked memory, memlock, is 64 KiB)"
    world.pool(ready(), unhealthy=[{"name": "a", "reason": "MemoryNotPinned", "message": words}])
    (found,) = world.wrong()
    assert "MemoryNotPinned" in found.message and "memlock, is 64 KiB" in found.message


def test_reader_that_has_seen_enough_gets_no_stack_trace(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("orbitkv_operator.cli.main._connect", lambda kubeconfig: world.api)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["doctor", "--json"]) == PROBLEMS
    assert capsys.readouterr().err == ""


def test_what_a_pool_says_itself_is_said_once(world: World) -> None:
    said = ready("GPUAccess", "False", "RuntimeClassNotFound"), ready("Available", "False", "NoAgents")
    world.pool(*said, gpu={"access": "runtimeClass"})
    world.add(NODES, node("a", {"nvidia.com/gpu.present": "true"}))
    (found,) = world.wrong()
    assert found.message.startswith("GPUAccess: RuntimeClassNotFound")
