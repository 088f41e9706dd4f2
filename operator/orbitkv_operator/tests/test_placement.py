"""Which nodes a DaemonSet runs on: as Kubernetes decides it."""

from __future__ import annotations

from typing import Any

import pytest

from orbitkv_operator.cluster.api import Manifest
from orbitkv_operator.placement import matching, wanted
from orbitkv_operator.tests.fakes import node


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
        }
    }


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, **({"values": list(values)} if values else {})}]}


def fits(placement: dict[str, Any], **labels: str) -> bool:
    return wanted([node("n", labels)], placement, ()) == ["n"]


@pytest.mark.parametrize(
    ("placement", "labels", "fit"),
    [
        ({}, {}, True),
        ({"nodeSelector": {"zone": "a"}}, {"zone": "a"}, True),
        ({"nodeSelector": {"zone": "a"}}, {"zone": "b"}, False),
        (required(expression("zone", "In", "a", "b")), {"zone": "b"}, True),
        (required(expression("zone", "In", "a")), {}, False),
        (required(expression("zone", "NotIn", "a")), {}, True),
        (required(expression("zone", "NotIn", "a")), {"zone": "a"}, False),
        (required(expression("zone", "Exists")), {"zone": ""}, True),
        (required(expression("zone", "DoesNotExist")), {"zone": ""}, False),
        (required(expression("cores", "Gt", "8")), {"cores": "16"}, True),
        (required(expression("cores", "Gt", "8")), {"cores": "many"}, False),
        (required(expression("cores", "Lt", "8")), {"cores": "4"}, True),
        (required({}), {}, False),
        (required(expression("zone", "In", "x"), expression("zone", "In", "a")), {"zone": "a"}, True),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}), {}, True),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}), {}, False),
    ],
    ids=str,
)
def test_labels(placement: dict[str, Any], labels: dict[str, str], fit: bool) -> None:
    assert fits(placement, **labels) is fit


TAINT = {"key": "dedicated", "value": "infra", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("toleration", "fit"),
    [
        (None, False),
        ({"key": "dedicated", "operator": "Exists"}, True),
        ({"key": "dedicated", "value": "infra"}, True),
        ({"key": "dedicated", "value": "other"}, False),
        ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"operator": "Exists"}, True),
    ],
    ids=str,
)
def test_taints(toleration: dict[str, str] | None, fit: bool) -> None:
    placement = {"tolerations": [toleration]} if toleration else {}
    assert bool(wanted([node("n", taints=[TAINT])], placement, ())) is fit


def down(name: str) -> Manifest:
    return node(
        name,
        ready=False,
        taints=[
            {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"},
            {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"},
        ],
    )


def test_cordoned_node_keeps_and_gets_an_agent() -> None:
    cordoned = node("n", taints=[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}])
    assert wanted([cordoned], {}, ()) == ["n"]


def test_node_that_is_down_keeps_its_agent_and_gets_no_new_one() -> None:
    assert wanted([down("n")], {}, {"n"}) == ["n"]
    assert wanted([down("n")], {}, ()) == []


def test_node_that_is_down_still_belongs_to_its_pool() -> None:
    assert matching([down("n")], {}) == ["n"]
