from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest

from orbitkv_agent.queries.operations import QueryOperation, State

LEGAL = {
    ("none", "preparing"),
    ("none", "retired"),
    ("preparing", "ready"),
    ("preparing", "retired"),
    ("ready", "restoring"),
    ("ready", "retired"),
    ("restoring", "drained"),
    ("drained", "retired"),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_only_the_steps_of_the_table_are_taken(before: State, after: State) -> None:
    operation = QueryOperation(Mock(), Mock(), 7, 1, [], None)
    operation.state = before
    if (before.name.lower(), after.name.lower()) in LEGAL:
        operation.to(after)
        assert operation.state is after
    else:
        with pytest.raises(AssertionError, match=f"query 7: {before.name} is not followed by {after.name}"):
            operation.to(after)
