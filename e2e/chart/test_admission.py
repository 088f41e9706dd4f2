"""The webhook between a real apiserver and what people create: no nodes are needed to see what becomes of a pod.

On the cluster's own version, and on the oldest and newest that are supported where these are built.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from e2e.chart.helm import NAMESPACE
from e2e.chart.helm import Helm as Renderer
from e2e.cluster import programs
from e2e.cluster.control_plane import free_ports, standalone
from e2e.support.installation import cache_object, namespace_object, pool_object
from e2e.support.kubectl import Kubectl, KubectlError, Object
from e2e.support.policy_webhook import MIRROR, SIDECAR, VARIABLE, policies
from orbitkv_crds import names, stamps
from orbitkv_crds.stamps import ANNOTATION_FROM, ANNOTATION_INJECTED, ANNOTATION_SKIP_REASON
from orbitkv_operator.admission.asks import LMCACHE_ENGINE, LMCACHE_LABEL, LMCACHE_PULL_SECRETS
from orbitkv_operator.admission.findings import Findings
from orbitkv_operator.admission.server import PATH
from orbitkv_operator.admission.tests.pods import make_pod, table
from orbitkv_operator.certificates import renewed
from orbitkv_operator.cluster.api import PODS, KubernetesApi, load_client
from orbitkv_operator.engines.pods import EnginePods
from orbitkv_operator.events import Events
from orbitkv_operator.names import PAYLOAD_CONTAINER
from orbitkv_operator.reconcile.payload import PayloadPulls, with_image
from orbitkv_operator.reconcile.pod import PodReconciler
from orbitkv_operator.reconcile.system import Owner
from orbitkv_operator.reconcile.webhook import WEBHOOK, WebhookReconciler
from orbitkv_operator.reports.store import ReportStore
from orbitkv_operator.settings import Settings
from orbitkv_operator.view import View

MODULES = programs.tested_apiservers()
CONFIGURATION = "mutatingwebhookconfiguration"
ASK = names.ANNOTATION_CACHE_NAMESPACE
ENGINE: Object = {"name": "engine", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "a/b"]}
STRINGS: Object = {"type": "object", "additionalProperties": {"type": "string"}}
TEMPLATE: Object = {
    "type": "object",
    "properties": {
        "metadata": {
            "type": "object",
            "properties": {
                "annotations": STRINGS,
                "labels": STRINGS,
                "finalizers": {"type": "array", "items": {"type": "string"}},
                "name": {"type": "string"},
                "namespace": {"type": "string"},
            },
        },
        "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    },
}
"""What is not named here is dropped by the apiserver, and so would be an annotation where it were not."""
GROUP: Object = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "format": "int32", "default": 1},
        "startupPolicy": {"type": "string", "enum": ["LeaderCreated", "LeaderReady"], "default": "LeaderCreated"},
        "rolloutStrategy": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"type": "string", "enum": ["RollingUpdate"], "default": "RollingUpdate"},
                "rollingUpdateConfiguration": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            },
        },
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "properties": {
                "leaderTemplate": TEMPLATE,
                "workerTemplate": TEMPLATE,
                "size": {"type": "integer", "format": "int32", "default": 1},
                "restartPolicy": {"type": "string", "default": "RecreateGroupOnPodRestart"},
            },
        },
    },
}
GROUPS: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "leaderworkersets.leaderworkerset.x-k8s.io"},
    "spec": {
        "group": "leaderworkerset.x-k8s.io",
        "scope": "Namespaced",
        "names": {
            "kind": "LeaderWorkerSet",
            "listKind": "LeaderWorkerSetList",
            "plural": "leaderworkersets",
            "singular": "leaderworkerset",
            "shortNames": ["lws"],
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"},
                },
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": GROUP,
                            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        },
                    }
                },
            }
        ],
    },
}
"""LeaderWorkerSet in the shape of its own definition, but for what is in a pod."""
UNLUCKY = "unlucky"
PROGRAM = f"""
import sys
from orbitkv_operator.admission import main, review

decide = review.decide

def sometimes(pod, *others):
    if pod["spec"]["containers"][0]["name"] == "{UNLUCKY}":
        raise LookupError("a defect of ours")
    return decide(pod, *others)

review.decide = sometimes
sys.exit(main.main())
"""
"""The webhook, with a defect that pods meet whose first container is called UNLUCKY."""


@dataclass
class Webhook:
    """The program, as a process of this machine."""

    kubeconfig: Path
    port: int
    probes_port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Begin to run it, with more flags."""
        flags = ["--namespace", NAMESPACE, "--payload-image", "localhost/payload:1", "--metrics-port", "0"]
        flags += ["--look-seconds", "1", "--log-level", "debug", "--lmcache", "true"]
        ports = ["--port", str(self.port), "--probes-port", str(self.probes_port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *flags, *ports, *more],
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
                stdout=log,
                stderr=log,
            )

    def ready(self) -> bool:
        """Whether it says so."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.probes_port}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:
            return False

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
            self.process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Without it."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def started_with(self, *more: str) -> Iterator[None]:
        """While it runs with more flags; it is not waited for, neither then nor afterwards."""
        self.stop()
        self.start(*more)
        try:
            yield
        finally:
            self.stop()
            self.start()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """While it takes requests and answers none."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class Server:
    """An apiserver that asks the webhook."""

    kubectl: Kubectl
    webhook: Webhook

    def create(self, pod: Object, namespace: str, *arguments: str) -> Object:
        """Creates a pod; returns it as it was admitted. Raises KubectlError."""
        command = ["create", "-o", "json", f"--namespace={namespace}", *arguments, "-f", "-"]
        return dict(json.loads(self.kubectl.run(*command, stdin=json.dumps(pod))))

    def trust(self, bundle: str | None) -> None:
        """Has the configuration ask our process, with this CA."""
        found = self.kubectl.get(CONFIGURATION, names.WEBHOOK)
        assert found is not None
        for each in found["webhooks"]:
            each["clientConfig"] = {"url": f"https://localhost:{self.webhook.port}{PATH}", "caBundle": bundle}
        self.kubectl.run("replace", "-f", "-", stdin=json.dumps(found))


@pytest.fixture(scope="module", params=MODULES, ids=lambda module: module.version())
def server(
    request: pytest.FixtureRequest, helm: Renderer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    built = programs.Programs(programs.CLUSTER)
    folder = tmp_path_factory.mktemp("apiserver")
    rendered = helm.render()
    with standalone(programs.ensure((request.param,))["kube-apiserver"], folder) as plane:
        kubectl = Kubectl(built["kubectl"], plane.kubeconfig)
        kubectl.apply(namespace_object(NAMESPACE), GROUPS, *rendered.of("CustomResourceDefinition"))
        kubectl.apply(rendered.one("ValidatingAdmissionPolicy", "orbitkv-stamps"))
        kubectl.apply(rendered.one("ValidatingAdmissionPolicyBinding", "orbitkv-stamps"))
        kubectl.apply(rendered.one("MutatingWebhookConfiguration", names.WEBHOOK))
        kubectl.run("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s")
        data = renewed(None, ["localhost"])
        assert data is not None
        metadata = {"name": names.WEBHOOK, "namespace": NAMESPACE}
        kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        port, probes_port = free_ports(2)
        found = Server(kubectl, Webhook(plane.kubeconfig, port, probes_port, folder / "webhook.log"))
        found.trust(data["ca.crt"])
        found.webhook.start()
        try:
            kubectl.until(found.webhook.ready, "the webhook to be ready", timeout=60)
            make_namespace(found, "warm")
            kubectl.until(lambda: stamped(found.create(asking(), "warm", "--dry-run=server")), "it to be asked")
            yield found
        finally:
            found.webhook.stop()
            print(found.webhook.log.read_text()[-4000:])  # pytest shows it with what failed


def make_namespace(server: Server, name: str, labels: dict[str, str] | None = None, **annotations: str) -> str:
    """A namespace with its service account: no controller makes it here."""
    namespace = namespace_object(name, labels)
    namespace["metadata"]["annotations"] = {f"orbitkv.io/{k.replace('_', '-')}": v for k, v in annotations.items()}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}}
    server.kubectl.apply(namespace)
    server.kubectl.apply(account)
    return name


@pytest.fixture(scope="module")
def team(server: Server) -> str:
    """A namespace for tests that need nothing of it."""
    return make_namespace(server, "team")


def asking(ask: dict[str, str] | None = None, *containers: Object, **spec: Any) -> Object:
    return make_pod(list(containers) or [ENGINE], {ASK: "chat"} if ask is None else ask, **spec)


def stamped(pod: Object) -> bool:
    return stamps.is_stamped(pod["metadata"].get("labels", {}))


def annotations_of(pod: Object) -> dict[str, str]:
    return dict(pod["metadata"].get("annotations", {}))


def skip_of(pod: Object) -> str:
    note = stamps.read_skip(annotations_of(pod))
    return note.reason if note else ""


def described(server: Server, pod: Object) -> str:
    """What `kubectl describe pod` says, once the operator has posted its events."""
    api, view, pods = KubernetesApi(load_client(str(server.kubectl.kubeconfig))), View(), EnginePods()
    pods.put(pod)
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    PodReconciler(view, pods, ReportStore(), Events(api, "operator"), lambda cache: None).reconcile(namespace, name)
    return server.kubectl.run("describe", "pod", name, f"--namespace={namespace}")


# ----------------------------------------------------------------------------------------------------------------- pods


def test_apiserver_takes_every_pod_of_the_table_as_it_takes_it_without_us(server: Server, team: str) -> None:
    def accepted(pods: list[Object]) -> set[str]:
        for number, pod in enumerate(pods):
            pod["metadata"] |= {"name": f"row-{number}"}
        listed = {"apiVersion": "v1", "kind": "List", "items": pods}
        command = [f"--kubeconfig={server.kubectl.kubeconfig}", f"--namespace={team}", "create", "--dry-run=server"]
        done = subprocess.run(
            [server.kubectl.program, *command, "-o", "name", "-f", "-"],
            input=json.dumps(listed).encode(),
            capture_output=True,
            timeout=120,
            check=False,
        )
        return set(done.stdout.decode().split())

    rows = table()
    plain = accepted([row.silent() | {"metadata": {"labels": {"app": "engine"}}} for row in rows])
    assert len(plain) > 100
    assert accepted([row.asking() for row in rows]) == plain


def test_pod_is_injected_and_keeps_its_command_line(server: Server, team: str) -> None:
    pod = server.create(asking(), team)
    stamp = stamps.read_injected(annotations_of(pod))
    assert stamp is not None
    assert (stamp.namespace, stamp.container, stamp.engine) == (f"{team}/chat", "engine", "vllm")
    assert [note.reason for note in stamp.info] == ["cache-namespace-not-found"]
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ENGINE["args"]
    (source,) = next(it for it in pod["spec"]["volumes"] if it["name"] == "orbitkv-token")["projected"]["sources"]
    system = server.kubectl.get("namespace", "kube-system")
    assert system is not None
    assert source["serviceAccountToken"]["audience"] == names.engine_audience(system["metadata"]["uid"])
    assert pod["status"]["qosClass"] == server.create(asking({}), team)["status"]["qosClass"] == "BestEffort"


def test_apiserver_has_nothing_to_add_to_an_injected_pod_and_asks_once(server: Server, team: str) -> None:
    """It gives every container its ServiceAccount's token, and would ask again after it had given it to ours."""
    pod = asking()
    pod["metadata"]["name"] = "asked-once"
    made = server.create(pod, team)
    (copying,), (container,) = made["spec"]["initContainers"], made["spec"]["containers"]
    (given,) = (
        it for it in container["volumeMounts"] if it["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    )
    assert given in copying["volumeMounts"]
    reviews = [line for line in server.webhook.log.read_text().splitlines() if f"{team}/asked-once" in line]
    assert len(reviews) == 1


def test_limits_of_a_namespace_come_out_as_without_us(server: Server) -> None:
    namespace = make_namespace(server, "limited")
    limits = {
        "type": "Container",
        "max": {"cpu": "2", "memory": "1Gi"},
        "min": {"cpu": "100m", "memory": "64Mi"},
        "default": {"cpu": "1", "memory": "512Mi"},
        "defaultRequest": {"cpu": "500m", "memory": "256Mi"},
        "maxLimitRequestRatio": {"cpu": "2"},
    }
    metadata = {"name": "limits", "namespace": namespace}
    server.kubectl.apply({"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": {"limits": [limits]}})

    def resources(pod: Object) -> list[Object]:
        return [each["resources"] for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])]

    expected = {"limits": limits["default"], "requests": limits["defaultRequest"]}
    server.kubectl.until(
        lambda: resources(server.create(asking({}), namespace, "--dry-run=server")) == [expected], "the limits to hold"
    )
    injected = server.create(asking(), namespace)
    assert resources(injected) == [expected, expected]
    assert injected["status"]["qosClass"] == "Burstable"


def test_objects_that_come_later_are_known_within_a_second_or_so(server: Server, team: str) -> None:
    def notes() -> list[str]:
        stamp = stamps.read_injected(annotations_of(server.create(asking({ASK: "later"}), team, "--dry-run=server")))
        return [note.reason for note in stamp.info] if stamp else ["none"]

    assert notes() == ["cache-namespace-not-found"]
    server.kubectl.apply(pool_object("later"), cache_object("later", team, "later"))
    server.kubectl.until(lambda: notes() == ["pool-not-ready"], "the objects to be known", timeout=10)


def test_each_skip_reason_that_a_pod_can_meet(server: Server, team: str) -> None:
    forbidding = make_namespace(server, "baseline", {"pod-security.kubernetes.io/enforce": "baseline"})
    two = [{"name": name, "image": f"acme/{name}:1"} for name in ("a", "b")]
    own = [{"name": "orbitkv-token", "emptyDir": {}}]
    found = {
        "unknown-annotation": (asking({ASK: "chat", "orbitkv.io/x": "y"}), team),
        "invalid-annotation": (asking({ASK: "Not A Name"}), team),
        "target-container-not-found": (asking(None, *two), team),
        "engine-unknown": (asking({ASK: "chat", stamps.ANNOTATION_ENGINE: "other"}), team),
        "args-unreadable": (
            asking({ASK: "chat", stamps.ANNOTATION_INJECT_VIA: "args"}, ENGINE | {"command": ["sh", "-c"]}),
            team,
        ),
        "kv-transfer-config-present": (
            asking({ASK: "chat", stamps.ANNOTATION_INJECT_VIA: "args"}, ENGINE | {"args": ["--kv-transfer-config={}"]}),
            team,
        ),
        "name-taken": (asking(None, volumes=own), team),
        "pod-security-forbids-hostpath": (asking(), forbidding),
    }
    for reason, (pod, namespace) in found.items():
        admitted = server.create(pod, namespace)
        assert (skip_of(admitted), stamped(admitted)) == (reason, True)
        assert ANNOTATION_INJECTED not in annotations_of(admitted)
    runtime = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "gvisor"},
        "handler": "runsc",
    }
    server.kubectl.apply(runtime)
    server.kubectl.until(
        lambda: skip_of(server.create(asking(None, runtimeClassName="gvisor"), team)) == "runtime-isolated",
        "a pod in a sandbox to be made",
    )
    failing = Findings("localhost/payload:1", pull_failing="No node could pull it.").write()
    metadata = {"name": names.WEBHOOK, "namespace": NAMESPACE}
    server.kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": failing})
    try:
        server.kubectl.until(
            lambda: skip_of(server.create(asking(), team)) == "payload-pull-failing", "the finding to be read"
        )
    finally:
        server.kubectl.delete("configmap", names.WEBHOOK, NAMESPACE)
    server.kubectl.until(lambda: not skip_of(server.create(asking(), team, "--dry-run=server")), "its end to be read")
    met = {*found, "runtime-isolated", "payload-pull-failing"}
    assert set(stamps.SKIP_REASONS) - met == {"internal-error"}, "which takes a defect of ours: the next test"


def test_pod_that_meets_a_defect_of_ours_is_made_and_says_so(server: Server, team: str) -> None:
    unlucky = server.create(asking(None, ENGINE | {"name": UNLUCKY}), team)
    assert (skip_of(unlucky), stamped(unlucky)) == ("internal-error", True)
    assert "initContainers" not in unlucky["spec"] and ANNOTATION_INJECTED not in annotations_of(unlucky)
    assert "LookupError: a defect of ours" in server.webhook.log.read_text()

    words = described(server, unlucky)
    assert re.search(rf"(?m)^Annotations:.*(\n .*)*{re.escape(ANNOTATION_SKIP_REASON)}: internal-error: ", words), words
    assert re.search(r"Warning +CacheSkipped .*internal-error: .*the log of orbitkv-webhook", words), words


def test_pod_that_comes_with_its_namespace_is_judged_by_it(server: Server) -> None:
    """What the webhook has not seen yet may forbid what it adds: the pod must be made all the same."""
    for number in range(3):
        name = f"at-once-{number}"
        pod = asking()
        pod["metadata"] |= {"name": "engine", "namespace": name}
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}}
        baseline = namespace_object(name, {"pod-security.kubernetes.io/enforce": "baseline"})
        everything = {"apiVersion": "v1", "kind": "List", "items": [baseline, account, pod]}
        server.kubectl.run("create", "-f", "-", stdin=json.dumps(everything))
        made = server.kubectl.get("pod", "engine", name)
        assert made is not None and skip_of(made) == "pod-security-forbids-hostpath"


def test_whoever_makes_a_skipped_pod_is_told_at_once(server: Server, team: str) -> None:
    command = [server.kubectl.program, f"--kubeconfig={server.kubectl.kubeconfig}", f"--namespace={team}"]
    pods = [asking({ASK: "chat", "orbitkv.io/x": "y"}), asking(None, ENGINE | {"name": UNLUCKY})]
    both = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    done = subprocess.run(
        [*command, "create", "-f", "-"], input=both, capture_output=True, text=True, timeout=60, check=True
    )
    assert "Warning: OrbitKV: unknown-annotation: This release does not know orbitkv.io/x" in done.stderr
    assert "Warning: OrbitKV: internal-error: The webhook failed on this pod" in done.stderr


def test_default_of_a_namespace_and_the_way_out_of_it(server: Server) -> None:
    namespace = make_namespace(server, "by-default", {stamps.ANNOTATION_INJECT: "true"}, cache_namespace="chat")

    def injected() -> bool:
        return (
            stamps.read_injected(annotations_of(server.create(asking({}), namespace, "--dry-run=server"))) is not None
        )

    server.kubectl.until(injected, "the namespace to be known", timeout=10)
    web = server.create(asking({}, {"name": "web", "image": "nginx:1"}), namespace)
    assert not stamped(web) and "volumes" not in {k for k, v in web["spec"].items() if k == "volumes" and len(v) > 1}
    out = server.create(asking({stamps.ANNOTATION_INJECT: "false"}), namespace)
    assert not stamped(out)


def test_pods_that_are_labelled_for_lmcache_are_asked_about_where_the_chart_says_so(
    server: Server, team: str, helm: Renderer
) -> None:
    """The webhook would serve them all along: whether the apiserver asks is up to the chart's value."""
    pod = asking({LMCACHE_ENGINE: "theirs", LMCACHE_PULL_SECRETS: "pull"})
    pod["metadata"]["labels"][LMCACHE_LABEL] = "true"
    assert not stamped(server.create(pod, team, "--dry-run=server"))
    before = server.kubectl.get(CONFIGURATION, names.WEBHOOK)
    assert before is not None
    served = helm.render({"compat": {"lmcache": True}}).one("MutatingWebhookConfiguration", names.WEBHOOK)
    conditions = {each["name"]: each["matchConditions"] for each in served["webhooks"]}
    after = [each | {"matchConditions": conditions[each["name"]]} for each in before["webhooks"]]
    server.kubectl.patch(CONFIGURATION, names.WEBHOOK, {"webhooks": after})
    try:
        server.kubectl.until(lambda: stamped(server.create(pod, team, "--dry-run=server")), "such pods to be seen")
        made = server.create(pod, team)
    finally:
        server.kubectl.patch(CONFIGURATION, names.WEBHOOK, {"webhooks": before["webhooks"]})
    stamp = stamps.read_injected(annotations_of(made))
    assert stamp is not None and stamp.namespace == f"{team}/theirs"
    assert {"name": "pull"} in made["spec"]["imagePullSecrets"]


def test_namespaces_of_the_cluster_and_of_orbitkv_are_left_alone_but_for_the_dry_run(server: Server) -> None:
    for namespace in ("kube-system", NAMESPACE):
        make_namespace(server, namespace)
        assert not stamped(server.create(asking(), namespace, "--dry-run=server"))
    probe = asking()
    probe["metadata"]["labels"][names.LABEL_PROBE] = "true"
    assert stamped(server.create(probe, NAMESPACE, "--dry-run=server"))
    assert not stamped(server.create(probe, NAMESPACE))


# --------------------------------------------------------------------------------------------------------------- stamps


def test_forged_stamps_are_taken_off_and_stamps_are_frozen(server: Server, team: str) -> None:
    forged = asking({ANNOTATION_INJECTED: '{"version":"x"}', ANNOTATION_SKIP_REASON: "internal-error: x"})
    admitted = server.create(forged, team)
    assert not {ANNOTATION_INJECTED, ANNOTATION_SKIP_REASON} & set(annotations_of(admitted))

    pod = server.create(asking(), team)
    name = pod["metadata"]["name"]

    def refused(*change: str) -> str:
        try:
            server.kubectl.run(*change, f"--namespace={team}")
        except KubectlError as error:
            return str(error)
        return ""

    server.kubectl.until(
        lambda: "cannot be changed" in refused("annotate", "pod", name, f"{ANNOTATION_INJECTED}=x", "--overwrite"),
        "the policy to be in force",
        timeout=30,
    )
    assert "cannot be changed" in refused("annotate", "pod", name, f"{ANNOTATION_SKIP_REASON}=x")
    assert "cannot be changed" in refused("annotate", "pod", name, f"{ANNOTATION_INJECTED}-")
    assert "cannot be changed" in refused("label", "pod", name, f"{names.LABEL_CACHE}-")
    status = json.dumps({"metadata": {"annotations": {ANNOTATION_INJECTED: "x"}}})
    assert "cannot be changed" in refused("patch", "pod", name, "--subresource=status", "--type=merge", "-p", status)
    unstamped = server.create(make_pod([ENGINE]), team)["metadata"]["name"]
    assert "cannot be changed" in refused("label", "pod", unstamped, f"{names.LABEL_CACHE}=true")
    assert refused("annotate", "pod", name, "example.com/a=b") == ""
    running = json.dumps({"status": {"phase": "Running"}})
    assert refused("patch", "pod", name, "--subresource=status", "--type=merge", "-p", running) == ""


def test_an_injected_pod_can_be_debugged(server: Server, team: str) -> None:
    """By a container that joins it, and in a copy of it, with and without its annotations."""
    pod = asking()
    pod["metadata"]["name"] = "debugged"
    pod = server.create(pod, team)
    where = [f"--namespace={team}", "--image=busybox:1", "--image-pull-policy=Never"]

    def made(name: str) -> Object:
        found = server.kubectl.get("pod", name, team)
        assert found is not None
        return found

    server.kubectl.run("debug", "debugged", "--target=engine", "--container=looking", *where)
    joined = made("debugged")
    assert [each["name"] for each in joined["spec"]["ephemeralContainers"]] == ["looking"]
    assert joined["spec"]["containers"] == pod["spec"]["containers"] and annotations_of(joined) == annotations_of(pod)

    def ours(found: Object) -> list[Object]:
        engine = next(each for each in found["spec"]["containers"] if each["name"] == "engine")
        init = found["spec"]["initContainers"]
        return [engine["env"], [each for each in engine["volumeMounts"] if each["name"].startswith("orbitkv-")], init]

    for name, more in (("copy", []), ("copy-as-it-is", ["--keep-annotations", "--keep-labels"])):
        server.kubectl.run("debug", "debugged", f"--copy-to={name}", "--container=looking", *more, *where)
        copied = made(name)
        assert [each["name"] for each in copied["spec"]["containers"]] == ["engine", "looking"]
        assert ours(copied) == ours(pod)
        assert stamped(copied) == (ASK in annotations_of(copied))


@pytest.mark.parametrize("name", ["aa-policies", "zz-policies"])
def test_policies_before_and_after_us_leave_a_pod_that_has_both(server: Server, name: str) -> None:
    """Each is asked once more when the other has changed something, and finds its own work as it was."""
    namespace = make_namespace(server, name)
    plain = make_pod([ENGINE], {})

    def names_of(pod: Object) -> list[str]:
        return [each["name"] for each in pod["spec"]["containers"]]

    with policies(server.kubectl, name, namespace):
        server.kubectl.until(
            lambda: names_of(server.create(plain, namespace, "--dry-run=server")) == [SIDECAR, "engine"],
            "the policies to be in force",
            timeout=30,
        )
        pod = server.create(asking(), namespace)
    assert stamps.read_injected(annotations_of(pod)) is not None and names_of(pod) == [SIDECAR, "engine"]
    (copying,) = pod["spec"]["initContainers"]
    assert copying["image"] == f"{MIRROR}localhost/payload:1"
    sidecar, engine = pod["spec"]["containers"]
    assert engine["image"] == MIRROR + ENGINE["image"]
    for container in (copying, sidecar, engine):
        given = [each["name"] for each in container["env"]]
        assert len(given) == len(set(given)) and VARIABLE in given
        assert ("ORBITKV_INJECTED" in given) == (container is engine)
    volumes = [each["name"] for each in pod["spec"]["volumes"]]
    assert len(volumes) == len(set(volumes)) and {"orbitkv-socket", "orbitkv-token", "orbitkv-payload"} <= set(volumes)


# --------------------------------------------------------------------------------------------------------------- owners


def workload(kind: str, name: str, namespace: str, own: dict[str, str] | None = None) -> Object:
    template: Object = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [ENGINE]}}
    spec: Object = {"replicas": 2, "selector": {"matchLabels": {"app": name}}, "template": template}
    version = "apps/v1"
    if kind == "LeaderWorkerSet":
        version = "leaderworkerset.x-k8s.io/v1"
        spec = {
            "replicas": 1,
            "leaderWorkerTemplate": {"leaderTemplate": template, "workerTemplate": template, "size": 2},
        }
    if kind == "StatefulSet":
        spec["serviceName"] = name
    metadata = {"name": name, "namespace": namespace, **({"annotations": own} if own else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def templates(found: Object) -> list[dict[str, str]]:
    """The annotations of each template."""
    spec = found["spec"]
    both = spec.get("leaderWorkerTemplate")
    every = [both["leaderTemplate"], both["workerTemplate"]] if both else [spec["template"]]
    return [dict(each["metadata"].get("annotations") or {}) for each in every]


def test_group_without_a_template_for_its_leader_has_the_copy_on_the_one_there_is(server: Server, team: str) -> None:
    """Leaders are made from the workers' then."""
    group = workload("LeaderWorkerSet", "leaderless", team, {ASK: "chat"})
    del group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    server.kubectl.apply(group)
    found = server.kubectl.get("leaderworkerset", "leaderless", team)
    assert found is not None
    assert set(found["spec"]["leaderWorkerTemplate"]) == {"workerTemplate", "size", "restartPolicy"}
    worker = found["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert worker["metadata"]["annotations"] == {ASK: "chat", ANNOTATION_FROM: "owner"}


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "LeaderWorkerSet"])
def test_annotation_of_a_workload_comes_to_its_pods_in_one_change_and_goes_with_it(
    server: Server, team: str, kind: str
) -> None:
    """In one change: nobody writes here but this test, so what a request leaves is what a rollout begins with."""
    name = kind.lower()
    plain = workload(kind, name, team)
    server.kubectl.apply(plain)

    def state() -> Object:
        found = server.kubectl.get(name, name, team)
        assert found is not None
        return found

    first = state()
    assert all(not each for each in templates(first))
    server.kubectl.run("annotate", name, name, f"{ASK}=chat", f"--namespace={team}")
    second = state()
    assert all(each == {ASK: "chat", ANNOTATION_FROM: "owner"} for each in templates(second))

    # what is in Git has the annotation on the workload and nothing on the template
    in_git = workload(kind, name, team, {ASK: "chat"})
    server.kubectl.apply(in_git)
    server.kubectl.apply(in_git, arguments=["--server-side", "--force-conflicts", "--field-manager=gitops"])
    server.kubectl.apply(in_git, arguments=["--server-side", "--force-conflicts", "--field-manager=gitops"])
    server.kubectl.run("replace", "-f", "-", stdin=json.dumps(in_git))
    assert state()["spec"] == second["spec"], "applied again it changes nothing"

    server.kubectl.run("annotate", name, name, f"{ASK}-", f"--namespace={team}")
    assert all(not each for each in templates(state()))
    server.kubectl.delete(name, name, team)


def test_workload_made_with_its_annotation_has_the_copy_from_the_first_moment(server: Server, team: str) -> None:
    server.kubectl.apply(workload("Deployment", "whole", team, {ASK: "chat", stamps.ANNOTATION_MODE: "save_only"}))
    found = server.kubectl.get("deployment", "whole", team)
    assert found is not None
    assert templates(found) == [{ASK: "chat", stamps.ANNOTATION_MODE: "save_only", ANNOTATION_FROM: "owner"}]


MEMBERS: Object = {
    "leader": {"image": "vllm/vllm-openai:v0.11.0", "command": ["sh", "-c", "ray start --head; vllm serve a/b"]},
    "worker": {"image": "registry/ray:2", "command": ["sh", "-c", "ray start --address=$(LEADER):6379 --block"]},
}
"""The containers of a model's pods that runs on several nodes: no engine is named on a worker."""


def member_template(role: str, ask: dict[str, str]) -> Object:
    metadata = {"labels": {"app": "group", "role": role}, "annotations": ask}
    return {"metadata": metadata, "spec": {"containers": [{"name": role, **MEMBERS[role]}]}}


def made_by_ray(server: Server, namespace: str, ask: dict[str, str]) -> list[Object]:
    """The pods of a RayCluster: its operator makes them from the templates of its groups as they are."""
    return [member_template(role, ask) for role in MEMBERS]


def made_by_leader_worker_set(server: Server, namespace: str, ask: dict[str, str]) -> list[Object]:
    """The pods of a LeaderWorkerSet: its controller makes a StatefulSet of each template, and that makes the pods."""
    name = f"group-{len(server.kubectl.list_all('leaderworkerset', namespace))}"
    both = {f"{role}Template": member_template(role, {}) for role in MEMBERS}
    group = workload("LeaderWorkerSet", name, namespace, ask)
    server.kubectl.apply(group | {"spec": {"replicas": 1, "leaderWorkerTemplate": {**both, "size": 2}}})
    found = server.kubectl.get("leaderworkerset", name, namespace)
    assert found is not None
    owner = {key: found["metadata"][key] for key in ("name", "uid")} | {"controller": True}
    owner |= {"apiVersion": found["apiVersion"], "kind": found["kind"]}
    sets = []
    for role in MEMBERS:
        it = workload("StatefulSet", f"{name}-{role}", namespace)
        it["metadata"]["ownerReferences"] = [owner]
        it["spec"] |= {"selector": {"matchLabels": {"app": "group", "role": role}}}
        it["spec"] |= {"template": found["spec"]["leaderWorkerTemplate"][f"{role}Template"]}
        sets.append(it)
    server.kubectl.apply(*sets)
    return [
        made["spec"]["template"]
        for made in (server.kubectl.get("statefulset", it["metadata"]["name"], namespace) for it in sets)
        if made is not None
    ]


@pytest.mark.parametrize("pods_of", [made_by_leader_worker_set, made_by_ray])
def test_all_pods_of_a_group_are_treated_alike(
    server: Server, team: str, pods_of: Callable[[Server, str, dict[str, str]], list[Object]]
) -> None:
    def made(ask: dict[str, str]) -> list[Object]:
        templates = pods_of(server, team, ask)
        assert [each["metadata"]["labels"]["role"] for each in templates] == list(MEMBERS)
        return [
            server.create(
                {"apiVersion": "v1", "kind": "Pod", **each, "metadata": each["metadata"] | {"name": name}}, team
            )
            for name, each in ((f"{pods_of.__name__.replace('_', '-')}-{time.monotonic_ns()}", it) for it in templates)
        ]

    injected = made({ASK: "chat", stamps.ANNOTATION_MODE: "save_only"})
    stamped_as = [stamps.read_injected(annotations_of(pod)) for pod in injected]
    assert [stamp.container for stamp in stamped_as if stamp] == list(MEMBERS)
    first, second = (replace(stamp, container="", engine="") for stamp in stamped_as if stamp)
    assert first == second and first.namespace == f"{team}/chat"

    def ours(pod: Object) -> Object:
        (container,), spec = pod["spec"]["containers"], pod["spec"]
        return {
            "env": [each for each in container["env"] if each["name"].startswith(("ORBITKV_", "PYTHONPATH"))],
            "mounts": [each for each in container["volumeMounts"] if each["name"].startswith("orbitkv-")],
            "volumes": [each for each in spec["volumes"] if each["name"].startswith("orbitkv-")],
            "init": [each | {"volumeMounts": None} for each in spec["initContainers"]],
        }

    assert ours(injected[0]) == ours(injected[1])
    assert {"name": "ORBITKV_MODE", "value": "save_only"} in ours(injected[0])["env"]

    skipped = {annotations_of(pod)[ANNOTATION_SKIP_REASON] for pod in made({ASK: "chat", "orbitkv.io/x": "y"})}
    assert len(skipped) == 1 and skipped.pop().startswith("unknown-annotation: ")


# ----------------------------------------------------------------------------------------------------- never in the way


def test_pods_are_made_without_a_webhook_and_with_one_that_hangs_or_cannot_be_trusted(
    server: Server, team: str
) -> None:
    def made() -> Object:
        began = time.monotonic()
        pod = server.create(asking(), team)
        assert time.monotonic() - began < 20, "most of it is this machine's other work: how often it was asked counts"
        return pod

    def let_pass() -> int:
        """How many pods the apiserver has let pass for want of an answer: each costs the two seconds that we allow."""
        lines = server.kubectl.run("get", "--raw", "/metrics").splitlines()
        counts = [
            it for it in lines if it.startswith('apiserver_admission_webhook_fail_open_count{name="pods.orbitkv.io"')
        ]
        return sum(int(float(each.rpartition(" ")[2])) for each in counts)

    before = let_pass()
    with server.webhook.hanging():
        assert not stamped(made())
    assert let_pass() == before + 1, "it was asked once"
    assert stamped(made())
    found = server.kubectl.get(CONFIGURATION, names.WEBHOOK)
    assert found is not None
    bundle = found["webhooks"][0]["clientConfig"]["caBundle"]
    other = renewed(None, ["localhost"])
    assert other is not None
    server.trust(other["ca.crt"])
    try:
        server.kubectl.until(lambda: not stamped(made()), "the other CA to be in force", timeout=20)
    finally:
        server.trust(bundle)
    with server.webhook.stopped():
        assert not stamped(made())
    server.kubectl.until(server.webhook.ready, "the webhook to be ready", timeout=60)
    server.kubectl.until(lambda: stamped(made()), "the webhook to be asked again", timeout=30)


# ----------------------------------------------------------------------------------------------- what the operator does


@contextmanager
def certificate_kept(server: Server) -> Iterator[None]:
    """While the operator may make another certificate, which is not for our process: then it is as it was again."""
    original = server.kubectl.get("secret", names.WEBHOOK, NAMESPACE)
    assert original is not None
    try:
        yield
    finally:
        metadata = {"name": names.WEBHOOK, "namespace": NAMESPACE}
        server.kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": original["data"]})
        server.trust(original["data"]["ca.crt"])


def test_operator_makes_the_certificate_and_tells_the_apiserver_whom_to_trust(server: Server) -> None:
    kubectl = server.kubectl
    with certificate_kept(server):
        kubectl.delete("secret", names.WEBHOOK, NAMESPACE)
        operator = reconciler(server)
        operator.reconcile(WEBHOOK)
        secret, found = kubectl.get("secret", names.WEBHOOK, NAMESPACE), kubectl.get(CONFIGURATION, names.WEBHOOK)
        assert secret is not None and found is not None
        assert {each["clientConfig"]["caBundle"] for each in found["webhooks"]} == {secret["data"]["ca.crt"]}
        assert b"BEGIN CERTIFICATE" in base64.b64decode(secret["data"]["ca.crt"])
        operator.reconcile(WEBHOOK)
        again = kubectl.get(CONFIGURATION, names.WEBHOOK)
        assert again is not None
        assert again["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"]


def test_image_volumes_are_used_where_a_dry_run_gives_them_back(
    server: Server, request: pytest.FixtureRequest, team: str
) -> None:
    make_namespace(server, NAMESPACE)
    with certificate_kept(server):
        reconciler(server, payload_mode="imageVolume").reconcile(WEBHOOK)
    found = server.kubectl.get("configmap", names.WEBHOOK, NAMESPACE)
    assert found is not None
    volumes = [{"name": "a", "image": {"reference": "a:1"}}]
    kept = server.create(make_pod([ENGINE], {}, volumes=volumes), team, "--dry-run=server", "--validate=false")
    served = any("image" in each for each in kept["spec"]["volumes"])
    assert found["data"]["imageVolumes"] == ("true" if served else "false")

    # what the webhook makes of it, and a pod says of it
    def made() -> Object:
        return server.create(asking(), team, "--dry-run=server")

    def payload_of(pod: Object) -> str:
        stamp = stamps.read_injected(annotations_of(pod))
        told = [] if stamp is None else [note.reason for note in stamp.info]
        return f"{stamp.payload if stamp else ''}{', told' * ('image-volume-unavailable' in told)}"

    expected = "imageVolume" if served else "init, told"
    with server.webhook.started_with("--payload-mode", "imageVolume"):
        server.kubectl.until(lambda: payload_of(made()) == expected, f"the payload to come by {expected}")
        pod = server.create(asking(), team)
    volume = next(each for each in pod["spec"]["volumes"] if each["name"] == "orbitkv-payload")
    assert ("image" in volume, "initContainers" in pod["spec"]) == (served, not served)
    words = described(server, pod)
    assert served or re.search(r"Normal +CacheInjected .*image-volume-unavailable: ", words), words
    server.kubectl.until(lambda: payload_of(made()) == "init", "the payload to be copied again")


def test_pods_of_agents_pull_another_payload_and_nothing_else_of_them_changes(server: Server, team: str) -> None:
    agent = {"name": "agent", "image": "localhost/agent:1", "env": [{"name": "A", "value": "a"}]}
    payload = {"name": PAYLOAD_CONTAINER, "image": "localhost/payload:0", "command": ["/orbitkv-copy", "--wait"]}
    made = server.create(make_pod([agent, payload]), team)
    (told,) = with_image([made], "localhost/payload:1")
    found = KubernetesApi(load_client(str(server.kubectl.kubeconfig))).apply(PODS, told)
    made["spec"]["containers"][1]["image"] = "localhost/payload:1"
    assert found["spec"] == made["spec"]
    assert found["metadata"]["uid"] == made["metadata"]["uid"]


def reconciler(server: Server, **settings: Any) -> WebhookReconciler:
    api = KubernetesApi(load_client(str(server.kubectl.kubeconfig)))
    found = Settings(
        namespace=NAMESPACE,
        pod_name="a",
        agent_image="a",
        webhook=True,
        payload_image="localhost/payload:1",
        **settings,
    )
    return WebhookReconciler(api, found, Owner(api, NAMESPACE), PayloadPulls())
