"""The cluster that the other tests run on: that it is one, that its nodes are apart, and that nothing of it stays."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.cgroups import ROOT, ControlGroups
from e2e.cluster.cluster import FIRST, Cluster, state_folder
from e2e.cluster.network import HOST_INTERFACE, NODES, PODS, SERVICES
from e2e.cluster.node import PRIVATE
from e2e.support.installation import Installations, fake_node_object, namespace_object, unique
from e2e.support.kubectl import Kubectl, Object, has_condition
from e2e.support.target import Target
from orbitkv_crds.quantity import parse_quantity


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def traces() -> dict[str, object]:
    """What a cluster leaves on this machine, by kind; each is empty where there is none."""
    folder = str(state_folder())
    commands = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if folder in line or "containerd-shim" in line:
            commands.append(line)
    networks = [network.rsplit(".", 2)[0] for network in (NODES, PODS, SERVICES)]
    return {
        "processes": commands + sorted(map(str, ControlGroups().processes())),
        "groups": [str(path) for path in ROOT.glob("*/orbitkv-cluster")],
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if folder in line],
        "interfaces": [line for line in output("ip", "-br", "link").splitlines() if line.startswith(HOST_INTERFACE)],
        "routes": [line for line in output("ip", "route").splitlines() if line.startswith(tuple(networks))],
        "ports": [line for line in output("ss", "-lntH").splitlines() if line.split()[3].startswith("10.24")],
        "folder": [str(path) for path in [state_folder()] if path.exists()],
    }


@pytest.mark.ends_cluster
def test_a_cluster_that_was_cut_short_goes_without_a_trace_and_starts_again(
    own_cluster: Cluster, installations: Installations
) -> None:
    before = {path: Path(path).exists() for path in PRIVATE if Path(path).exists() and any(Path(path).iterdir())}
    assert traces()["processes"], "the cluster that runs would not be seen"
    # as after a crash in the middle of a start
    (own_cluster.folder / "complete").unlink()
    own_cluster.nodes["node-b"].processes.stop("containerd")
    own_cluster.control_plane.processes.stop("etcd")
    Cluster.down()
    installations.forget()
    assert not any(traces().values()), traces()
    assert {path: Path(path).exists() for path in before} == before

    started = time.monotonic()
    Cluster.up()
    seconds = time.monotonic() - started
    own_cluster.reload()
    assert seconds < 180
    assert own_cluster.ended() == []


def test_a_cluster_that_runs_is_not_started_again(own_cluster: Cluster) -> None:
    apiserver = own_cluster.control_plane.processes.record("apiserver")
    Cluster.up()
    assert own_cluster.control_plane.processes.record("apiserver") == apiserver


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    name = unique()
    kubectl.apply(namespace_object(name))
    yield name
    kubectl.delete("namespace", name)


def daemon_set(namespace: str, image: str, program: str) -> Object:
    """A program of Python on every node, which sees the node's /run/orbitkv."""
    container = {
        "name": "main",
        "image": image,
        "command": ["python3", "-u", "-c", program],
        "volumeMounts": [{"name": "run", "mountPath": "/run/orbitkv"}],
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    }
    volume = {"name": "run", "hostPath": {"path": "/run/orbitkv", "type": "DirectoryOrCreate"}}
    pod = {"containers": [container], "volumes": [volume], "terminationGracePeriodSeconds": 0}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"app": "probe"}},
            "template": {"metadata": {"labels": {"app": "probe"}}, "spec": pod},
        },
    }


PROGRAM = """
import http.server, os, pathlib
path = pathlib.Path("/run/orbitkv/probe")
path.write_text(os.environ["NODE"])
os.chdir("/run/orbitkv")
http.server.test(http.server.SimpleHTTPRequestHandler, http.server.ThreadingHTTPServer, port=8000)
"""

FETCH = """
import sys, time, urllib.request
deadline = time.monotonic() + 30
while True:
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=3).read().decode(), end="")
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.2)
"""


def test_nodes_have_files_of_their_own_and_reach_each_other_by_name(
    target: Target, kubectl: Kubectl, images: list[str], namespace: str
) -> None:
    if target.own is None:
        pytest.skip("about the project's own cluster: unset KUBECONFIG")
    kubectl.apply(daemon_set(namespace, images[1], PROGRAM))
    ready = kubectl.wait(
        "daemonset",
        "probe",
        lambda each: each["status"].get("numberReady") == len(FIRST),
        "a pod on each node",
        namespace=namespace,
    )
    assert ready["status"]["desiredNumberScheduled"] == len(FIRST)
    pods = {pod["spec"]["nodeName"]: pod for pod in kubectl.list_all("pods", namespace)}
    assert sorted(pods) == list(FIRST)
    for name, node in target.own.nodes.items():
        assert node.host_path("/run/orbitkv/probe").read_text() == name
        node.host_path("/run/orbitkv/probe").rename(node.host_path(f"/run/orbitkv/{name}"))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "on-b", "namespace": namespace},
        "spec": {"selector": {"on": "node-b"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    kubectl.run("label", "pod", pods["node-b"]["metadata"]["name"], "on=node-b", f"--namespace={namespace}")
    kubectl.apply(service)
    asks = pods["node-a"]["metadata"]["name"]
    url = f"http://on-b.{namespace}.svc.cluster.local/node-b"
    assert kubectl.execute(asks, namespace, "python3", "-c", FETCH, url) == "node-b"
    address = kubectl.get("service", "on-b", namespace)
    assert address is not None
    # from this machine too, as tests read metrics of pods that way
    assert output("curl", "-fsS", "-m", "10", f"http://{address['spec']['clusterIP']}/node-b") == "node-b"
    for name, node in target.own.nodes.items():
        node.host_path(f"/run/orbitkv/{name}").unlink()


def test_nodes_do_not_count_the_same_memory_twice(target: Target, kubectl: Kubectl) -> None:
    if target.own is None:
        pytest.skip("about the project's own cluster: unset KUBECONFIG")
    nodes = kubectl.list_all("nodes")
    allocatable = sum(parse_quantity(node["status"]["allocatable"]["memory"]) for node in nodes)
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")]
    assert allocatable < 1024 * int(line.split()[1])


def test_nodes_without_a_machine_are_played(own_cluster: Cluster, kubectl: Kubectl) -> None:
    own_cluster.start_kwok()
    name = unique("fake")
    kubectl.apply(fake_node_object(name))
    kubectl.wait("node", name, has_condition("Ready"), "a fake node to be ready")
    kubectl.delete("node", name)
    own_cluster.repair()
    assert own_cluster.ended() == []
