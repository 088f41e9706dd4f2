from __future__ import annotations

import array
import dataclasses
import fcntl
import gc
import json
import mmap
import os
import socket
import stat
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union, get_args

import msgspec
import pytest

from orbitkv.protocol import framing
from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    Arenas,
    AttachInstance,
    ConfigureNamespace,
    Done,
    EngineReport,
    GetStatus,
    Goodbye,
    Hello,
    JoinSession,
    MapArenas,
    Nothing,
    Ping,
    Pong,
    Refusal,
    Request,
    RetiredArenas,
    Status,
    SubmitSaves,
    SyncArenas,
)
from orbitkv.protocol.records import SLOTS, WORD_BYTES, Header
from orbitkv.protocol.versions import MESSAGES, PAGE_IMAGE, RECORDS, VersionRange
from orbitkv_agent.agent import Agent
from orbitkv_agent.sessions import dispatch, server
from orbitkv_agent.sessions.errors import Refused
from orbitkv_agent.sessions.peers import peer_of
from orbitkv_agent.sessions.server import SocketTakenError
from orbitkv_agent.sessions.session import MAX_WAITING_BYTES, Session, SessionState
from orbitkv_agent.tests.harness import INSTANCE, Client, World, hashes, ints, save_request
from orbitkv_agent.transfers.saves import SAVE_BYTES

# ------------------------------------------------------------------------------------------ the socket


def test_the_socket_is_for_its_user_only(world: World) -> None:
    assert stat.S_IMODE(os.lstat(world.path).st_mode) == 0o600


def test_a_second_agent_is_refused_and_the_first_one_serves_on(world: World) -> None:
    with pytest.raises(SocketTakenError, match=rf"another agent \(pid {os.getpid()}\) serves .*agent\.sock"):
        Agent(world.config)
    assert world.client().call(Ping(), Pong).ok


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "agent.sock"))
    with World(tmp_path) as world:
        assert world.client().call(Ping(), Pong).ok


def test_a_squatted_socket_is_refused_and_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(str(tmp_path / "agent.sock"))
        squatter.listen()
        with pytest.raises(SocketTakenError, match="no OrbitKV agent listens on"):
            World(tmp_path)
    assert (tmp_path / "agent.sock").exists()


def test_a_file_in_the_sockets_place_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "agent.sock").write_text("mine")
    with pytest.raises(SocketTakenError, match="is not a socket"):
        World(tmp_path)
    assert (tmp_path / "agent.sock").read_text() == "mine"


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "agent.sock.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(SocketTakenError, match="cannot open the lock file"):
        World(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SocketTakenError, match=r"nowhere/agent\.sock"):
        World(tmp_path, socket_path=str(tmp_path / "nowhere" / "agent.sock"))


def test_the_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        path = world.path
    assert not os.path.exists(path)


def test_a_socket_that_somebody_else_put_there_meanwhile_is_not_removed(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        os.unlink(world.path)
        Path(world.path).write_text("somebody else's")
        path = world.path
    assert os.path.exists(path)


# --------------------------------------------------------------------------------------- the handshake


def test_the_welcome_says_what_a_client_needs(world: World) -> None:
    welcome = world.client().welcome
    assert welcome is not None
    assert (welcome.boot_id, welcome.mode, welcome.cache_namespace) == (world.agent.boot_id, "host", "")
    assert (welcome.max_session_queries, welcome.reply_ttl_ms, welcome.heartbeat_ms) == (128, 60_000, 0)
    assert welcome.query_budget_bytes == 3 << 20
    other = world.client().welcome
    assert other is not None
    assert other.epoch != welcome.epoch


def test_every_boot_has_its_own_id(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        first = world.agent.boot_id
    with World(tmp_path) as world:
        assert world.agent.boot_id != first


def join_of(client: Client, boot: str = "") -> JoinSession:
    """What another session says that belongs with this one."""
    assert client.welcome is not None
    return JoinSession(boot or client.welcome.boot_id, client.welcome.epoch)


def test_a_session_joins_another_one_of_its_client(world: World) -> None:
    client = world.client()
    world.client().call(join_of(client), Done)


@pytest.mark.guard("boot-ids")
def test_a_session_of_an_earlier_boot_of_the_agent_is_joined_by_none(world: World) -> None:
    refusal = world.client().refused(join_of(world.client(), "an earlier boot"))
    assert refusal.kind == ErrorKind.STALE and refusal.message.startswith("agent-changed: ")


@pytest.mark.guard("own-session")
@pytest.mark.parametrize("whose", ["of another cache namespace", "of another process"])
def test_a_session_of_others_is_joined_by_none_and_the_answer_does_not_show_that_it_is_there(
    tmp_path: Path, whose: str
) -> None:
    with World(tmp_path, cache_namespaces={"a": {}}) as world:
        theirs = world.client("a" if whose == "of another cache namespace" else "")
        if whose == "of another process":
            theirs.session.peer = dataclasses.replace(theirs.session.peer, process=("pid", 1))
        join = join_of(theirs)
        while_there = world.client().refused(join)
        theirs.goodbye()
        assert while_there == world.client().refused(join)


def test_a_session_that_has_ended_or_never_was_is_joined_by_none(world: World) -> None:
    ended, stranger = world.client(), world.client(hello=False)
    join = join_of(ended)
    ended.goodbye()
    for epoch in (join.epoch, join.epoch + 1, join.epoch + 100):  # the second has not said hello
        refusal = world.client().refused(JoinSession(join.boot_id, epoch))
        assert refusal.kind == ErrorKind.STALE and refusal.message.startswith("stale-session: ")
    assert not stranger.closed()


def test_options_of_the_namespace_come_with_the_welcome(tmp_path: Path) -> None:
    with World(tmp_path, cache_namespaces={"a": {"options": {"max_wait_ms": 100}}}) as world:
        welcome = world.client("a").welcome
        assert welcome is not None
        assert welcome.namespace_options == {"max_wait_ms": 100}


@pytest.mark.guard("versions")
@pytest.mark.parametrize("field", ["messages", "records", "page_image"])
def test_versions_that_do_not_meet_are_refused_with_both_ranges(world: World, field: str) -> None:
    client = world.client(hello=False)
    refusal = client.refused(Hello(**{field: VersionRange(7, 9)}))  # type: ignore[arg-type]
    assert refusal.kind == ErrorKind.INCOMPATIBLE
    assert field in refusal.message
    assert "[7, 9]" in refusal.message
    assert str({"messages": MESSAGES, "records": RECORDS, "page_image": PAGE_IMAGE}[field]) in refusal.message
    assert client.closed()
    assert world.agent.counters.session_rejections["version-mismatch"] == 1


def test_a_message_of_a_newer_release_is_refused_and_the_session_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As this agent did before it knew what engines report."""
    before = tuple(each for each in get_args(Request) if each is not EngineReport)
    monkeypatch.setattr(dispatch, "request_decoder", msgspec.msgpack.Decoder(Union[before]))  # noqa: UP007 - a tuple
    client = world.client()
    assert client.refused(EngineReport("vllm 0.32.0")).kind == ErrorKind.INVALID
    assert client.call(Ping(), Pong).ok


def test_a_newer_client_that_speaks_our_version_too_is_served(world: World) -> None:
    newer = VersionRange(MESSAGES.highest, MESSAGES.highest + 1)
    assert world.client(hello=False).hello(Hello(messages=newer)).messages_version == MESSAGES.highest


@pytest.mark.parametrize(
    ("hello", "kind", "words"),
    [
        (Hello(cache_namespace="nobody"), ErrorKind.DENIED, "cache namespace 'nobody' is not configured"),
        (Hello(token=b"secret"), ErrorKind.UNSUPPORTED, "token"),
        (AttachInstance(INSTANCE), ErrorKind.INVALID, "AttachInstance came before Hello"),
    ],
    ids=["namespace", "token", "no hello"],
)
def test_a_bad_introduction_is_refused_and_closed(world: World, hello: Any, kind: ErrorKind, words: str) -> None:
    client = world.client(hello=False)
    refusal = client.refused(hello)
    assert refusal.kind == kind
    assert words in refusal.message
    assert "secret" not in refusal.message
    assert client.closed()


def test_a_second_hello_is_refused(world: World) -> None:
    assert world.client().refused(Hello()).kind == ErrorKind.INVALID


def test_who_does_not_introduce_itself_in_time_is_closed(world: World) -> None:
    silent, talking = world.client(hello=False), world.client()
    world.advance(4.9)
    assert not silent.closed()
    world.advance(0.2)
    assert silent.closed()
    assert world.agent.counters.session_rejections == {"hello-timeout": 1}
    assert talking.call(Ping(), Pong).ok


def test_a_user_that_is_not_allowed_is_denied(tmp_path: Path) -> None:
    with World(tmp_path, allowed_uids=[os.getuid() + 1]) as world:
        assert _refusal(world).kind == ErrorKind.DENIED
        assert world.agent.counters.session_rejections == {"user-denied": 1}


def _refusal(world: World) -> Refusal:
    """What a connection that is turned away is told."""
    client = world.client(hello=False)
    assert client.closed()
    refusal = client.replies[0]
    assert isinstance(refusal, Refusal)
    return refusal


def test_connections_are_limited_before_they_introduce_themselves(tmp_path: Path) -> None:
    with World(tmp_path, max_connections=2) as world:
        first = world.client()
        world.client(hello=False)
        refusal = _refusal(world)
        assert (refusal.kind, "max_connections" in refusal.message) == (ErrorKind.BUSY, True)
        first.goodbye()
        assert world.client().call(Ping(), Pong).ok


def test_connections_of_one_user_are_limited(tmp_path: Path) -> None:
    with World(tmp_path, max_connections_per_peer=1) as world:
        world.client()
        refusal = _refusal(world)
        assert (refusal.kind, "max_connections_per_peer" in refusal.message) == (ErrorKind.BUSY, True)
        assert world.agent.counters.session_rejections == {"too-many-connections": 1}


# ------------------------------------------------------------------------------------------- bad input


def _frame(body: bytes, sequence: int = 1) -> bytes:
    return framing.HEADER.pack(len(body), sequence) + body


def test_a_message_that_cannot_be_read_is_refused_and_the_session_goes_on(world: World) -> None:
    client = world.client()
    for body in (b"", b"\x00", b"\x93\x14\x01", b"\x92\xcc\xff\x01", b"\xc1" * 100):
        client.sequence += 1
        client.socket.sendall(_frame(body, client.sequence))
        refusal = client.reply(client.sequence)
        assert isinstance(refusal, Refusal)
        assert refusal.kind == ErrorKind.INVALID
    assert client.call(Ping(), Pong).ok


def test_a_frame_that_is_too_large_closes_the_connection(world: World) -> None:
    client, other = world.client(), world.client()
    client.socket.sendall(framing.HEADER.pack(framing.MAX_FRAME_BYTES + 1, 1))
    assert client.closed()
    assert f"{framing.MAX_FRAME_BYTES + 1} bytes" in str(client.replies[0])
    assert other.call(Ping(), Pong).ok


def test_before_the_handshake_only_small_frames_are_taken(world: World) -> None:
    client = world.client(hello=False)
    client.socket.sendall(framing.HEADER.pack(framing.MAX_HELLO_BYTES + 1, 1))
    assert client.closed()
    assert world.agent.counters.session_rejections == {"bad-frame": 1}


def test_a_frame_may_come_in_pieces_and_several_in_one_piece(world: World) -> None:
    client = world.client()
    frames = bytes(framing.encode(Ping(), 101)) + bytes(framing.encode(Ping(), 102))
    for start in range(len(frames)):
        client.socket.sendall(frames[start : start + 1])
        world.pump()
    assert isinstance(client.reply(101), Pong)
    assert isinstance(client.reply(102), Pong)


def test_a_truncated_frame_ends_with_its_connection(world: World) -> None:
    client = world.client()
    client.socket.sendall(bytes(framing.encode(Ping(), 1))[:-1])
    client.drop()
    assert world.client().call(Ping(), Pong).ok


def test_who_stops_in_the_middle_of_a_frame_is_told_so(world: World) -> None:
    client = world.client()
    client.socket.sendall(bytes(framing.encode(Ping(), 1))[:-1])
    client.socket.shutdown(socket.SHUT_WR)
    world.until(client.closed)
    refusal = client.replies[0]
    assert isinstance(refusal, Refusal) and refusal.message.startswith("bad-frame: "), refusal
    assert world.agent.counters.session_rejections["bad-frame"] == 1


def test_who_stops_reading_is_closed_and_others_are_served(world: World, caplog: pytest.LogCaptureFixture) -> None:
    deaf, other = world.client(), world.client()
    request = bytes(framing.encode(GetStatus(), 7)) * 64
    session = deaf.session
    sent = 0
    while session.state is SessionState.OPEN:
        try:
            sent += deaf.socket.send(request)
        except BlockingIOError:
            pass
        except BrokenPipeError:
            break
        world.pump(1)
        assert sent < 100 * MAX_WAITING_BYTES
        assert other.call(Ping(), Pong).ok
    assert world.agent.counters.session_rejections == {"not-reading": 1}
    assert "left" in caplog.text
    assert other.call(Ping(), Pong).ok


def test_a_slow_reader_gets_everything(world: World) -> None:
    client = world.client()
    numbers = [client.post(GetStatus()) for _ in range(200)]
    world.pump(20)
    for _ in range(200):
        client.read()
        world.pump()
    assert all(isinstance(client.replies[number], Status) for number in numbers)


def test_a_session_that_ends_in_the_middle_of_a_reply_is_not_told_why_in_there(world: World) -> None:
    client = world.client()
    for _ in range(200):
        client.post(GetStatus())
    world.pump(20)
    session = client.session
    received = client.socket.recv(1 << 16)  # there is room for what comes next
    assert session._outbox
    world.agent.server.expel(session, Refused(ErrorKind.DENIED, "you were expelled"))
    while piece := client.socket.recv(1 << 16):
        received += piece
    assert b"expelled" not in received


def test_descriptors_that_a_client_sends_are_dropped(world: World) -> None:
    client = world.client()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 0, 0]))]
        client.socket.sendmsg([framing.encode(Ping(), 0)], rights)
        world.pump()
    assert client.call(Ping(), Pong).ok
    assert len(os.listdir("/proc/self/fd")) == before


# --------------------------------------------------------------------------------------- shared memory


def test_completion_records_cannot_be_written_by_a_client(world: World) -> None:
    client = world.client()
    fd = client.descriptors[0]
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SLOTS * WORD_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_an_arena_cannot_be_shrunk_by_its_holder(world: World) -> None:
    engine = world.engine()
    plan = engine.save(hashes(1))
    before = len(engine.worker.descriptors)
    reply = engine.worker.call(MapArenas(ints(plan.pages[0].arenas)), Arenas)
    fd = engine.worker.descriptors[before]
    for size in (0, reply.arenas[0][1] + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.guard("arena-namespace")
def test_an_arena_is_mapped_in_its_own_cache_namespace_only(tmp_path: Path) -> None:
    with World(tmp_path, cache_namespaces={"a": {}, "b": {}}) as world:
        arena = ints(world.engine(namespace="a").save(hashes(1)).pages[0].arenas)
        assert world.client("b").call(MapArenas(arena), Arenas) == Arenas([])
        assert len(world.client("a").call(MapArenas(arena), Arenas).arenas) == 1


def test_unknown_arenas_are_left_out_and_too_many_are_refused(world: World) -> None:
    client = world.client()
    assert client.call(MapArenas([4711]), Arenas) == Arenas([])
    assert client.refused(MapArenas(list(range(251)))).kind == ErrorKind.INVALID


def test_a_session_is_told_which_arenas_to_unmap(tmp_path: Path) -> None:
    with World(tmp_path, pool="1MiB", arena="1MiB", cache_namespaces={"a": {}, "b": {}}) as world:
        first = world.engine(namespace="a")
        arena = ints(first.save(hashes(1)).pages[0].arenas)
        first.worker.call(MapArenas(arena), Arenas)
        assert first.worker.call(SyncArenas([]), RetiredArenas) == RetiredArenas([])
        second = world.engine(namespace="b")
        for number in range(200):
            second.save(hashes(1000 + number))
            world.advance(0.1)
            if second.restore(hashes(1000 + number)):
                break
        records = first.worker.records
        assert records is not None
        assert records.counter(Header.ARENAS) == 1
        assert first.worker.call(SyncArenas([]), RetiredArenas) == RetiredArenas(arena)
        assert first.worker.call(SyncArenas(arena), RetiredArenas) == RetiredArenas([])
        assert first.worker.session.arenas == set()


# ------------------------------------------------------------------------------------------- lifetimes


def test_a_session_that_holds_nothing_is_over_with_its_stream(world: World) -> None:
    world.client().drop()
    assert not world.agent.server.sessions


def test_a_session_lingers_while_its_process_may_touch_arenas(world: World) -> None:
    engine = world.engine()
    plan = engine.worker.submit(engine.registration, hashes(1))
    engine.worker.call(MapArenas(ints(plan.pages[0].arenas)), Arenas)
    session = engine.worker.session
    engine.worker.drop()
    assert session.state is SessionState.LINGERING
    assert not world.agent.membership.registered_bytes, "its registration is over at once"


def test_goodbye_closes_in_order(world: World) -> None:
    client = world.client()
    session = client.session
    client.socket.sendall(framing.encode(Goodbye(), 0))
    assert client.closed()
    assert session.state is SessionState.CLOSED


def test_a_client_whose_exit_cannot_be_observed_must_be_heard(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbitkv_agent.sessions.peers._pidfd", lambda connection, pid: None)
    client = world.client()
    assert client.welcome is not None
    assert client.welcome.heartbeat_ms == 5000
    for _ in range(10):
        world.advance(5)
        assert client.call(Ping(), Pong).ok
    world.advance(16)
    assert client.closed()


def test_sessions_leave_no_descriptors_behind(world: World) -> None:
    world.client().goodbye()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        world.client().drop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_sessions_leave_no_garbage_that_only_a_full_collection_would_free(world: World) -> None:
    def once() -> None:
        engine = world.engine()
        engine.save(hashes(1, 2))
        engine.restore(hashes(1, 2))
        engine.ready(hashes(1))
        engine.query(hashes(9))
        engine.close()
        world.clients.clear()
        world.advance(100)

    once()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            once()
        assert gc.collect() < 20, "sessions, leases or registrations form cycles"
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------- administration


def test_status_is_a_snapshot_in_json(world: World) -> None:
    world.engine().save(hashes(1, 2))
    status = json.loads(world.client().call(GetStatus(), Status).body)
    assert status["agent"]["boot_id"] == world.agent.boot_id
    assert status["cache"]["block_insertions"] == 2
    assert status["sessions"]["by_namespace"] == {"": 3}
    assert status["instances"][0]["engine"] == "engine/1"
    assert status["instances"][0]["serving"] is True


def test_a_namespace_can_be_made_and_limited_live(world: World) -> None:
    admin = world.client()
    admin.call(ConfigureNamespace("team", quota_bytes=8192, insert_class="retained"), Done)
    assert world.engine(namespace="team").save(hashes(1, 2, 3)).dropped == {"quota": 1}
    row = next(row for row in world.agent.snapshot()["namespaces"] if row["name"] == "team")
    assert (row["quota_bytes"], row["insert_class"], row["used_bytes"]) == (8192, "retained", 8192)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"protected_percent": 10}, ErrorKind.UNSUPPORTED, "protected_percent is 10"),
        ({"ttl_seconds": 5}, ErrorKind.UNSUPPORTED, "ttl_seconds is 5"),
        ({"uid": "x"}, ErrorKind.UNSUPPORTED, "uid is 'x'"),
        ({"insert_class": "gold"}, ErrorKind.INVALID, "insert_class"),
        ({"guaranteed_bytes": 1 << 40}, ErrorKind.INVALID, "'team': cache_namespaces: guaranteed adds up to 1 TiB"),
        ({"quota_bytes": -1}, ErrorKind.INVALID, "quota"),
        ({"reset_generation": 1}, ErrorKind.INVALID, "it only rises"),
    ],
)
def test_wrong_settings_of_a_namespace_are_refused(
    world: World, change: dict[str, Any], kind: ErrorKind, words: str
) -> None:
    admin = world.client()
    admin.call(ConfigureNamespace("team", reset_generation=2), Done)
    refusal = admin.refused(ConfigureNamespace("team", **({"reset_generation": 2} | change)))
    assert refusal.kind == kind
    assert words in refusal.message


def test_another_user_may_not_administrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = os.getuid() + 1
    monkeypatch.setattr(server, "peer_of", lambda connection: dataclasses.replace(peer_of(connection), uid=stranger))
    with World(tmp_path, allowed_uids=[stranger]) as world:
        client = world.client()
        assert client.call(Ping(), Pong).ok
        assert client.refused(GetStatus()).kind == ErrorKind.DENIED
        assert client.refused(ConfigureNamespace("team")).kind == ErrorKind.DENIED


# ----------------------------------------------------------------------------------------------- drain


def test_a_draining_agent_admits_nothing_and_finishes_what_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine = world.engine()
    engine.save(hashes(1, 2))
    plan = engine.worker.submit(engine.registration, hashes(3))
    ready = engine.ready(hashes(1))
    world.agent.request_stop()
    pong = engine.control.call(Ping(), Pong)
    assert (pong.ok, pong.message) == (False, "the agent is shutting down")
    assert engine.query(hashes(1)) == Nothing("draining")
    save = SubmitSaves([save_request(engine.registration, hashes(4))])
    assert engine.worker.refused(save).kind == ErrorKind.UNAVAILABLE
    stranger = Client(world)
    assert stranger.refused(Hello()).kind == ErrorKind.UNAVAILABLE
    # What was promised may still be fetched while something runs anyway.
    restore = engine.worker.start(engine.registration, ready.leases[0], [0])
    engine.worker.commit(plan)
    engine.worker.done(restore)
    assert world.agent.serve(), "nothing is left over"
    engine.control.read()
    assert engine.control.ended
    assert not os.path.exists(world.path)
    for client in (*world.clients, stranger):
        client.drop_after_end()


def test_a_drain_ends_at_its_deadline_and_says_that_copies_were_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, drain_timeout_ms=30_000)
    engine = world.engine()
    engine.worker.submit(engine.registration, hashes(3))
    world.agent.request_stop()
    world.pump()
    world.clock.now += 31
    assert world.agent.serve() is False
    assert "copies in flight" in caplog.text
    for client in world.clients:
        client.drop_after_end()


def test_waiting_queries_are_answered_when_a_drain_begins(tmp_path: Path) -> None:
    with World(tmp_path, max_queries=1) as world:
        engine = world.engine()
        engine.save(hashes(1))
        held = engine.ready(hashes(1))
        engine.query(hashes(1), operation=100)
        plan = engine.start(held)  # frees the place, keeps the agent from ending
        assert isinstance(engine.control.poll(100), object)
        engine.query(hashes(1), operation=101)
        world.agent.request_stop()
        assert engine.control.poll(101) == Nothing("draining")
        engine.control.cancel(100)
        engine.worker.done(plan)


def test_a_flood_of_requests_leaves_a_turn_to_the_others(world: World) -> None:
    """Hundreds of them come with one read; they are all answered, in order, and nobody waits for all of that."""
    flood, other = world.client(), world.client()
    numbers = range(1000, 1500)
    flood.socket.sendall(b"".join(framing.encode(Ping(), number) for number in numbers))
    number = other.post(Ping())
    for _ in range(2):
        world.agent.loop.run_once(0)
    other.read()
    assert number in other.replies
    assert flood.session.backlog > len(numbers) // 2

    def answered() -> bool:
        flood.read()
        return numbers[-1] in flood.replies

    world.until(answered)
    assert [each for each in flood.replies if each in numbers] == list(numbers)


def test_who_makes_the_agent_keep_most_goes_when_it_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HELD_BYTES", 120_000)
    frame = framing.encode(EngineReport("vllm", "too-old", "x" * 50_000), 77)
    with World(tmp_path, cache_namespaces={"a": {}, "b": {}}, pool="1MiB") as world:
        tenant, *greedy = world.client("b"), world.client("a"), world.client("a"), world.client("a")
        tenant.socket.sendall(frame[:45_000])  # more than any one of the others
        for each, size in zip(greedy, (30_000, 40_000, 10_000), strict=True):
            each.socket.sendall(frame[:size])
            world.pump()
        assert [each.session.is_open for each in (tenant, greedy[0], greedy[2])] == [True] * 3
        greedy[1].read()
        assert greedy[1].ended
        refusal = greedy[1].replies[0]
        assert isinstance(refusal, Refusal) and refusal.message.startswith("too-much-held: ")
        assert world.agent.counters.session_rejections["too-much-held"] == 1
        tenant.socket.sendall(frame[45_000:])
        world.pump()
        tenant.read()
        assert isinstance(tenant.replies[77], Done)
        assert world.agent.server._held.total == 40_000


def test_replies_that_nobody_reads_and_long_requests_count_as_held(world: World) -> None:
    engine = world.engine()
    held = world.agent.server._held
    number = 0
    while held.total < 100_000:
        number = engine.control.post(GetStatus())
        world.pump()
    world.until(lambda: engine.control.reply(number))
    assert held.total < 10_000
    before = held.total
    batch = SubmitSaves([save_request(engine.registration, hashes(number)) for number in range(40)])
    number = engine.worker.post(batch)
    world.agent.loop.run_once(0)
    assert held.total > before + 40 * 32
    world.until(lambda: engine.worker.reply(number))
    assert held.total == before + 40 * SAVE_BYTES
    assert before > 0, "the registration"
    engine.worker.drop()
    world.pump()
    assert held.total == 0


def test_nobody_waits_for_a_client_by_what_was_passed_to_it(world: World) -> None:
    client = world.client()
    for fd in client.descriptors:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    with suppress(OSError):
        os.eventfd_write(client.descriptors[1], (1 << 64) - 2)  # as full as an eventfd can be
    session = client.session

    def tell() -> None:
        for _ in range(2000):
            session.notify(Header.INSTANCE)

    telling = threading.Thread(target=tell, daemon=True)  # it would hang for ever
    telling.start()
    telling.join(10)
    assert not telling.is_alive()
    assert client.records is not None
    assert client.records.counter(Header.INSTANCE) == 2000
    assert os.read(client.descriptors[1], 8) == (1).to_bytes(8, "little")


def test_a_few_large_requests_leave_a_turn_to_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a whole batch are saved by requests that take a good part of a millisecond each."""
    saves, other = world.client(), world.client()
    served: list[int] = []
    events = saves.session._events

    def slowly(session: Any, sequence: int, body: Any) -> None:
        events.frame(session, sequence, body)
        if session is saves.session:
            served.append(sequence)
            world.clock.now += 0.0003

    monkeypatch.setattr(
        saves.session,
        "_events",
        SimpleNamespace(frame=slowly, holds=events.holds, closed=events.closed, stream_ended=events.stream_ended),
    )
    saves.socket.sendall(b"".join(framing.encode(Ping(), number) for number in range(1, 11)))
    world.agent.loop.run_once(0)
    assert served == [1, 2]
    number = other.post(Ping())
    world.agent.loop.run_once(0)
    other.read()
    assert number in other.replies
    assert len(served) < 10
    world.until(lambda: len(served) == 10)
    assert served == list(range(1, 11))


@pytest.mark.guard("tenants-turns")
def test_a_tenant_with_many_sessions_is_served_no_more_than_one_with_a_single_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its sessions alike. Each request takes 0.3 ms: a session's turn is two of them, a tenant's round four."""
    with World(tmp_path, cache_namespaces={"a/one": {}, "a/two": {}, "b/one": {}}) as world:
        crowd = [world.client(f"a/{name}") for name in ("one", "two") for _ in range(10)]
        other = world.client("b/one")
        served: Counter[Session] = Counter()
        frame = world.agent.server.frame

        def slowly(session: Session, sequence: int, body: Any) -> None:
            frame(session, sequence, body)
            served[session] += 1
            world.clock.now += 0.0003

        monkeypatch.setattr(world.agent.server, "frame", slowly)
        for each in crowd:
            each.socket.sendall(b"".join(framing.encode(Ping(), number) for number in range(1000, 1020)))
        for _ in range(40):
            before = served.total()
            number = other.post(Ping())
            world.agent.loop.run_once(0)
            other.read()
            assert number in other.replies
            assert served.total() - before <= 1 + 4 + 2, "a round of direct turns, and one that had waited"
        counts = [served[each.session] for each in crowd]
        assert max(counts) - min(counts) <= 4, f"they have turns alike: {counts}"
        world.until(lambda: served.total() == 40 + 20 * 20)
        for each in crowd:
            each.read()
            assert [number for number in each.replies if number >= 1000] == list(range(1000, 1020))


def test_what_came_before_an_exit_is_served_in_order(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        client = world.client()
        session = client.session
        client.socket.sendall(b"".join(framing.encode(Ping(), number) for number in range(1, 200)))
        client.socket.sendall(framing.encode(Goodbye(), 200))
        world.agent.loop.run_once(0)
        assert session.backlog
        session._on_exit(0)
        assert session.state is SessionState.CLOSED
        assert not session.backlog
