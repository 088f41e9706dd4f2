"""What people see of pods that ask for a cache: events, the CacheNamespace's status, `orbitkv explain` and `doctor`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from e2e.support.engines import PROGRAM, PYTHON
from e2e.support.installation import PRIVILEGED, Installation, cache_object
from e2e.support.kubectl import Kubectl, Object, condition
from orbitkv_crds import stamps

WEBHOOK = "deployment/orbitkv-webhook"
COUNT = 8
OWN_CONNECTOR = """
import time
from orbitkv.injection import StayOff, tell_agent
from orbitkv.protocol.reasons import OffReason
off = StayOff(OffReason.KV_TRANSFER_CONFIG_PRESENT, "--kv-transfer-config is given, for OtherConnector")
while tell_agent("vllm 0.32.0", off):
    time.sleep(1)
time.sleep(1e6)
"""
"""What the plugin does, with its own code, in an engine whose user has chosen a connector."""
ARGS: Object = {stamps.ANNOTATION_INJECT_VIA: "args"}
ODD: dict[str, tuple[Object, Object, Object]] = {
    "unknown-annotation": ({"orbitkv.io/x": "y"}, {}, {}),
    "invalid-annotation": ({stamps.ANNOTATION_MODE: "sometimes"}, {}, {}),
    "target-container-not-found": ({stamps.ANNOTATION_CONTAINER: "other"}, {}, {}),
    "engine-unknown": ({stamps.ANNOTATION_ENGINE: "other"}, {}, {}),
    "args-unreadable": (ARGS | {stamps.ANNOTATION_ENGINE: "vllm"}, {}, {}),
    "kv-transfer-config-present": (
        ARGS | {stamps.ANNOTATION_ENGINE: "vllm"},
        {},
        {"command": ["sh", "-c", "sleep infinity"], "args": ["--kv-transfer-config={}"]},
    ),
    "name-taken": ({}, {"volumes": [{"name": "orbitkv-token", "emptyDir": {}}]}, {}),
    "runtime-isolated": ({}, {"runtimeClassName": "gvisor"}, {}),
}
"""For each reason to leave a pod as it is: annotations, and what the pod's spec and its container have, to meet it."""


@dataclass(frozen=True)
class Team:
    """A namespace with a cache, its pool, and another namespace that may not use it."""

    kubectl: Kubectl
    installation: Installation
    image: str
    pool: str
    cache: str
    namespace: str
    elsewhere: str

    def pod(self, name: str, namespace: str, command: list[str], ask: str) -> Object:
        """A pod that asks for a cache, if it does."""
        container = {"name": "engine", "image": self.image, "imagePullPolicy": "IfNotPresent", "command": command}
        metadata: Object = {"name": name, "namespace": namespace}
        metadata |= {"annotations": {"orbitkv.io/cache-namespace": ask}} if ask else {}
        spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def make(self, name: str, namespace: str, command: list[str], ask: str) -> None:
        """Makes such a pod."""
        self.kubectl.create(self.pod(name, namespace, command, ask))

    def make_odd(self) -> None:
        """Makes a pod for each reason to leave one as it is, by the name of the reason."""
        pods = []
        for reason, (asks, spec, container) in ODD.items():
            pod = self.pod(reason, self.namespace, ["sleep", "infinity"], "another")
            pod["metadata"]["annotations"] |= asks
            pod["spec"] |= spec
            pod["spec"]["containers"][0] |= container
            pods.append(pod)
        self.kubectl.apply(*pods)

    def described(self, namespace: str) -> dict[str, str]:
        """What `kubectl describe pod` says of each pod of a namespace, a line each event."""
        printed = self.kubectl.run("describe", "pods", f"--namespace={namespace}")
        parts = re.split(r"(?m)^Name: +", printed)[1:]
        return {part.split()[0]: part for part in parts}

    def idle(self, name: str, *, namespace: str = "", ask: str = "") -> None:
        """Makes a pod that never attaches."""
        self.make(name, namespace or self.namespace, ["sleep", "infinity"], ask)

    def engine(self, name: str, *, namespace: str = "", cache: str = "") -> None:
        """Makes a pod whose engine attaches when it can."""
        full = cache or f"{self.namespace}/{self.cache}"
        options = json.dumps({"cache": full, "count": COUNT, "patience": 600})
        self.make(name, namespace or self.namespace, [PYTHON, "-c", PROGRAM, "hold", options], full)

    def wait_event(self, name: str, reason: str, words: str, *, namespace: str = "") -> None:
        """Waits for an event on a pod, with words in its note."""
        where = namespace or self.namespace

        def posted() -> bool:
            events = self.kubectl.events("Pod", name, where)
            return any(it["reason"] == reason and words in it["note"] for it in events)

        self.kubectl.until(posted, f"event {reason} ({words}) on pod {name}", timeout=100)

    def wait_in_use(self, *words: str, status: str = "True") -> Object:
        """Waits until the condition InUse says all of these words."""

        def says(cache: Object) -> bool:
            found = condition(cache, "InUse")
            return found.get("status") == status and all(word in found["message"] for word in words)

        return self.kubectl.wait(
            "cachenamespace", self.cache, says, f"InUse to say {words}", namespace=self.namespace, timeout=100
        )

    def orbitkv(self, *arguments: str) -> tuple[int, Object]:
        """Runs the command; returns its exit code and what it printed as JSON."""
        program = [sys.executable, "-m", "orbitkv_operator.cli.main", *arguments, "--json"]
        done = subprocess.run(
            [*program, f"--kubeconfig={self.kubectl.kubeconfig}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def explained(self, name: str, *, namespace: str = "") -> tuple[bool, str]:
        """Whether a pod uses its cache, and all that `orbitkv explain pod` says."""
        code, found = self.orbitkv("explain", "pod", f"{namespace or self.namespace}/{name}")
        assert code == (0 if found["usesCache"] else 1)
        return found["usesCache"], " ".join(f"{it['about']}: {it['message']} {it['fix']}" for it in found["findings"])

    def probe(self) -> float | None:
        """The metric of the webhook's trial, of the operator that acts."""
        pods = {pod["metadata"]["name"]: pod for pod in self.installation.operators()}
        leader = pods.get(self.installation.leader())
        if leader is None:
            return None
        token = self.kubectl.run(
            "create", "token", "orbitkv-metrics-reader", f"--namespace={self.installation.namespace}"
        )
        request = urllib.request.Request(
            f"http://{leader['status']['podIP']}:9090/metrics", headers={"Authorization": f"Bearer {token.strip()}"}
        )
        lines = urllib.request.urlopen(request, timeout=10).read().decode().splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith("orbitkv_webhook_probe_success ")]
        return float(values[0]) if values else None


@pytest.fixture(scope="module")
def team(installation: Installation, kubectl: Kubectl, images: list[str]) -> Team:
    operator = kubectl.get("deployment", "orbitkv-operator", installation.namespace)
    if operator is None or "ORBITKV_OPERATOR_PATIENCE_SECONDS" not in json.dumps(operator):
        pytest.skip("the operator there gives pods five minutes; the tests' own installation gives them seconds")
    pool = installation.make_pool(memory="128Mi")
    namespace = installation.make_namespace(PRIVILEGED)
    cache = installation.make_cache(namespace, pool)
    elsewhere = installation.make_namespace({"pod-security.kubernetes.io/enforce": "baseline"})
    image = next(name for name in images if "/node-agent" in name)
    return Team(kubectl, installation, image, pool, cache, namespace, elsewhere)


@pytest.fixture
def sandbox(kubectl: Kubectl) -> Iterator[None]:
    """A RuntimeClass that is called like a sandbox; pods that have it run all the same."""
    kind = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "gvisor"}, "handler": "runc"}
    kubectl.apply(kind)
    yield
    kubectl.delete("runtimeclass", "gvisor")


@pytest.mark.usefixtures("sandbox")
def test_every_pod_that_asks_is_told_what_became_of_it(team: Team, kubectl: Kubectl) -> None:
    full = f"{team.namespace}/{team.cache}"
    kubectl.apply(cache_object("waiting", team.namespace, "no-such-pool"))
    team.engine("user")
    team.idle("silent", ask=team.cache)
    team.idle("skipped", namespace=team.elsewhere, ask=full)
    team.idle("lost", ask="no-such-cache")
    team.idle("late")
    team.make("own", team.namespace, [PYTHON, "-c", OWN_CONNECTOR], full)
    stranger = team.installation.make_namespace(PRIVILEGED)
    team.engine("stranger", namespace=stranger, cache=full)
    team.make_odd()
    team.idle("early", ask="waiting")
    kubectl.run("annotate", "pod", "late", f"--namespace={team.namespace}", f"orbitkv.io/cache-namespace={team.cache}")

    team.wait_event("user", "CacheInjected", full)
    team.wait_event("user", "CacheAttached", full)
    team.wait_event("skipped", "CacheSkipped", "pod-security-forbids-hostpath", namespace=team.elsewhere)
    team.wait_event("late", "CacheMissed", "webhook-missed")
    team.wait_event("stranger", "CacheNotAttached", "access.namespaces is Same", namespace=stranger)
    team.wait_event("silent", "CacheNotAttached", "never-came")
    team.wait_event("own", "CacheNotAttached", "kv-transfer-config-present")
    team.wait_event("lost", "CacheInjected", "cache-namespace-not-found")
    team.wait_event("lost", "CacheNotAttached", "cache-namespace-not-found")

    team.wait_event("early", "CacheInjected", "pool-not-ready")
    for reason in ODD:
        team.wait_event(reason, "CacheSkipped", reason)

    told = {
        **{name: ("CacheSkipped", name) for name in ODD},
        "user": ("CacheAttached", full),
        "silent": ("CacheNotAttached", "never-came"),
        "late": ("CacheMissed", "webhook-missed"),
        "lost": ("CacheInjected", "cache-namespace-not-found"),
        "early": ("CacheInjected", "pool-not-ready"),
        "skipped": ("CacheSkipped", "pod-security-forbids-hostpath"),
        "stranger": ("CacheInjected", "access-denied"),
        "own": ("CacheNotAttached", "OtherConnector"),
    }
    described: dict[str, str] = {}
    for where in (team.namespace, team.elsewhere, stranger):
        described |= team.described(where)
    for name, both in told.items():
        events = described[name].partition("Events:")[2].splitlines()
        assert any(all(word in line for word in both) for line in events), described[name]

    found = team.wait_in_use(
        "1 node", "/silent (never-came", "/skipped (pod-security", "/late (webhook-missed", "/stranger (", "/own ("
    )
    assert found["status"]["attached"]["without"] == 5
    (first,) = found["status"]["attached"]["first"]
    assert (first["namespace"], first["name"]) == (team.namespace, "user")
    wide = kubectl.run("get", "cns", team.cache, f"--namespace={team.namespace}", "-o", "wide").splitlines()
    columns = ("POOL", "READY", "IN USE", "USED", "HIT RATE", "REASON", "PODS", "WITHOUT", "ASKED", "FOUND")
    assert all(name in wide[0] for name in columns)

    uses, words = team.explained("user")
    assert uses and "uses CacheNamespace" in words
    for name, where, expected in (
        ("silent", team.namespace, "never-came"),
        ("skipped", team.elsewhere, "pod-security-forbids-hostpath"),
        ("late", team.namespace, "would inject container engine"),
        ("lost", team.namespace, "It does not exist."),
        ("own", team.namespace, "kv-transfer-config-present"),
        ("stranger", stranger, "access.namespaces is Same"),
    ):
        uses, words = team.explained(name, namespace=where)
        assert not uses and expected in words, words
    kubectl.delete("cachenamespace", "waiting", team.namespace)  # doctor is to find nothing wrong in a later test


def test_engine_that_loses_its_access_is_told_so(team: Team, kubectl: Kubectl) -> None:
    access = {"namespaces": "Same", "serviceAccounts": ["nobody"]}
    kubectl.patch("cachenamespace", team.cache, {"spec": {"access": access}}, team.namespace)
    team.wait_event("user", "CacheDetached", "access.serviceAccounts")
    assert not team.explained("user")[0]
    assert team.wait_in_use(status="False")


def test_webhook_that_is_away_is_noticed_and_so_are_the_pods_that_it_missed(team: Team, kubectl: Kubectl) -> None:
    where = f"--namespace={team.installation.namespace}"

    def runs(pod: Object) -> bool:
        return bool(pod.get("status", {}).get("phase") == "Running")

    def stamped(name: str) -> bool:
        found = kubectl.get("pod", name, team.namespace)
        assert found is not None
        return stamps.is_stamped(found["metadata"].get("labels", {}))

    kubectl.until(lambda: team.probe() == 1, "the webhook's trial to succeed", timeout=60)
    code, found = team.orbitkv("doctor")
    assert code == 0, [it for it in found["findings"] if it["level"] == "problem"]
    replicas = json.loads(kubectl.run("get", WEBHOOK, where, "-o", "json"))["spec"]["replicas"]
    kubectl.run("scale", WEBHOOK, where, "--replicas=0")
    try:
        kubectl.until(lambda: team.probe() == 0, "the webhook's trial to fail", timeout=60)
        team.idle("missed", ask=team.cache)
        team.wait_event("missed", "CacheMissed", "webhook-missed")
        kubectl.wait("pod", "missed", runs, "it to run all the same", namespace=team.namespace)
        assert not stamped("missed")
        code, found = team.orbitkv("doctor")
        problems = {it["about"]: it for it in found["findings"] if it["level"] == "problem"}
        assert code == 1 and {"Webhook", f"Namespace {team.namespace}"} <= problems.keys()
    finally:
        kubectl.run("scale", WEBHOOK, where, f"--replicas={replicas}")
        kubectl.run("rollout", "status", WEBHOOK, where, "--timeout=120s", timeout=150)
    kubectl.until(lambda: team.probe() == 1, "the webhook's trial to succeed again", timeout=60)
    assert "would inject container engine" in team.explained("missed")[1]
    team.idle("seen", ask=team.cache)
    assert stamped("seen")
