"""The CustomResourceDefinitions on real apiservers, each alone with etcd: what they take, refuse, default and show.

The apiserver of the cluster's own version is built when it is missing. Those of the oldest and newest versions that are
supported are built by `make test ONLY=api-versions`; elsewhere they are left out, loudly, while they are not built.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest
import urllib3

from e2e.cluster import programs
from e2e.cluster.control_plane import ControlPlane, standalone
from e2e.cluster.processes import wait_until
from orbitkv_crds.cachenamespace import CacheNamespace
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_crds.schema import KINDS, Kind, crds
from orbitkv_crds.tests.cases import Case, cases

MODULES = programs.tested_apiservers()
CASES = cases()
POOLS, CACHES = KINDS
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@dataclass(frozen=True)
class Answer:
    """What the apiserver said: its status, the object, and its warnings."""

    status: int
    body: dict[str, Any]
    warnings: list[str]

    @property
    def causes(self) -> list[tuple[str, str]]:
        """(field, message) of each thing that is wrong; the field is empty for the object as a whole."""
        causes = self.body.get("details", {}).get("causes", [])
        pairs = [(cause.get("field", ""), cause["message"]) for cause in causes]
        # what the apiserver adds when it gave up, tried one half of an alternative, or (from 1.37) says a second time
        noise = (
            "some validation rules were not checked",
            "must validate at least one schema",
            "Checked value must be of type",
        )
        return [
            ("" if field == "<nil>" else field, message)
            for field, message in pairs
            if not any(words in message for words in noise)
        ]


class Apiserver:
    """Requests to one apiserver, as its administrator."""

    def __init__(self, plane: ControlPlane) -> None:
        self._url = plane.url
        self._kubeconfig = plane.kubeconfig
        certificates = plane.authority.folder
        self._connections = urllib3.PoolManager(
            ca_certs=str(plane.authority.certificate),
            cert_file=str(certificates / "admin.crt"),
            key_file=str(certificates / "admin.key"),
        )

    def close(self) -> None:
        """Close the connections."""
        self._connections.clear()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        accept: str = "application/json",
        content: str = "application/json",
        **query: str,
    ) -> Answer:
        """Send one request."""
        answer = self._connections.request(
            method,
            f"{self._url}{path}{'?' if query else ''}{urlencode(query)}",
            body=None if body is None else json.dumps(body),
            headers={"Accept": accept, "Content-Type": content},
        )
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return Answer(answer.status, answer.json() if is_json else {}, list(answer.headers.getlist("Warning")))

    def create(self, kind: Kind, body: dict[str, Any], **query: str) -> Answer:
        """Create an object, strictly unless told otherwise."""
        return self.request("POST", collection(kind), body, **{"fieldValidation": "Strict", **query})

    def patch(self, kind: Kind, name: str, body: dict[str, Any], part: str = "") -> Answer:
        """Change an object, or its part `/status`."""
        return self.request("PATCH", f"{collection(kind)}/{name}{part}", body, content="application/merge-patch+json")

    def kubectl(self, kubectl: str, *arguments: str) -> str:
        """Run kubectl; return what it prints."""
        command = [kubectl, f"--kubeconfig={self._kubeconfig}", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def collection(kind: Kind) -> str:
    """The path of a kind's objects."""
    namespace = "" if kind.scope == "Cluster" else "/namespaces/default"
    return f"/apis/orbitkv.io/v1alpha1{namespace}/{kind.plural}"


def serves(api: Apiserver, kind: Kind) -> bool:
    """Whether objects of a kind can be listed."""
    return api.request("GET", collection(kind)).status == 200


@pytest.fixture(scope="module", params=MODULES, ids=lambda module: module.version())
def apiserver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apiserver]:
    module = request.param
    program = programs.ensure((module,))["kube-apiserver"]
    with standalone(program, tmp_path_factory.mktemp("apiserver")) as plane:
        api = Apiserver(plane)
        for definition in crds():
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            answer = api.request("POST", path, definition, fieldValidation="Strict")
            assert answer.status == 201, answer.body["message"]
        for kind in KINDS:
            wait_until(partial(serves, api, kind), f"the apiserver to serve {kind.plural}", 30)
        yield api
        api.close()


@pytest.fixture
def pool(apiserver: Apiserver) -> Iterator[dict[str, Any]]:
    """A pool, as the apiserver has it."""
    body = {"apiVersion": "orbitkv.io/v1alpha1", "kind": "ManagerPool", "metadata": {"name": "pool"}}
    yield apiserver.create(POOLS, body | {"spec": {"memory": {"pool": "8Gi"}}}).body
    apiserver.request("DELETE", f"{collection(POOLS)}/pool")


@pytest.fixture
def cache(apiserver: Apiserver) -> Iterator[dict[str, Any]]:
    """A cache namespace, as the apiserver has it."""
    body = {"apiVersion": "orbitkv.io/v1alpha1", "kind": "CacheNamespace", "metadata": {"name": "cache"}}
    yield apiserver.create(CACHES, body | {"spec": {"poolRef": {"name": "pool"}, "resetGeneration": 2}}).body
    apiserver.request("DELETE", f"{collection(CACHES)}/cache")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_apiserver_judges_as_the_model_does(apiserver: Apiserver, case: Case) -> None:
    answer = apiserver.create(case.kind, case.body, dryRun="All")
    if case.refused is None:
        assert answer.status == 201, answer.body["message"]
        # and both fill in the same defaults
        assert answer.body["spec"] == case.kind.model.model_validate(case.body).to_body()["spec"]
        assert not answer.warnings
    else:
        assert answer.status == 422
        assert {field for field, _ in answer.causes} == {case.refused.field}
        assert any(case.refused.says in message for _, message in answer.causes), answer.causes


def test_definitions_are_structural_and_cause_no_warning(apiserver: Apiserver) -> None:
    answer = apiserver.request("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    for definition in answer.body["items"]:
        conditions = {each["type"]: each["status"] for each in definition["status"]["conditions"]}
        assert conditions.pop("Established") == "True"
        assert conditions.pop("NamesAccepted") == "True"
        assert not conditions
    for definition in crds():
        again = apiserver.request(
            "PATCH",
            f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}",
            definition,
            content="application/apply-patch+yaml",
            fieldManager="test",
            force="true",
        )
        assert again.status == 200
        assert not again.warnings


@pytest.mark.parametrize("place", ["spec", "memory", "env"])
def test_unknown_field_is_refused_by_name_under_strict_validation(apiserver: Apiserver, place: str) -> None:
    body = _with_unknown_field(place)
    answer = apiserver.create(POOLS, body, dryRun="All")
    assert answer.status == 400
    assert f'unknown field "spec.{_PATHS[place]}"' in answer.body["message"]


def test_unknown_field_is_dropped_with_a_warning_for_other_clients(apiserver: Apiserver) -> None:
    answer = apiserver.create(POOLS, _with_unknown_field("memory"), dryRun="All", fieldValidation="Warn")
    assert answer.status == 201
    assert any('unknown field \\"spec.memory.sise\\"' in warning for warning in answer.warnings)
    assert "sise" not in answer.body["spec"]["memory"]


_PATHS = {"spec": "sise", "memory": "memory.sise", "env": "env[0].sise"}


def _with_unknown_field(place: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"memory": {"pool": "8Gi"}, "env": [{"name": "A"}]}
    {"spec": spec, "memory": spec["memory"], "env": spec["env"][0]}[place]["sise"] = 1
    kind, metadata = "ManagerPool", {"name": "pool"}
    return {"apiVersion": "orbitkv.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"poolRef": {"name": "other"}}, "spec.poolRef.name", "cannot be changed"),
        ({"poolRef": None}, "spec.poolRef", "Required value"),
        ({"poolRef": {"name": None}}, "spec.poolRef.name", "Required value"),
        ({"resetGeneration": 1}, "spec.resetGeneration", "only rises"),
        ({"resetGeneration": None}, "spec.resetGeneration", "only rises"),
    ],
    ids=str,
)
def test_change_that_a_cache_must_not_see_is_refused(
    apiserver: Apiserver, cache: dict[str, Any], change: dict[str, Any], field: str, says: str
) -> None:
    answer = apiserver.patch(CACHES, "cache", {"spec": change})
    assert answer.status == 422
    ((named, message),) = answer.causes
    assert named == field
    assert says in message


def test_everything_else_of_a_cache_can_be_changed(apiserver: Apiserver, cache: dict[str, Any]) -> None:
    spec = {"resetGeneration": 3, "quota": {"dram": "1Gi"}, "mode": "save_only", "retention": {"class": "retained"}}
    answer = apiserver.patch(CACHES, "cache", {"spec": spec})
    assert answer.status == 200
    assert answer.body["metadata"]["generation"] == cache["metadata"]["generation"] + 1


def test_status_is_written_apart_from_the_spec(apiserver: Apiserver, pool: dict[str, Any]) -> None:
    ignored = apiserver.patch(POOLS, "pool", {"status": {"cacheNamespaces": 3}})
    assert "status" not in ignored.body
    written = apiserver.patch(POOLS, "pool", {"status": POOL_STATUS, "spec": {"memory": {"pool": "9Gi"}}}, "/status")
    assert written.status == 200
    assert written.body["spec"]["memory"]["pool"] == "8Gi"
    assert written.body["metadata"]["generation"] == pool["metadata"]["generation"]
    assert ManagerPool.model_validate(written.body).status.to_body() == POOL_STATUS


CONDITION = {
    "observedGeneration": 1,
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "message": "Every node has an agent that serves.",
}
POOL_STATUS = {
    "observedGeneration": 1,
    "gpuRoute": "none",
    "cacheNamespaces": 2,
    "nodes": {"desired": 3, "ready": 2, "updated": 3, "unhealthy": 1},
    "unhealthyNodes": [
        {"name": "node-3", "pod": "orbitkv-pool-abcde", "reason": "OOMKilled", "message": "Out of memory."}
    ],
    "tiers": {"dram": {"capacity": "24Gi", "used": "1.46Gi"}},
    "conditions": [
        {"type": "Ready", "status": "False", "reason": "AgentsNotReady", **CONDITION},
        {"type": "ConfigValid", "status": "True", "reason": "Valid", **CONDITION},
    ],
}
CACHE_STATUS = {
    "observedGeneration": 1,
    "tiers": {"dram": {"used": "512Mi"}},
    "attached": {
        "pods": 1,
        "sessions": 2,
        "without": 0,
        "first": [{"namespace": "default", "name": "vllm-0", "node": "node-1", "sessions": 2}],
    },
    "lastHour": {"hitRate": "87.5%", "requestedTokens": 8000, "hitTokens": 7000, "computedTokens": 1000},
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Ready", **CONDITION},
        {"type": "InUse", "status": "True", "reason": "EngineAttached", **CONDITION},
    ],
}


def test_kubectl_get_shows_the_state(apiserver: Apiserver, pool: dict[str, Any], cache: dict[str, Any]) -> None:
    assert apiserver.patch(POOLS, "pool", {"status": POOL_STATUS}, "/status").status == 200
    cache_status = apiserver.patch(CACHES, "cache", {"status": CACHE_STATUS}, "/status")
    assert CacheNamespace.model_validate(cache_status.body).status.to_body() == CACHE_STATUS
    assert _row(apiserver, POOLS) == {
        "Name": "pool",
        "Nodes": 3,
        "Ready": 2,
        "Capacity": "24Gi",
        "Used": "1.46Gi",
        "Route": "none",
        "Status": "AgentsNotReady",
    }
    assert _row(apiserver, CACHES) == {
        "Name": "cache",
        "Pool": "pool",
        "Ready": "True",
        "In use": "True",
        "Used": "512Mi",
        "Hit rate": "87.5%",
    }


def _row(apiserver: Apiserver, kind: Kind) -> dict[str, Any]:
    """The one row of `kubectl get`, but for its age."""
    table = apiserver.request("GET", collection(kind), accept=TABLE).body
    (row,) = table["rows"]
    cells = zip(table["columnDefinitions"], row["cells"], strict=True)
    return {column["name"]: cell for column, cell in cells if column["priority"] == 0 and column["name"] != "Age"}


def test_cache_namespaces_are_selected_by_their_pool(apiserver: Apiserver, cache: dict[str, Any]) -> None:
    def found(selector: str) -> list[str]:
        answer = apiserver.request("GET", collection(CACHES), fieldSelector=selector)
        return [each["metadata"]["name"] for each in answer.body["items"]]

    assert found("spec.poolRef.name=pool") == ["cache"]
    assert found("spec.poolRef.name=other") == []


def test_wrong_version_of_the_api_is_not_found(apiserver: Apiserver) -> None:
    assert apiserver.request("GET", "/apis/orbitkv.io/v1/managerpools").status == 404
    wrong = {"apiVersion": "orbitkv.io/v1", "kind": "ManagerPool", "metadata": {"name": "pool"}, "spec": {}}
    answer = apiserver.create(POOLS, wrong, dryRun="All")
    assert answer.status == 400
    assert 'ManagerPool in version "v1" cannot be handled' in answer.body["message"]


def test_short_names_and_category_are_known(apiserver: Apiserver) -> None:
    resources = apiserver.request("GET", "/apis/orbitkv.io/v1alpha1").body["resources"]
    known = {each["name"]: each for each in resources}
    assert set(known) == {"managerpools", "managerpools/status", "cachenamespaces", "cachenamespaces/status"}
    assert known["managerpools"]["shortNames"] == ["mpool"]
    assert known["cachenamespaces"]["shortNames"] == ["cns"]
    assert known["managerpools"]["categories"] == known["cachenamespaces"]["categories"] == ["orbitkv"]


def test_kubectl_explain_tells_what_fields_mean(apiserver: Apiserver) -> None:
    kubectl = programs.ensure((programs.CLUSTER[0],))["kubectl"]
    path = "/openapi/v3/apis/orbitkv.io/v1alpha1"
    wait_until(lambda: apiserver.request("GET", path).status == 200, "the apiserver to publish the schemas", 60)
    text = apiserver.kubectl(kubectl, "explain", "managerpools.spec.memory")
    assert "Memory for pages on each node, for example 64Gi." in " ".join(text.split())
    assert "queryBudgetPercent\t<integer>" in text
    assert "-required-" in text
    text = apiserver.kubectl(kubectl, "explain", "cachenamespaces.spec.mode")
    assert "ENUM:\n    read_write\n    save_only" in text


def test_largest_objects_stay_within_what_rules_may_cost(apiserver: Apiserver) -> None:
    answer = apiserver.create(POOLS, _largest_pool(), dryRun="All")
    assert answer.status == 201, answer.body["message"]


def _largest_pool() -> dict[str, Any]:
    """A pool with every list and map as long as it may be, and long texts in what rules look at."""
    key = f"{'.'.join(['a' * 63] * 3)}/"
    values = [f"{'v' * 60}{index:03}" for index in range(64)]
    requirement = {"key": key + "x" * 63, "operator": "In", "values": values}
    term = {"matchExpressions": [requirement] * 16}
    labels = {f"{key}{index:063}": values[0] for index in range(32)}
    amounts = {f"{key}{index:063}": "0.00000000000000000000000000001" for index in range(6)}
    pods = {
        "topologyKey": key + "t" * 63,
        "labelSelector": {"matchLabels": labels, "matchExpressions": [requirement] * 16},
    }
    spec = {
        "memory": {"pool": "8Gi"},
        "podLabels": labels,
        "podAnnotations": labels,
        "nodeSelector": labels,
        "env": [{"name": f"A{index}", "valueFrom": {"fieldRef": {"fieldPath": "f" * 512}}} for index in range(64)],
        "extraArgs": ["a" * 1024] * 64,
        "imagePullSecrets": [{"name": f"secret-{index}"} for index in range(16)],
        "resources": {"requests": amounts, "limits": amounts},
        "tolerations": [{"key": key + "t" * 63, "operator": "Equal", "value": values[0]}] * 32,
        "allowedNamespaces": {"from": "Selector", "selector": pods["labelSelector"]},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term] * 16},
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": term}] * 4,
            },
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [pods] * 4},
        },
    }
    kind, metadata = "ManagerPool", {"name": "p" * 50}
    return {"apiVersion": "orbitkv.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
