"""Pools on a cluster with real agents: how they come, change, fail and are described."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import pytest

from e2e.cluster.cluster import Cluster
from e2e.support.installation import Installation, pool_object, unique
from e2e.support.kubectl import Kubectl, Object, condition, has_condition

SMALL = "64Mi"


def uids(agents: dict[str, Object]) -> dict[str, str]:
    return {node: pod["metadata"]["uid"] for node, pod in agents.items()}


def change(kubectl: Kubectl, pool: str, **spec: object) -> None:
    kubectl.patch("managerpool", pool, {"spec": spec})


def wait_pool(kubectl: Kubectl, pool: str, kind: str, status: str, reason: str, timeout: float = 90) -> str:
    """Wait for a condition; return its message."""
    found = kubectl.wait(
        "managerpool",
        pool,
        has_condition(kind, status, reason),
        f"pool {pool} to have {kind}={status} ({reason})",
        timeout=timeout,
    )
    return str(condition(found, kind)["message"])


def wait_unhealthy(kubectl: Kubectl, pool: str, reasons: set[str], timeout: float = 90) -> Object:
    """Wait until a node is unhealthy for one of some reasons; return its entry."""

    def sick(pool: Object) -> list[Object]:
        return [it for it in pool.get("status", {}).get("unhealthyNodes", []) if it["reason"] in reasons]

    found = kubectl.wait(
        "managerpool", pool, lambda it: bool(sick(it)), f"pool {pool} to name {reasons}", timeout=timeout
    )
    return sick(found)[0]


def test_pool_is_ready_on_every_node_within_a_minute(clean: Installation, kubectl: Kubectl) -> None:
    pool = clean.make_pool(memory=SMALL, ready=60)
    nodes = [node["metadata"]["name"] for node in kubectl.list_all("nodes")]
    agents = clean.agents(pool)
    assert sorted(agents) == sorted(nodes)
    found = kubectl.get("managerpool", pool)
    assert found is not None
    assert found["status"]["nodes"] == {
        "desired": len(nodes),
        "ready": len(nodes),
        "updated": len(nodes),
        "unhealthy": 0,
    }
    assert found["status"]["gpuRoute"] == "none"
    kubectl.wait(
        "managerpool",
        pool,
        lambda it: it["status"].get("tiers", {}).get("dram", {}).get("capacity") == f"{64 * len(nodes)}Mi",
        "the agents' reports to show what they have",
        timeout=60,
    )


def test_placement_live_and_other_changes(clean: Installation, kubectl: Kubectl) -> None:
    pool = clean.make_pool(memory=SMALL)
    before = uids(clean.agents(pool))
    stays, *others = sorted(before)

    change(kubectl, pool, nodeSelector={"kubernetes.io/hostname": stays})
    kubectl.until(lambda: sorted(clean.agents(pool)) == [stays], "the other agents to go")
    clean.wait_ready("managerpool", pool)
    assert uids(clean.agents(pool)) == {stays: before[stays]}

    change(kubectl, pool, nodeSelector=None, logging={"level": "debug"}, memory={"queryBudgetPercent": 40})
    kubectl.until(lambda: sorted(clean.agents(pool)) == sorted(before), "the other agents to come back")
    clean.wait_ready("managerpool", pool)
    now = uids(clean.agents(pool))
    assert now[stays] == before[stays]
    live = kubectl.get("configmap", f"orbitkv-{pool}", clean.namespace)
    assert live is not None and "query_budget_percent: 40" in live["data"]["live.yaml"]

    change(kubectl, pool, updateStrategy={"paused": True}, memory={"pool": "96Mi"})
    wait_pool(kubectl, pool, "Progressing", "False", "Paused")
    assert uids(clean.agents(pool)) == now

    change(kubectl, pool, updateStrategy={"paused": False})
    fewest = len(before)
    deadline = time.monotonic() + 150
    while not set(uids(clean.agents(pool)).values()).isdisjoint(now.values()):
        ready = sum(condition(pod, "Ready").get("status") == "True" for pod in clean.agents(pool).values())
        fewest = min(fewest, ready)
        assert time.monotonic() < deadline, "the rollout does not end"
    assert fewest >= len(before) - 1  # maxUnavailable is 1
    found = clean.wait_ready("managerpool", pool, timeout=120)
    assert found["status"]["nodes"]["updated"] == len(before)
    assert others


def test_bad_image_is_named_and_the_rest_serves_on(clean: Installation, kubectl: Kubectl) -> None:
    pool = clean.make_pool(memory=SMALL)
    change(kubectl, pool, image="localhost/orbitkv/no-such-agent:1")
    message = wait_pool(kubectl, pool, "Progressing", "False", "Stalled", 120)
    assert "localhost/orbitkv/no-such-agent:1" in message
    sick = wait_unhealthy(kubectl, pool, {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"})
    assert "localhost/orbitkv/no-such-agent:1" in sick["message"] and "spec.image" in sick["message"]
    found = kubectl.get("managerpool", pool)
    assert found is not None and found["status"]["nodes"]["ready"] == len(kubectl.list_all("nodes")) - 1
    assert any(event["reason"] == sick["reason"] for event in kubectl.events("ManagerPool", pool, "default"))


def test_agent_killed_for_memory_names_memory(clean: Installation, kubectl: Kubectl) -> None:
    pool = clean.make_pool(memory=SMALL, ready=0, resources={"limits": {"memory": "72Mi"}})
    sick = wait_unhealthy(kubectl, pool, {"OOMKilled"}, 120)
    assert "limits.memory" in sick["message"] and "72Mi" in sick["message"] and SMALL in sick["message"]


def test_agent_that_ends_at_once_repeats_its_last_words(clean: Installation, kubectl: Kubectl) -> None:
    pool = clean.make_pool(memory=SMALL, ready=0, extraArgs=["--no-such-flag"])
    sick = wait_unhealthy(kubectl, pool, {"CrashLoopBackOff"}, 120)
    assert "--no-such-flag" in sick["message"] and "exit code 2" in sick["message"]
    assert condition(kubectl.wait("managerpool", pool, bool, "the pool"), "Ready")["status"] == "False"


def test_two_pools_on_the_same_nodes(clean: Installation, kubectl: Kubectl) -> None:
    older = clean.make_pool(memory=SMALL)
    before = uids(clean.agents(older))
    younger = clean.make_pool(memory=SMALL, ready=0)
    for pool in (older, younger):
        message = wait_pool(kubectl, pool, "ConfigValid", "False", "NodesOverlap")
        assert older in message and younger in message and all(node in message for node in before)
    wait_pool(kubectl, younger, "Ready", "False", "NodesOverlap")
    assert uids(clean.agents(older)) == before and clean.agents(younger) == {}
    assert condition(clean.wait_ready("managerpool", older), "Available")["status"] == "True"


def test_gpu_access_is_refused_by_name(clean: Installation, kubectl: Kubectl) -> None:
    pool = unique("pool")
    clean._pools.append(pool)
    kubectl.apply(pool_object(pool, gpu={"access": "runtimeClass"}))
    message = wait_pool(kubectl, pool, "GPUAccess", "False", "AccessNotSupported")
    assert "runtimeClass" in message
    assert kubectl.get("daemonset", f"orbitkv-{pool}", clean.namespace) is None


def test_cordoned_node_keeps_its_agent(clean: Installation, kubectl: Kubectl, own_cluster: Cluster) -> None:
    pool = clean.make_pool(memory=SMALL)
    before = uids(clean.agents(pool))
    node = sorted(before)[-1]
    kubectl.run("cordon", node)
    try:
        kubectl.run("delete", "pod", clean.agents(pool)[node]["metadata"]["name"], f"--namespace={clean.namespace}")
        clean.wait_ready("managerpool", pool)
        assert sorted(clean.agents(pool)) == sorted(before)
    finally:
        kubectl.run("uncordon", node)


def test_node_that_dies_is_named(clean: Installation, kubectl: Kubectl, own_cluster: Cluster) -> None:
    pool = clean.make_pool(memory=SMALL)
    own_cluster.nodes["node-b"].processes.stop("kubelet")
    sick = wait_unhealthy(kubectl, pool, {"NodeNotReady"}, 90)
    assert sick["name"] == "node-b" and "kubectl describe node node-b" in sick["message"]


def test_metrics_are_refused_without_the_right(clean: Installation, kubectl: Kubectl) -> None:
    addresses = [pod["status"]["podIP"] for pod in clean.operators()]
    stranger = kubectl.run("create", "token", "default", f"--namespace={clean.namespace}").strip()
    for address in addresses:
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {stranger}"}, 403)):
            request = urllib.request.Request(f"http://{address}:9090/metrics", headers=headers)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=10)
            assert caught.value.code == status


def test_operator_logs_are_objects_without_tokens(clean: Installation, kubectl: Kubectl) -> None:
    lines = [line for line in clean.operator_logs().splitlines() if line]
    assert lines
    for line in lines:
        entry = json.loads(line)
        assert {"ts", "level", "event"} <= entry.keys()
        assert "eyJ" not in line  # how each token begins
