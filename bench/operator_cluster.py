"""What `bench.operator` needs of the cluster: nodes that KWOK plays, requests that were made, CPU that was used."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from bench.figures import say
from e2e.cluster.cluster import Cluster
from e2e.support.installation import Installation, fake_node_object
from e2e.support.kubectl import Kubectl
from orbitkv_operator.cluster.api import CACHES, DAEMON_SETS, NODES, Api, Manifest
from orbitkv_operator.health import is_down

LABEL: Final = "orbitkv-bench"
"""On every node of the bench: "node"."""
GPUS: Final = 8
LIMIT: Final = 900.0
GRACE_SECONDS: Final = 300
LEASE_SECONDS: Final = 200
"""Two cores do not renew a thousand Leases in the time after which a node of the tests' cluster counts as lost."""
STAGES: Final = Path(__file__).with_name("kwok_nodes.yaml")
TICKS: Final = os.sysconf("SC_CLK_TCK")
IMAGES: Final = 50
"""Images that a node lists: most of a real Node's bytes."""
PROGRESS_SECONDS: Final = 20.0


def node_object(name: str) -> Manifest:
    """Return a Node with eight GPUs that is about as large as a real one."""
    made = fake_node_object(name, {LABEL: "node", "nvidia.com/gpu.present": "true", "nvidia.com/gpu.count": str(GPUS)})
    size = {"cpu": "128", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": str(GPUS)}
    images = [
        {"names": [f"registry.example.com/some/team/image-{number}@sha256:{number:064x}"], "sizeBytes": 10**9 + number}
        for number in range(IMAGES)
    ]
    made["status"] = {"allocatable": size, "capacity": size, "images": images}
    return made


@contextmanager
def fake_nodes(cluster: Cluster) -> Iterator[None]:
    """Have KWOK play nodes, and nodes be given more time than in tests."""
    cluster.set_node_grace(GRACE_SECONDS)
    cluster.start_kwok(LEASE_SECONDS, STAGES)
    try:
        yield
    finally:
        kubectl = Kubectl(cluster.programs["kubectl"], cluster.kubeconfig)
        kubectl.run("delete", "nodes", f"--selector={LABEL}=node", "--wait=false", timeout=LIMIT)
        cluster.stop_kwok()
        cluster.set_node_grace()


def make_nodes(kubectl: Kubectl, api: Api, names: Sequence[str]) -> None:
    """Make nodes and wait until all are ready. (`kubectl wait` asks for one after the other, which takes minutes.)"""
    items = [node_object(name) for name in names]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    kubectl.run("apply", "--server-side", "-f", "-", stdin=listed, timeout=LIMIT)

    def missing() -> str:
        nodes = {it["metadata"]["name"]: it for it in api.list_all(NODES, labels=f"{LABEL}=node")}
        unready = [name for name in names if name not in nodes or is_down(nodes[name])]
        return f"{len(unready)} nodes are not ready" if unready else ""

    wait(missing, "all nodes to be ready", interval=3)


def wait(holds: Callable[[], str], what: str, limit: float = LIMIT, interval: float = 0.5) -> float:
    """Wait until `holds` returns nothing (else how far it is); return the seconds that it took."""
    began = said = time.monotonic()
    while missing := holds():
        now = time.monotonic()
        if now - began > limit:
            raise RuntimeError(f"waited {limit:g} s in vain for {what}: {missing}")
        if now - said > PROGRESS_SECONDS:
            said = now
            say(f"    {now - began:.0f} s: {missing}")
        time.sleep(interval)
    return time.monotonic() - began


def until_daemon_set(api: Api, namespace: str, name: str, field_name: str, count: int) -> float:
    """Wait until a DaemonSet's status counts so many; return the seconds that it took."""

    def missing() -> str:
        found = (api.get(DAEMON_SETS, namespace, name) or {}).get("status") or {}
        there = found.get(field_name) or 0
        return "" if there == count else f"{there} of {count} ({field_name})"

    return wait(missing, f"DaemonSet {name}", interval=0.25)


def in_parallel(calls: Sequence[Callable[[], Any]], senders: int = 8) -> list[Any]:
    """Make calls from several threads; return what they returned, in order."""
    with ThreadPoolExecutor(senders) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


# ------------------------------------------------------------------------------------------------------------ requests


class AuditLog:
    """The apiserver's audit log from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)

    def requests(self, namespace: str, seconds: float, began: float) -> Counter[tuple[str, str, str]]:
        """Count requests by the ServiceAccounts of a namespace in a window: (account, verb, resource).

        Args:
            began: when the window began (seconds since the epoch).
        """
        found: Counter[tuple[str, str, str]] = Counter()
        prefix, seen = f"system:serviceaccount:{namespace}:", set()
        for line in self._lines():
            if prefix.encode() not in line:
                continue
            entry = json.loads(line)
            user, at = entry["user"]["username"], _seconds(entry["requestReceivedTimestamp"])
            if entry["auditID"] in seen or not user.startswith(prefix) or not began <= at < began + seconds:
                continue
            seen.add(entry["auditID"])  # a watch has a line at its begin and one at its end
            reference = entry.get("objectRef") or {}
            what = "/".join(filter(None, (reference.get("resource"), reference.get("subresource"))))
            found[user.removeprefix(prefix), entry["verb"], what or entry["requestURI"]] += 1
        return found

    def _lines(self) -> Iterator[bytes]:
        yield from self._file
        if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:  # it grew too long, and was begun anew
            self._file.close()
            self._file = self._path.open("rb")
            yield from self._file


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ----------------------------------------------------------------------------------------------------------------- CPU


@dataclass(frozen=True)
class Usage:
    """CPU seconds that were used until a moment (monotonic seconds)."""

    at: float
    operator: Mapping[str, float]
    """By pod."""
    apiserver: float


def usage(cluster: Cluster, installation: Installation) -> Usage:
    """Read what operator and apiserver have used so far."""
    kubectl = installation.target.kubectl
    pods = {}
    for pod in installation.operators():
        name = pod["metadata"]["name"]
        pods[name] = _cpu(kubectl.execute(name, installation.namespace, "cat", "/proc/1/stat"))
    record = cluster.control_plane.processes.record("apiserver")
    assert record is not None
    return Usage(time.monotonic(), pods, _cpu(Path(f"/proc/{record.pid}/stat").read_text()))


def cores(before: Usage, after: Usage) -> tuple[float, float]:
    """Return how many cores all replicas of the operator together, and the apiserver, used between two moments.

    Raises:
        RuntimeError: a replica was made anew meanwhile.
    """
    if before.operator.keys() != after.operator.keys():
        raise RuntimeError(f"the operator's pods were {sorted(before.operator)} and are {sorted(after.operator)}")
    seconds = after.at - before.at
    operator = sum(after.operator[name] - used for name, used in before.operator.items())
    return operator / seconds, (after.apiserver - before.apiserver) / seconds


def _cpu(stat: str) -> float:
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory(installation: Installation) -> dict[str, float]:
    """Return the most memory that each replica of the operator has taken, in MiB."""
    found = {}
    for pod in installation.operators():
        name = pod["metadata"]["name"]
        status = installation.target.kubectl.execute(name, installation.namespace, "cat", "/proc/1/status")
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        found[name] = int(line.split()[1]) / 1024
    return found


# ------------------------------------------------------------------------------------------------------------- metrics

_BUCKET: Final = re.compile(r'orbitkv_reconcile_duration_seconds_bucket{kind="(\w+)",le="([^"]+)"} (\S+)')


def reconciles(installation: Installation) -> dict[str, dict[float, float]]:
    """Return the acting operator's histogram of looks at objects: by kind, how many took at most so many seconds."""
    kubectl = installation.target.kubectl
    token = kubectl.run("create", "token", "orbitkv-metrics-reader", f"--namespace={installation.namespace}").strip()
    leader = installation.leader()
    (address,) = (it["status"]["podIP"] for it in installation.operators() if it["metadata"]["name"] == leader)
    request = urllib.request.Request(f"http://{address}:9090/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, dict[float, float]] = {}
    for kind, bound, count in _BUCKET.findall(text):
        found.setdefault(kind, {})[float(bound)] = float(count)
    return found


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """Return a quantile of a cumulative histogram, even within a bucket; the bound below where there is none above."""
    wanted, below, counted = share * max(buckets.values(), default=0.0), 0.0, 0.0
    for bound in sorted(buckets):
        if buckets[bound] >= wanted:
            inside = buckets[bound] - counted
            return (
                below if bound == float("inf") or not inside else below + (bound - below) * (wanted - counted) / inside
            )
        below, counted = bound, buckets[bound]
    return 0.0


# ------------------------------------------------------------------------------------------------------------ statuses


@dataclass
class Statuses:
    """Watches the statuses of all CacheNamespaces, from `start` to `stop`. The lock guards both mappings."""

    client: Any
    in_use: dict[str, str] = field(default_factory=dict)
    """By uid: the status of InUse."""
    figures: dict[str, list[float]] = field(default_factory=dict)
    """By uid: when its figures were seen to change (monotonic seconds)."""
    _used: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._run, name="statuses", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join(20)

    def seen(self, uids: set[str], status: str) -> set[str]:
        """Return which of these CacheNamespaces have InUse at `status`."""
        with self._lock:
            return {uid for uid in uids if self.in_use.get(uid) == status}

    def intervals(self, since: float) -> list[float]:
        """Return the times between two changes of an object's figures, of those that began after `since`."""
        with self._lock:
            every = list(self.figures.values())
        return [later - sooner for times in every for sooner, later in itertools.pairwise(times) if sooner >= since]

    def _run(self) -> None:
        from kubernetes import watch as untyped
        from kubernetes.client import CustomObjectsApi

        make_watch: Any = untyped.Watch
        listing = CustomObjectsApi(self.client).list_cluster_custom_object
        where = CACHES.group, CACHES.version, CACHES.plural
        version = listing(*where, limit=1)["metadata"]["resourceVersion"]
        while not self._stop.is_set():
            for event in make_watch().stream(listing, *where, resource_version=version, timeout_seconds=10):
                version = event["object"]["metadata"]["resourceVersion"]
                self._show(event["object"])
                if self._stop.is_set():
                    break

    def _show(self, manifest: Manifest) -> None:
        uid, status = manifest["metadata"]["uid"], manifest.get("status") or {}
        used = str(((status.get("tiers") or {}).get("dram") or {}).get("used"))
        with self._lock:
            for condition in status.get("conditions") or ():
                if condition["type"] == "InUse":
                    self.in_use[uid] = condition["status"]
            if self._used.get(uid) != used:
                self._used[uid] = used
                self.figures.setdefault(uid, []).append(time.monotonic())
