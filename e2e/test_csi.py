"""The CSI driver on a real cluster: engines where Pod Security forbids them the folder of the agent's socket.

What the driver answers, and how it mounts, is tested without a cluster in `orbitkv_agent/csi/tests`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster.node import Node
from e2e.support.engines import EnginePod
from e2e.support.helm import CHART
from e2e.support.installation import RELEASE, Installation, cache_object
from e2e.support.kubectl import Kubectl, Object
from e2e.support.target import Target
from e2e.test_admission import deployment, strict
from orbitkv_crds import names, stamps

NODE = "node-a"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
DRIVERS = "app.kubernetes.io/name=orbitkv,app.kubernetes.io/component=csi"
SOCKET_VOLUME = "ORBITKV_WEBHOOK_SOCKET_VOLUME"
WEBHOOKS = "app.kubernetes.io/name=orbitkv,app.kubernetes.io/component=webhook"


@contextmanager
def by_csi(target: Target, installation: Installation) -> Iterator[None]:
    """While engines' pods get the agent's socket by the driver."""
    change(target, installation, "csi")
    try:
        yield
    finally:
        change(target, installation, "hostPath", "injection.csi.enabled=false")


def change(target: Target, installation: Installation, kind: str, *values: str, wait: bool = True) -> None:
    """Changes by what volume pods get the socket, and further values; waits until the webhook goes by that alone."""
    kubectl, where = target.kubectl, f"--namespace={installation.namespace}"
    waiting = ["--wait", "--timeout=120s"] if wait else []
    given = [f"--set={value}" for value in (f"injection.socketVolume={kind}", *values)]
    target.helm[3].run("upgrade", RELEASE, str(CHART), where, "--reuse-values", *waiting, *given)

    def settled() -> bool:
        earlier = [
            pod["metadata"]["name"]
            for pod in kubectl.list_all("pods", installation.namespace, WEBHOOKS)
            if {"name": SOCKET_VOLUME, "value": kind} not in pod["spec"]["containers"][0]["env"]
        ]
        # they would go by themselves, and serve for some more seconds
        if earlier:
            kubectl.run("delete", "pods", *earlier, where, "--grace-period=1", "--ignore-not-found", "--timeout=60s")
        return not earlier

    if wait:
        kubectl.until(settled, f"the webhook's pods to go by {kind}")


def engines(kubectl: Kubectl, namespace: str, count: int) -> list[Object]:
    """The engines' pods, once so many run."""
    found: list[Object] = []

    def run() -> bool:
        found[:] = [
            pod
            for pod in kubectl.list_all("pods", namespace, "app=engine")
            if pod.get("status", {}).get("phase") == "Running"
        ]
        return len(found) == count

    kubectl.until(run, f"{count} engines to run", timeout=90)
    return found


def mounts(node: Node, pod: Object) -> list[str]:
    """What is mounted on a node for a pod through CSI drivers; the node's own folder may show each once more."""
    uid = pod["metadata"]["uid"]
    lines = node.run("cat", "/proc/mounts").splitlines()
    return [line for line in lines if f"/pods/{uid}/volumes/kubernetes.io~csi/" in line]


def test_engines_in_a_restricted_namespace_attach_through_the_driver(
    target: Target, kubectl: Kubectl, clean: Installation, images: list[str]
) -> None:
    """Also those that come while the driver is replaced and the kubelet starts anew, which leave mounts as they are;
    and when all goes back to hostPath, nothing stays mounted."""
    if target.own is None:
        pytest.skip("looks at nodes, so it runs on the project's own cluster only: unset KUBECONFIG")
    node = target.own.nodes[NODE]
    image = next(name for name in images if "/node-agent" in name)
    namespace = clean.make_namespace(RESTRICTED)
    pool = clean.make_pool(ready=0)
    kubectl.apply(cache_object("chat", namespace, pool))
    with by_csi(target, clean):
        on_node = kubectl.run("get", "csinode", NODE, "-o", "jsonpath={.spec.drivers[*].name}")
        assert names.CSI_DRIVER in on_node.split()
        kubectl.apply(deployment("engine", namespace, "chat", strict(image, "main", nodeName=NODE)))
        (first,) = engines(kubectl, namespace, 1)
        stamp = stamps.read_injected(first["metadata"]["annotations"])
        assert stamp is not None and stamp.namespace == f"{namespace}/chat"
        before = EnginePod(kubectl, first["metadata"]["name"], namespace)
        assert before.run("save", cache=stamp.namespace, count=10, patience=60)["kept"] == 10
        mounted = mounts(node, first)
        assert mounted and all("ro" in line.split()[3].split(",") for line in mounted)

        node.processes.stop("kubelet")
        node.processes.restart("kubelet")
        drivers = {pod["spec"]["nodeName"]: pod for pod in kubectl.list_all("pods", clean.namespace, DRIVERS)}
        kubectl.delete("pod", drivers[NODE]["metadata"]["name"], clean.namespace, wait=0)
        kubectl.run("scale", "deployment", "engine", "--replicas=2", f"--namespace={namespace}")
        both = engines(kubectl, namespace, 2)
        (second,) = (pod for pod in both if pod["metadata"]["uid"] != first["metadata"]["uid"])
        after = EnginePod(kubectl, second["metadata"]["name"], namespace)
        for engine in (before, after):
            assert engine.run("find", cache=stamp.namespace, count=10, patience=60)["hits"] == 10
        assert mounts(node, first) == mounted
        still = kubectl.get("pod", before.name, namespace)
        assert still is not None and [each["restartCount"] for each in still["status"]["containerStatuses"]] == [0]

        change(target, clean, "hostPath", "injection.csi.enabled=true", wait=False)
        kubectl.delete("deployment", "engine", namespace)
        kubectl.until(lambda: not any(mounts(node, pod) for pod in both), "the volumes to be unmounted")
        assert node.host_path(names.SOCKET_PATH).is_socket()
    assert kubectl.get("csidriver", names.CSI_DRIVER) is None
