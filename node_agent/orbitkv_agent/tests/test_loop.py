from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from orbitkv_agent.loop import Deadlines, Loop
from orbitkv_agent.tests.harness import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(clock: Clock) -> Iterator[Loop]:
    loop = Loop(clock)
    yield loop
    loop.close()


class Time:
    """In place of the module: it passes with each look at it and with sleep, and all of it is processor time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now

    def thread_time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Time:
    passing = Time()
    monkeypatch.setattr("orbitkv_agent.loop.time", passing)
    return passing


def looking(busy_poll_s: float, clock: Callable[[], float] = time.monotonic) -> Loop:
    """A loop that looks for the next event for so long before it sleeps."""
    loop = Loop(clock, busy_poll_s)
    for _ in range(3):
        loop.post(lambda: None)
        loop.run_once(1)
    return loop


def test_timers_run_in_order_when_they_are_due(loop: Loop, clock: Clock) -> None:
    ran: list[int] = []
    for seconds in (3, 1, 2):
        loop.call_later(seconds, lambda seconds=seconds: ran.append(seconds))  # type: ignore[misc]
    cancelled = loop.call_later(1.5, lambda: ran.append(99))
    cancelled.cancel()
    clock.now += 2
    loop.run_once(0)
    assert ran == [1, 2]
    clock.now += 1
    loop.run_once(0)
    assert ran == [1, 2, 3]


def test_the_mailbox_wakes_the_loop_from_another_thread() -> None:
    loop = Loop()
    ran: list[str] = []

    def finish() -> None:
        ran.append(threading.current_thread().name)
        loop.stop()

    thread = threading.Thread(target=lambda: loop.post(finish))
    thread.start()
    loop.run()
    thread.join()
    assert ran == [threading.current_thread().name]
    loop.close()
    loop.post(finish)  # nobody is left to run it, and nothing breaks


def test_what_is_to_come_soon_waits_for_all_that_are_ready_and_not_for_more(loop: Loop) -> None:
    reader, writer = os.pipe()
    order: list[str] = []

    def work(left: int) -> None:
        order.append("work")
        if left:
            loop.soon(lambda: work(left - 1))

    def read(_events: int) -> None:
        order.append("read")
        if os.read(reader, 1) == b"f":
            loop.soon(lambda: work(2))

    loop.watch(reader, select.EPOLLIN, read)
    os.write(writer, b"fxx")
    started = time.monotonic()
    while len(order) < 6:
        loop.run_once(20)
    assert order == ["read", "read", "work", "read", "work", "work"]
    assert time.monotonic() - started < 10, "it slept while there was something to do"
    loop.forget(reader)
    os.close(reader)
    os.close(writer)


def test_a_descriptor_is_watched_until_it_is_forgotten(loop: Loop) -> None:
    reader, writer = os.pipe()
    seen: list[bytes] = []
    loop.watch(reader, select.EPOLLIN, lambda events: seen.append(os.read(reader, 10)))
    os.write(writer, b"a")
    loop.run_once(0)
    loop.forget(reader)
    loop.forget(reader)
    os.write(writer, b"b")
    loop.run_once(0)
    assert seen == [b"a"]
    os.close(reader)
    os.close(writer)


def test_looking_for_more_keeps_no_timer_waiting() -> None:
    loop = looking(30)
    due: list[float] = []
    start = loop.now()
    loop.call_later(0.02, lambda: due.append(loop.now() - start))
    loop.run_once(60)
    assert len(due) == 1 and 0.02 <= due[0] < 20
    loop.close()


def test_looking_for_more_ends_when_nothing_comes() -> None:
    loop = looking(0.2)
    looks = 0

    def crowded() -> bool:
        nonlocal looks
        looks += 1
        return False

    loop.crowded = crowded
    loop.run_once(0.5)
    looks = 0
    loop.run_once(0.5)
    loop.run_once(0.5)
    assert not looks, "it looked for events while none came, instead of sleeping"
    loop.close()


class Bell:
    """Something to look at. `rings_at_rest`: it is there in the moment in which the loop says that it looks no more."""

    def __init__(self, *, rings_at_rest: bool = False) -> None:
        self.rung = False
        self.served = 0
        self.told: list[bool] = []
        self.rings_at_rest = rings_at_rest

    def rings(self) -> bool:
        return self.rung

    def look(self) -> bool:
        rung, self.rung = self.rung, False
        self.served += rung
        return rung

    def watched(self, *, watched: bool) -> None:
        self.told.append(watched)
        self.rung = self.rung or (self.rings_at_rest and not watched)


@pytest.fixture
def busy_loop() -> Iterator[Loop]:
    loop = looking(0.1)
    yield loop
    loop.close()


def test_the_loop_looks_elsewhere_too_until_it_sleeps(busy_loop: Loop) -> None:
    bell = Bell()
    busy_loop.look_also(bell)
    bell.rung = True
    start = time.monotonic()
    busy_loop.run_once(10)
    assert bell.served == 1 and time.monotonic() - start < 5
    assert bell.told == [True]
    busy_loop.run_once(0.3)
    assert bell.told == [True, False], "whoever rings must know that nobody listens"
    busy_loop.look_also(bell)
    assert bell.told == [True, False], "it would sleep at once"
    bell.rung = True
    busy_loop.run_once(0)
    assert bell.served == 1


def test_who_rings_without_end_keeps_nobody_else_waiting(busy_loop: Loop) -> None:
    bells = [Bell(), Bell(), Bell()]
    for bell in bells:
        busy_loop.look_also(bell)
    for _ in range(9):
        for bell in bells:
            bell.rung = True
        busy_loop.run_once(1)
    assert [bell.served for bell in bells] == [3, 3, 3]


def test_what_comes_just_before_the_loop_sleeps_is_seen(busy_loop: Loop) -> None:
    bell = Bell(rings_at_rest=True)
    busy_loop.look_also(bell)
    busy_loop.run_once(0.3)
    assert bell.served == 1


def test_what_is_not_to_be_looked_at_any_more_is_not(busy_loop: Loop) -> None:
    bell = Bell()
    busy_loop.look_also(bell)
    busy_loop.look_no_more(bell)
    busy_loop.look_no_more(bell)
    bell.rung = True
    busy_loop.run_once(0.2)
    assert bell.served == 0 and bell.told == [True, False]


def test_time_of_looking_is_not_counted_and_that_of_what_was_found_is(passing: Time) -> None:
    loop = looking(0.1, passing.perf_counter)
    bell = Bell()
    loop.look_also(bell)
    loop.call_later(0.05, lambda: setattr(bell, "rung", True))
    loop.run_once(1)  # the timer, after 0.05 s of looking
    loop.run_once(1)
    assert bell.served == 1
    assert loop.longest_turn_s < 0.02

    def work() -> bool:
        passing.now += 0.03
        return True

    bell.look = work  # type: ignore[method-assign]
    bell.rung = True
    loop.run_once(1)
    assert 0.03 <= loop.longest_turn_s < 0.1
    loop.close()


def test_a_turn_knows_how_long_it_took_so_far_and_the_next_one_begins_anew(loop: Loop, passing: Time) -> None:
    took: list[float] = []

    def work() -> None:
        passing.now += 0.03
        took.append(loop.turn_s)

    loop.soon(work)
    loop.soon(lambda: took.append(loop.turn_s))
    loop.run_once(0)
    loop.soon(work)
    loop.soon(lambda: took.append(loop.turn_s))
    loop.run_once(0)
    assert 0.03 <= took[2] < 0.1 and 0 <= took[3] < 0.02, took


def test_where_others_need_the_interpreter_it_is_left_to_them_now_and_then(passing: Time) -> None:
    """Not by a system call that returns at once: the loop has the interpreter back before another thread is awake."""
    loop = Loop(busy_poll_s=0.01)
    crowded = False
    loop.crowded = lambda: crowded

    def work_for(seconds: float) -> None:
        end = passing.now + seconds
        while passing.now < end:
            loop.soon(lambda: None)
            loop.run_once(1)

    work_for(0.02)
    assert not passing.slept
    crowded = True
    work_for(0.02)
    assert 10 <= len(passing.slept) <= 70 and set(passing.slept) == {50e-6}, "once in 0.3 ms"
    for _ in range(3):
        loop.post(lambda: None)
        loop.run_once(1)
    passing.slept.clear()
    loop.run_once(1e-3)
    assert passing.slept, "nor does it look without a pause for what comes next"
    loop.close()


def test_a_handler_that_forgets_another_keeps_it_from_running(loop: Loop) -> None:
    pipes = [os.pipe(), os.pipe()]
    seen: list[int] = []

    def handler(mine: int, other: int) -> None:
        seen.append(mine)
        loop.forget(other)

    first, second = pipes[0][0], pipes[1][0]
    loop.watch(first, select.EPOLLIN, lambda events: handler(first, second))
    loop.watch(second, select.EPOLLIN, lambda events: handler(second, first))
    for _, writer in pipes:
        os.write(writer, b"x")
    loop.run_once(0)
    assert len(seen) == 1
    for pipe in pipes:
        for fd in pipe:
            os.close(fd)


def test_a_defect_in_a_callback_is_logged_and_the_loop_goes_on(
    loop: Loop, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise RuntimeError("a defect")

    loop.post(fail)
    loop.post(lambda: ran.append(1))
    loop.call_later(0, fail)
    loop.call_later(0, lambda: ran.append(2))
    loop.run_once(0)
    assert ran == [1, 2]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


def test_deadlines_expire_in_order_unless_discarded(loop: Loop, clock: Clock) -> None:
    expired: list[str] = []
    deadlines: Deadlines[str] = Deadlines(loop, 10, expired.append)
    deadlines.add("a")
    clock.now += 4
    deadlines.add("b")
    deadlines.add("c")
    deadlines.discard("c")
    deadlines.discard("never there")
    clock.now += 5
    deadlines.add("a")  # starts again
    loop.run_once(0)
    assert (expired, len(deadlines)) == ([], 2)
    clock.now += 5
    loop.run_once(0)
    assert expired == ["b"]
    clock.now += 5
    loop.run_once(0)
    assert expired == ["b", "a"]
    deadlines.add("d")
    clock.now += 10
    loop.run_once(0)
    assert expired == ["b", "a", "d"]


def test_what_expires_may_start_its_time_again_and_a_defect_stops_no_other(loop: Loop, clock: Clock) -> None:
    expired: list[str] = []

    def again(key: str) -> None:
        expired.append(key)
        deadlines.add(key)
        if len(expired) == 1:
            raise RuntimeError("a defect")

    deadlines: Deadlines[str] = Deadlines(loop, 10, again)
    deadlines.add("a")
    deadlines.add("b")
    for _ in range(5):
        clock.now += 10
        loop.run_once(0)
        loop.run_once(0)
    assert expired == ["a", "b"] * 5
    assert len(loop._timers) == 1, "timers do not multiply"
