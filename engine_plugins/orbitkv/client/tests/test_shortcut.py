"""Calls that go past the socket while both sides look, and by the socket when one does not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orbitkv.client import connection as connection_module
from orbitkv.client.connection import Connection
from orbitkv.protocol import framing
from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import Pong
from orbitkv.protocol.shortcut import MOST_BYTES, REPLY, REQUEST, STORES_IN_ORDER, WATCHED
from tools.harness.agent import AgentProcess

from .conftest import Engine, hashes

pytestmark = pytest.mark.skipif(not STORES_IN_ORDER, reason="shortcuts are not used on this machine")


@pytest.fixture
def looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AgentProcess, Engine]]:
    """An agent and a client that look for each other for long, and however often in vain."""
    monkeypatch.setattr(connection_module, "_BUSY_POLL_S", 0.05)
    monkeypatch.setattr(Connection, "_crowded_until", 0.0)
    monkeypatch.setattr(Connection, "_looked", lambda *_, **__: None)  # whoever else wants the processors
    with AgentProcess(tmp_path, pool="64MiB", busy_poll_us=1000) as agent, Engine(agent) as engine:
        engine.save(hashes(1, 2))
        for _ in range(3):
            engine.client.health()
        yield agent, engine
        agent.resume()


def stop_while_it_looks(agent: AgentProcess, engine: Engine) -> None:
    agent.pause()
    shortcut = engine.client._session.connection._shortcut
    assert shortcut is not None
    shortcut.words[WATCHED] = 1


@pytest.fixture
def pushed(looking: tuple[AgentProcess, Engine], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what went by the socket of the client's own connection."""
    connection, sizes = looking[1].client._session.connection, []
    push = connection._push

    def counted(frame: bytes) -> None:
        sizes.append(len(frame))
        push(frame)

    monkeypatch.setattr(connection, "_push", counted)
    return sizes


def test_calls_in_a_row_send_nothing(looking: tuple[AgentProcess, Engine], pushed: list[int]) -> None:
    _, engine = looking
    calls, deadline = 0, time.monotonic() + 100
    while calls < len(pushed) + 20:  # whenever both have a processor
        calls += 1
        assert engine.query(f"r{calls}", hashes(1, 2)).pages == 2
        engine.client.cancel_query(f"r{calls}")
        pushed.pop()
        assert time.monotonic() < deadline, f"{len(pushed)} of {calls} calls went by the socket"


def test_a_reply_that_comes_while_others_have_the_processor_for_too_long_is_taken_all_the_same(
    looking: tuple[AgentProcess, Engine], pushed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, engine = looking
    stop_while_it_looks(agent, engine)
    connection = engine.client._session.connection
    shortcut = connection._shortcut
    assert shortcut is not None
    connection._soon = True

    def reply_late() -> None:
        time.sleep(0.06)
        number = shortcut.words[REQUEST]
        shortcut.put(REPLY, number, framing.encode(Pong("", ok=True, message="late"), number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_yield", reply_late)
        assert engine.client.health() == (True, "late")
    assert not pushed


def test_what_does_not_fit_goes_by_the_socket(looking: tuple[AgentProcess, Engine], pushed: list[int]) -> None:
    _, engine = looking
    many = hashes(*range(1, MOST_BYTES // 32 + 1))
    for number in range(5):
        assert engine.query(f"r{number}", many).pages == 2
    assert sum(size > MOST_BYTES for size in pushed) == 5


def test_an_agent_that_stopped_while_it_looked_is_asked_by_the_socket_and_its_late_answer_returned(
    looking: tuple[AgentProcess, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, engine = looking
    stop_while_it_looks(agent, engine)
    looked: list[float] = []
    with monkeypatch.context() as patched, pytest.raises(OrbitKVError) as caught:
        patched.setattr(Connection, "_look", lambda _, end: looked.append(end))
        engine.client.query_prefetch("r", [hashes(1)], instance=engine.instance, timeout_ms=200)
    assert caught.value.kind is ErrorKind.TIMEOUT
    assert not looked, "what was looked for in vain is slept for"
    agent.resume()
    assert engine.query("r", hashes(1)).pages == 1
    assert agent.status()["leases"]["live"] == 1
    engine.client.cancel_query("r")
    agent.wait_at_rest()


class Interrupted(BaseException):
    """As of Ctrl-C."""


def interrupt(*_: object) -> None:
    raise Interrupted


def test_a_call_that_is_interrupted_while_it_waits_at_the_socket_leaves_nothing_leased(
    looking: tuple[AgentProcess, Engine], pushed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, engine = looking
    agent.pause()
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Connection, "_receive_waiting", interrupt)
        patched.setattr(Connection, "_by_shortcut", lambda *_: None)
        engine.client.query_prefetch("r", [hashes(1)], instance=engine.instance)
    agent.resume()
    pushed.clear()
    assert engine.client.health()[0]
    assert len(pushed) == 2, "the next call goes by the socket, meets the late answer, and its lease is released"
    agent.wait(lambda status: not status["leases"]["live"], "no lease is left", timeout=15)
    engine.client.cancel_query("r")
    agent.wait_at_rest()


def test_an_interrupted_call_leaves_nothing_leased(
    looking: tuple[AgentProcess, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, engine = looking
    interrupted, deadline = 0, time.monotonic() + 100
    while interrupted < 5:  # whenever the agent looks
        assert time.monotonic() < deadline
        with monkeypatch.context() as patched:
            patched.setattr(os, "sched_yield", interrupt)
            try:
                engine.client.query_prefetch(f"r{interrupted}", [hashes(1)], instance=engine.instance)
            except Interrupted:
                interrupted += 1
            else:
                engine.client.cancel_query(f"r{interrupted}")
        assert engine.client.health()[0]  # with the late answer before its own
    agent.wait(lambda status: not status["leases"]["live"], "no lease is left", timeout=15)
    for number in range(interrupted):
        engine.client.cancel_query(f"r{number}")
    agent.wait_at_rest()


def test_an_agent_that_is_gone_is_said_to_be(looking: tuple[AgentProcess, Engine]) -> None:
    agent, engine = looking
    stop_while_it_looks(agent, engine)
    agent.kill9()
    with pytest.raises(OrbitKVError) as caught:
        engine.client.query_prefetch("r", [hashes(1)], instance=engine.instance, timeout_ms=1000)
    assert caught.value.kind in (ErrorKind.UNAVAILABLE, ErrorKind.TIMEOUT)
