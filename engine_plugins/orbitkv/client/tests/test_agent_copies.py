from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orbitkv.client import OrbitKVError, RestoreStatus, agent_copies
from orbitkv.client.agent_copies import ASK_S, SIGN_S, AgentCopies
from orbitkv.client.handles import RestoreHandle
from orbitkv.protocol.messages import Done, Ping, RecordRef, Reply, Request, RestorePlan
from orbitkv.protocol.records import RecordState

from .test_handles import registration_of_two_layers


class FakeConnection:
    path = "/agent.sock"

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.came: list[Callable[[], None]] = []
        self._answers = True

    def go_silent(self) -> None:
        self._answers = False
        self.came.clear()

    def post(self, request: Request, answered: Callable[[Reply], None]) -> None:
        self.asked.append(request)
        if self._answers:
            reply = Done() if isinstance(request, Ping) else RestorePlan(1, RecordRef(7, 1), [])
            self.came.append(lambda: answered(reply))

    def take_late_replies(self) -> None:
        while self.came:
            self.came.pop()()


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(agent_copies, "time", clock)
    return clock


@pytest.fixture
def connection() -> FakeConnection:
    return FakeConnection()


@pytest.fixture
def copies(connection: FakeConnection, clock: Clock) -> AgentCopies:
    records = SimpleNamespace(state=lambda _: RecordState.PENDING)
    session: Any = SimpleNamespace(connection=connection, welcome=SimpleNamespace(messages_version=1), records=records)
    copies = AgentCopies(session, lambda *_: None, lambda _: None)
    copies.restore(RestoreHandle(registration_of_two_layers(), 1, [(0, np.array([1]))], layer_order=False))
    return copies


def test_an_agent_that_owes_something_and_gives_no_sign_is_given_up(
    copies: AgentCopies, connection: FakeConnection, clock: Clock
) -> None:
    connection.go_silent()
    assert copies.watch() == pytest.approx(ASK_S)
    clock.now += ASK_S
    assert copies.watch() == pytest.approx(SIGN_S)
    clock.now += SIGN_S
    with pytest.raises(OrbitKVError, match="gives no sign"):
        copies.watch()


def test_an_agent_that_answered_an_engine_that_stood_still_itself_is_not_given_up(
    copies: AgentCopies, connection: FakeConnection, clock: Clock
) -> None:
    clock.now += ASK_S
    copies.watch()
    clock.now += 100 * SIGN_S
    assert copies.watch() == pytest.approx(ASK_S), "its answer waits to be read"
    clock.now += ASK_S
    copies.watch()
    assert sum(isinstance(each, Ping) for each in connection.asked) == 2


def test_a_restore_that_two_threads_see_done_ends_once(connection: FakeConnection, clock: Clock) -> None:
    """After the loss of a session its transfer thread drains, and another one that is about to wait for its fence."""
    ended: list[RestoreStatus] = []

    def state(ref: RecordRef) -> RecordState:
        if not ended:
            ended.append(RestoreStatus.PENDING)
            both.settle()  # the other thread comes just now
        return RecordState.DONE

    session: Any = SimpleNamespace(
        connection=connection, welcome=SimpleNamespace(messages_version=1), records=SimpleNamespace(state=state)
    )
    both = AgentCopies(session, lambda _, status: ended.append(status), lambda _: None)
    both.restore(RestoreHandle(registration_of_two_layers(), 1, [(0, np.array([1]))], layer_order=False))
    connection.take_late_replies()
    both.settle()
    assert ended == [RestoreStatus.PENDING, RestoreStatus.DONE] and not len(both)
