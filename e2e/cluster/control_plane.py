"""etcd and the apiserver: alone on free ports for tests of schemas, or as the head of the cluster.

Alone it needs neither root nor anything but the two programs:

    with standalone(programs["kube-apiserver"], folder) as api:
        kubectl(api.kubeconfig, ...)
"""

import random
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from e2e.cluster.certificates import Authority, Pair
from e2e.cluster.processes import ClusterError, Processes

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
"""Who asked for what, and the answer's code; not the objects. Tests compare it with the rights that a role gives."""

NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "127.0.0.1",
)


@dataclass
class ControlPlane:
    """etcd and one apiserver in a folder.

    `address` is where the apiserver is reached, `listen` the addresses it binds; ports are of its network namespace.
    """

    folder: Path
    processes: Processes
    authority: Authority
    apiserver: str
    etcd: str = "etcd"
    address: str = "127.0.0.1"
    listen: str = "127.0.0.1"
    port: int = 6443
    etcd_port: int = 2379
    services: str = "10.96.0.0/16"
    first_service: str = "10.96.0.1"
    features: str = "WatchList=false"  # Debian's etcd 3.4 cannot tell how far its watches have come
    extra: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where the apiserver is reached."""
        return f"https://{self.address}:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's way in."""
        return self.folder / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON object a line: each request that was answered."""
        return self.processes.logs / "audit.jsonl"

    def prepare(self) -> None:
        """Makes certificates, kubeconfigs and the audit policy."""
        names = (*NAMES, self.first_service, self.address)
        self.authority.sign("apiserver", "kube-apiserver", addresses=tuple(dict.fromkeys(names)))
        self.authority.sign("service-accounts", "service-accounts")
        self.kubeconfig_for("admin", "admin", "system:masters")
        (self.folder / "audit-policy.yaml").write_text(yaml.safe_dump(AUDIT_POLICY))

    def kubeconfig_for(self, name: str, user: str, group: str = "") -> Path:
        """Makes a user's certificate and kubeconfig, `name`.kubeconfig."""
        return write_kubeconfig(
            self.folder / f"{name}.kubeconfig", self.url, self.authority, self.authority.sign(name, user, group)
        )

    def start(self) -> None:
        """Starts etcd and the apiserver and waits until they serve. Raises ClusterError."""
        self.start_etcd()
        self.start_apiserver()
        self.wait_apiserver()

    def start_etcd(self) -> None:
        """Starts etcd; the apiserver waits for it by itself."""
        # Without fsync: what a test wrote need not survive a loss of power
        url, peers = f"http://127.0.0.1:{self.etcd_port}", f"http://127.0.0.1:{self.etcd_port + 1}"
        self.processes.start(
            "etcd",
            [
                self.etcd,
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls={url}",
                f"--advertise-client-urls={url}",
                f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=default={peers}",
                "--unsafe-no-fsync",
            ],
        )

    def start_apiserver(self) -> None:
        """Starts the apiserver, also after it was stopped."""
        certificates = self.authority.folder
        self.processes.start(
            "apiserver",
            [
                self.apiserver,
                f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
                f"--secure-port={self.port}",
                f"--bind-address={self.listen}",
                f"--advertise-address={self.address}",
                f"--service-cluster-ip-range={self.services}",
                f"--client-ca-file={self.authority.certificate}",
                f"--tls-cert-file={certificates / 'apiserver.crt'}",
                f"--tls-private-key-file={certificates / 'apiserver.key'}",
                f"--cert-dir={certificates}",
                f"--service-account-key-file={certificates / 'service-accounts.key'}",
                f"--service-account-signing-key-file={certificates / 'service-accounts.key'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
                f"--audit-policy-file={self.folder / 'audit-policy.yaml'}",
                f"--audit-log-path={self.audit_log}",
                "--audit-log-maxsize=500",
                f"--feature-gates={self.features}",
                *self.extra,
            ],
        )

    def wait_apiserver(self) -> None:
        """Waits until the apiserver says that it is ready. Raises ClusterError."""
        self.processes.wait_ready("apiserver", self.ready, "the apiserver to be ready")

    def ready(self) -> bool:
        """Whether the apiserver says that it is ready."""
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.load_cert_chain(self.authority.folder / "admin.crt", self.authority.folder / "admin.key")
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """Stops the apiserver, then etcd."""
        self.processes.stop("apiserver")
        self.processes.stop("etcd")


def write_kubeconfig(path: Path, url: str, authority: Authority, pair: Pair) -> Path:
    """Writes a kubeconfig that goes to `url` with a client certificate."""
    user = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "orbitkv", "cluster": {"server": url, "certificate-authority": str(authority.certificate)}}
        ],
        "users": [{"name": pair.certificate.stem, "user": user}],
        "contexts": [{"name": "orbitkv", "context": {"cluster": "orbitkv", "user": pair.certificate.stem}}],
        "current-context": "orbitkv",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def free_ports(count: int) -> list[int]:
    """Adjacent ports of 127.0.0.1 that nobody listens on. Raises ClusterError if there are none."""
    for start in random.sample(range(20000, 30000, 10), 1000):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, each in enumerate(sockets):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("127.0.0.1", start + offset))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return list(range(start, start + count))
    raise ClusterError("no free ports between 20000 and 30000")


@contextmanager
def standalone(apiserver: str, folder: Path, etcd: str = "etcd") -> Iterator[ControlPlane]:
    """Runs etcd and an apiserver, without nodes, on free ports of this machine. Needs no root. Raises ClusterError."""
    etcd_port, _, port = free_ports(3)
    processes = Processes(folder, prefix=["setpriv", "--pdeathsig", "KILL"])  # never outlives whoever started it
    plane = ControlPlane(
        folder,
        processes,
        Authority(folder / "certificates"),
        apiserver,
        etcd,
        port=port,
        etcd_port=etcd_port,
        # no pod asks for the Service `kubernetes`, and newer apiservers refuse to make it of a loopback address
        extra=["--endpoint-reconciler-type=none"],
    )
    plane.prepare()
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
