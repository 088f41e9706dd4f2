"""Selectors, who may use a pool, and who may attach."""

from __future__ import annotations

from typing import Any

import pytest

from orbitkv_crds.access import Access, AllowedNamespaces
from orbitkv_crds.selectors import LabelSelector

LABELS = {"team": "a", "stage": "prod", "empty": ""}


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ({}, True),
        ({"matchLabels": {}}, True),
        ({"matchLabels": {"team": "a"}}, True),
        ({"matchLabels": {"team": "a", "stage": "test"}}, False),
        ({"matchLabels": {"absent": ""}}, False),
        ({"matchLabels": {"empty": ""}}, True),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["b", "a"]}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["b"]}]}, False),
        ({"matchExpressions": [{"key": "absent", "operator": "In", "values": [""]}]}, False),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "absent", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "empty", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "absent", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "absent", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, False),
        ({"matchLabels": {"team": "a"}, "matchExpressions": [{"key": "stage", "operator": "DoesNotExist"}]}, False),
    ],
    ids=str,
)
def test_selector_matches_as_in_kubernetes(selector: dict[str, Any], matches: bool) -> None:
    assert LabelSelector.model_validate(selector).matches(LABELS) is matches


def test_pool_for_all_admits_namespaces_whose_labels_are_not_known() -> None:
    assert AllowedNamespaces().admits(None)


def test_pool_with_a_selector_admits_only_known_labels_that_match() -> None:
    allowed = AllowedNamespaces.model_validate({"from": "Selector", "selector": {"matchLabels": {"team": "a"}}})
    assert allowed.admits(LABELS)
    assert not allowed.admits({"team": "b"})
    assert not allowed.admits(None)
    everyone = AllowedNamespaces.model_validate({"from": "Selector", "selector": {}})
    assert everyone.admits({})
    assert not everyone.admits(None)


def refusal(access: dict[str, Any], namespace: str, account: str = "engine") -> str:
    labels: dict[str, dict[str, str]] = {"own": {}, "friend": {"team": "a"}, "stranger": {"team": "b"}}
    return Access.model_validate(access).refusal("own", namespace, labels.get(namespace), account) or ""


def test_by_default_pods_of_the_same_namespace_attach() -> None:
    assert refusal({}, "own") == ""
    assert refusal({}, "friend") == "access.namespaces is Same: only pods in the namespace own may attach"


def test_pods_of_selected_namespaces_attach_and_those_of_the_own() -> None:
    access = {"namespaces": "Selector", "selector": {"matchLabels": {"team": "a"}}}
    assert refusal(access, "own") == ""
    assert refusal(access, "friend") == ""
    assert refusal(access, "stranger") == "the labels of the namespace stranger do not match access.selector"
    assert refusal(access, "unknown") == "the labels of the namespace unknown do not match access.selector"


def test_pods_of_all_namespaces_attach() -> None:
    assert refusal({"namespaces": "All"}, "unknown") == ""


def test_service_accounts_are_asked_for_by_name_or_with_their_namespace() -> None:
    access = {"namespaces": "All", "serviceAccounts": ["engine", "friend/other"]}
    assert refusal(access, "own", "engine") == ""
    assert refusal(access, "stranger", "engine") == ""
    assert refusal(access, "friend", "other") == ""
    assert "stranger/other is not among access.serviceAccounts" in refusal(access, "stranger", "other")


def test_empty_list_of_service_accounts_lets_nobody_attach() -> None:
    assert "own/engine is not among" in refusal({"serviceAccounts": []}, "own")
