"""What a pool's status says of agents that do not serve."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_operator import health
from orbitkv_operator.cluster.api import Manifest
from orbitkv_operator.health import Problem
from orbitkv_operator.rollout import Health
from orbitkv_operator.tests.fakes import node, pool

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
POOL = pool(memory={"pool": "8Gi"})


def ago(**time: float) -> str:
    return (NOW - timedelta(**time)).isoformat().replace("+00:00", "Z")


def pod(status: dict[str, Any] | None = None, container: dict[str, Any] | None = None, **metadata: Any) -> Manifest:
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "False", "lastTransitionTime": ago(minutes=5)},
    ]
    containers = [{"name": "agent", "restartCount": 0, "started": True, "state": {"running": {}}, **(container or {})}]
    return {
        "metadata": {"name": "agent-1", "uid": "u", "creationTimestamp": ago(minutes=5), "annotations": {}, **metadata},
        "spec": {
            "nodeName": "a",
            "containers": [
                {"name": "agent", "image": "registry/agent:9", "resources": {"limits": {"memory": "8448Mi"}}}
            ],
        },
        "status": {
            "phase": "Running",
            "startTime": ago(minutes=5),
            "conditions": conditions,
            "containerStatuses": containers,
            **(status or {}),
        },
    }


def ready(container: dict[str, Any] | None = None) -> Manifest:
    return pod({"conditions": [{"type": "Ready", "status": "True"}]}, container)


def problem(pod: Manifest) -> Problem:
    found = health.problem(POOL, pod, NOW)
    assert found is not None
    return found


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"])
def test_bad_image_is_named(reason: str) -> None:
    found = problem(pod(container={"state": {"waiting": {"reason": reason, "message": "manifest unknown"}}}))
    assert found.reason == reason
    assert (
        "registry/agent:9" in found.message and "manifest unknown." in found.message and "spec.image" in found.message
    )


KILLED = {"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": ago(minutes=1)}}}


def test_kill_for_memory_names_limit_and_pool() -> None:
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 4}
    found = problem(pod(container=KILLED | waiting))
    assert found.reason == "OOMKilled"
    assert "8448Mi" in found.message and "8Gi" in found.message and "limits.memory" in found.message


def test_kill_for_memory_stays_visible_for_a_while() -> None:
    assert problem(ready(KILLED)).reason == "OOMKilled"
    long_ago = {"lastState": {"terminated": {"reason": "OOMKilled", "finishedAt": ago(minutes=11)}}}
    assert health.problem(POOL, ready(long_ago), NOW) is None


def test_crash_loop_repeats_the_last_words() -> None:
    container = {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {
            "terminated": {"reason": "Error", "exitCode": 2, "message": "starting\npool: must be at least 1 MiB\n"}
        },
        "restartCount": 5,
    }
    found = problem(pod(container=container))
    assert found.reason == "CrashLoopBackOff"
    assert "exit code 2, 5 restarts" in found.message and "It said: pool: must be at least 1 MiB." in found.message


def test_evicted_agent() -> None:
    found = problem(pod({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory"}))
    assert found.reason == "Evicted" and "low on resource: memory." in found.message


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("0/2 nodes are available: 1 Insufficient memory", "Lower spec.memory.pool (8Gi)"),
        ("1 node(s) didn't match pod anti-affinity rules", "agent of another pool"),
    ],
)
def test_no_room_says_what_to_do(words: str, advice: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": words}
    found = problem(pod({"conditions": [condition], "containerStatuses": []}))
    assert found.reason == "Unschedulable" and words in found.message and advice in found.message


def test_missing_object_is_named() -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "login" not found'}
    assert 'secret "login" not found.' in problem(pod(container={"state": {"waiting": waiting}})).message


def test_starting_agent_is_no_problem_for_a_while() -> None:
    starting = {"started": False}
    assert health.problem(POOL, pod(container=starting), NOW) is None
    assert problem(pod({"startTime": ago(minutes=11)}, starting)).reason == "StillStarting"


def test_unready_agent_is_no_problem_for_a_minute() -> None:
    lately = [{"type": "Ready", "status": "False", "lastTransitionTime": ago(seconds=30)}]
    assert health.problem(POOL, pod({"conditions": lately}), NOW) is None
    assert problem(pod()).reason == "NotReady"


def test_going_agent_is_a_problem_only_when_it_does_not_go() -> None:
    assert health.problem(POOL, pod(deletionTimestamp=ago(seconds=-30)), NOW) is None
    assert problem(pod(deletionTimestamp=ago(minutes=2))).reason == "StuckTerminating"


def unhealthy(pods: list[Manifest], since: datetime | None = NOW - timedelta(hours=1), **nodes: bool) -> list[str]:
    all_nodes = {name: node(name, ready=ready) for name, ready in (nodes or {"a": True}).items()}
    found = health.observe(POOL, pods, all_nodes, list(all_nodes), since, NOW)
    return [f"{it.name} {it.reason}" for it in found.unhealthy]


EVICTED = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": "Pod ephemeral local storage usage exceeds 1Ki.",
    "conditions": [{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": ago(minutes=1)}],
}


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_evicted_agent_is_named_however_it_ended(phase: str) -> None:
    found = problem(pod(EVICTED | {"phase": phase}))
    assert found.reason == "Evicted" and "exceeds 1Ki" in found.message


def remembered(latest: Manifest, **changes: Any) -> list[str]:
    evicted = pod(EVICTED | changes, name="agent-0")
    found = health.observe(POOL, [latest], {"a": node("a")}, ["a"], NOW - timedelta(hours=1), NOW, [evicted])
    return [f"{it.name} {it.pod} {it.reason}: {it.message}" for it in found.unhealthy]


def test_eviction_is_named_although_another_pod_has_taken_the_place_at_once() -> None:
    (starting,) = remembered(pod(container={"started": False}))
    assert starting.startswith("a agent-1 Evicted: ") and starting.endswith("exceeds 1Ki.")
    (serving,) = remembered(ready())
    assert serving.endswith("It runs again.")


def test_eviction_is_forgotten_after_a_while_and_when_the_agent_is_made_otherwise() -> None:
    long_ago = [{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": ago(minutes=11)}]
    assert remembered(ready(), conditions=long_ago) == []
    otherwise = ready()
    otherwise["metadata"]["annotations"] = {names.ANNOTATION_TEMPLATE_HASH: "another"}
    assert remembered(otherwise) == []


def test_node_without_a_pod() -> None:
    assert unhealthy([]) == ["a NoPod"]
    assert unhealthy([], since=NOW - timedelta(seconds=5)) == []
    assert unhealthy([], since=None) == []


def test_node_that_is_down_is_named_instead_of_its_agent() -> None:
    assert unhealthy([pod()], a=False) == ["a NodeNotReady"]


def test_pod_without_a_node_belongs_to_the_one_that_it_is_made_for() -> None:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    waiting = pod({"conditions": [{"type": "PodScheduled", "status": "False", "message": "no"}]})
    waiting["spec"] = {"affinity": affinity, "containers": waiting["spec"]["containers"]}
    assert unhealthy([waiting]) == ["a Unschedulable"]


def test_health_of_a_pod() -> None:
    assert health.read_agent(ready()).health is Health.READY
    assert health.read_agent(pod()).health is Health.NOT_READY
    assert health.read_agent(pod(deletionTimestamp=ago())).health is Health.GOING
    assert health.read_agent(pod({"phase": "Failed"})).health is Health.GOING
