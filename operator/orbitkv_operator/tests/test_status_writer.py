"""When a status is written."""

from __future__ import annotations

from typing import Any

import pytest

from orbitkv_operator.cluster.api import CACHES, POOLS, ApiError
from orbitkv_operator.reconcile.status_writer import LastWrites, StatusWriter, wait_for
from orbitkv_operator.tests.fakes import FakeApi, cache_body, pool_body


def status(ready: str = "True", used: str = "1Gi", caches: int = 1, **more: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    return {"conditions": conditions, "cacheNamespaces": caches, "tiers": {"dram": {"used": used}}, **more}


NEVER = LastWrites()


def test_same_status_is_not_written() -> None:
    assert wait_for(status(), status(), NEVER, 100.0) is None


def test_changed_condition_is_written_at_once() -> None:
    assert wait_for(status(), status("False"), NEVER, 100.0) == 0


def test_next_change_of_the_same_object_waits() -> None:
    assert wait_for(status(), status("False"), LastWrites(any=95.0), 100.0) == 5
    assert wait_for(status(), status("False"), LastWrites(any=95.0), 100.0, facts_seconds=6.0) == 1


@pytest.mark.parametrize(("used", "written"), [("1.05Gi", False), ("1.2Gi", True), ("0.8Gi", True), ("0", True)])
def test_figures_are_written_when_they_moved_by_a_tenth(used: str, written: bool) -> None:
    assert (wait_for(status(), status(used=used), NEVER, 100.0) is not None) is written


def test_figures_are_written_every_five_minutes_at_most() -> None:
    assert wait_for(status(), status(used="9Gi"), LastWrites(any=90.0, figures=90.0), 100.0) == 290


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tiers": {"dram": {"used": "0"}}}, {"tiers": {"dram": {"used": "64Mi"}}}),
        ({"tiers": None}, {"tiers": {"dram": {"used": "64Mi"}}}),
        (
            {"lastHour": {"hitRate": "0%", "requestedTokens": 9, "hitTokens": 0}},
            {"lastHour": {"hitRate": "50%", "requestedTokens": 18, "hitTokens": 9}},
        ),
    ],
)
def test_first_of_a_figure_is_written_as_soon_as_a_condition(before: dict[str, Any], after: dict[str, Any]) -> None:
    last = LastWrites(any=95.0, figures=95.0)
    assert wait_for(status() | before, status() | after, last, 100.0) == 5
    assert wait_for(status() | after, status() | before, last, 100.0) == 295  # what goes is no news


def test_new_figures_go_along_with_a_changed_condition() -> None:
    api = FakeApi()
    live = api.add(POOLS, pool_body() | {"status": status()})
    writer = StatusWriter(api)
    assert writer.write(POOLS, live, status("False", "1.01Gi")) is None
    stored = api.get(POOLS, None, "main")
    assert stored is not None and stored["status"]["tiers"]["dram"]["used"] == "1.01Gi"


def test_pool_that_nobody_refers_to_any_more_shows_it_without_waiting() -> None:
    assert wait_for(status(caches=3), status(caches=0), LastWrites(any=99.0), 100.0) == 0
    assert wait_for(status(caches=3), status(caches=2), LastWrites(any=99.0), 100.0) == 9


def test_three_writes_a_second_in_all() -> None:
    api, now = FakeApi(), [1000.0]
    writer = StatusWriter(api, clock=lambda: now[0])
    bodies = [api.add(CACHES, cache_body(f"cache-{number}")) for number in range(100)]
    waiting = bodies
    while waiting:
        waiting = [body for body in waiting if writer.write(CACHES, body, status()) is not None]
        now[0] += 0.05
    assert len(api.writes) == 100
    assert 32 <= now[0] - 1000 <= 36


def test_who_waits_is_given_a_time_and_need_not_ask_before() -> None:
    api, now = FakeApi(), 1000.0
    writer = StatusWriter(api, clock=lambda: now)
    bodies = [api.add(CACHES, cache_body(f"cache-{number}")) for number in range(30)]
    waits = [writer.write(CACHES, body, status()) or 0.0 for body in bodies]
    assert waits == pytest.approx([number / 3 for number in range(30)])
    for body, wait in zip(bodies[1:], waits[1:], strict=True):
        now = 1000.001 + wait
        assert writer.write(CACHES, body, status()) is None
    assert len(api.writes) == 30


def test_pool_does_not_wait_behind_a_thousand_caches() -> None:
    api, now = FakeApi(), 1000.0
    writer = StatusWriter(api, clock=lambda: now)
    for number in range(1000):
        writer.write(CACHES, api.add(CACHES, cache_body(f"cache-{number}")), status())
    assert writer.write(POOLS, api.add(POOLS, pool_body()), status()) is None


def test_changed_condition_does_not_wait_behind_the_figures_of_a_thousand() -> None:
    api, now = FakeApi(), 1000.0
    writer = StatusWriter(api, clock=lambda: now)
    bodies = [api.add(CACHES, cache_body(f"cache-{number}") | {"status": status()}) for number in range(1000)]
    waits = [writer.write(CACHES, body, status(used="9Gi")) for body in bodies]
    assert (waits[-1] or 0) > 300
    assert writer.write(CACHES, bodies[-1], status("False")) is None
    assert (writer.write(CACHES, bodies[-2], status("False")) or 0.0) < 1
    now += 1
    assert writer.write(CACHES, bodies[1], status(used="9Gi")), "figures wait while a condition does"
    assert writer.write(CACHES, bodies[-2], status("False")) is None
    assert writer.write(CACHES, bodies[1], status(used="9Gi")) is None


def test_status_is_not_written_to_another_object_of_the_same_name() -> None:
    api = FakeApi()
    api.add(POOLS, pool_body(uid="new"))
    with pytest.raises(Exception, match="another uid"):
        StatusWriter(api).write(POOLS, pool_body(uid="old"), status())


def test_status_of_an_object_that_is_gone_is_not_asked_for_again() -> None:
    api = FakeApi()
    live = api.add(CACHES, cache_body("cache"))

    def gone(*_: Any, **__: Any) -> None:
        raise ApiError(404, "cachenamespaces.orbitkv.io cache not found")

    api.apply = gone  # type: ignore[assignment,method-assign]
    assert StatusWriter(api).write(CACHES, live, status()) is None


def test_turns_of_those_that_are_gone_go_to_others() -> None:
    """Else who comes after a thousand that were deleted waits for minutes, for nobody."""
    api, now = FakeApi(), [1000.0]
    writer = StatusWriter(api, clock=lambda: now[0])
    bodies = [api.add(CACHES, cache_body(f"cache-{number}")) for number in range(1000)]
    waits = [writer.write(CACHES, body, status()) for body in bodies]
    last = bodies.pop()
    assert (waits.pop() or 0) > 300
    for body in bodies:
        writer.forget(CACHES, body["metadata"]["namespace"], body["metadata"]["name"])
    late = [api.add(CACHES, cache_body(f"late-{number}")) for number in range(10)]
    assert max(writer.write(CACHES, body, status()) or 0.0 for body in late) < 5
    assert (writer.write(CACHES, last, status()) or 0.0) < 5  # and so do those that wait already
    writes, asked = 0, [*late, last]
    for _ in range(50):
        now[0] += 0.1
        before = len(api.writes)
        asked = [body for body in asked if writer.write(CACHES, body, status()) is not None]
        writes += len(api.writes) - before
        assert len(api.writes) - before <= 1
    assert writes == 11
