"""Whatever a client sends, it harms itself at most."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import msgspec

from orbitkv.protocol import framing
from orbitkv.protocol.messages import (
    Allocation,
    AttachInstance,
    CancelQuery,
    CommitSave,
    ConfigureNamespace,
    GetStatus,
    GroupHashes,
    Hello,
    Instance,
    MapArenas,
    Ping,
    PollQuery,
    Pong,
    ProofReport,
    Query,
    Ranks,
    Release,
    Request,
    ResetInstance,
    RestoreDone,
    StartRestore,
    SubmitSaves,
    SyncArenas,
    TakeEvents,
    Unregister,
)
from orbitkv.protocol.shortcut import BEFORE, MOST_BYTES, REPLY, REQUEST, WATCHED
from orbitkv_agent.tests.harness import (
    INSTANCE,
    Client,
    World,
    blocks_blob,
    group_geometry,
    hashes,
    register_message,
    save_request,
)

ROUNDS = 400


def _numbers(chance: random.Random, known: list[int]) -> int:
    return chance.choice([*known, 0, 1, -1, 2**31, 2**32 - 1, 2**62, chance.getrandbits(16)])


def _request(chance: random.Random, known: list[int]) -> Request:
    """A request that is well formed, with values that may be anything."""

    def number() -> int:
        return _numbers(chance, known)

    def blob() -> bytes:
        return chance.choice([b"", b"x", hashes(1), hashes(1, 2, 3), chance.randbytes(chance.randrange(200))])

    instance = chance.choice([INSTANCE, Instance("fuzz", "1"), Instance("", ""), Instance("x" * 300, "y")])
    part = GroupHashes(chance.choice([0, 0, 1, number()]), chance.choice([32, 32, 0, -1, 16, number()]), blob())
    blocks = blocks_blob([chance.choice([0, 1, 2, -1, -7, 63, 64, 2**31 - 1]) for _ in range(chance.randrange(5))])
    requests: list[Request] = [
        Hello(),
        Ping(),
        GetStatus(),
        AttachInstance(instance, chance.choice(["", "g"]), chance.random() < 0.5),
        register_message(
            instance,
            ranks=chance.choice([Ranks(), Ranks(number(), number()), Ranks(0, 2)]),
            allocations=[Allocation(chance.choice([1 << 20, number()]))],
            groups=[group_geometry(chance.choice([0, number()]), blocks=chance.choice([64, number()]))],
        ),
        Unregister(number()),
        ProofReport(number(), chance.random() < 0.5, "x" * chance.randrange(2000)),
        ResetInstance(instance),
        Query(instance, number(), number(), [part], max_wait_ms=number(), proof=chance.random() < 0.3),
        Query(instance, number(), number(), [part, part][: chance.randrange(3)]),
        PollQuery(number(), number()),
        CancelQuery([number()]),
        Release([number(), number()]),
        StartRestore(number(), number(), [blocks]),
        RestoreDone(number(), chance.random() < 0.5),
        SubmitSaves([save_request(number(), hashes(1, 2), [0, chance.choice([1, 0, 99])])]),
        CommitSave(number(), chance.random() < 0.5),
        MapArenas([number(), 1]),
        SyncArenas([number()]),
        TakeEvents(instance),
        ConfigureNamespace("fuzz", quota_bytes=number(), guaranteed_bytes=number(), reset_generation=number()),
    ]
    return chance.choice(requests)


def _mutated(chance: random.Random, whole: bytes) -> bytes:
    frame = bytearray(whole)
    kind = chance.randrange(6)
    if kind == 0:
        for _ in range(chance.randrange(1, 8)):
            frame[chance.randrange(len(frame))] = chance.randrange(256)
    elif kind == 1:
        del frame[chance.randrange(len(frame)) :]
    elif kind == 2:
        frame[8:8] = chance.randbytes(chance.randrange(1, 20))
    elif kind == 3:
        return chance.randbytes(chance.randrange(1, 200))
    return bytes(frame)


def _scribble(chance: random.Random, client: Client, frame: bytes) -> None:
    """Put something into the client's shortcut, and let the agent look there."""
    shortcut = client.shortcut
    if shortcut is None:
        return
    shortcut.put(REQUEST, chance.choice([client.sequence, client.sequence + 1]), _mutated(chance, frame)[:MOST_BYTES])
    for _ in range(chance.randrange(3)):
        word = chance.choice([WATCHED, BEFORE, REQUEST, REPLY])
        shortcut.words[word] = chance.choice([0, 1, client.sequence, chance.getrandbits(32), chance.getrandbits(64)])
    if not client.closed():
        client.session.look()


def _handles(replies: list[object]) -> list[int]:
    """Numbers that replies gave to this client: they make the next requests reach further."""
    found: list[int] = []
    for reply in replies:
        for value in msgspec.structs.asdict(reply).values() if isinstance(reply, msgspec.Struct) else ():
            if isinstance(value, int) and value > 1 << 16:
                found.append(value)
            elif isinstance(value, list):
                found += [each for each in value if isinstance(each, int)]
                found += _handles([each for each in value if isinstance(each, msgspec.Struct)])
    return found


def test_random_requests_and_broken_frames_harm_nobody_else(tmp_path: Path) -> None:
    chance = random.Random(20261129)
    with World(tmp_path, max_session_queries=4) as world:
        honest = world.engine()
        honest.save(hashes(11, 12))
        known: list[int] = []
        client: Client | None = None
        for turn in range(ROUNDS):
            if client is None or client.closed():
                if client is not None:
                    client.drop()
                client = world.client()
            for _ in range(chance.randrange(1, 8)):
                client.sequence += 1
                frame = framing.encode(_request(chance, known), client.sequence)
                with contextlib.suppress(BrokenPipeError, BlockingIOError, ConnectionResetError):
                    client.socket.send(_mutated(chance, frame) if chance.random() < 0.2 else frame)
                if chance.random() < 0.3:
                    _scribble(chance, client, frame)
            world.pump()
            client.read()
            known = (known + _handles(list(client.replies.values())))[-20:]
            client.replies.clear()
            if chance.random() < 0.1:
                world.advance(chance.choice([0.1, 3, 61]))
            if chance.random() < 0.05:
                client.drop()
                for session in [each for each in world.agent.server.sessions if not each.is_open]:
                    session.close()
                client = None
            if turn % 20 == 0:
                assert honest.control.call(Ping(), Pong).ok
                assert honest.restore(hashes(11, 12)) == 2
        world.agent.cache.check_invariants()


def test_internal_errors_are_no_answer_to_anything_a_client_can_send(tmp_path: Path) -> None:
    chance = random.Random(4711)
    internal = []
    with World(tmp_path) as world:
        client = world.client()
        known: list[int] = []
        for _ in range(ROUNDS * 2):
            request = _request(chance, known)
            if isinstance(request, Hello):
                continue
            number = client.post(request)
            reply = client.reply(number)
            known = (known + _handles([reply]))[-20:]
            if reply is not None and getattr(reply, "kind", "") == "internal":
                internal.append(request)
        assert not internal
