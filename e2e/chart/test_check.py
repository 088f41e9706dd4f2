"""What `helm test` finds missing."""

import importlib.util
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest
from kubernetes import client

from e2e.chart.helm import CHART, Helm

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("orbitkv_chart_check", CHART / "files" / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lease(holder: str = "orbitkv-operator-a", age: int = 3) -> client.V1Lease:
    spec = client.V1LeaseSpec(
        holder_identity=holder, renew_time=NOW - timedelta(seconds=age), lease_duration_seconds=15
    )
    return client.V1Lease(spec=spec)


def pool(status: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "default", "generation": 2}, "status": status}


def test_an_operator_that_renews_its_lease_acts(check: ModuleType) -> None:
    assert check.operator_missing(lease(), NOW) is None


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "no operator has started to act"),
        (lease(holder=""), "no operator holds"),
        (lease(age=60), "60 seconds ago"),
        (client.V1Lease(spec=None), "no operator holds"),
    ],
)
def test_an_operator_that_does_not_act_is_named(check: ModuleType, found: client.V1Lease | None, says: str) -> None:
    assert says in check.operator_missing(found, NOW)


def test_a_pool_counts_when_its_newest_version_is_ready(check: ModuleType) -> None:
    ready = {"observedGeneration": 2, "conditions": [{"type": "Ready", "status": "True"}]}
    assert check.pool_missing(pool(ready)) is None
    assert "newest version" in check.pool_missing(pool({**ready, "observedGeneration": 1}))
    assert "newest version" in check.pool_missing({"metadata": {"name": "default", "generation": 1}})


def test_a_pool_that_is_not_ready_says_why(check: ModuleType) -> None:
    condition = {"type": "Ready", "status": "False", "reason": "NodesOverlap", "message": "pool other is there"}
    text = check.pool_missing(pool({"observedGeneration": 2, "conditions": [condition]}))
    assert text == "ManagerPool default is not ready: NodesOverlap: pool other is there"
    assert "no reason yet" in check.pool_missing(pool({"observedGeneration": 2}))


def test_the_pod_runs_the_file_as_it_is(helm: Helm) -> None:
    spec = helm.render().one("Pod", "orbitkv-test")["spec"]
    (container,) = spec["containers"]
    assert container["args"] == [(CHART / "files" / "check.py").read_text()]
    assert spec["activeDeadlineSeconds"] > 120, "it must be able to say what is missing"
