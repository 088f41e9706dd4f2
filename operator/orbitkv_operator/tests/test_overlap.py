"""Pools that want the same nodes."""

from __future__ import annotations

from orbitkv_operator.overlap import Candidate, overlaps
from orbitkv_operator.tests.fakes import node

NODES = [node("a", {"zone": "a"}), node("b", {"zone": "b"})]


def candidate(name: str, created: str = "2026-01-01T00:00:00Z", **selector: str) -> Candidate:
    return Candidate(name, f"uid-{name}", created, {"nodeSelector": selector})


def test_pools_on_different_nodes_do_not_overlap() -> None:
    assert overlaps(candidate("one", zone="a"), [candidate("two", zone="b")], NODES) == []


def test_both_pools_see_the_nodes_and_who_is_older() -> None:
    older, younger = candidate("old", "2026-01-01T00:00:00Z"), candidate("new", "2026-01-02T00:00:00Z", zone="b")
    (seen_by_younger,) = overlaps(younger, [older, younger], NODES)
    (seen_by_older,) = overlaps(older, [older, younger], NODES)
    assert (seen_by_younger.other, seen_by_younger.other_is_older, seen_by_younger.nodes) == ("old", True, ("b",))
    assert (seen_by_older.other, seen_by_older.other_is_older, seen_by_older.nodes) == ("new", False, ("b",))


def test_of_the_same_second_exactly_one_is_older() -> None:
    one, two = candidate("one"), candidate("two")
    assert overlaps(one, [two], NODES)[0].other_is_older is not overlaps(two, [one], NODES)[0].other_is_older
