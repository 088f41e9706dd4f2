"""OrbitKV's life on a cluster, from nothing to nothing, by the commands that README, NOTES and documentation give."""

import base64
import os
import re
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from e2e.chart.earlier import earlier_chart
from e2e.support.engines import EnginePod, heard, held_pod, let_go, make_engine_pod
from e2e.support.installation import OWN_NAMESPACE, SMALL, Installation, unique
from e2e.support.kubectl import Kubectl, KubectlError, Object, condition, has_condition
from e2e.support.target import Target
from orbitkv_operator import certificates

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES_PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
READY_SECONDS = 300
RELEASE = "another"
DEFINITIONS = {
    "customresourcedefinition/managerpools.orbitkv.io",
    "customresourcedefinition/cachenamespaces.orbitkv.io",
}


def commands(page: str, heading: str) -> list[str]:
    """The shell commands of the first block below a heading."""
    block = re.search(rf"^## {re.escape(heading)}\n.*?^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None, f"no commands below {heading}"
    return block[1].replace("\\\n", " ").strip().split("\n")


def commands_of_notes(notes: str) -> list[str]:
    """The shell commands in what the installation printed: its lines that are set in by five spaces and more."""
    lines = re.findall(r"(?m)^ {5}( *\S.*)$", notes)
    joined: list[str] = []
    for line in lines:
        if line.startswith(" "):
            joined[-1] += line
        else:
            joined.append(line)
    return joined


@dataclass
class Shell:
    """Runs commands as a person does, with `helm` and `kubectl` on the path."""

    target: Target
    folder: Path

    def run(self, command: str) -> str:
        """Runs one command; it must succeed."""
        for name, program in (("helm", self.target.helm[3].program), ("kubectl", self.target.kubectl.program)):
            link = self.folder / name
            if not link.exists():
                link.symlink_to(program)
        environment = {**os.environ, "KUBECONFIG": str(self.target.kubeconfig)}
        environment["PATH"] = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def objects(kubectl: Kubectl) -> set[str]:
    """Every object of the cluster, as kind/name or kind/namespace/name, but for events."""
    kinds = kubectl.run("api-resources", "--verbs=list", "--output=name").split()
    kinds = [kind for kind in kinds if not kind.startswith(("events", "componentstatuses"))]
    columns = "custom-columns=KIND:.kind,NAMESPACE:.metadata.namespace,NAME:.metadata.name"
    listed = kubectl.run("get", ",".join(kinds), "--all-namespaces", "--no-headers", "--output", columns)
    rows = (line.split() for line in listed.splitlines())
    return {"/".join(part for part in (kind.lower(), *rest) if part != "<none>") for kind, *rest in rows}


def node_files(target: Target) -> dict[str, set[str]]:
    """What is in OrbitKV's folders on each node."""
    assert target.own is not None
    return {
        f"{name}:{folder}": {path.name for path in (node.folder / "own" / folder).iterdir()}
        for name, node in target.own.nodes.items()
        for folder in ("run/orbitkv", "var/lib/orbitkv")
        if (node.folder / "own" / folder).exists()
    }


# ----------------------------------------------------------------------------------------------------------- whole life


@dataclass
class Life:
    """What was seen from the installation to the removal."""

    before: set[str]
    installed: set[str]
    ready_seconds: float
    pool: Object
    nodes_with_agents: set[str]
    cache: Object
    test_output: str
    table: str
    orphan: tuple[list[str], list[dict[str, Any]]]
    """What a pod logged and said that was injected before the removal and started after it."""
    after: set[str]
    files: dict[str, set[str]]


@pytest.fixture(scope="module")
def life(bare: Target, images: list[str], tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Installs OrbitKV as the README says, goes on as NOTES say, and removes it as the documentation says."""
    shell, kubectl = Shell(bare, tmp_path_factory.mktemp("shell")), bare.kubectl
    before = objects(kubectl)
    began = time.monotonic()
    notes = ""
    for command in commands((ROOT / "README.md").read_text(), "On Kubernetes"):
        if "NAME" not in command:  # of a workload that is there already
            printed = shell.run(command)
            notes = printed if command.startswith("helm install") else notes
    for command in commands_of_notes(notes):
        if "NAME" not in command:
            shell.run(command)
    seconds = time.monotonic() - began
    installation = Installation(bare, OWN_NAMESPACE)
    pool = kubectl.get("managerpool", "default")
    assert pool is not None
    for command in commands(KUBERNETES_PAGE, "The first pool and cache"):
        table = shell.run(command)
    cache = kubectl.get("cachenamespace", "chat", "default")
    assert cache is not None
    nodes = set(installation.agents("default"))
    test_output = shell.run(f"helm test orbitkv --namespace {OWN_NAMESPACE}")
    installed = objects(kubectl)
    image = next(name for name in images if "/node-agent" in name)
    kubectl.apply(held_pod(image, "orphan", "default", min(nodes), "chat"))
    for command in commands(KUBERNETES_PAGE, "Remove"):
        shell.run(command)
    let_go(kubectl, "orphan", "default")
    kubectl.until(lambda: len(heard(kubectl, "orphan", "default")[1]) > 5, "it to compute", timeout=30)
    orphan = heard(kubectl, "orphan", "default")
    kubectl.delete("pod", "orphan", "default")
    kubectl.until(
        lambda: not [each for each in objects(kubectl) - before if each not in expected_left()],
        "everything but the definitions and the namespace to be gone",
        timeout=60,
    )
    after = objects(kubectl)
    return Life(before, installed, seconds, pool, nodes, cache, test_output, table, orphan, after, node_files(bare))


def expected_left() -> set[str]:
    """What the documentation says stays, with what Kubernetes puts into every namespace."""
    own = {
        "apiservice/v1alpha1.orbitkv.io",
        f"namespace/{OWN_NAMESPACE}",
        f"configmap/{OWN_NAMESPACE}/kube-root-ca.crt",
        f"serviceaccount/{OWN_NAMESPACE}/default",
    }
    return DEFINITIONS | own


def test_from_nothing_to_a_ready_pool_on_every_node(life: Life, bare: Target) -> None:
    print(f"from nothing to a ready pool: {life.ready_seconds:.0f} s")
    assert life.ready_seconds < READY_SECONDS
    assert bare.own is not None
    assert life.nodes_with_agents == set(bare.own.nodes)
    assert condition(life.pool, "Ready")["status"] == "True"
    nodes = life.pool["status"]["nodes"]
    assert nodes["desired"] == nodes["ready"] == len(bare.own.nodes)


def test_first_cache_is_ready(life: Life) -> None:
    assert condition(life.cache, "Ready")["status"] == "True"
    assert re.search(r"(?m)^default\s+cachenamespace.orbitkv.io/chat\s+default\s+True", life.table), life.table


def test_helm_test_finds_operator_and_pool_ready(life: Life) -> None:
    assert re.search(r"Phase: +Succeeded", life.test_output), life.test_output


def test_removal_leaves_what_the_documentation_says(life: Life) -> None:
    assert len(life.installed - life.before) > 20
    assert life.after - life.before == expected_left()
    assert not life.before - life.after


def test_an_injected_pod_that_starts_after_the_removal_computes_and_says_once_what_is_missing(life: Life) -> None:
    words, said = life.orphan
    assert len(words) == 1 and "no OrbitKV agent at /run/orbitkv/agent.sock" in words[0], words
    assert not any(each["attached"] for each in said) and said[-1]["computed"] > said[0]["computed"]


def test_removal_leaves_empty_folders_on_the_nodes(life: Life) -> None:
    """But for what agents keep for their next start."""
    assert life.files
    for folder, names in life.files.items():
        assert not names or folder.endswith("var/lib/orbitkv"), folder


# ---------------------------------------------------------------------------------------------- under another name


@pytest.fixture(scope="module")
def again(bare: Target, life: Life, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """An earlier OrbitKV, installed under another release name: it takes over the definitions that were left."""
    chart = earlier_chart(tmp_path_factory.mktemp("earlier"))
    bare.helm[3].install(RELEASE, OWN_NAMESPACE, SMALL, "--take-ownership", chart=chart)
    there = Installation(bare, OWN_NAMESPACE)
    yield there
    there.clean_up()


@pytest.fixture(scope="module")
def pool(again: Installation) -> str:
    return again.make_pool()


@pytest.fixture(scope="module")
def cache(again: Installation, pool: str) -> str:
    """A cache namespace, by its full name."""
    namespace = again.make_namespace()
    return f"{namespace}/{again.make_cache(namespace, pool)}"


def hold(kubectl: Kubectl, images: list[str], cache: str, node: str) -> EnginePod:
    """An engine that stays attached and asks for its pages again and again."""
    image = next(name for name in images if "/node-agent" in name)
    namespace = cache.partition("/")[0]
    how: dict[str, Any] = {"cache": cache, "count": 8, "patience": 60}
    engine = make_engine_pod(kubectl, image, unique("engine"), namespace, node, token=True, action="hold", **how)
    engine.wait_said("hits")
    return engine


def test_another_release_takes_over_and_works(again: Installation, pool: str) -> None:
    assert again.target.helm[3].releases(OWN_NAMESPACE) == [RELEASE]
    owner = again.target.kubectl.get("crd", "managerpools.orbitkv.io")
    assert owner is not None
    assert owner["metadata"]["annotations"]["meta.helm.sh/release-name"] == RELEASE
    assert len(again.agents(pool)) == 2


def test_pool_in_use_is_kept_until_its_last_cache_is_gone(again: Installation) -> None:
    kubectl = again.target.kubectl
    pool, namespace = unique("pool"), again.make_namespace()
    again.make_pool(pool, ready=0)
    first, second = (again.make_cache(namespace, pool, ready=0) for _ in range(2))
    counted = "the pool to count its CacheNamespaces"
    kubectl.wait("managerpool", pool, lambda it: it.get("status", {}).get("cacheNamespaces") == 2, counted)
    with pytest.raises(KubectlError, match="CacheNamespaces that refer to it: 2"):
        kubectl.run("delete", "managerpool", pool)
    kubectl.delete("cachenamespace", first, namespace)
    with pytest.raises(KubectlError, match="CacheNamespaces that refer to it: "):
        kubectl.run("delete", "managerpool", pool)
    kubectl.delete("cachenamespace", second, namespace)
    kubectl.wait("managerpool", pool, lambda it: not it["status"].get("cacheNamespaces"), counted)
    kubectl.delete("managerpool", pool)


def test_rules_of_the_deletion_guard_have_no_doubtful_types(again: Installation) -> None:
    found = again.target.kubectl.wait(
        "validatingadmissionpolicy",
        "orbitkv-pool-deletion",
        lambda it: it.get("status", {}).get("observedGeneration") == it["metadata"]["generation"],
        "the rule's types to be checked",
    )
    assert not found["status"].get("typeChecking", {}).get("expressionWarnings")


def test_roles_of_a_namespace_cover_cache_namespaces_and_not_pools(again: Installation) -> None:
    kubectl, namespace = again.target.kubectl, again.make_namespace()
    for role in ("edit", "view"):
        kubectl.run("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}r", f"-n={namespace}")

    def may(user: str, verb: str, kind: str) -> bool:
        try:
            kubectl.run("auth", "can-i", verb, f"{kind}.orbitkv.io", f"--as={user}", f"-n={namespace}", "--quiet")
        except KubectlError:
            return False
        return True

    kubectl.until(lambda: may("editr", "create", "cachenamespaces"), "the roles to be put together")
    assert may("editr", "delete", "cachenamespaces")
    assert may("viewr", "list", "cachenamespaces")
    assert not may("viewr", "create", "cachenamespaces")
    assert not may("editr", "create", "managerpools")


# ------------------------------------------------------------------------------------------------------------- metrics


def fetch(address: str, token: str = "") -> tuple[int, str]:
    """Status and text of a page on this cluster's network."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


@pytest.mark.parametrize("part", ["operator", "agent"])
def test_metrics_are_for_those_who_may_read_them(again: Installation, pool: str, part: str) -> None:
    kubectl, namespace = again.target.kubectl, again.make_namespace()
    pods = again.operators() if part == "operator" else list(again.agents(pool).values())
    port = 9090 if part == "operator" else 9091
    address = f"http://{pods[0]['status']['podIP']}:{port}/metrics"
    assert fetch(address)[0] == 401
    assert fetch(address, "wrong")[0] == 401
    stranger = kubectl.run("create", "token", "default", f"--namespace={namespace}").strip()
    assert fetch(address, stranger)[0] == 403
    reader = kubectl.run("create", "token", "orbitkv-metrics-reader", f"--namespace={OWN_NAMESPACE}").strip()
    code, text = fetch(address, reader)
    assert code == 200
    assert "orbitkv_" in text
    # the token that Prometheus is given
    secret = kubectl.run(
        "get",
        "secret",
        "orbitkv-metrics-reader",
        f"--namespace={OWN_NAMESPACE}",
        "-o",
        "go-template={{.data.token | base64decode}}",
    )
    assert fetch(address, secret)[0] == 200


# -------------------------------------------------------------------------------------------------------- certificates


def served(again: Installation) -> x509.Certificate | None:
    """The certificate that the report server shows now."""
    service = again.target.kubectl.get("service", "orbitkv-reports", OWN_NAMESPACE)
    assert service is not None
    try:
        pem = ssl.get_server_certificate((service["spec"]["clusterIP"], 9443), timeout=5)
    except OSError:
        return None
    return x509.load_pem_x509_certificate(pem.encode())


def fingerprint(again: Installation) -> int:
    found = served(again)
    return 0 if found is None else found.serial_number


def wait_in_use(again: Installation, cache: str) -> None:
    """Waits until agents have reported that engines are attached to a CacheNamespace."""
    namespace, name = cache.split("/")
    words = f"agents to report that {name} is in use"
    again.target.kubectl.wait("cachenamespace", name, has_condition("InUse"), words, namespace=namespace, timeout=150)


def write_certificates(again: Installation, data: dict[str, str]) -> None:
    again.target.kubectl.patch("secret", "orbitkv-certificates", {"data": data}, OWN_NAMESPACE)


def names() -> list[str]:
    return [f"orbitkv-reports.{OWN_NAMESPACE}.svc", f"orbitkv-reports.{OWN_NAMESPACE}.svc.cluster.local"]


def test_certificates_are_renewed_while_requests_run(
    again: Installation, kubectl: Kubectl, images: list[str], pool: str, cache: str
) -> None:
    """First one that is due, without a restart; then one that has expired together with its CA, at the start."""
    operators = {pod["metadata"]["uid"] for pod in again.operators()}
    engine = hold(kubectl, images, cache, min(again.agents(pool)))
    wait_in_use(again, cache)
    secret = kubectl.get("secret", "orbitkv-certificates", OWN_NAMESPACE)
    assert secret is not None
    before = fingerprint(again)
    write_certificates(again, aged(secret["data"]))
    kubectl.until(lambda: fingerprint(again) not in (0, before), "another certificate to be served", timeout=90)
    assert valid_for_long(again)
    assert {pod["metadata"]["uid"] for pod in again.operators()} == operators

    renewed = fingerprint(again)
    expired = certificates.renewed(None, names(), datetime.now(UTC) - timedelta(days=4000))
    assert expired is not None
    write_certificates(again, expired)
    for pod in again.operators():
        kubectl.delete("pod", pod["metadata"]["name"], OWN_NAMESPACE, wait=0)
    kubectl.until(
        lambda: fingerprint(again) not in (0, renewed) and valid_for_long(again),
        "a certificate of the new CA to be served",
        timeout=90,
    )
    assert [line["hits"] for line in engine.said()] == [8], engine.said()
    # agents have learned of the new CA, and report. (That an engine has gone would be believed a while later only.)
    another = f"{engine.namespace}/{again.make_cache(engine.namespace, pool)}"
    hold(kubectl, images, another, min(again.agents(pool)))
    wait_in_use(again, another)


def valid_for_long(again: Installation) -> bool:
    """Whether the report server shows a certificate that is not about to expire."""
    found = served(again)
    return found is not None and found.not_valid_after_utc > datetime.now(UTC) + timedelta(days=60)


def aged(data: dict[str, str]) -> dict[str, str]:
    """Returns a Secret's data with a server certificate of the same CA that is due: it was made 80 days ago."""
    ca = x509.load_pem_x509_certificate(base64.b64decode(data["ca-signing.crt"]))
    ca_key = serialization.load_pem_private_key(base64.b64decode(data["ca-signing.key"]), None)
    key = serialization.load_pem_private_key(base64.b64decode(data["tls.key"]), None)
    now = x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"]))
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey) and isinstance(key, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(now.subject, ca.subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now.not_valid_before_utc - timedelta(days=80))
    builder = builder.not_valid_after(now.not_valid_after_utc - timedelta(days=80))
    for extension in now.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    pem = builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return {"tls.crt": base64.b64encode(pem).decode()}


# ------------------------------------------------------------------------------------------------ upgrade and rollback


def test_sessions_outlive_upgrades_and_rollbacks(
    again: Installation, kubectl: Kubectl, images: list[str], pool: str, cache: str
) -> None:
    """With Helm 3, then with Helm 4: a new field comes and goes, agents and sessions stay."""
    agents = uids(again, pool)
    engine = hold(kubectl, images, cache, min(agents))
    namespace, name = cache.split("/")

    def change(what: str, **spec: Any) -> Object:
        """Changes the CacheNamespace, and waits until the operator has acted on it."""
        found = kubectl.get("cachenamespace", name, namespace)
        assert found is not None
        generation = found["metadata"]["generation"]
        kubectl.patch("cachenamespace", name, {"spec": spec}, namespace)
        return kubectl.wait(
            "cachenamespace",
            name,
            lambda it: it["metadata"]["generation"] > generation and seen(it),
            what,
            namespace=namespace,
            timeout=90,
        )

    for step, version in enumerate((3, 4)):
        helm = again.target.helm[version]
        helm.install(RELEASE, OWN_NAMESPACE, {**SMALL, "operator": {**SMALL["operator"], "logLevel": "debug"}})
        upgraded = change("the new operator to see the new field", saveDecode=False)
        assert upgraded["spec"]["saveDecode"] is False
        helm.run("rollback", RELEASE, "1", f"--namespace={OWN_NAMESPACE}", "--wait", "--timeout=120s")
        rolled_back = change("the earlier operator to see a change", minLoadTokens=step + 1)
        assert "saveDecode" not in rolled_back["spec"]
    assert uids(again, pool) == agents
    assert [line["hits"] for line in engine.said()] == [8], engine.said()


def uids(installation: Installation, pool: str) -> dict[str, Any]:
    """The uid of each node's agent."""
    return {node: pod["metadata"]["uid"] for node, pod in installation.agents(pool).items()}


def seen(found: Object) -> bool:
    """Whether the operator has acted on an object as it is."""
    return bool(found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"])
