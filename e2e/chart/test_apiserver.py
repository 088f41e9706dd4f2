"""The chart on a real apiserver that has no nodes: what it takes, guards, keeps and gives up.

On the cluster's own version, and on the oldest and newest that are supported where these are built.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.chart import foreign_kinds
from e2e.chart.earlier import FIELD, earlier_chart
from e2e.chart.helm import EVERYTHING, NAMESPACE
from e2e.chart.helm import Helm as Renderer
from e2e.cluster import programs
from e2e.cluster.control_plane import standalone
from e2e.support.helm import CHART, Helm, HelmError
from e2e.support.installation import PRIVILEGED, cache_object, namespace_object, pool_object
from e2e.support.kubectl import Kubectl, KubectlError, Object

MODULES = programs.tested_apiservers()
EXAMPLES = CHART.parents[1] / "examples" / "kubernetes"
DEFINITIONS = {"managerpools.orbitkv.io", "cachenamespaces.orbitkv.io"}


@dataclass(frozen=True)
class Server:
    """An apiserver, and what talks to it."""

    kubectl: Kubectl
    helm: dict[int, Helm]

    def definitions(self) -> dict[str, Object]:
        """Our CustomResourceDefinitions, by name."""
        found = self.kubectl.list_all("customresourcedefinitions")
        return {crd["metadata"]["name"]: crd for crd in found if crd["spec"]["group"] == "orbitkv.io"}

    def clear(self) -> None:
        """Removes every release and the CustomResourceDefinitions."""
        for release in self.helm[3].releases(NAMESPACE):
            self.helm[3].uninstall(release, NAMESPACE)
        for name in self.definitions():
            self.kubectl.delete("customresourcedefinition", name)


@pytest.fixture(scope="module", params=MODULES, ids=lambda module: module.version())
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    module = request.param
    built = programs.Programs(programs.CLUSTER)
    program = programs.ensure((module,))["kube-apiserver"]
    with standalone(program, tmp_path_factory.mktemp("apiserver")) as plane:
        kubectl = Kubectl(built["kubectl"], plane.kubeconfig)
        kubectl.apply(namespace_object(NAMESPACE, PRIVILEGED))
        yield Server(kubectl, {version: Helm(built[f"helm{version}"], plane.kubeconfig) for version in (3, 4)})


@pytest.fixture
def install(server: Server) -> Iterator[Callable[..., str]]:
    """Installs the chart without waiting: nothing runs here. Removes all of it after the test."""

    def run(release: str = "orbitkv", *arguments: str, helm: int = 3, **options: Any) -> str:
        return server.helm[helm].install(release, NAMESPACE, None, *arguments, wait=0, **options)

    yield run
    server.clear()


# ------------------------------------------------------------------------------------------------------------ manifests


def test_every_object_is_valid_by_its_kinds_own_schema(server: Server, helm: Renderer) -> None:
    """Strictly: an unknown field is an error. The kinds of others are theirs."""
    for source in foreign_kinds.SOURCES:
        for path in source.paths():
            server.kubectl.run("apply", "--server-side", "-f", str(path))
    # what others refer to has to be there even when nothing is stored
    server.kubectl.apply(*helm.render().of("CustomResourceDefinition"), *helm.render().of("ServiceAccount"))
    for name in [*DEFINITIONS, "certificates.cert-manager.io", "podmonitors.monitoring.coreos.com"]:
        server.kubectl.run("wait", f"crd/{name}", "--for=condition=Established", "--timeout=30s")
    try:
        for values in ({}, EVERYTHING):
            objects = {"apiVersion": "v1", "kind": "List", "items": helm.render(values).all}
            command = ("apply", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "-f", "-")
            server.kubectl.run(*command, stdin=json.dumps(objects))
    finally:
        for account in helm.render().names("ServiceAccount"):
            server.kubectl.delete("serviceaccount", account, NAMESPACE)
        server.clear()


@pytest.fixture(scope="class")
def installed(server: Server) -> Iterator[str]:
    """The chart, installed once for a class of tests; what the installation printed."""
    yield server.helm[3].install("orbitkv", NAMESPACE, None, wait=0)
    server.clear()


def test_notes_warn_of_a_namespace_in_which_no_agent_would_start(server: Server, install: Callable[..., str]) -> None:
    label = "pod-security.kubernetes.io/enforce"
    server.kubectl.run("label", "namespace", NAMESPACE, f"{label}=restricted", "--overwrite")
    try:
        notes = install()
    finally:
        server.kubectl.run("label", "namespace", NAMESPACE, f"{label}=privileged", "--overwrite")
    assert "it enforces restricted" in notes
    assert f"kubectl label namespace {NAMESPACE} {label}=privileged" in notes


def count(server: Server, number: int) -> None:
    """Writes what the operator would."""
    server.kubectl.patch("managerpool", "used", {"status": {"cacheNamespaces": number}}, subresource="status")


def refused(server: Server, name: str) -> str:
    """The apiserver's words against deleting a pool; the rule takes a moment to be in force after the installation."""
    words: list[str] = []

    def denied() -> bool:
        try:
            server.kubectl.run("delete", "managerpool", name, "--dry-run=server")
        except KubectlError as error:
            words[:] = [str(error)]
            return True
        return False

    server.kubectl.until(denied, "the deletion to be refused", timeout=20)
    return words[0]


class TestInstalled:
    """The chart as it is installed with its defaults."""

    @pytest.fixture
    def pool(self, server: Server, installed: str) -> Iterator[str]:
        """A pool that one CacheNamespace refers to, according to its status."""
        server.kubectl.apply(pool_object("used"))
        count(server, 1)
        yield "used"
        if server.kubectl.get("managerpool", "used") is not None:
            count(server, 0)
            server.kubectl.delete("managerpool", "used")

    def test_notes_name_the_next_steps(self, server: Server, installed: str) -> None:
        assert "kubectl wait mpool/default" in installed
        assert "WARNING" not in installed
        assert set(server.definitions()) == DEFINITIONS

    def test_examples_are_taken(self, server: Server, installed: str) -> None:
        server.kubectl.apply(EXAMPLES / "managerpool.yaml", EXAMPLES / "cachenamespace.yaml")
        for path in (EXAMPLES / "cachenamespace.yaml", EXAMPLES / "managerpool.yaml"):
            server.kubectl.run("delete", "-f", str(path))

    @pytest.mark.parametrize("verb", ["get", "create", "delete"])
    def test_agents_have_their_rights_and_no_more(self, server: Server, installed: str, verb: str) -> None:
        account = f"--as=system:serviceaccount:{NAMESPACE}:orbitkv-default"
        groups = (f"--as-group=system:serviceaccounts:{NAMESPACE}", "--as-group=system:authenticated")

        def may(kind: str) -> bool:
            try:
                return server.kubectl.run("auth", "can-i", verb, kind, account, *groups, "-A").startswith("yes")
            except KubectlError:
                return False

        allowed = {
            "get": {"cachenamespaces.orbitkv.io", "namespaces"},
            "create": {"tokenreviews.authentication.k8s.io", "subjectaccessreviews.authorization.k8s.io"},
            "delete": set[str](),
        }[verb]
        asked = {
            "cachenamespaces.orbitkv.io",
            "managerpools.orbitkv.io",
            "namespaces",
            "nodes",
            "pods",
            "secrets",
            "configmaps",
            "tokenreviews.authentication.k8s.io",
            "subjectaccessreviews.authorization.k8s.io",
            "serviceaccounts/token",
        }
        assert {kind for kind in asked if may(kind)} == allowed

    def test_a_pool_in_use_is_not_deleted(self, server: Server, pool: str) -> None:
        words = refused(server, pool)
        assert "ManagerPool used is in use: CacheNamespaces that refer to it: 1." in words
        assert "kubectl annotate mpool used orbitkv.io/confirm-delete=true" in words
        with pytest.raises(KubectlError, match="is in use"):
            server.kubectl.run("delete", "managerpools", "--all")
        assert server.kubectl.get("managerpool", pool) is not None

    def test_a_pool_in_use_is_deleted_when_confirmed(self, server: Server, pool: str) -> None:
        refused(server, pool)
        server.kubectl.run("annotate", "mpool", pool, "orbitkv.io/confirm-delete=false")
        assert "is in use" in refused(server, pool)
        server.kubectl.run("annotate", "mpool", pool, "orbitkv.io/confirm-delete=true", "--overwrite")
        server.kubectl.run("delete", "mpool", pool)
        assert server.kubectl.get("managerpool", pool) is None

    def test_a_pool_that_nobody_uses_is_deleted(self, server: Server, pool: str) -> None:
        refused(server, pool)
        count(server, 0)
        server.kubectl.run("delete", "mpool", pool)
        server.kubectl.apply(pool_object("fresh"))
        server.kubectl.run("delete", "mpool", "fresh")
        assert server.kubectl.list_all("managerpools") == []


# --------------------------------------------------------------------------------------------- what stays, what goes


def everything(server: Server) -> set[tuple[str, str, str]]:
    """Kind, namespace and name of all objects of kinds that the chart has."""
    kinds = (
        "deployments,services,serviceaccounts,secrets,configmaps,networkpolicies,poddisruptionbudgets,roles,rolebindings,"
        "clusterroles,clusterrolebindings,priorityclasses,validatingadmissionpolicies,validatingadmissionpolicybindings,"
        "customresourcedefinitions"
    )
    listed = json.loads(server.kubectl.run("get", kinds, "--all-namespaces", "-o", "json"))["items"]
    return {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"])
        for each in listed
        if "orbitkv" in each["metadata"]["name"]
    }


@pytest.mark.parametrize("version", [3, 4])
def test_uninstalling_leaves_the_definitions_and_another_release_takes_them_over(
    server: Server, install: Callable[..., str], version: int
) -> None:
    install(helm=version)
    assert len(everything(server)) > 15
    server.kubectl.apply(pool_object("stays"))
    server.helm[version].run("uninstall", "orbitkv", "--namespace", NAMESPACE)
    assert everything(server) == {("CustomResourceDefinition", "", name) for name in DEFINITIONS}
    with pytest.raises(HelmError, match=r"exists and cannot be imported|invalid ownership metadata"):
        install("other", helm=version)
    install("other", "--take-ownership", helm=version)
    owners = {crd["metadata"]["annotations"]["meta.helm.sh/release-name"] for crd in server.definitions().values()}
    assert owners == {"other"}
    assert server.kubectl.get("managerpool", "stays") is not None
    assert server.kubectl.get("deployment", "orbitkv-operator", NAMESPACE) is not None


# ---------------------------------------------------------------------------------------------- upgrade and rollback


def has_field(server: Server) -> bool:
    """Whether the field that the earlier chart lacks is in the schema."""
    kind, path = FIELD
    schema = server.definitions()[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path:
        schema = schema.get("properties", {}).get(name, {})
    return bool(schema)


def test_upgrade_brings_a_new_field_and_rollback_takes_it_away(
    server: Server, install: Callable[..., str], tmp_path: Path
) -> None:
    install(chart=earlier_chart(tmp_path))
    assert not has_field(server)
    server.kubectl.apply(pool_object("pool"), cache_object("cache", "default", "pool"))
    before = server.kubectl.get("cns", "cache", "default")
    install(helm=4)
    assert has_field(server)
    server.kubectl.apply(cache_object("cache", "default", "pool", saveDecode=False))
    after = server.kubectl.get("cns", "cache", "default")
    assert before is not None and after is not None
    assert before["metadata"]["uid"] == after["metadata"]["uid"]
    assert after["spec"]["saveDecode"] is False
    server.helm[4].run("rollback", "orbitkv", "1", "--namespace", NAMESPACE)
    assert not has_field(server)
    again = server.kubectl.get("cns", "cache", "default")
    assert again is not None and again["metadata"]["uid"] == before["metadata"]["uid"]
    assert "saveDecode" not in again["spec"]


def test_rendering_again_and_again_changes_nothing(server: Server, helm: Renderer) -> None:
    """As tools for GitOps do it: render, apply on the server, compare."""
    objects = {"apiVersion": "v1", "kind": "List", "items": helm.render().all}
    command = ("apply", "--server-side", "--field-manager=gitops", "-f", "-")

    def versions() -> dict[str, str]:
        listed = json.loads(server.kubectl.run(*command, "-o", "json", stdin=json.dumps(objects)))["items"]
        return {f"{each['kind']} {each['metadata']['name']}": each["metadata"]["resourceVersion"] for each in listed}

    server.kubectl.apply(*helm.render().of("CustomResourceDefinition"))
    first = versions()
    assert versions() == first
    server.kubectl.run("delete", "--ignore-not-found", "-f", "-", stdin=json.dumps(objects))


def test_earlier_chart_is_this_one_with_a_field_fewer(tmp_path: Path) -> None:
    earlier = earlier_chart(tmp_path)
    files = {path.relative_to(CHART): path.read_text() for path in CHART.rglob("*") if path.is_file()}
    other = {path.relative_to(earlier): path.read_text() for path in earlier.rglob("*") if path.is_file()}
    assert {str(path) for path in files if files[path] != other.get(path)} == {
        "Chart.yaml",
        f"templates/crds/{FIELD[0].split('.')[0]}.yaml",
    }
    versions = [yaml.safe_load(text[Path("Chart.yaml")])["version"] for text in (files, other)]
    assert versions[0] != versions[1]
    assert files.keys() == other.keys()
