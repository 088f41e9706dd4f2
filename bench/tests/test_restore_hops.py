"""What is read out of a connector's calls."""

from __future__ import annotations

import pytest

from bench.restore_hops import ALLOCATED, BUILD, HEARD, LOOK_UP, Calls, medians

Row = tuple[str, float, float, list[int]]


def alone(tokens: int, began: float) -> list[Row]:
    """A restore that is looked up at `began`, sent 1 ms, seen 5 ms and scheduled 7 ms later."""
    return [
        (LOOK_UP, began, 0.0004, [tokens]),
        (ALLOCATED, began + 0.0008, 0.0002, [tokens]),
        (BUILD, began + 0.0011, 0.0, [0, 0]),
        (HEARD, began + 0.0012, 0.0, [0]),
        (BUILD, began + 0.002, 0.0, [0, 0]),
        (HEARD, began + 0.0049, 0.0001, [1]),
        (ALLOCATED, began + 0.006, 0.0, [0]),
        (BUILD, began + 0.007, 0.0, [0, 16]),
    ]


def test_the_hops_of_restores_alone_are_told_apart_by_their_tokens() -> None:
    calls = Calls([*alone(1008, 1.0), *alone(8176, 2.0), *alone(1008, 3.0)])
    found = calls.hops(1008)
    assert len(found) == 2
    middle = medians(found)
    assert (middle.sent, middle.seen, middle.scheduled) == pytest.approx((1.0, 5.0, 7.0))
    assert len(calls.hops(8176)) == 1


def test_restores_side_by_side_are_left_out() -> None:
    both = sorted([*alone(1008, 1.0), *alone(1008, 1.0001)], key=lambda row: row[1])
    assert Calls(both).hops(1008) == []
    assert len(Calls([*both, *alone(1008, 2.0)]).hops(1008)) == 1


def test_a_steps_calls_are_added_up_if_it_computes() -> None:
    rows: list[Row] = [
        (BUILD, 0.0, 0.00002, [0, 16]),
        ("start_load_kv", 0.1, 0.00001, []),
        (HEARD, 0.2, 0.00003, [0]),
        (LOOK_UP, 0.3, 0.00005, [0]),
        (BUILD, 0.4, 0.00001, [0, 0]),
        (HEARD, 0.5, 1.0, [0]),
        (BUILD, 0.6, 0.0, [0, 16]),
    ]
    assert Calls(rows).microseconds_per_step() == pytest.approx([100.0])
