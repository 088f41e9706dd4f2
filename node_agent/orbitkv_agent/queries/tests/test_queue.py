from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv_agent.queries.boundaries import common_boundary
from orbitkv_agent.queries.queue import Lanes, Places
from orbitkv_agent.queries.shares import Shares


class Waiter:
    ticket = 0


@dataclass(frozen=True)
class Lane:
    name: str
    tenant: str = ""


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 3), max_size=30), st.sets(st.integers(0, 3)))
def test_lanes_serve_in_the_order_of_arrival_leaving_out_the_full_ones(lanes: list[int], full: set[int]) -> None:
    queue: Lanes[int, Waiter] = Lanes()
    arrived = [(lane, Waiter()) for lane in lanes]
    for lane, waiter in arrived:
        queue.append(lane, waiter)
    expected = [(lane, waiter) for lane, waiter in arrived if lane not in full]
    served = []
    while (first := queue.first(full.__contains__)) is not None:
        served.append(first)
        queue.remove(*first)
    assert served == expected
    assert queue.count == len(arrived) - len(expected)
    assert {lane for lane, _ in arrived if queue.waits_in(lane)} == {lane for lane in lanes if lane in full}


def test_places_are_limited_by_lane_and_in_all() -> None:
    a, b, c = map(Lane, "abc")
    places: Places[Lane] = Places(2, 3, Shares(lambda: False))
    places.take(a)
    places.take(a)
    assert places.lane_is_full(a)
    assert not places.free(a)
    assert not places.lane_is_full(b)
    assert places.free(b)
    places.take(b)
    assert places.full
    assert not places.free(c)
    places.give_back(a)
    assert (places.full, places.lane_is_full(a), places.taken) == (False, False, 2)


def test_a_tenants_places_are_limited_however_many_sessions_it_has() -> None:
    places: Places[Lane] = Places(2, 8, Shares(lambda: True))
    for name in "aabb":
        places.take(Lane(name, "t"))
    assert places.lane_is_full(Lane("c", "t")) and not places.free(Lane("c", "t"))
    assert places.free(Lane("c", "u"))
    places.give_back(Lane("a", "t"))
    assert places.free(Lane("c", "t"))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 100)), min_size=1, max_size=4))
def test_a_common_boundary_is_whole_pages_of_every_group(groups: list[tuple[int, int]]) -> None:
    step, longest = common_boundary(groups)
    for tokens, pages in groups:
        assert step % tokens == 0
        assert longest % tokens == 0
        assert longest // tokens <= pages
    assert any((longest + step) // tokens > pages for tokens, pages in groups), "there is no longer one"
