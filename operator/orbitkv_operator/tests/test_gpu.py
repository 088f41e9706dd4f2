"""The ways to the GPUs: what is looked up, what agents get, and what is said of what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_crds.agent_api.reports_pb2 import Report, Tier
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_operator.builders import agents
from orbitkv_operator.cluster.api import (
    CLAIM_TEMPLATES,
    DAEMON_SETS,
    DEVICE_CLASSES,
    NAMESPACES,
    NODES,
    PODS,
    RESOURCE_SLICES,
    RUNTIME_CLASSES,
    ApiError,
    Manifest,
)
from orbitkv_operator.dra import Obstacle
from orbitkv_operator.gpu import HOST, Route, find_route, judge, keep_off
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
    assert find_route(asked, runtime_class, [gpu_node("a")], None, RELEASE) == found


@pytest.mark.parametrize(
    ("asked", "runtime_class", "reason", "says"),
    [
        (pool("runtimeClass"), None, "RuntimeClassNotFound", "no RuntimeClass nvidia"),
        (pool("runtimeClassCDI", runtimeClassName="other"), None, "RuntimeClassNotFound", "no RuntimeClass other"),
        (pool("auto", "runtimeClass"), None, "RuntimeClassNotFound", "gpu.access auto"),
        (pool("runtimeClass"), {"handler": "gone"}, "HandlerNotFound", "node a does not have"),
        (pool("dra"), NVIDIA, "DRANotServed", "Kubernetes has from 1.34 on"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(asked: ManagerPool, runtime_class: Manifest | None, reason: str, says: str) -> None:
    found = find_route(asked, runtime_class, [gpu_node("a")], None, RELEASE)
    assert isinstance(found, Obstacle) and found.reason == reason and says in found.message


def test_node_that_does_not_say_which_handlers_it_has_is_given_the_benefit_of_the_doubt() -> None:
    assert isinstance(find_route(pool("runtimeClass"), NVIDIA, [gpu_node("a", handlers=())], None, RELEASE), Route)


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
        ("nvidia.com/mig.config.state", "rebooting", False),
        ("nvidia.com/mig.config.state", "failed", True),
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


@pytest.mark.parametrize(
    ("label", "value", "after"),
    [
        ("nvidia.com/gpu-driver-upgrade-state", "pod-deletion-required", "upgrade-done"),
        ("nvidia.com/gpu-driver-upgrade-state", "drain-required", "upgrade-done"),
        ("nvidia.com/gpu-driver-upgrade-state", "pod-restart-required", "upgrade-done"),
        ("nvidia.com/mig.config.state", "pending", "success"),
        ("nvidia.com/mig.config.state", "rebooting", "success"),
    ],
)
def test_agent_goes_for_a_change_of_driver_or_mig_and_comes_back(label: str, value: str, after: str) -> None:
    world = World(gpu_node("a"), gpu_node("b"))
    world.pool(gpu={"access": "defaultRuntime"})
    world.settle()
    stays = world.pods()["b"]
    for state, there in ((value, {"b"}), (after, {"a", "b"})):
        changed = gpu_node("a")
        changed["metadata"]["labels"] |= {label: state}
        world.api.add(NODES, changed)
        world.settle()
        assert set(world.pods()) == there and world.pods()["b"] == stays
        assert world.status()["nodes"]["desired"] == len(there)


# -------------------------------------------------------------------------------------------------------- whole pools


@pytest.fixture
def world() -> World:
    made = World(gpu_node("a"), gpu_node("b"))
    made.api.add(RUNTIME_CLASSES, NVIDIA)
    return made


def see(world: World, pods: dict[str, str] | None = None, **gpus: int) -> None:
    """Agents report how many GPUs they see. `pods`: by node, the uids of the agents' pods; None: those that run."""
    pods = world.pods() if pods is None else pods
    for name, count in gpus.items():
        tier, uid, sequence = Tier(capacity_bytes=1), pods[name], int(world.now)
        report = Report(pool="main", node=name, pod_uid=uid, boot_id=uid, sequence=sequence, dram=tier, gpus=count)
        world.reports.put(report)


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


def test_what_the_agent_before_saw_says_nothing_of_the_present_one(world: World) -> None:
    world.reports.start()
    world.pool(gpu={"access": "auto"})
    world.settle()
    before = world.pods()
    world.pool(gpu={"access": "privileged"})
    for _ in range(6):
        see(world, before, a=2, b=2)
        world.step()
    assert not set(world.pods().values()) & set(before.values())
    assert world.condition("GPUAccess") == ("Unknown", "Waiting")
    see(world, a=2, b=2)
    world.step()
    assert world.condition("GPUAccess") == ("True", "DevicesSeen")
    assert "by way of privileged" in world.message("GPUAccess")


def test_what_an_agent_saw_says_nothing_any_more_when_its_pod_is_being_deleted(world: World) -> None:
    world.reports.start()
    world.pool(gpu={"access": "auto"})
    world.settle()
    see(world, a=2, b=2)
    world.step()
    assert world.condition("GPUAccess") == ("True", "DevicesSeen")
    pod = next(it for it in world.api.list_all(PODS) if it["metadata"]["uid"] == world.pods()["a"])
    world.api.add(PODS, {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    world.now += 60
    world.reconciler.reconcile("main")
    assert world.condition("GPUAccess") == ("Unknown", "Waiting")


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


def test_runtime_class_that_goes_from_a_ready_pool_is_named_and_its_agents_stay(world: World) -> None:
    world.pool(gpu={"access": "auto"})
    world.settle()
    see(world, a=2, b=2)
    world.step()
    before, daemon_set = world.pods(), world.child(DAEMON_SETS)
    del world.api.objects[RUNTIME_CLASSES, "", "nvidia"]
    world.settle()
    assert world.condition("GPUAccess") == world.condition("Ready") == ("False", "RuntimeClassNotFound")
    assert world.condition("Available") == ("True", "AgentsReady") and world.condition("Progressing")[1] == "Blocked"
    assert world.pods() == before and world.child(DAEMON_SETS) == daemon_set
    world.api.add(RUNTIME_CLASSES, NVIDIA)
    see(world, a=2, b=2)
    world.step()
    assert world.condition("Ready") == ("True", "Ready") and world.pods() == before


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


# ------------------------------------------------------------------------------------------------------------- claims

ADMIN = "resource.kubernetes.io/admin-access"


def slice_of(name: str, driver: str = "gpu.nvidia.com", devices: int = 8) -> Manifest:
    spec = {"driver": driver, "nodeName": name, "devices": [{"name": f"gpu-{number}"} for number in range(devices)]}
    return {"metadata": {"name": f"{name}-{driver}"}, "spec": spec}


def allow_admin(world: World, allowed: bool = True) -> None:
    labels = {ADMIN: "true"} if allowed else {}
    world.view.put(NAMESPACES, {"metadata": {"name": RELEASE, "uid": "u", "labels": labels}})


@pytest.fixture
def with_claims(world: World) -> World:
    """A cluster that has all that claims with admin access need."""
    world.api.add(DEVICE_CLASSES, {"metadata": {"name": "gpu.nvidia.com"}})
    for name in "ab":
        world.api.add(RESOURCE_SLICES, slice_of(name))
    allow_admin(world)
    return world


def test_agents_claim_all_gpus_with_admin_access_and_take_none(with_claims: World) -> None:
    world = with_claims
    world.pool(gpu={"access": "dra"})
    world.settle()
    template = world.child(CLAIM_TEMPLATES)
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All", "adminAccess": True}
    assert template["metadata"]["ownerReferences"][0]["uid"] == "uid-of-main"
    pod = world.child(DAEMON_SETS)["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "orbitkv-main"}]
    assert container(world)["resources"]["claims"] == [{"name": "gpus"}]
    assert "runtimeClassName" not in pod and "NVIDIA_VISIBLE_DEVICES" not in str(pod)
    see(world, a=8, b=8)
    world.step()
    assert world.status()["gpuRoute"] == "dra" and len(world.pods()) == 2
    world.api.writes.clear()
    world.settle()
    assert not world.changes()


@pytest.mark.parametrize(
    ("take_away", "reason", "says"),
    [
        (lambda world: world.api.absent.add(CLAIM_TEMPLATES), "DRANotServed", "1.34"),
        (
            lambda world: world.api.objects.pop((DEVICE_CLASSES, "", "gpu.nvidia.com")),
            "DeviceClassNotFound",
            "NVIDIA's DRA driver",
        ),
        (lambda world: allow_admin(world, False), "AdminAccessNotAllowed", f"{ADMIN}=true"),
        (
            lambda world: world.api.objects.pop((RESOURCE_SLICES, "", "b-gpu.nvidia.com")),
            "NoDevicesPublished",
            "no ResourceSlice of b:",
        ),
        (lambda world: world.api.add(RESOURCE_SLICES, slice_of("b", devices=0)), "NoDevicesPublished", "of b:"),
    ],
)
def test_each_thing_that_claims_need_is_named_when_it_is_missing(
    with_claims: World, take_away: Callable[[World], object], reason: str, says: str
) -> None:
    world = with_claims
    take_away(world)
    world.pool(gpu={"access": "dra"})
    world.settle()
    assert world.condition("GPUAccess") == ("False", reason) and says in world.message("GPUAccess")
    assert world.condition("Ready") == ("False", reason)
    assert not world.api.list_all(DAEMON_SETS) and not world.api.list_all(CLAIM_TEMPLATES)


def test_all_that_is_missing_is_named_at_once(world: World) -> None:
    world.pool(gpu={"access": "dra"})
    world.settle()
    message = world.message("GPUAccess")
    assert world.condition("GPUAccess") == ("False", "DeviceClassNotFound")
    assert ADMIN in message and "no ResourceSlice of a, b" in message


def test_cluster_that_drops_admin_access_gets_no_claim(with_claims: World) -> None:
    def drop(manifest: Manifest) -> Manifest:
        for request in manifest["spec"]["spec"]["devices"]["requests"]:
            del request["exactly"]["adminAccess"]
        return manifest

    world = with_claims
    world.api.admit = drop
    world.pool(gpu={"access": "dra"})
    world.settle()
    assert world.condition("GPUAccess") == ("False", "AdminAccessDropped")
    assert not world.api.list_all(CLAIM_TEMPLATES) and not world.api.list_all(DAEMON_SETS)


def test_claim_that_a_policy_refuses_is_said_in_its_words(with_claims: World) -> None:
    def refuse(manifest: Manifest) -> Manifest:
        raise ApiError(403, "admission webhook denied the request: no admin claims here")

    world = with_claims
    world.api.admit = refuse
    world.pool(gpu={"access": "dra"})
    world.settle()
    assert world.condition("GPUAccess") == ("False", "ClaimRefused")
    assert "no admin claims here" in world.message("GPUAccess")


def test_template_goes_when_another_way_is_taken(with_claims: World) -> None:
    world = with_claims
    world.pool(gpu={"access": "dra"})
    world.settle()
    world.pool(gpu={"access": "runtimeClass"})
    world.settle()
    assert not world.api.list_all(CLAIM_TEMPLATES)
    assert "resourceClaims" not in world.child(DAEMON_SETS)["spec"]["template"]["spec"]
    assert "claims" not in container(world)["resources"]


def test_template_goes_too_when_another_way_is_taken_because_something_is_missing(with_claims: World) -> None:
    world = with_claims
    world.pool(gpu={"access": "dra"})
    world.settle()
    allow_admin(world, False)
    world.settle()
    world.pool(gpu={"access": "runtimeClass"})
    world.settle()
    assert not world.api.list_all(CLAIM_TEMPLATES) and world.status()["gpuRoute"] == "runtimeClass"


def test_agents_stay_when_something_that_claims_need_goes(with_claims: World) -> None:
    world = with_claims
    world.pool(gpu={"access": "dra"})
    world.settle()
    before = world.pods()
    allow_admin(world, False)
    world.settle()
    assert world.condition("GPUAccess") == ("False", "AdminAccessNotAllowed") and world.pods() == before
