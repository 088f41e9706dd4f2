"""What runs in an attacker's pod in tests: somebody with a token of their own, and no manners.

    python -c PROGRAM ACTION OPTIONS-AS-JSON

Speaks the protocol by hand where the client would not do it. Prints one JSON object a line, and at the end when the
action began and ended (seconds since 1970). This file's text is the PROGRAM; it needs nothing but OrbitKV's client.
"""

import json
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from orbitkv.client.connection import Connection
from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.framing import MAX_FRAME_BYTES, MAX_HELLO_BYTES, FrameReader, encode, reply_decoder
from orbitkv.protocol.messages import (
    Allocation,
    Arenas,
    AttachInstance,
    CommitSave,
    ConfigureNamespace,
    GetStatus,
    GroupBlocks,
    GroupGeometry,
    GroupHashes,
    Hello,
    Instance,
    JoinSession,
    LayerRegion,
    Loading,
    MapArenas,
    Ping,
    PollQuery,
    ProofReport,
    Query,
    Ranks,
    Ready,
    Refusal,
    Register,
    Registered,
    Release,
    Reply,
    ResetInstance,
    RestoreDone,
    SaveRequest,
    SavesAccepted,
    StartRestore,
    SubmitSaves,
    Unregister,
    Welcome,
)
from orbitkv.protocol.versions import VersionRange

SOCKET = "/run/orbitkv/agent.sock"
TOKEN = "/var/run/secrets/orbitkv/token"
PAGE = 65536
BLOCKS = 64
PATTERN = 0xA7


def say(**facts: Any) -> None:
    """Prints one line."""
    print(json.dumps(facts), flush=True)


def outcome(attempt: Callable[[], Any]) -> str:
    """What an attempt ended in: the reason that the agent's refusal begins with, or the kind of its answer."""
    try:
        answer = attempt()
    except OrbitKVError as error:
        if error.kind is ErrorKind.TIMEOUT:
            return "no answer in time"
        first, _, rest = str(error).partition(": ")
        return first if rest and " " not in first else str(error)
    if isinstance(answer, Loading):
        return f"Loading admitted={answer.admitted}"
    reason = getattr(answer, "reason", "")
    return type(answer).__name__ + (f" {reason}" if reason else "")


def names(first: int, count: int) -> GroupHashes:
    """Hashes of pages, the same as every stand-in engine of the tests uses."""
    numbers = range(first + 1, first + count + 1)
    return GroupHashes(0, 32, b"".join(number.to_bytes(8, "little") * 4 for number in numbers))


def blocks(*numbers: int) -> GroupBlocks:
    """Block ids."""
    return GroupBlocks(0, struct.pack(f"<{len(numbers)}i", *numbers))


def connect() -> Connection:
    """A connection that has said nothing yet."""
    return Connection(SOCKET, server_uid=None, timeout_ms=10_000, on_late_reply=lambda reply: None)


def greet(cache: str, token: bytes, **more: Any) -> Reply:
    """Says hello on a connection of its own."""
    connection = connect()
    try:
        return _welcomed(connection, Hello(cache, token, "attacker", **more))
    finally:
        connection.close()


class Attacker:
    """An attached and registered engine of the attacker's own, at the level of messages."""

    def __init__(self, cache: str, identity: str) -> None:
        with open(TOKEN, "rb") as file:
            self.token = file.read().strip()
        self.connection = connect()
        welcome, self.descriptors = self.connection.call_for_descriptors(Hello(cache, self.token, "attacker"), 10_000)
        assert isinstance(welcome, Welcome)
        self.boot_id, self.epoch = welcome.boot_id, welcome.epoch
        self.instance = Instance("attacker", uuid.uuid4().hex)
        self.call(AttachInstance(self.instance))
        region = LayerRegion("layer", 0, 0, BLOCKS, PAGE, PAGE, "uint8")
        reply = self.call(
            Register(
                self.instance,
                Ranks(),
                identity,
                "stand-in",
                "host",
                [Allocation(BLOCKS * PAGE)],
                [GroupGeometry(0, "full", 16, [region])],
            )
        )
        assert isinstance(reply, Registered)
        self.registration = reply.registration
        self.call(ProofReport(self.registration, True))

    def call(self, message: Any) -> Any:
        """One request and its answer."""
        return self.connection.call(message, 10_000)

    def query(self, hashes: GroupHashes, max_wait_ms: int = 0) -> Any:
        """A look-up under a new number."""
        return self.call(Query(self.instance, secrets.randbits(40), 1, [hashes], max_wait_ms))

    def wait_for(self, hashes: GroupHashes, max_wait_ms: int) -> tuple[str, float]:
        """What comes of a look-up that may wait, and after how many seconds."""
        number, began = secrets.randbits(40), time.monotonic()
        reply = self.call(Query(self.instance, number, 1, [hashes], max_wait_ms))
        while isinstance(reply, Loading):
            time.sleep(0.01)
            reply = self.call(PollQuery(number, 1))
        return outcome(lambda: reply), time.monotonic() - began

    def save(self, first: int, count: int) -> int:
        """Saves pages that nobody has written; returns how many there was no room for."""
        dropped = 0
        for start in range(first, first + count, BLOCKS):
            request = SaveRequest(self.registration, [names(start, BLOCKS)], [blocks(*range(BLOCKS))])
            accepted = self.call(SubmitSaves([request]))
            assert isinstance(accepted, SavesAccepted)
            (plan,) = accepted.plans
            dropped += sum(plan.dropped.values())
            self.call(CommitSave(plan.save, True))
        return dropped

    def close(self) -> None:
        """Leaves without a word."""
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def tokens(options: dict[str, Any]) -> None:
    """Shows each of the tokens; says what the agent answers."""
    found = {}
    for name, text in options["tokens"].items():
        found[name] = outcome(lambda: greet(options["cache"], text.encode()))  # noqa: B023
    with open(TOKEN, "rb") as file:
        own = file.read().strip()
    head, body, signature = own.split(b".")
    forged = b".".join([head, body, signature[:-8] + b"AAAAAAAA"])
    found["none"] = outcome(lambda: greet(options["cache"], b""))
    found["forged"] = outcome(lambda: greet(options["cache"], forged))
    found["random"] = outcome(lambda: greet(options["cache"], secrets.token_hex(40).encode()))
    found["own, for the cache of another namespace"] = outcome(lambda: greet(options["theirs"], own))
    say(**found)


def guesses(options: dict[str, Any]) -> None:
    """Uses what another tenant has, by its right number or name, and what nobody has. Says what comes of it; where the
    two differ, both."""
    earlier = Attacker(options["cache"], options["identity"])
    old, old_epoch = earlier.registration, earlier.epoch
    earlier.close()
    it = Attacker(options["cache"], options["identity"])
    lease, registration, operation = options["lease"], options["registration"], options["operation"]
    who = Instance(*options["instance"])
    nobody, number = Instance(who.engine_id, "guessed"), 123456789
    tries: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
        "restore from a lease": (lambda n: StartRestore(it.registration, n, [blocks(0)]), lease, number),
        "give a lease back": (lambda n: Release([n]), lease, number),
        "save by a registration": (
            lambda n: SubmitSaves([SaveRequest(n, [names(0, 1)], [blocks(0)])]),
            registration,
            7,
        ),
        "retire a registration": (Unregister, registration, number),
        "use one of an earlier session": (Unregister, old, number),
        "join a session": (lambda n: JoinSession(it.boot_id, n), options["epoch"], number),
        "go on from an earlier session": (lambda n: JoinSession(it.boot_id, n), old_epoch, number),
        "go on from an earlier agent": (lambda n: JoinSession(secrets.token_hex(16), n), options["epoch"], it.epoch),
        "end a restore": (lambda n: RestoreDone(n, True), operation, number),
        "commit a save": (lambda n: CommitSave(n, True), operation, number),
        "poll an operation": (lambda n: PollQuery(n, 1), operation, number),
        "reset an engine": (ResetInstance, who, nobody),
        "look up for an engine": (lambda n: Query(n, secrets.randbits(40), 1, [names(0, 4)], 0), who, nobody),
    }
    found: dict[str, Any] = {}
    for name, (make, theirs, guessed) in tries.items():
        first, second = outcome(lambda: it.call(make(theirs))), outcome(lambda: it.call(make(guessed)))  # noqa: B023
        found[name] = first if first == second else f"{first} / {second}"
    found["map all memory"] = f"{_mapped_bytes_of_others(it)} bytes"
    found["the other's hash keys"] = outcome(lambda: it.query(names(0, options["count"])))
    beyond = SaveRequest(it.registration, [names(0, 1)], [blocks(BLOCKS)])
    found["save from a block beyond its own"] = outcome(lambda: it.call(SubmitSaves([beyond])))
    found["the agent's state"] = outcome(lambda: it.call(GetStatus()))
    found["configure a cache"] = outcome(lambda: it.call(ConfigureNamespace(options["theirs"], quota_bytes=0)))
    found["reset its own"] = outcome(lambda: it.call(ResetInstance(it.instance)))
    say(**found)


def _mapped_bytes_of_others(it: Attacker) -> int:
    """How many bytes can be read of all memory that can be mapped, before this tenant has written any."""
    reply, descriptors = it.connection.call_for_descriptors(MapArenas(list(range(1, 200))), 10_000)
    assert isinstance(reply, Arenas)
    found = 0
    for (_, size), descriptor in zip(reply.arenas, descriptors, strict=True):
        with mmap.mmap(descriptor, size) as memory:
            found += size - memory[:].count(0)
        os.close(descriptor)
    return found


def frames(options: dict[str, Any]) -> None:
    """Sends what is no frame, or of no version; says how the agent ends each connection."""
    with open(TOKEN, "rb") as file:
        token = file.read().strip()
    ancient = VersionRange(0, 0)
    say(
        version=outcome(lambda: greet(options["cache"], token, messages=ancient)),
        torn=_said(struct.pack("<II", 100, 1) + b"half", stop=True),
        oversized=_said(struct.pack("<II", MAX_HELLO_BYTES + 1, 1)),
        random=_said(struct.pack("<II", 40, 1) + secrets.token_bytes(40)),
        early=_said(struct.pack("<II", 2, 1) + b"\x91\x05"),
    )


def _said(data: bytes, *, stop: bool = False) -> str:
    """The reason with which the agent ends a connection that sent `data`, and says that nothing more comes if it is to
    stop there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(10)
        raw.connect(SOCKET)
        raw.sendall(data)
        if stop:
            raw.shutdown(socket.SHUT_WR)
        return _reason(raw)


def _reason(raw: socket.socket) -> str:
    """The reason with which the agent refuses what a connection sent, or the connection."""
    reader = FrameReader(MAX_FRAME_BYTES)
    try:
        while piece := raw.recv(4096):
            for _, body in reader.feed(piece):
                reply = reply_decoder.decode(body)
                return reply.message.partition(": ")[0] if isinstance(reply, Refusal) else type(reply).__name__
    except ConnectionResetError:
        pass
    return "nothing"


def flood(options: dict[str, Any]) -> None:
    """Saves beyond its quota, and then for some seconds look-ups as fast as they are answered, and hellos with forged
    tokens. Says what the agent made of it."""
    it = Attacker(options["cache"], options["identity"])
    dropped = it.save(0, options["count"])
    answers: Counter[str] = Counter()
    hellos: Counter[str] = Counter()
    end = time.monotonic() + options["seconds"]
    while time.monotonic() < end:
        for first in range(options["count"] - 200, options["count"] - 4):  # those that its quota leaves, and others
            answers[outcome(lambda: it.query(names(first, 4)))] += 1  # noqa: B023
        hellos[_hurried_hello(options["cache"])] += 1
    patient = Counter(outcome(lambda: it.query(names(options["count"] - 4, 4), max_wait_ms=60_000)) for _ in range(10))
    say(dropped=dropped, answers=answers, hellos=hellos, patient=patient)


def _hurried_hello(cache: str) -> str:
    """Says hello with a token that nobody knows and leaves soon."""
    connection = connect()
    try:
        return outcome(lambda: connection.call(Hello(cache, secrets.token_hex(20).encode(), "attacker"), 50))
    finally:
        connection.close()


def hoard(options: dict[str, Any]) -> None:
    """Has so many pages leased again and again, by engine after engine, until there is nothing more to be had; then all
    of them wait for more, for some seconds. Says how much was leased, and what comes of a look-up that may wait."""
    crew = [Attacker(options["cache"], options["identity"]) for _ in range(12)]
    pages = names(0, options["pages"])
    crew[0].save(0, 2 * BLOCKS)
    leases, size = 0, 0
    for it in crew:
        while isinstance(reply := it.query(pages), Ready):
            leases, size = leases + 1, size + reply.bytes
    answer, seconds = crew[0].wait_for(pages, options["max_wait_ms"])
    waiting = Counter(outcome(lambda: it.query(pages, max_wait_ms=30_000)) for it in crew for _ in range(8))  # noqa: B023
    time.sleep(options["seconds"])
    say(leases=leases, bytes=size, answer=answer, waited_ms=round(seconds * 1000), waiting=waiting)


def crowds(options: dict[str, Any]) -> None:
    """Opens more connections than it may: silent ones, ones with forged tokens, and sessions of its own. Says with
    which reasons the agent ended or refused them, and how many sessions there were."""
    silent = [_greeting(b"") for _ in range(100)]
    ended: Counter[str] = Counter()
    for each in silent[:30]:  # the oldest
        each.settimeout(3)
        ended[_reason(each)] += 1
    for each in silent:
        each.close()
    forged = [
        _greeting(encode(Hello(options["cache"], secrets.token_hex(20).encode(), "attacker"), 1)) for _ in range(24)
    ]
    hellos: Counter[str] = Counter(_reason(each) for each in forged)
    for each in forged:
        each.close()
    sessions: list[Connection] = []
    with open(TOKEN, "rb") as file:
        hello = Hello(options["cache"], file.read().strip(), "attacker")
    refused = ""
    while not refused:
        sessions.append(connect())
        answer = outcome(lambda: _welcomed(sessions[-1], hello))
        refused = "" if answer == "Welcome" else answer
    say(silent=ended, hellos=hellos, sessions=len(sessions) - 1, then=refused)


def _greeting(data: bytes) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(10)
    raw.connect(SOCKET)
    raw.sendall(data)
    return raw


def _welcomed(connection: Connection, hello: Hello) -> Reply:
    reply, descriptors = connection.call_for_descriptors(hello, 10_000)
    for descriptor in descriptors:
        os.close(descriptor)
    return reply


def burst(options: dict[str, Any]) -> None:
    """Sends thousands of small requests in one piece, by each of its sessions, again and again for some seconds; says
    how many were answered."""
    with open(TOKEN, "rb") as file:
        hello = Hello(options["cache"], file.read().strip(), "attacker")
    crew: list[Connection] = []
    while len(crew) < options["sessions"]:
        crew.append(connect())
        assert isinstance(_welcomed(crew[-1], hello), Welcome)
    request = bytes(encode(Ping(), 1))
    crew[0]._socket.setblocking(True)
    crew[0]._socket.sendall(request)
    answer = len(crew[0]._socket.recv(1 << 16))
    everything = memoryview(request * 5000)
    sockets = {each._socket.fileno(): each._socket for each in crew}
    unsent, unanswered = dict.fromkeys(sockets, everything), dict.fromkeys(sockets, 5000 * answer)
    poll, received = select.poll(), 0
    for number, raw in sockets.items():
        raw.setblocking(False)
        poll.register(number, select.POLLIN | select.POLLOUT)
    end = time.monotonic() + options["seconds"]
    while time.monotonic() < end:
        for number, events in poll.poll(100):
            if events & select.POLLIN:
                size = len(sockets[number].recv(1 << 18))
                received, unanswered[number] = received + size, unanswered[number] - size
                if not unanswered[number]:
                    unsent[number], unanswered[number] = everything, 5000 * answer
            if unsent[number] and events & select.POLLOUT:
                unsent[number] = unsent[number][sockets[number].send(unsent[number]) :]
            poll.modify(number, select.POLLIN | (select.POLLOUT if unsent[number] else 0))
    say(answered=received // answer)


def deaf(options: dict[str, Any]) -> None:
    """Asks and never reads, again and again for some seconds; says how often, and how often the agent ended that."""
    end = time.monotonic() + options["seconds"]
    tried, ended = 0, 0
    while time.monotonic() < end:
        tried += 1
        ended += _ended_for_not_reading(options)
    say(tried=tried, ended=ended)


def _ended_for_not_reading(options: dict[str, Any]) -> bool:
    it = Attacker(options["cache"], options["identity"])
    raw = it.connection._socket
    raw.setblocking(False)
    end = time.monotonic() + 60
    request = bytes(encode(Unregister(1), 1)) * 200  # small, with an answer that is not
    rest = memoryview(request)
    while time.monotonic() < end:
        try:
            sent = raw.send(rest, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        except OSError:
            return True
        rest = rest[sent:] or memoryview(request)
    return False


def times(options: dict[str, Any]) -> None:
    """The median times, in seconds, of look-ups of hashes that the other has and of two kinds that nobody has."""
    it = Attacker(options["cache"], options["identity"])
    taken: dict[int, list[float]] = {0: [], 1 << 20: [], 1 << 21: []}
    for _ in range(options["rounds"]):
        for first, found in taken.items():
            began = time.perf_counter()
            it.query(names(first, 16))
            found.append(time.perf_counter() - began)
    theirs, nobodys, others = (sorted(found)[len(found) // 2] for found in taken.values())
    say(theirs=theirs, nobodys=nobodys, others=others)


def keep(options: dict[str, Any]) -> None:
    """Maps memory of its cache, fills it, and looks at it on and on, also after its session has ended."""
    it = Attacker(options["cache"], options["identity"])
    plan = it.call(SubmitSaves([SaveRequest(it.registration, [names(0, BLOCKS)], [blocks(*range(BLOCKS))])])).plans[0]
    wanted = sorted({struct.unpack("<I", plan.pages[0].arenas[i : i + 4])[0] for i in range(0, 4 * BLOCKS, 4)})
    reply, descriptors = it.connection.call_for_descriptors(MapArenas(wanted), 10_000)
    assert isinstance(reply, Arenas)
    memory = mmap.mmap(descriptors[0], reply.arenas[0][1])
    offsets = struct.unpack(f"<{BLOCKS}Q", plan.pages[0].offsets)
    for offset in offsets:
        memory[offset : offset + PAGE] = bytes([PATTERN]) * PAGE
    it.call(CommitSave(plan.save, True))
    say(mapped=len(memory))
    ended = ""
    while not ended:
        ended = outcome(lambda: it.query(names(0, 1)))
        ended = "" if ended.startswith(("Ready", "Nothing")) else ended
        time.sleep(0.2)
    say(ended=ended)
    seen: set[int] = set()
    end = time.monotonic() + options["seconds"]
    while time.monotonic() < end:
        seen |= set(memory[:])
        time.sleep(0.2)
    say(seen=sorted(seen))
    time.sleep(3600)


ACTIONS = {each.__name__: each for each in (tokens, guesses, frames, flood, hoard, crowds, burst, deaf, times, keep)}


if __name__ == "__main__":
    started = time.time()
    ACTIONS[sys.argv[1]](json.loads(sys.argv[2]))
    say(attack=[started, time.time()])
