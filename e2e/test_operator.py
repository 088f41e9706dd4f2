"""Pools on a cluster with real agents: how they come, change, fail and are described."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from e2e.cluster.cluster import Cluster
from e2e.support.installation import Installation
from e2e.support.kubectl import Kubectl, Object, condition, has_condition
from images import build

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


def counts(nodes: int) -> Callable[[Object], bool]:
    """A predicate: the pool's status has so many nodes, and as many with an agent that is ready."""

    def holds(pool: Object) -> bool:
        found = pool.get("status", {}).get("nodes", {})
        return (found.get("desired"), found.get("ready")) == (nodes, nodes)

    return holds


# ------------------------------------------------------------------------------------------- pools that do not work


def test_agents_that_fail_are_named_with_the_reason(clean: Installation, kubectl: Kubectl) -> None:
    """One pool runs out of memory, and later of disk; another, on the other node, has an option that there is not."""
    nodes = sorted(node["metadata"]["name"] for node in kubectl.list_all("nodes"))
    first, second = ({"kubernetes.io/hostname": node} for node in (nodes[0], nodes[-1]))
    hungry = clean.make_pool(memory=SMALL, ready=0, nodeSelector=first, resources={"limits": {"memory": "72Mi"}})
    wrong = clean.make_pool(memory=SMALL, ready=0, nodeSelector=second, extraArgs=["--no-such-flag"])
    sick = wait_unhealthy(kubectl, wrong, {"CrashLoopBackOff"}, 120)
    assert "--no-such-flag" in sick["message"] and "exit code 2" in sick["message"]
    assert condition(kubectl.wait("managerpool", wrong, bool, "the pool"), "Ready")["status"] == "False"
    sick = wait_unhealthy(kubectl, hungry, {"OOMKilled"}, 120)
    assert "limits.memory" in sick["message"] and "72Mi" in sick["message"] and SMALL in sick["message"]
    change(kubectl, hungry, resources={"limits": {"memory": None, "ephemeral-storage": "1Ki"}})
    sick = wait_unhealthy(kubectl, hungry, {"Evicted"}, 120)
    assert "ephemeral" in sick["message"]


# --------------------------------------------------------------------------------- the life of one pool, test by test


@pytest.fixture(scope="module")
def pool(installation: Installation) -> str:
    """A pool on every node. Each test that changes it leaves it ready, with an agent on each node."""
    return installation.make_pool(memory=SMALL, ready=180)


def test_pool_is_ready_on_every_node(clean: Installation, kubectl: Kubectl, pool: str) -> None:
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


def test_placement_live_and_other_changes(clean: Installation, kubectl: Kubectl, pool: str) -> None:
    before = uids(clean.agents(pool))
    stays, *others = sorted(before)
    assert others

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


def test_bad_image_is_named_the_rest_serves_on_and_taking_it_back_mends_it(
    clean: Installation, kubectl: Kubectl, pool: str
) -> None:
    change(kubectl, pool, image="localhost/orbitkv/no-such-agent:1")
    message = wait_pool(kubectl, pool, "Progressing", "False", "Stalled", 120)
    assert "localhost/orbitkv/no-such-agent:1" in message
    sick = wait_unhealthy(kubectl, pool, {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"})
    assert "localhost/orbitkv/no-such-agent:1" in sick["message"] and "spec.image" in sick["message"]
    found = kubectl.get("managerpool", pool)
    assert found is not None and found["status"]["nodes"]["ready"] == len(kubectl.list_all("nodes")) - 1
    assert any(event["reason"] == sick["reason"] for event in kubectl.events("ManagerPool", pool, "default"))
    change(kubectl, pool, image=None)
    clean.wait_ready("managerpool", pool)


def test_two_pools_on_the_same_nodes(clean: Installation, kubectl: Kubectl, pool: str) -> None:
    before = uids(clean.agents(pool))
    younger = clean.make_pool(memory=SMALL, ready=0)
    for each in (pool, younger):
        message = wait_pool(kubectl, each, "ConfigValid", "False", "NodesOverlap")
        assert pool in message and younger in message and all(node in message for node in before)
    wait_pool(kubectl, younger, "Ready", "False", "NodesOverlap")
    assert uids(clean.agents(pool)) == before and clean.agents(younger) == {}
    assert condition(clean.wait_ready("managerpool", pool), "Available")["status"] == "True"


def test_cordoned_node_keeps_its_agent(clean: Installation, kubectl: Kubectl, pool: str, own_cluster: Cluster) -> None:
    before = uids(clean.agents(pool))
    node = sorted(before)[-1]
    kubectl.run("cordon", node)
    try:
        kubectl.run("delete", "pod", clean.agents(pool)[node]["metadata"]["name"], f"--namespace={clean.namespace}")
        clean.wait_ready("managerpool", pool)
        assert sorted(clean.agents(pool)) == sorted(before)
    finally:
        kubectl.run("uncordon", node)


def test_node_that_comes_gets_an_agent_and_is_forgotten_when_it_goes(
    clean: Installation, kubectl: Kubectl, pool: str, own_cluster: Cluster
) -> None:
    before = uids(clean.agents(pool))
    node = own_cluster.add_node("node-c")
    found = kubectl.get("node", "node-c")
    assert found is not None
    assert {"type": "InternalIP", "address": node.address} in found["status"]["addresses"]
    build.load_node(node, [image for image in build.IMAGES if image.name != "operator"])
    kubectl.wait("managerpool", pool, counts(len(before) + 1), "the new node's agent to be ready", timeout=120)
    assert sorted(clean.agents(pool)) == sorted([*before, "node-c"])
    own_cluster.remove_node("node-c")
    assert not node.folder.exists()
    kubectl.wait("managerpool", pool, counts(len(before)), "the pool to forget the node", timeout=90)
    clean.wait_ready("managerpool", pool)
    # as Kubernetes does itself after a minute
    gone = ["--field-selector=spec.nodeName=node-c", "--force", "--grace-period=0"]
    kubectl.run("delete", "pods", f"--namespace={clean.namespace}", *gone)
    assert uids(clean.agents(pool)) == before


def test_node_that_dies_is_named(clean: Installation, kubectl: Kubectl, pool: str, own_cluster: Cluster) -> None:
    own_cluster.nodes["node-b"].processes.stop("kubelet")
    sick = wait_unhealthy(kubectl, pool, {"NodeNotReady"}, 90)
    assert sick["name"] == "node-b" and "kubectl describe node node-b" in sick["message"]


def test_operator_logs_are_objects_without_tokens(clean: Installation, kubectl: Kubectl) -> None:
    lines = [line for line in clean.operator_logs().splitlines() if line]
    assert lines
    for line in lines:
        entry = json.loads(line)
        assert {"ts", "level", "event"} <= entry.keys()
        assert "eyJ" not in line  # how each token begins
