"""Conditions."""

from __future__ import annotations

from datetime import UTC, datetime

from orbitkv_crds.meta import condition, find_condition

EARLY = datetime(2026, 1, 1, tzinfo=UTC)
LATE = datetime(2026, 1, 2, 3, 4, 5, 999, tzinfo=UTC)


def test_time_of_change_is_kept_while_the_status_stays() -> None:
    first = condition([], "Ready", False, "AgentsNotReady", "One of two.", 1, EARLY)
    again = condition([first], "Ready", False, "NodesOverlap", "Another reason.", 2, LATE)
    assert again.last_transition_time == "2026-01-01T00:00:00Z"
    assert (again.reason, again.message, again.observed_generation) == ("NodesOverlap", "Another reason.", 2)
    turned = condition([again], "Ready", True, "Ready", "All.", 2, LATE)
    assert turned.last_transition_time == "2026-01-02T03:04:05Z"
    assert turned.status == "True"


def test_condition_of_another_type_does_not_matter() -> None:
    other = condition([], "Available", True, "Available", "", 1, EARLY)
    assert condition([other], "Ready", True, "Ready", "", 1, LATE).last_transition_time == "2026-01-02T03:04:05Z"
    assert find_condition([other], "Ready") is None


def test_what_is_not_known_is_unknown() -> None:
    assert condition([], "PoolReady", None, "NoReport", "", 1, EARLY).status == "Unknown"
