"""The ways to the GPUs: what is looked up, what agents get, and what is said of what they see."""

from __future__ import annotations

from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_crds.agent_api.reports_pb2 import Report, Tier
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_operator.builders import agents
from orbitkv_operator.cluster.api import DAEMON_SETS, NODES, PODS, RUNTIME_CLASSES, Manifest
from orbitkv_operator.gpu import HOST, Obstacle, Route, find_route, judge, keep_off
from orbitkv_operator.placement import matching
from orbitkv_operator.tests.fakes import RELEASE, node, pool_body
from orbitkv_operator.tests.test_pool import World

PRESENT = {"nvidia.com/gpu.present": "true"}
NVIDIA: Manifest = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}


def pool(access: str, route: str | None = None, **gpu: Any) -> ManagerPool:
    body = pool_body(gpu={"access": access, **gpu})
    return ManagerPool.model_validate(body | {"status": {"gpuRoute": route} if route else {}})


def gpu_node(name: str, offered: int | None = 2, handlers: tuple[str, ...] = ("", "runc", "nvidia")) -> Manifest:
    made = node(name, PRESENT)
    made["status"]["runtimeHandlers"] = [{"name": handler, "features": {}} for handler in handlers]
    if offered is not None:
        made["status"]["allocatable"] = {"nvidia.com/gpu": str(offered)}
    return made


# ------------------------------------------------------------------------------------------------- what is looked up


@pytest.mark.parametrize(
    ("asked", "runtime_class", "found"),
    [
        (pool("none"), None, HOST),
        (pool("runtimeClass"), NVIDIA, Route("runtimeClass", "nvidia", "all")),
        (pool("runtimeClassCDI"), NVIDIA, Route("runtimeClassCDI", "nvidia", "management.nvidia.com/gpu=all")),
        (pool("runtimeClass", runtimeClassName="other"), NVIDIA, Route("runtimeClass", "other", "all")),
        (pool("defaultRuntime"), None, Route("defaultRuntime", visible="all")),
        (pool("privileged"), None, Route("privileged", visible="all", privileged=True)),
        (pool("auto"), NVIDIA, Route("runtimeClass", "nvidia", "all")),
        (pool("auto"), None, Route("defaultRuntime", visible="all")),
        (pool("auto", "defaultRuntime"), NVIDIA, Route("defaultRuntime", visible="all")),  # what was chosen stays
    ],
    ids=str,
)
def test_route(asked: ManagerPool, runtime_class: Manifest | None, found: Route) -> None:
    assert find_route(asked, runtime_class, [gpu_node("a")]) == found


@pytest.mark.parametrize(
    ("asked", "runtime_class", "reason", "says"),
    [
        (pool("runtimeClass"), None, "RuntimeClassNotFound", "no RuntimeClass nvidia"),
        (pool("runtimeClassCDI", runtimeClassName="other"), None, "RuntimeClassNotFound", "no RuntimeClass other"),
        (pool("auto", "runtimeClass"), None, "RuntimeClassNotFound", "gpu.access auto"),
        (pool("runtimeClass"), {"handler": "gone"}, "HandlerNotFound", "node a does not have"),
        (pool("dra"), NVIDIA, "AccessNotSupported", "gpu.access is dra"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(asked: ManagerPool, runtime_class: Manifest | None, reason: str, says: str) -> None:
    found = find_route(asked, runtime_class, [gpu_node("a")])
    assert isinstance(found, Obstacle) and found.reason == reason and says in found.message


def test_node_that_does_not_say_which_handlers_it_has_is_given_the_benefit_of_the_doubt() -> None:
    assert isinstance(find_route(pool("runtimeClass"), NVIDIA, [gpu_node("a", handlers=())]), Route)


# --------------------------------------------------------------------------------------------------- what agents see


def report(name: str, gpus: int | None) -> Report:
    return Report(pool="main", node=name, boot_id="x", sequence=1, gpus=gpus)


@pytest.mark.parametrize(
    ("reports", "blind", "verdict", "says"),
    [
        ({"a": 2, "b": 2}, (), (True, "DevicesSeen"), "4 GPUs on 2 nodes, by way of runtimeClass nvidia"),
        ({"a": 2, "b": 1}, (), (False, "DevicesDiffer"), "b offers 2 and its agent sees 1"),
        ({"a": 2}, ("b",), (False, "NoGPU"), "node b see"),
        ({"a": 2}, (), (None, "Waiting"), "Not all agents"),
        ({"a": 2, "b": None}, (), (None, "Waiting"), "Not all agents"),
        ({}, (), (None, "Waiting"), "Not all agents"),
    ],
)
def test_devices(
    reports: dict[str, int | None], blind: tuple[str, ...], verdict: tuple[bool | None, str], says: str
) -> None:
    nodes = {name: gpu_node(name) for name in "ab"}
    route = Route("runtimeClass", "nvidia", "all")
    serving = [name for name in "ab" if name not in blind]
    found = judge(route, ["a", "b"], serving, blind, nodes, [report(*each) for each in reports.items()])
    assert found[:2] == verdict and says in found[2]


def test_agents_are_believed_where_a_node_offers_nothing() -> None:
    """Without a device plugin there is nothing to compare with."""
    nodes = {"a": gpu_node("a", offered=None)}
    assert judge(Route("privileged"), ["a"], ["a"], (), nodes, [report("a", 8)])[0] is True


def test_no_node_with_gpus_is_said_with_the_label() -> None:
    found = judge(Route("defaultRuntime"), [], [], (), {}, [])
    assert found[:2] == (False, "NoGPUNodes") and "nvidia.com/gpu.present" in found[2]


# ---------------------------------------------------------------------------------------------- changes of the driver


@pytest.mark.parametrize(
    ("label", "value", "stays"),
    [
        ("nvidia.com/gpu-driver-upgrade-state", "pod-deletion-required", False),
        ("nvidia.com/gpu-driver-upgrade-state", "drain-required", False),
        ("nvidia.com/gpu-driver-upgrade-state", "pod-restart-required", False),
        ("nvidia.com/gpu-driver-upgrade-state", "upgrade-done", True),
        ("nvidia.com/mig.config.state", "pending", False),
        ("nvidia.com/mig.config.state", "success", True),
    ],
)
def test_agent_is_off_a_node_whose_driver_or_mig_is_being_changed(label: str, value: str, stays: bool) -> None:
    changed = node("a", PRESENT | {label: value})
    assert matching([changed], agents.placement_for(pool("auto"))) == (["a"] if stays else [])


def test_wishes_of_the_spec_hold_as_well() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["x"]}
    terms = [
        {"matchExpressions": [zone]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]},
    ]
    given = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    placement = {"affinity": keep_off(given)}
    busy = {"nvidia.com/mig.config.state": "pending"}
    nodes = [node("a", {"zone": "x"}), node("b"), node("c"), node("d", {"zone": "x"} | busy)]
    assert matching(nodes, placement) == ["a", "b"]
    given["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] = [{}]
    assert matching(nodes, {"affinity": keep_off(given)}) == []  # an empty term matches nothing


# -------------------------------------------------------------------------------------------------------- whole pools


@pytest.fixture
def world() -> World:
    made = World(gpu_node("a"), gpu_node("b"))
    made.api.add(RUNTIME_CLASSES, NVIDIA)
    return made


def see(world: World, **gpus: int) -> None:
    """Agents report how many GPUs they see."""
    for name, count in gpus.items():
        tier = Tier(capacity_bytes=1)
        sequence = int(world.now)
        world.reports.put(Report(pool="main", node=name, boot_id=name, sequence=sequence, dram=tier, gpus=count))


def container(world: World) -> Manifest:
    (found,) = world.child(DAEMON_SETS)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_pool_with_gpus_is_ready_when_agents_see_what_nodes_offer(world: World) -> None:
    world.pool(gpu={"access": "auto"})
    world.settle()
    assert world.condition("GPUAccess") == ("Unknown", "Waiting")
    template = world.child(DAEMON_SETS)["spec"]["template"]
    assert template["spec"]["runtimeClassName"] == "nvidia"
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container(world)["env"]
    assert "mode: cuda" in str(template["metadata"]["annotations"])
    see(world, a=2, b=2)
    world.step()
    assert world.condition("GPUAccess") == ("True", "DevicesSeen")
    assert world.condition("Ready") == ("True", "Ready")
    assert world.status()["gpuRoute"] == "runtimeClass"


def test_operator_that_begins_to_act_takes_the_word_of_the_one_before(world: World) -> None:
    world.pool(gpu={"access": "auto"})
    world.settle()
    see(world, a=2, b=2)
    world.step()
    world.restart()
    world.step()
    assert world.condition("GPUAccess") == ("True", "DevicesSeen")


def test_without_its_runtime_class_a_pool_starts_no_agent_and_says_so(world: World) -> None:
    world.pool(gpu={"access": "runtimeClass", "runtimeClassName": "other"})
    world.settle()
    assert world.condition("GPUAccess") == ("False", "RuntimeClassNotFound")
    assert world.condition("Ready") == ("False", "RuntimeClassNotFound")
    assert not world.api.list_all(DAEMON_SETS)
    world.api.add(RUNTIME_CLASSES, {"metadata": {"name": "other"}, "handler": "nvidia"})
    world.settle()
    assert len(world.pods()) == 2


def test_agents_that_end_as_they_see_no_gpu_are_named(world: World) -> None:
    world.pool(gpu={"access": "defaultRuntime"})
    world.settle()
    for pod in world.api.list_all(PODS, RELEASE):
        words = "orbitkv-agent: mode is cuda, but the CUDA driver shows no GPU to this process"
        ended = {"exitCode": names.AGENT_SEES_NO_GPU, "message": words}
        status = {"name": "agent", "restartCount": 1, "state": {"terminated": ended}}
        conditions = [{"type": "Ready", "status": "False"}]
        world.api.add(PODS, pod | {"status": {"containerStatuses": [status], "conditions": conditions}})
    world.step()
    assert world.condition("GPUAccess") == ("False", "NoGPU")
    assert "nodes a, b" in world.message("GPUAccess") and "default of containerd" in world.message("GPUAccess")
    assert "shows no GPU" in world.status()["unhealthyNodes"][0]["message"]


def test_privileged_agents_have_the_nodes_devices_and_others_are_confined(world: World) -> None:
    world.pool(gpu={"access": "privileged"})
    world.settle()
    privileged = container(world)
    assert privileged["securityContext"]["privileged"] is True
    assert {"name": "dev", "mountPath": "/dev"} in privileged["volumeMounts"]
    world.pool(gpu={"access": "defaultRuntime"})
    world.settle()
    assert container(world)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_no_route_asks_for_a_gpu_of_an_engine(world: World) -> None:
    for access in ("auto", "runtimeClassCDI", "defaultRuntime", "privileged"):
        world.pool(gpu={"access": access})
        world.settle()
        assert "nvidia.com/gpu" not in str(container(world)["resources"])


def test_label_that_goes_takes_the_agents_along_and_is_said(world: World) -> None:
    world.pool(gpu={"access": "auto"})
    world.settle()
    for name in "ab":
        world.api.add(NODES, node(name))
    world.settle()
    assert world.condition("GPUAccess") == ("False", "NoGPUNodes") and not world.pods()
