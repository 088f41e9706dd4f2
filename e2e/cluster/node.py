"""A node: containerd, kubelet and kube-proxy in a network and a mount namespace of their own.

To the node's processes and pods /run/orbitkv, /var/lib/orbitkv and the other folders of PRIVATE are the node's own;
seen from this machine they lie in the node's folder (`Node.host_path`). One sleeping process, the holder, holds both
namespaces; when it and all others of the node have ended, they are gone with their mounts and interfaces.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from e2e.cluster import network, pause_image
from e2e.cluster.certificates import Authority
from e2e.cluster.cgroups import ControlGroups
from e2e.cluster.control_plane import write_kubeconfig
from e2e.cluster.gpu import libraries, runtime
from e2e.cluster.processes import ClusterError, Processes
from e2e.cluster.programs import Programs

PRIVATE = (
    "/run/containerd",
    "/run/orbitkv",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/var/lib/orbitkv",
    "/var/log/containers",
    "/var/log/pods",
)
SOCKET = "/run/containerd/containerd.sock"
KEPT_BYTES = 3 << 30
"""Memory that no node counts as its own: for the control plane, the tests, and this machine."""
SHARES = 3
"""Each node counts this fraction of the rest as its own, so that a third node can be added to the two."""


def memory_total() -> int:
    """The memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reserved_memory(total: int) -> int:
    """What a node leaves to others, in bytes, of a machine with `total`."""
    return total - max(total - KEPT_BYTES, total // 2) // SHARES


@dataclass
class Node:
    """One node. `url` is the apiserver's; each index has an address and a network of pods."""

    name: str
    index: int
    folder: Path
    url: str
    authority: Authority
    programs: Programs
    groups: ControlGroups

    def __post_init__(self) -> None:
        self._group = self.groups.system(self.name)
        self._outside = Processes(self.folder, groups=[self._group])

    @property
    def address(self) -> str:
        """The node's address, reachable from this machine and from all pods."""
        return network.node_address(self.index)

    @property
    def holder(self) -> int:
        """The process that holds the node's namespaces."""
        record = self._outside.record("holder")
        if record is None:
            raise ClusterError(f"{self.name} was never started")
        return record.pid

    def held(self) -> bool:
        """Whether the node's namespaces are still there."""
        return self._outside.running("holder")

    @property
    def processes(self) -> Processes:
        """Starts and stops processes inside of the node's namespaces."""
        prefix = ["nsenter", f"--target={self.holder}", "--net", "--mount"]
        return Processes(self.folder, prefix=prefix, groups=[self._group])

    def host_path(self, path: str) -> Path:
        """Where a file of the node, below one of PRIVATE, is seen from this machine."""
        if not any(path == own or path.startswith(own + "/") for own in PRIVATE):
            raise ValueError(f"{path} is not a folder of the node's own")
        return self.folder / "own" / path.lstrip("/")

    @property
    def containerd(self) -> str:
        """The socket of the node's containerd, seen from this machine."""
        return str(self.host_path(SOCKET))

    def start_holder(self) -> None:
        """Makes the node's namespaces and folders."""
        lines = ["set -e", "mount --make-rshared /"]
        for path in PRIVATE:
            self.host_path(path).mkdir(parents=True)
            lines.append(f"mount --bind '{self.host_path(path)}' {path}")
        ready = self.folder / "namespaces-ready"
        lines += [f"echo > '{ready}'", "exec sleep infinity"]
        script = self.folder / "holder.sh"
        script.write_text("\n".join([*lines, ""]))
        # what is mounted on this machine later still arrives, and nothing goes the other way
        unshare = ["unshare", "--net", "--mount", "--propagation=slave", "/bin/sh", str(script)]
        self._outside.start("holder", unshare)
        self._outside.wait_ready("holder", ready.exists, f"the namespaces of {self.name}")

    @property
    def _gpus(self) -> Path:
        return self.folder / "gpus"

    def start_containerd(self) -> None:
        """Starts containerd and gives it the image that holds pods."""
        self._gpus.mkdir(exist_ok=True)
        (self.folder / "cni").mkdir(exist_ok=True)
        (self.folder / "cni" / "10-pods.conflist").write_text(json.dumps(self._pod_network()))
        config = self.folder / "containerd.toml"
        config.write_text(self._containerd_config())
        path = {"PATH": self.programs.search_path()}
        self.processes.start("containerd", [self.programs["containerd"], f"--config={config}"], path)

    def finish_containerd(self) -> None:
        """Waits for containerd, and imports the image that holds pods."""
        self.processes.wait_ready("containerd", self._containerd_answers, f"containerd of {self.name}")
        archive = self.folder / "pause.tar"
        pause_image.write(Path(self.programs["pause"]), archive)
        self.import_image(archive)

    def start_kubelet(self) -> None:
        """Starts the kubelet, also after it was stopped."""
        names = ("127.0.0.1", self.address, self.name)
        pair = self.authority.sign(f"kubelet-{self.name}", f"system:node:{self.name}", "system:nodes", names)
        kubeconfig = write_kubeconfig(self.folder / "kubelet.kubeconfig", self.url, self.authority, pair)
        config = self.folder / "kubelet.yaml"
        (self.folder / "resolv.conf").write_text(f"nameserver {network.node_address(0)}\n")
        config.write_text(yaml.safe_dump(self._kubelet_config(), sort_keys=False))
        arguments = [
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        ]
        path = {"PATH": self.programs.search_path()}
        self.processes.start("kubelet", [self.programs["kubelet"], *arguments], path)

    def start_proxy(self) -> None:
        """Starts kube-proxy, which makes Services reachable from the node."""
        pair = self.authority.sign(f"proxy-{self.name}", "system:kube-proxy")
        kubeconfig = write_kubeconfig(self.folder / "proxy.kubeconfig", self.url, self.authority, pair)
        arguments = [
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={network.PODS}",
            "--conntrack-max-per-core=0",  # the limit is this machine's, not the node's
        ]
        path = {"PATH": self.programs.search_path()}
        self.processes.start("proxy", [self.programs["kube-proxy"], *arguments], path)

    def end(self) -> None:
        """Kills all processes of the node, its pods' included, and deletes its folder. Raises TimeoutError."""
        self.groups.end_node(self.name)
        shutil.rmtree(self.folder)

    def import_image(self, archive: Path) -> None:
        """Imports an OCI archive into containerd. Raises ClusterError."""
        command = [self.programs["ctr"], "--address", self.containerd, "--namespace", "k8s.io", "images", "import"]
        done = subprocess.run([*command, str(archive)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{self.name} could not import {archive}: {done.stderr.strip()[-2000:]}")

    def images(self) -> set[str]:
        """The names of the images that the node has."""
        command = [self.programs["ctr"], "--address", self.containerd, "--namespace", "k8s.io", "images", "list", "-q"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{self.name} could not list its images: {done.stderr.strip()[-2000:]}")
        return set(done.stdout.split())

    def run(self, *command: str) -> str:
        """Runs a command in the node's namespaces and returns what it printed. Raises ClusterError if it fails."""
        words = ["nsenter", f"--target={self.holder}", "--net", "--mount", *command]
        environment = {**os.environ, "PATH": self.programs.search_path()}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise ClusterError(f"{self.name}: {' '.join(command)}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def crictl(self, *arguments: str) -> str:
        """Asks the node's containerd as a kubelet would, by crictl."""
        return self.run(self.programs["crictl"], f"--runtime-endpoint=unix://{SOCKET}", *arguments)

    def _containerd_answers(self) -> bool:
        command = [self.programs["ctr"], "--address", self.containerd, "version"]
        return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0

    def _pod_network(self) -> dict[str, object]:
        gateway = network.pod_network(self.index).replace(".0/24", ".1")
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": network.pod_network(self.index), "gateway": gateway}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}

    def _containerd_config(self) -> str:
        return f"""version = 3
root = "{self.folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{pause_image.NAME}"
[plugins."io.containerd.cri.v1.runtime"]
  # root may lack CAP_SYS_RESOURCE here, and without it no process may lower its own oom_score_adj
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{self.folder}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    options = {{ BinaryName = "{self._runtime("runc")}" }}
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    options = {{ BinaryName = "{self._runtime("nvidia")}" }}
"""

    def _runtime(self, handler: str) -> Path:
        """The program that containerd runs for a handler: runc at once while the node has no GPUs."""
        path = self._gpus / handler
        command = shlex.join([sys.executable, "-I", runtime.__file__, str(self._gpus), handler])
        path.write_text(f'#!/bin/sh\n[ -e {self._gpus}/gpus.json ] || exec runc "$@"\nexec {command} "$@"\n')
        path.chmod(0o755)
        return path

    def give_gpus(self, devices: dict[str, int], handlers: Iterable[str] = ("nvidia",)) -> None:
        """Lets containers have GPUs that are stand-ins, from their next start on.

        Args:
            devices: value of NVIDIA_VISIBLE_DEVICES to how many GPUs a container with it sees.
            handlers: those of containerd that are NVIDIA's runtime; with `runc`, the default is.
        """
        if not (self._gpus / "stub.so").exists():
            libraries.write(self._gpus / "stub.so")
        wanted = {"devices": devices, "handlers": list(handlers)}
        unfinished = self._gpus / "gpus.json.part"
        unfinished.write_text(json.dumps(wanted))
        unfinished.rename(self._gpus / "gpus.json")

    def take_gpus(self) -> None:
        """Leaves the node without GPUs."""
        (self._gpus / "gpus.json").unlink(missing_ok=True)

    def _kubelet_config(self) -> dict[str, object]:
        certificate = self.authority.folder / f"kubelet-{self.name}.crt"
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "x509": {"clientCAFile": str(self.authority.certificate)},
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(certificate),
            "tlsPrivateKeyFile": str(certificate.with_suffix(".key")),
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.groups.add_node(self.name),
            "failSwapOn": False,
            "featureGates": {"ImageVolume": True},
            "clusterDNS": [network.node_address(0)],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.folder / "resolv.conf"),
            # Both nodes see all of this machine's memory: each leaves the others' share alone
            "systemReserved": {"memory": str(reserved_memory(memory_total()))},
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            # a changed ConfigMap is seen in a mounted volume at the pod's next sync: usually a minute, here less
            "syncFrequency": "3s",
        }
