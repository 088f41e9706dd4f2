"""Requests that come by the shortcut: once each, in order, and answered where the client waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orbitkv.protocol import framing
from orbitkv.protocol.messages import (
    Arenas,
    CancelQuery,
    GetStatus,
    GroupHashes,
    Hello,
    MapArenas,
    Nothing,
    Ping,
    Pong,
    Query,
    Ready,
    Refusal,
    Reply,
    Status,
    TakeEvents,
)
from orbitkv.protocol.shortcut import BEFORE, REPLY, REQUEST, WATCHED
from orbitkv.protocol.versions import VersionRange
from orbitkv_agent.tests.harness import HASH_BYTES, INSTANCE, Client, Engine, World, hashes


@pytest.fixture
def engine(engine: Engine) -> Engine:
    engine.save(hashes(1, 2))
    return engine


def query(*names: int, operation: int = 1, revision: int = 1) -> Query:
    return Query(INSTANCE, operation, revision, [GroupHashes(0, HASH_BYTES, hashes(*names))])


def leases(world: World) -> int:
    return world.agent.queries.leases.live


def came_by_socket(client: Client) -> dict[int, Reply]:
    """Replies since the last time, by number."""
    client.world.pump()
    client.read()
    found, client.replies = dict(client.replies), {}
    return found


def test_a_request_is_served_once_and_answered_where_it_came(world: World, engine: Engine) -> None:
    client = engine.control
    number = client.put(query(1, 2))
    assert client.found(number) is None
    assert client.session.look()
    assert isinstance(client.found(number), Ready)
    assert not client.session.look()
    assert leases(world) == 1
    assert not came_by_socket(client)


def test_a_request_waits_for_what_its_client_had_sent_before(world: World, engine: Engine) -> None:
    client = engine.control
    client.call(query(1, 2), Ready)
    cancel = framing.encode(CancelQuery([1]), 0)
    client.socket.sendall(cancel)
    client.sent += len(cancel)
    number = client.put(query(1, 2))
    assert not client.session.look(), "the cancel is still on its way"
    world.pump()
    assert client.session.look()
    assert isinstance(client.found(number), Ready) and leases(world) == 1


def test_what_was_not_seen_in_time_is_served_when_it_comes_by_the_socket_and_not_again(
    world: World, engine: Engine
) -> None:
    client = engine.control
    number = client.put(query(1, 2))
    client.socket.sendall(framing.encode(query(1, 2), number))
    assert isinstance(came_by_socket(client)[number], Ready)
    client.call(CancelQuery([1]), object)
    assert not client.session.look()
    assert leases(world) == 0


def test_an_answer_that_its_client_did_not_wait_for_is_sent_once_by_the_socket(world: World, engine: Engine) -> None:
    client = engine.control
    number = client.put(query(1, 2))
    assert client.session.look()
    answer = client.found(number)
    for expected in ({number: answer}, {}):
        client.socket.sendall(framing.encode(query(1, 2), number))
        assert came_by_socket(client) == expected
    assert leases(world) == 1


def test_an_answer_that_comes_after_its_client_gave_up_goes_to_the_socket(world: World, engine: Engine) -> None:
    """A message that is answered later, as some registrations are."""
    client = engine.control
    later: list[int] = []
    handlers = world.agent.server._handle._handlers  # type: ignore[attr-defined]
    handlers[Ping] = lambda session, sequence, message: later.append(sequence)
    number = client.put(Ping())
    assert client.session.look()
    client.socket.sendall(framing.encode(Ping(), number))
    assert not came_by_socket(client) and later == [number], "it is served once"
    client.session.reply(number, Pong("boot", True, "ok"))
    assert client.found(number) is None
    assert isinstance(came_by_socket(client)[number], Pong)


def test_requests_that_take_several_turns_are_answered_there_and_keep_the_next_one_waiting(
    world: World, engine: Engine
) -> None:
    client = engine.control

    def in_turns(session: object, sequence: int, message: Ping) -> Iterator[None]:
        yield
        yield
        return Pong("boot", True, "ok")  # type: ignore[return-value]

    world.agent.server._handle._handlers[Ping] = in_turns  # type: ignore[attr-defined]
    number = client.put(Ping())
    assert client.session.look()
    second = client.put(query(1, 2))
    assert not client.session.look()
    world.pump()
    # The client gave the first one up when it put the second: its reply goes nowhere but there.
    assert client.shortcut is not None and client.shortcut.words[REPLY] == number
    assert client.session.look()
    assert isinstance(client.found(second), Ready)


def test_what_does_not_fit_is_answered_by_the_socket_and_said_to_be(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.sessions.shortcut.MOST_BYTES", 64)
    client = world.client()
    number = client.put(GetStatus())
    assert client.session.look()
    assert client.shortcut is not None and client.shortcut.words[REPLY] == number
    assert client.shortcut.body(REPLY) == b""
    assert isinstance(came_by_socket(client)[number], Status)


def test_descriptors_come_by_the_socket(world: World, engine: Engine) -> None:
    client = engine.worker
    before = len(client.descriptors)
    number = client.put(MapArenas([1]))
    assert client.session.look()
    assert client.found(number) is None
    assert isinstance(came_by_socket(client)[number], Arenas)
    assert len(client.descriptors) > before


def test_a_refusal_comes_there_too(engine: Engine) -> None:
    number = engine.control.put(TakeEvents(INSTANCE))
    assert engine.control.session.look()
    assert isinstance(engine.control.found(number), Refusal)


@pytest.mark.parametrize(
    ("word", "value"),
    [(REQUEST, 0), (REQUEST, 1 << 32), (REQUEST, (1 << 64) - 1), (BEFORE, (1 << 64) - 1), (WATCHED, 7), (REPLY, 99)],
)
def test_nonsense_in_the_words_harms_only_its_client(world: World, engine: Engine, word: int, value: int) -> None:
    stranger = world.client()
    assert stranger.shortcut is not None
    number = stranger.put(Ping())
    stranger.shortcut.words[word] = value
    stranger.session.look()
    stranger.session.look()
    stranger.socket.sendall(framing.encode(Ping(), number))
    assert isinstance(came_by_socket(stranger).get(number) or stranger.found(number), Pong)
    assert isinstance(engine.query(hashes(1, 2)), Ready)


def test_a_frame_that_cannot_be_read_is_refused(world: World) -> None:
    client = world.client()
    assert client.shortcut is not None
    for number, frame in ((5, b"\xff" * 64), (6, framing.HEADER.pack(3, 6) + b"\xc1\xc1\xc1")):
        client.shortcut.put(REQUEST, number, frame)
        assert client.session.look()
        assert isinstance(client.found(number), Refusal)
    assert client.call(Ping(), Pong).ok


def test_who_changes_a_request_while_it_is_served_changes_nothing(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = engine.control
    assert client.shortcut is not None
    memory, served = client.shortcut, world.agent.server._handle

    def scribbled_on(session: object, sequence: int, body: bytes) -> None:
        memory.put(REQUEST, sequence, b"\xff" * 4096)
        served(session, sequence, body)  # type: ignore[arg-type]

    monkeypatch.setattr(world.agent.server, "_handle", scribbled_on)
    number = client.put(query(1, 2))
    assert client.session.look()
    answer = client.found(number)
    assert isinstance(answer, Ready) and answer.pages[0].count == 2


def test_an_ended_session_is_not_looked_at_and_says_so(world: World) -> None:
    client = world.client()
    assert client.shortcut is not None
    session = client.session
    world.agent.loop._in_a_row = True
    world.agent.loop.look_also(session)
    assert client.shortcut.words[WATCHED]
    session.end_stream()
    assert not client.shortcut.words[WATCHED]
    client.put(Ping())
    assert not world.agent.loop._lookouts


def test_a_client_of_the_release_before_is_given_none(world: World) -> None:
    client = world.client(hello=False)
    assert client.hello(Hello(records=VersionRange(1, 1))).records_version == 1
    assert client.shortcut is None and len(client.descriptors) == 3
    assert client.call(Ping(), Pong).ok
    assert isinstance(client.ask(Query(INSTANCE, 1, 1, [GroupHashes(0, HASH_BYTES, hashes(1))])), Nothing)
