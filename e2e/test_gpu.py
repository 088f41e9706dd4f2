"""The ways to the GPUs, on a node whose GPUs are stand-ins: each works, and what is missing for one is named."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from e2e.cluster.cluster import Cluster
from e2e.cluster.node import Node
from e2e.support.installation import Installation
from e2e.support.kubectl import Kubectl, Object, condition, has_condition

PRESENT = "nvidia.com/gpu.present"
UPGRADE = "nvidia.com/gpu-driver-upgrade-state"
MIG = "nvidia.com/mig.config.state"
AWAY = (
    (UPGRADE, "pod-deletion-required", "upgrade-done"),
    (UPGRADE, "drain-required", "upgrade-done"),
    (UPGRADE, "pod-restart-required", "upgrade-done"),
    (MIG, "pending", "success"),
    (MIG, "rebooting", "success"),
)
"""Labels and their values that take an agent off its node, and after which it comes back."""
ALL = "all"
BY_CDI = "management.nvidia.com/gpu=all"
DRA = "resource.k8s.io/v1"
DRIVER = "gpu.nvidia.com"
SLICE = "orbitkv-test-gpus"
ADMIN = "resource.kubernetes.io/admin-access"
SECONDS = 180
"""What is missing has to be named within this time."""


def offer(kubectl: Kubectl, node: str, count: int | None) -> None:
    """Lets a node offer so many GPUs, as a device plugin would; the kubelet itself would take ten seconds to say so."""
    offered = {"nvidia.com/gpu": count}
    kubectl.patch("node", node, {"status": {"capacity": offered, "allocatable": offered}}, subresource="status")


def device_class() -> Object:
    expression = f'device.driver == "{DRIVER}"'
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    return {"apiVersion": DRA, "kind": "DeviceClass", "metadata": {"name": DRIVER}, "spec": spec}


def published(node: str, count: int) -> Object:
    """What NVIDIA's driver publishes of a node's GPUs."""
    spec = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": f"gpu-{number}"} for number in range(count)],
    }
    return {"apiVersion": DRA, "kind": "ResourceSlice", "metadata": {"name": SLICE}, "spec": spec}


def holder(namespace: str) -> list[Object]:
    """A pod that is to have one GPU to itself, and its claim."""
    metadata = {"name": "holder", "namespace": namespace}
    exactly = {"deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 1}
    claim = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    container = {"name": "main", "image": "localhost/none", "resources": {"claims": [{"name": "gpu"}]}}
    pod = {
        "containers": [container],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "holder"}],
        "terminationGracePeriodSeconds": 0,
    }
    return [
        {"apiVersion": DRA, "kind": "ResourceClaim", "metadata": metadata, "spec": claim},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod},
    ]


def allocated(kubectl: Kubectl, namespace: str) -> list[set[str]]:
    """The devices that each claim of a namespace was given."""
    claims = kubectl.list_all("resourceclaims.resource.k8s.io", namespace)
    given = [claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()) for claim in claims]
    return [{device["device"] for device in devices} for devices in given]


def runtime_class(name: str, handler: str) -> Object:
    return {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler}


@pytest.fixture
def node(own_cluster: Cluster, kubectl: Kubectl) -> Iterator[Node]:
    """A node that offers two GPUs and has a label that says so; NVIDIA's runtime has a handler of its own."""
    found = own_cluster.nodes["node-a"]
    found.give_gpus({ALL: 2, BY_CDI: 2})
    kubectl.run("label", "node", found.name, f"{PRESENT}=true")
    offer(kubectl, found.name, 2)
    yield found
    found.take_gpus()
    offer(kubectl, found.name, None)
    kubectl.run("label", "node", found.name, f"{PRESENT}-", f"{UPGRADE}-", f"{MIG}-")
    for name in ("nvidia", "other"):
        kubectl.delete("runtimeclass", name)
    kubectl.delete("resourceslice", SLICE)
    kubectl.delete("deviceclass", DRIVER)


@pytest.mark.timeout(1200)
def test_each_way_to_the_gpus_works_and_what_is_missing_is_named(
    clean: Installation, kubectl: Kubectl, node: Node
) -> None:
    def access(status: str, reason: str, *words: str, timeout: float = SECONDS) -> None:
        """Waits for the condition GPUAccess, and for words in its message."""
        found = kubectl.wait(
            "managerpool",
            pool,
            lambda it: (
                has_condition("GPUAccess", status, reason)(it)
                and all(word in condition(it, "GPUAccess")["message"] for word in words)
            ),
            f"GPUAccess={status} ({reason}) with {words}",
            timeout=timeout,
        )
        assert status == "True" or condition(found, "Ready")["status"] == "False"

    def go_by(way: str, **gpu: str | None) -> None:
        kubectl.patch("managerpool", pool, {"spec": {"gpu": {"access": way, **gpu}}})

    def try_again() -> None:
        """Makes the agent anew, so that nobody has to wait until a container that ended is started again."""
        kubectl.delete("pod", clean.agents(pool)[node.name]["metadata"]["name"], clean.namespace)

    def look_again() -> None:
        """Has the operator look at once at what no watch tells it of."""
        kubectl.run("annotate", "managerpool", pool, f"orbitkv-test/looked={time.monotonic()}", "--overwrite")

    def agent() -> str:
        """The uid of the agent's pod."""
        return str(clean.agents(pool)[node.name]["metadata"]["uid"])

    def works(route: str) -> None:
        access("True", "DevicesSeen", "2 GPUs on 1 nodes", timeout=90)
        found = clean.wait_ready("managerpool", pool)
        assert found["status"]["gpuRoute"] == route
        assert set(clean.agents(pool)) == {node.name}

    # by claims, of which the cluster has the kinds and NVIDIA's driver is not there
    pool = clean.make_pool(ready=0, gpu={"access": "dra"})
    access(
        "False", "DeviceClassNotFound", "DeviceClass gpu.nvidia.com", "admin-access=true", "no ResourceSlice of node-a"
    )
    assert kubectl.get("daemonset", f"orbitkv-{pool}", clean.namespace) is None

    # by a RuntimeClass, which is not there, then has a handler that is not there
    go_by("runtimeClass")
    access("False", "RuntimeClassNotFound", "no RuntimeClass nvidia")
    assert kubectl.get("daemonset", f"orbitkv-{pool}", clean.namespace) is None
    kubectl.apply(runtime_class("other", "gone"))
    go_by("runtimeClass", runtimeClassName="other")
    access("False", "HandlerNotFound", "node-a", "gone")
    assert kubectl.get("daemonset", f"orbitkv-{pool}", clean.namespace) is None
    kubectl.apply(runtime_class("nvidia", "nvidia"))
    go_by("auto", runtimeClassName=None)
    works("runtimeClass")

    # what agents see is held against what the node offers
    offer(kubectl, node.name, 3)
    access("False", "DevicesDiffer", "node-a offers 3 and its agent sees 2")
    offer(kubectl, node.name, 2)
    access("True", "DevicesSeen")

    # while the driver is replaced, or the MIG partition changed, there is no agent
    for label, during, after in AWAY:
        kubectl.run("label", "node", node.name, f"{label}={during}", "--overwrite")
        kubectl.until(lambda: not clean.agents(pool), f"the agent to go for {during}")
        if during == "pod-deletion-required":
            access("False", "NoGPUNodes")
        kubectl.run("label", "node", node.name, f"{label}={after}", "--overwrite")
        kubectl.until(lambda: node.name in clean.agents(pool), f"an agent to come after {during}")
    works("runtimeClass")

    # by CDI, of which nothing is specified at first
    node.give_gpus({ALL: 2})
    go_by("runtimeClassCDI")
    access("False", "NoGPU", "node-a", "nvidia-ctk cdi generate")
    node.give_gpus({ALL: 2, BY_CDI: 2})
    try_again()
    works("runtimeClassCDI")

    # the RuntimeClass goes from a pool that is ready: agents that run stay
    ready, made = agent(), kubectl.get("daemonset", f"orbitkv-{pool}", clean.namespace)
    kubectl.delete("runtimeclass", "nvidia")
    access("False", "RuntimeClassNotFound", "no RuntimeClass nvidia")
    left = kubectl.get("daemonset", f"orbitkv-{pool}", clean.namespace)
    assert made is not None and left is not None
    assert left["metadata"]["generation"] == made["metadata"]["generation"] and agent() == ready

    # without it auto is the node's default runtime, which is not NVIDIA's at first
    go_by("auto")
    access("False", "NoGPU", "node-a", "default of containerd")
    node.give_gpus({ALL: 2}, handlers=("runc",))
    try_again()
    works("defaultRuntime")
    ready = agent()
    kubectl.apply(runtime_class("nvidia", "nvidia"))  # what was chosen stays, and is the same when it is named
    go_by("defaultRuntime")
    works("defaultRuntime")
    assert agent() == ready

    # by privilege, where no runtime adds the driver's libraries at first
    node.give_gpus({ALL: 2})
    go_by("privileged")
    access("False", "NoGPU", "node-a", "libraries must be on the node")
    node.give_gpus({ALL: 2}, handlers=("runc",))
    try_again()
    works("privileged")

    # by claims again: what NVIDIA's driver would publish is there bit by bit, of 8 GPUs another pod holds one
    tenant = clean.make_namespace()
    kubectl.apply(device_class())
    go_by("dra")
    access("False", "AdminAccessNotAllowed", f"{ADMIN}=true")
    kubectl.run("label", "namespace", clean.namespace, f"{ADMIN}=true")
    look_again()
    access("False", "NoDevicesPublished", "no ResourceSlice of node-a")
    kubectl.apply(published(node.name, 8), *holder(tenant))
    kubectl.until(lambda: [len(devices) for devices in allocated(kubectl, tenant)] == [1], "the pod to hold a GPU")
    look_again()
    every = {f"gpu-{number}" for number in range(8)}
    kubectl.until(lambda: every in allocated(kubectl, clean.namespace), "an agent to be given all GPUs")
    assert len(allocated(kubectl, tenant)[0]) == 1
    kubectl.run("label", "namespace", clean.namespace, f"{ADMIN}-")
    look_again()
    access("False", "AdminAccessNotAllowed", f"{ADMIN}=true")
    assert set(clean.agents(pool)) == {node.name}
    kubectl.delete("pod", "holder", tenant, wait=0)
