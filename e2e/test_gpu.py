"""The ways to the GPUs, on a node whose GPUs are stand-ins: each works, and what is missing for one is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster.cluster import Cluster
from e2e.cluster.node import Node
from e2e.support.installation import Installation
from e2e.support.kubectl import Kubectl, Object, condition, has_condition

PRESENT = "nvidia.com/gpu.present"
UPGRADE = "nvidia.com/gpu-driver-upgrade-state"
MIG = "nvidia.com/mig.config.state"
ALL = "all"
BY_CDI = "management.nvidia.com/gpu=all"
SECONDS = 60
"""What is missing has to be named within this time."""


def offer(kubectl: Kubectl, node: str, count: int | None) -> None:
    """Lets a node offer so many GPUs, as a device plugin would."""
    kubectl.patch("node", node, {"status": {"capacity": {"nvidia.com/gpu": count}}}, subresource="status")


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


@pytest.mark.timeout(400)
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
    for label, during, after in ((UPGRADE, "pod-restart-required", "upgrade-done"), (MIG, "pending", "success")):
        kubectl.run("label", "node", node.name, f"{label}={during}")
        access("False", "NoGPUNodes")
        kubectl.until(lambda: not clean.agents(pool), "the agent to go")
        kubectl.run("label", "node", node.name, f"{label}={after}", "--overwrite")
        works("runtimeClass")

    # by CDI, of which nothing is specified at first
    node.give_gpus({ALL: 2})
    go_by("runtimeClassCDI")
    access("False", "NoGPU", "node-a", "nvidia-ctk cdi generate")
    node.give_gpus({ALL: 2, BY_CDI: 2})
    try_again()
    works("runtimeClassCDI")

    # by the node's default runtime, which is not NVIDIA's at first
    go_by("defaultRuntime")
    access("False", "NoGPU", "node-a", "default of containerd")
    node.give_gpus({ALL: 2}, handlers=("runc",))
    try_again()
    works("defaultRuntime")
    go_by("privileged")
    works("privileged")
