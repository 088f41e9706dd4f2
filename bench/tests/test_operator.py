"""What `bench.operator` works out of what it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.operator import baseline
from bench.operator_cluster import AuditLog, quantile
from orbitkv_crds import names


@pytest.mark.parametrize(
    ("share", "found"),
    [(0.5, 0.01), (0.95, 0.08), (0.99, 0.1), (1.0, 0.1)],
)
def test_quantile_lies_within_its_bucket(share: float, found: float) -> None:
    buckets = {0.01: 50.0, 0.05: 80.0, 0.1: 99.0, float("inf"): 100.0}
    assert quantile(buckets, share) == pytest.approx(found, abs=0.015)


def test_quantile_of_nothing_is_nothing() -> None:
    assert quantile({}, 0.5) == 0


def entry(number: int, user: str, at: str, verb: str = "get", stage: str = "ResponseComplete") -> str:
    made: dict[str, Any] = {
        "auditID": f"id-{number}",
        "stage": stage,
        "verb": verb,
        "user": {"username": user},
        "requestURI": "/x",
        "objectRef": {"resource": "pods"},
        "requestReceivedTimestamp": at,
    }
    return json.dumps(made) + "\n"


def test_requests_are_those_of_the_namespace_in_the_window_and_each_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    ours, other = "system:serviceaccount:orbitkv-system:orbitkv-operator", "system:serviceaccount:else:orbitkv-operator"
    path.write_text(entry(0, ours, "1970-01-01T00:01:40Z"))  # was there before
    log = AuditLog(path)
    with path.open("a") as file:
        file.write(entry(1, ours, "1970-01-01T00:01:40Z"))
        file.write(entry(2, ours, "1970-01-01T00:01:41Z", "watch", "ResponseStarted"))
        file.write(entry(2, ours, "1970-01-01T00:01:41Z", "watch"))
        file.write(entry(3, other, "1970-01-01T00:01:41Z"))
        file.write(entry(4, ours, "1970-01-01T00:02:41Z"))
    found = log.requests("orbitkv-system", seconds=10, began=100)
    assert found == {("orbitkv-operator", "get", "pods"): 1, ("orbitkv-operator", "watch", "pods"): 1}


def test_baseline_is_the_same_daemon_set_and_nobodys() -> None:
    labels = {names.LABEL_POOL: "bench", "app.kubernetes.io/managed-by": names.MANAGED_BY, "part": "agent"}
    spec = {"containers": [{"name": "agent"}], "nodeSelector": {"orbitkv-bench": "nowhere"}}
    template = {"metadata": {"labels": labels, "annotations": {"a": "b"}}, "spec": spec}
    owned = {"name": "orbitkv-bench", "namespace": "orbitkv-system", "ownerReferences": [{"uid": "x"}]}
    whole = {"selector": {"matchLabels": {names.LABEL_POOL: "bench"}}, "updateStrategy": {"type": "OnDelete"}}
    found = baseline({"metadata": owned, "spec": whole | {"template": template}})
    assert "ownerReferences" not in found["metadata"]
    made = found["spec"]["template"]
    assert found["spec"]["selector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    assert made["metadata"]["labels"]["app.kubernetes.io/managed-by"] != names.MANAGED_BY
    assert made["spec"] == spec | {"nodeSelector": {"orbitkv-bench": "node"}}
