"""When there is nothing to write."""

from __future__ import annotations

from typing import Any

import pytest

from orbitkv_operator.cluster.compare import covers


@pytest.mark.parametrize(
    ("live", "wanted", "same"),
    [
        ({"a": 1, "set": "by the server"}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        (None, {"a": 1}, False),
        ({}, {"a": []}, True),
        ({"list": [1, 2]}, {"list": [1]}, False),
        ({"list": [2, 1]}, {"list": [1, 2]}, False),
        ({"env": [{"name": "X"}, {"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "1"}]}, True),
        ({"env": [{"name": "A", "value": "2"}]}, {"env": [{"name": "A", "value": "1"}]}, False),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "1000m"}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1G"}}, False),
        ({"data": {"memory": "1Gi"}}, {"data": {"memory": "1024Mi"}}, False),
    ],
    ids=str,
)
def test_what_is_applied_covers_what_is_wanted(live: Any, wanted: Any, same: bool) -> None:
    assert covers(live, wanted) is same
