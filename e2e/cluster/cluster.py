"""The whole cluster: two nodes, and on the first the control plane. One on a machine, all of it in one folder.

cluster = Cluster.up()      nothing to do where it runs already
cluster.kubeconfig
cluster.nodes["node-b"].processes.stop("kubelet")
Cluster.down()              also after a crash, and of a cluster that was never whole
"""

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import network, programs
from e2e.cluster.certificates import Authority
from e2e.cluster.cgroups import ControlGroups
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.node import PRIVATE, Node
from e2e.cluster.processes import ClusterError, Processes, wait_until
from tools.cache import SetUpError, cache_folder, locked

TOOLS = Path(__file__).resolve().parents[2] / "tools"
FIRST = ("node-a", "node-b")
SYSCTLS = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)
"""Settings of the whole machine that a kubelet changes; put back by `down`."""

NODE_GRACE = 20
"""A node whose kubelet was killed is known to be gone after so many seconds, not 50: tests wait for it."""
CLIENT_LIMITS = ["--kube-api-qps=500", "--kube-api-burst=1000"]
"""Of the controller manager, so that what tests remove goes soon. The scheduler has its own, 50 requests a second."""
CONTROL_PROCESSES = ("etcd", "apiserver", "controller-manager", "scheduler", "coredns", "kwok")
NODE_PROCESSES = ("containerd", "kubelet", "proxy")


@dataclass(frozen=True)
class Before:
    """What this machine was like before: what `down` has to put back."""

    sysctls: dict[str, str]
    made_folders: list[str]


def state_folder() -> Path:
    """Where everything of the cluster lies, but for its programs."""
    return cache_folder() / "cluster"


def require_machine() -> None:
    """Checks for root and installs Debian's packages. Raises SetUpError with what is missing."""
    if os.geteuid() != 0:
        raise SetUpError("the cluster needs root, for its network and mount namespaces: try again with sudo -E")
    packages = subprocess.run(
        [str(TOOLS / "system_packages.sh"), "cluster"], env={**os.environ, "PYTHON": sys.executable}, check=False
    )
    if packages.returncode:
        raise SetUpError("Debian packages are missing, see above")


class Cluster:
    """A cluster that runs."""

    def __init__(self, folder: Path, built: programs.Programs) -> None:
        self.folder = folder
        self.programs = built
        self._groups = ControlGroups()
        self.reload()

    def reload(self) -> None:
        """Reads anew what is there, after the cluster was ended and another one started."""
        certificates = self.folder / "certificates"
        there = (certificates / "ca.key").exists()
        self.authority = Authority.load(certificates) if there else Authority(certificates)
        self._group = self._groups.system("control")
        self._outside = Processes(self.folder, groups=[self._group])
        self.nodes = {name: self._node(name, index) for name, index in self._indices().items()}

    @classmethod
    def up(cls) -> "Cluster":
        """Starts the cluster, or finds the one that runs. Raises SetUpError and ClusterError."""
        require_machine()
        built = programs.ensure()
        folder = state_folder()
        with cls._lock():
            cluster = cls.found()
            if cluster is not None:
                with contextlib.suppress(ClusterError):
                    cluster.repair()
                    return cluster
            cls._remove(folder)
            folder.mkdir(parents=True)
            (folder / "programs.json").write_text(json.dumps([str(place) for place in built.folders]))
            remember_machine(folder)
            cluster = cls(folder, built)
            try:
                cluster._start()
            except BaseException:
                # its logs stay: they say what happened. The next `up` begins with nothing all the same
                cluster._groups.end_all()
                raise
            (folder / "complete").touch()
            return cluster

    @classmethod
    def found(cls) -> "Cluster | None":
        """The cluster that was started with the programs of this tree and still has its namespaces, if there is one."""
        folder = state_folder()
        built = programs.Programs(programs.CLUSTER)
        places = [str(place) for place in built.folders]
        if not (folder / "complete").exists() or json.loads((folder / "programs.json").read_text()) != places:
            return None
        cluster = cls(folder, built)
        holders = [cluster._outside.running("switch"), *(node.held() for node in cluster.nodes.values())]
        return cluster if all(holders) else None

    @classmethod
    def running(cls) -> "Cluster | None":
        """The cluster that runs, whole and with the programs of this tree; None if there is none."""
        cluster = cls.found()
        return cluster if cluster is not None and not cluster.ended() else None

    @classmethod
    def down(cls) -> None:
        """Ends the cluster and removes all of it from this machine, but for the programs that were built."""
        if os.geteuid() != 0:
            raise SetUpError("the cluster runs as root: try again with sudo -E")
        state_folder().parent.mkdir(parents=True, exist_ok=True)
        with cls._lock():
            cls._remove(state_folder())

    @property
    def kubeconfig(self) -> Path:
        """The administrator's way in."""
        return self.control_plane.kubeconfig

    @property
    def control_plane(self) -> ControlPlane:
        """etcd and the apiserver, in the first node's namespaces: stop and start them here."""
        return ControlPlane(
            folder=self.folder / "control-plane",
            processes=self._control(),
            authority=self.authority,
            apiserver=self.programs["kube-apiserver"],
            address=network.node_address(0),
            listen="0.0.0.0",
            services=network.SERVICES,
            first_service=network.API_SERVICE,
            extra=[
                f"--kubelet-client-certificate={self.authority.folder / 'admin.crt'}",
                f"--kubelet-client-key={self.authority.folder / 'admin.key'}",
                "--kubelet-preferred-address-types=InternalIP",
            ],
            features=f"ImageVolume=true,{ControlPlane.features}",
        )

    def ended(self) -> list[str]:
        """The processes that should run and do not."""
        control = [name for name in CONTROL_PROCESSES if self._control().record(name)]
        missing = [name for name in control if not self._control().running(name)]
        for node in self.nodes.values():
            missing += [f"{node.name}'s {part}" for part in NODE_PROCESSES if not node.processes.running(part)]
        return missing

    def add_node(self, name: str) -> Node:
        """Adds a real node and waits until it is ready. Raises ClusterError."""
        if name in self.nodes:
            raise ClusterError(f"there is a {name} already")
        node = self._node(name, max(each.index for each in self.nodes.values()) + 1)
        self._connect(node)
        node.start_containerd()
        node.finish_containerd()
        node.start_kubelet()
        node.start_proxy()
        self._wait_nodes([name])
        return node

    def remove_node(self, name: str) -> None:
        """Ends a node that was added, its pods included, and deletes its Node object."""
        if name in FIRST:
            raise ClusterError(f"{name} belongs to every cluster")
        self.nodes[name].end()
        self._request("DELETE", f"/api/v1/nodes/{name}")
        del self.nodes[name]
        self._write_indices()

    def repair(self) -> None:
        """Starts what a test has stopped or paused, and removes nodes that it added. Raises ClusterError."""
        control = self._control()
        control.resume(CONTROL_PROCESSES)
        for node in self.nodes.values():
            node.processes.resume(NODE_PROCESSES)
        self.stop_kwok()
        for name in CONTROL_PROCESSES:
            if control.record(name) is not None and not control.running(name):
                control.restart(name)
                if name == "apiserver":
                    self.control_plane.wait_apiserver()
        for name in [name for name in self.nodes if name not in FIRST]:
            self.remove_node(name)
        begun = set()
        for node in self.nodes.values():
            for part in NODE_PROCESSES:
                if not node.processes.running(part):
                    node.processes.restart(part)
                    begun.add(node.name)
        self._wait_nodes(list(self.nodes))
        for name in begun:
            wait_until(lambda name=name: self._knows_its_pods(name), f"{name}'s kubelet to know its pods", 60)  # type: ignore[misc]

    def logs(self) -> list[Path]:
        """The logs of all of its processes."""
        return sorted(self.folder.glob("*/log/*.log"))

    def start_kwok(self, lease_seconds: int = 40, stages: Path | None = None) -> None:
        """Starts KWOK, which plays the kubelet of Node objects annotated `kwok.x-k8s.io/node: fake`.

        It renews their Leases each quarter of `lease_seconds`. `stages` is a file with Stages in the place of its own.
        """
        if self._control().running("kwok"):
            return
        arguments = [
            f"--kubeconfig={self.kubeconfig}",
            "--manage-all-nodes=false",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            f"--node-lease-duration-seconds={lease_seconds}",
            *([f"--config={stages}"] if stages else ()),
        ]
        self._control().start("kwok", [self.programs["kwok"], *arguments])

    def set_node_grace(self, seconds: int = NODE_GRACE) -> None:
        """Sets after how many seconds without a word a node counts as lost, by starting the controllers anew."""
        control, flag = self._control(), "--node-monitor-grace-period"
        record = control.record("controller-manager")
        assert record is not None
        command = [f"{flag}={seconds}s" if part.startswith(flag) else part for part in record.command]
        if command != record.command:
            control.stop("controller-manager")
            control.start("controller-manager", command)

    def stop_kwok(self) -> None:
        """Stops KWOK, if it was started. Nodes that it played are not ready from then on: delete them first."""
        self._control().stop("kwok")
        self._control().forget("kwok")

    @staticmethod
    def _lock() -> Any:
        return locked(cache_folder() / ".cluster.lock", "the cluster")

    def _indices(self) -> dict[str, int]:
        """The nodes that there are: name to index."""
        path = self.folder / "nodes.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _write_indices(self) -> None:
        indices = {node.name: node.index for node in self.nodes.values()}
        (self.folder / "nodes.json").write_text(json.dumps(indices))

    def _node(self, name: str, index: int) -> Node:
        return Node(
            name=name,
            index=index,
            folder=self.folder / name,
            url=f"https://{network.node_address(0)}:6443",
            authority=self.authority,
            programs=self.programs,
            groups=self._groups,
        )

    def _switch(self) -> int:
        record = self._outside.record("switch")
        assert record is not None
        return record.pid

    def _control(self) -> Processes:
        prefix = ["nsenter", f"--target={self.nodes[FIRST[0]].holder}", "--net", "--mount"]
        return Processes(self.folder / "control-plane", prefix=prefix, groups=[self._group])

    def _connect(self, node: Node) -> None:
        node.folder.mkdir()
        node.start_holder()
        network.connect_node(self._switch(), node.holder, node.name, node.index)
        for other in self.nodes.values():
            network.add_route(other.holder, node.index)
            network.add_route(node.holder, other.index)
        self.nodes[node.name] = node
        self._write_indices()

    def _start(self) -> None:
        self._outside.start("switch", ["unshare", "--net", "sleep", "infinity"])
        host_namespace = os.readlink("/proc/self/ns/net")
        switch_namespace = Path(f"/proc/{self._switch()}/ns/net")
        self._outside.wait_ready("switch", lambda: os.readlink(switch_namespace) != host_namespace, "the switch")
        network.make_switch(self._switch())
        for index, name in enumerate(FIRST):
            self._connect(self._node(name, index))
        plane = self.control_plane
        plane.folder.mkdir()
        plane.prepare()
        plane.start_etcd()
        plane.start_apiserver()
        for node in self.nodes.values():
            node.start_containerd()
        plane.wait_apiserver()
        self._start_controllers(plane)
        for node in self.nodes.values():
            node.finish_containerd()
            node.start_kubelet()
            node.start_proxy()
        self._wait_nodes(list(self.nodes))
        self._control().wait_ready("coredns", self._names_served, "CoreDNS")
        if ended := self.ended():
            raise ClusterError(f"ended by themselves: {', '.join(ended)}; see the logs in {self.folder}")

    def _start_controllers(self, plane: ControlPlane) -> None:
        certificates = self.authority.folder
        manager = plane.kubeconfig_for("controller-manager", "system:kube-controller-manager")
        scheduler = plane.kubeconfig_for("scheduler", "system:kube-scheduler")
        arguments = [
            f"--kubeconfig={manager}",
            f"--service-account-private-key-file={certificates / 'service-accounts.key'}",
            f"--root-ca-file={self.authority.certificate}",
            "--use-service-account-credentials",
            "--leader-elect=false",
            f"--node-monitor-grace-period={NODE_GRACE}s",
            "--node-monitor-period=2s",
            *CLIENT_LIMITS,
        ]
        self._control().start("controller-manager", [self.programs["kube-controller-manager"], *arguments])
        arguments = [f"--kubeconfig={scheduler}", "--leader-elect=false"]
        self._control().start("scheduler", [self.programs["kube-scheduler"], *arguments])
        names = plane.folder / "Corefile"
        names.write_text(
            f""".:53 {{
  bind {network.node_address(0)}
  errors
  ready 127.0.0.1:8181
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {plane.kubeconfig}
    pods insecure
  }}
  cache 2
}}
"""
        )
        self._control().start("coredns", [self.programs["coredns"], f"-conf={names}"])

    def _names_served(self) -> bool:
        done = subprocess.run(
            [
                "nsenter",
                f"--target={self.nodes[FIRST[0]].holder}",
                "--net",
                "curl",
                "-fs",
                "http://127.0.0.1:8181/ready",
            ],
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    def _wait_nodes(self, names: list[str]) -> None:
        wait_until(lambda: set(names) <= self._ready_nodes(), f"{', '.join(names)} to be ready: see {self.folder}", 120)

    def _ready_nodes(self) -> set[str]:
        nodes = self._request("GET", "/api/v1/nodes")["items"]
        return {
            node["metadata"]["name"]
            for node in nodes
            for condition in node["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        }

    def _knows_its_pods(self, node: str) -> bool:
        """Whether a kubelet has heard of its pods: it says that it is ready a second before, and then has no logs."""
        bound = self._request("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node},status.phase%3DRunning")
        try:
            known = self._request("GET", f"/api/v1/nodes/{node}/proxy/pods")
        except urllib.error.HTTPError:  # it takes no connections yet
            return False
        there = {pod["metadata"]["uid"] for pod in known["items"] or ()}
        return there >= {pod["metadata"]["uid"] for pod in bound["items"] if "deletionTimestamp" not in pod["metadata"]}

    def _request(self, method: str, path: str) -> Any:
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.load_cert_chain(self.authority.folder / "admin.crt", self.authority.folder / "admin.key")
        request = urllib.request.Request(f"{self.control_plane.url}{path}", method=method)
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return json.loads(answer.read())

    @staticmethod
    def _remove(folder: Path) -> None:
        try:
            ControlGroups().end_all()
        except TimeoutError as error:
            raise ClusterError(str(error)) from None
        network.remove_host_interface()
        left = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mounted in sorted((path for path in left if path.startswith(f"{folder}/")), reverse=True):
            network.command("umount", "--lazy", mounted)
        restore_machine(folder)
        if folder.exists():
            shutil.rmtree(folder)


def remember_machine(folder: Path) -> None:
    """Notes what `restore_machine` puts back, and makes the folders that nodes mount their own upon."""
    made = [path for path in PRIVATE if not Path(path).exists()]
    sysctls = {
        name: Path("/proc/sys", name).read_text().strip() for name in SYSCTLS if Path("/proc/sys", name).exists()
    }
    (folder / "before.json").write_text(json.dumps(asdict(Before(sysctls, made))))
    for path in made:
        Path(path).mkdir(parents=True)


def restore_machine(folder: Path) -> None:
    """Puts back what a kubelet changed of the whole machine, and removes the folders made by `remember_machine`."""
    try:
        before = Before(**json.loads((folder / "before.json").read_text()))
    except FileNotFoundError:
        return
    for name, value in before.sysctls.items():
        Path("/proc/sys", name).write_text(value)
    for path in reversed(before.made_folders):
        if Path(path).is_dir() and not any(Path(path).iterdir()):
            Path(path).rmdir()
