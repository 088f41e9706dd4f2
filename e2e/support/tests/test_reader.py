"""What tests read of a real apiserver is what kubectl would show them."""

import json
from pathlib import Path

import pytest

from e2e.cluster.control_plane import ControlPlane
from e2e.support.kubectl import Kubectl, KubectlError, Object

GROUP = "tests.example.com"
LEAF: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"leaves.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "Leaf", "plural": "leaves", "singular": "leaf", "shortNames": ["lf"]},
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}},
        ],
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "namespace"),
    [("namespace", "default", None), ("svc", "mine", "default"), ("ClusterRole", "cluster-admin", None)],
)
def test_an_object_is_as_kubectl_shows_it(direct: Kubectl, kind: str, name: str, namespace: str | None) -> None:
    if kind == "svc":
        direct.run("create", "service", "clusterip", name, "--tcp=443")
    shown = json.loads(direct.run("get", kind, name, "-o", "json"))
    assert direct.get(kind, name, namespace) == shown


def test_lists_are_as_kubectl_shows_them(direct: Kubectl) -> None:
    direct.run("label", "namespace", "kube-public", "here=yes")
    for selector in ("", "here=yes"):
        shown = json.loads(direct.run("get", "namespaces", "-o", "json", f"--selector={selector}"))["items"]
        assert direct.list_all("namespaces", selector=selector) == shown != []
    assert direct.list_all("events.v1.events.k8s.io", "kube-public") == []


def test_what_is_not_there_is_none_and_a_kind_that_is_not_there_an_error(direct: Kubectl) -> None:
    assert direct.get("pod", "none", "default") is None
    assert direct.get("clusterrole", "none") is None
    for ask in (lambda: direct.get("leaf", "a", "default"), lambda: direct.list_all("leaves")):
        with pytest.raises(KubectlError, match='have a resource type "lea'):
            ask()
    with pytest.raises(KubectlError, match='pods "none" not found'):
        direct.logs("none", "default")


def test_kinds_come_and_go(direct: Kubectl) -> None:
    for _ in range(2):
        direct.apply(LEAF)
        direct.run("wait", "crd", LEAF["metadata"]["name"], "--for=condition=Established", "--timeout=30s")
        direct.until(lambda: direct.list_all("lf") == [], "the kind to be served")
        made = direct.create({"apiVersion": f"{GROUP}/v1", "kind": "Leaf", "metadata": {"name": "a"}})
        assert direct.list_all(f"leaves.{GROUP}") == [direct.get("leaf", "a", "default")]
        assert made["metadata"]["uid"] == direct.list_all(f"leaves.v1.{GROUP}")[0]["metadata"]["uid"]
        direct.delete("crd", LEAF["metadata"]["name"])
        with pytest.raises(KubectlError):
            direct.get("leaf", "a", "default")


def test_an_apiserver_that_is_away_is_an_error_and_the_next_one_is_found(
    apiserver: ControlPlane, direct: Kubectl, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(apiserver.kubeconfig.read_text().replace(f":{apiserver.port}", ":1"))
    kubectl = Kubectl(direct.program, kubeconfig)
    with pytest.raises(KubectlError, match="no answer from the apiserver"):
        kubectl.get("namespace", "default")
    kubeconfig.write_text(apiserver.kubeconfig.read_text())
    assert kubectl.get("namespace", "default") is not None
