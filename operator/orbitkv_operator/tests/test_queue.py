"""One queue of keys."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from orbitkv_operator import queue as queues
from orbitkv_operator.queue import FIRST_BACKOFF, LONG_SECONDS, LONGEST_BACKOFF, Key, KeyedQueue

A, B = Key("Kind", "a"), Key("Kind", "b")


def test_key_that_is_added_often_is_handled_once() -> None:
    queue = KeyedQueue()
    for _ in range(3):
        queue.add(A)
    queue.add(B)
    assert {queue.take(), queue.take()} == {A, B}
    queue.done(A)
    queue.done(B)
    queue.add(B, 0.01)
    assert queue.take() == B


def test_key_is_not_handled_by_two_at_one_time() -> None:
    queue = KeyedQueue()
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    queue.add(B, 0.05)
    assert queue.take() == B  # not A, although its time has come
    queue.done(A)
    assert queue.take() == A


def test_who_waits_is_told_of_a_key_that_came_due_while_another_handled_it() -> None:
    queue, taken = KeyedQueue(), []
    queue.add(A)
    assert queue.take() == A
    waiting = threading.Thread(target=lambda: taken.append(queue.take()), daemon=True)
    waiting.start()
    deadline = time.monotonic() + 10
    while not queue._condition._waiters:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    queue.add(A)  # it looks, and passes over what is handled
    queue.add(B, 60)
    time.sleep(0.05)
    queue.done(A)
    waiting.join(10)
    assert taken == [A]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The queue's time, which stands still until a test sets it. (What is not due then is waited for without end.)"""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(queues, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_key_that_took_long_rests_for_as_long_while_others_are_handled(clock: SimpleNamespace) -> None:
    queue = KeyedQueue()
    queue.add(A)
    assert queue.take() == A
    clock.now += 2
    queue.add(A)  # something new of it, meanwhile
    queue.done(A)
    queue.add(A)
    queue.add(B, 1.9)
    clock.now += 1.9
    assert queue.take() == B
    queue.done(B)
    clock.now += 0.1
    assert queue.take() == A
    clock.now += LONG_SECONDS / 2
    queue.done(A)  # it was quick this time
    queue.add(A)
    assert queue.take() == A


def test_what_is_gone_rests_no_more(clock: SimpleNamespace) -> None:
    queue = KeyedQueue()
    queue.add(A)
    assert queue.take() == A
    clock.now += 2
    queue.done(A, last=True)
    queue.add(A)
    assert queue.take() == A


def test_adding_brings_forward_and_never_back() -> None:
    queue = KeyedQueue()
    queue.add(A, 3600)
    queue.add(A)
    queue.add(A, 3600)
    assert queue.take() == A


def test_failures_wait_longer_each_time_and_are_forgotten() -> None:
    queue = KeyedQueue()
    delays = []
    for _ in range(9):
        queue.add(A)
        assert queue.take() == A
        delays.append(queue.failed(A))
    assert delays[:3] == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF] and delays[-1] == LONGEST_BACKOFF
    queue.add(A)
    queue.take()
    queue.done(A)
    queue.add(A)
    queue.take()
    assert queue.failed(A) == FIRST_BACKOFF


def test_server_decides_how_long_to_wait_at_least() -> None:
    queue = KeyedQueue()
    queue.add(A)
    queue.take()
    assert queue.failed(A, 7.0) == 7.0


def test_while_one_is_busy_others_take_what_comes_due() -> None:
    queue = KeyedQueue()
    taken: list[Key | None] = []
    far = Key("Kind", "far")
    queue.add(far, 3600)
    threads = [threading.Thread(target=lambda: taken.append(queue.take()), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    queue.add(A, 0.02)
    queue.add(B, 0.05)
    for thread in threads:
        thread.join(5)
    assert set(taken) == {A, B}


def test_closing_lets_everybody_go() -> None:
    queue = KeyedQueue()
    taken: list[Key | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    queue.close()
    thread.join(5)
    assert taken == [None]


def test_stalled_handling_is_seen() -> None:
    queue = KeyedQueue()
    queue.add(A)
    queue.take()
    queue.add(B)
    deadline = time.monotonic() + 5
    while queue.longest_running() < 0.02 or queue.overdue() < 0.02:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    queue.done(A)
    assert queue.longest_running() == 0
