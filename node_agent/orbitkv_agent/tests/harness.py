"""A whole agent in the test's own thread and time, and clients that speak the bare protocol to its socket.

Nothing runs beside the test: a client sends, the test turns the agent's loop, the client reads. So every interleaving
is one that the test has chosen, and time passes only by `World.advance`.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from orbitkv.cuda import Driver
from orbitkv.protocol import framing
from orbitkv.protocol.messages import (
    Allocation,
    AttachInstance,
    CancelQuery,
    CommitSave,
    Done,
    Goodbye,
    GroupBlocks,
    GroupGeometry,
    GroupHashes,
    Hello,
    Instance,
    InstanceState,
    LayerRegion,
    Loading,
    Nothing,
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
    Request,
    RestoreDone,
    RestorePlan,
    SavePlan,
    SaveRequest,
    SavesAccepted,
    StartRestore,
    SubmitSaves,
    Welcome,
)
from orbitkv.protocol.records import RecordReader
from orbitkv.protocol.shortcut import BEFORE, REPLY, REQUEST, Shortcut
from orbitkv_agent.agent import Agent
from orbitkv_agent.config import AgentConfig
from orbitkv_agent.loop import Loop
from orbitkv_agent.sessions.session import Session

PAGE = 4096
BLOCKS = 64
TOKENS = 16
HASH_BYTES = 32
INSTANCE = Instance("engine", "1")
R = TypeVar("R")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """An agent and the clients of a test. Leaving it drains the agent and checks that nothing is left over.

    Args:
        folder: for the socket.
        driver: of GPUs; the agent is in CUDA mode then.
        settings: of the agent; small ones are the default.
    """

    def __init__(self, folder: Path, *, driver: Driver | None = None, **settings: Any) -> None:
        values: dict[str, Any] = {
            "socket_path": str(folder / "agent.sock"),
            "pool": "4MiB",
            "arena": "1MiB",
            "prefault": False,
            "mode": "host",
            "metrics_address": "off",
        }
        self.config = AgentConfig.model_validate(values | settings)
        self.clock = Clock()
        self.agent = Agent(self.config, Loop(self.clock), driver)
        self.path = self.config.socket_path
        self.clients: list[Client] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self.clients:
            client.drop()
        self.pump()
        # In this process there is no exit to wait for: what lingers is ended as if its process had gone.
        for session in list(self.agent.server.sessions):
            session.close()
        if kind is None:
            if self.agent.device.copier is not None:  # its threads tell of ends, perhaps later than the records do
                self.until(lambda: not any(self.agent.oracle().values()))
            self.agent.cache.check_invariants()
            assert not any(self.agent.oracle().values()), self.agent.oracle()
        self.agent.request_stop()
        drained = self.agent.serve()
        assert drained or kind is not None

    def pump(self, rounds: int = 3) -> None:
        """Let the agent do what there is to do now."""
        for _ in range(rounds):
            self.agent.loop.run_once(0)

    def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Let the agent work until `condition` holds; for what other threads report."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.agent.loop.run_once(0.01)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds
        self.pump()

    def connect(self) -> socket.socket:
        """A connection that has said nothing yet."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.path)
        self.pump()
        return connection

    def client(self, namespace: str = "", *, hello: bool = True) -> Client:
        """A connected client, after the handshake if `hello`."""
        client = Client(self)
        self.clients.append(client)
        if hello:
            client.hello(Hello(cache_namespace=namespace, client=f"test {len(self.clients)}"))
        return client

    def engine(self, **layout: Any) -> Engine:
        """A client whose instance is attached, registered, proven: it can hit."""
        return Engine(self, **layout)


class Way(Enum):
    """How a client asks."""

    SOCKET = "socket"
    SHORTCUT = "shortcut, as long as a reply comes there"
    UNSEEN = "shortcut, but the agent does not look; then the socket"
    GIVEN_UP = "shortcut, but the client does not wait for the reply; then the socket"


class Client:
    """One connection, driven by hand.

    Attributes:
        way: how `ask` asks.
        sent: bytes that went by the socket.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.socket = world.connect()
        self.socket.setblocking(False)
        self.reader = framing.FrameReader(framing.MAX_FRAME_BYTES)
        self.sequence = 0
        self.descriptors: list[int] = []
        self.replies: dict[int, Reply] = {}
        self.records: RecordReader | None = None
        self.shortcut: Shortcut | None = None
        self.way = Way.SOCKET
        self.sent = 0
        self.welcome: Welcome | None = None
        self.ended = False

    def hello(self, hello: Hello) -> Welcome:
        """Do the handshake."""
        welcome = self.call(hello, Welcome)
        self.records = RecordReader(self.descriptors[0])
        if len(self.descriptors) > 3:
            self.shortcut = Shortcut(self.descriptors[3])
        self.welcome = welcome
        return welcome

    @property
    def session(self) -> Session:
        """The agent's side of this connection."""
        assert self.welcome is not None
        return next(each for each in self.world.agent.server.sessions if each.epoch == self.welcome.epoch)

    def post(self, request: Request) -> int:
        """Send a request and return its number, without waiting for anything."""
        self.sequence += 1
        self._send(framing.encode(request, self.sequence))
        return self.sequence

    def send(self, request: Request) -> None:
        """Send a request that wants no reply, and let the agent take it."""
        self._send(framing.encode(request, 0))
        self.world.pump()

    def _send(self, frame: bytes) -> None:
        self.socket.sendall(frame)
        self.sent += len(frame)

    def put(self, request: Request) -> int:
        """Leave a request in the shortcut and return its number; `session.look` takes it."""
        assert self.shortcut is not None
        self.sequence += 1
        self.shortcut.words[BEFORE] = self.sent
        self.shortcut.put(REQUEST, self.sequence, framing.encode(request, self.sequence))
        return self.sequence

    def found(self, number: int) -> Reply | None:
        """The reply to a request that was put, if it is there."""
        assert self.shortcut is not None
        body = self.shortcut.body(REPLY) if self.shortcut.words[REPLY] == number else b""
        return framing.reply_decoder.decode(body) if body else None

    def _begin(self, request: Request) -> tuple[int, Reply | None]:
        """Send a request the client's way; return its number, and the reply if it came by the shortcut."""
        if self.way is Way.SOCKET or not self.session.is_open:
            return self.post(request), None
        self.world.pump()  # what was sent before is served: otherwise nobody takes what is in the shortcut
        number = self.put(request)
        if self.way is not Way.UNSEEN:
            self.session.look()
        reply = self.found(number) if self.way is Way.SHORTCUT else None
        if reply is None:
            try:
                self._send(framing.encode(request, number))
            except BrokenPipeError:  # it was the last request of the session
                reply = self.found(number)
        return number, reply

    def read(self) -> None:
        """Take what the agent has sent."""
        while not self.ended:
            try:
                data, descriptors = framing.receive_with_descriptors(self.socket, 1 << 16)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, descriptors = b"", []
            self.descriptors += descriptors
            self.ended = not data
            for number, body in self.reader.feed(data) if data else []:
                self.replies[number] = framing.reply_decoder.decode(body)

    def reply(self, number: int) -> Reply | None:
        """The reply to a request, if it has come."""
        self.world.pump()
        self.read()
        return self.replies.pop(number, None)

    def ask(self, request: Request) -> Reply:
        """Send a request, return its reply, whatever it is."""
        number, found = self._begin(request)
        if found is not None:
            return found
        deadline = time.monotonic() + 30
        while (reply := self.reply(number)) is None:
            assert not self.ended, "the agent closed the connection"
            assert time.monotonic() < deadline, f"no reply to {request}"
        return reply

    def call(self, request: Request, kind: type[R]) -> R:
        """Send a request, return its reply, which must be of this kind."""
        reply = self.ask(request)
        assert isinstance(reply, kind), reply
        return reply

    def refused(self, request: Request) -> Refusal:
        """Send a request that must be refused."""
        return self.call(request, Refusal)

    def closed(self) -> bool:
        """Whether the agent has closed the connection."""
        self.world.pump()
        self.read()
        return self.ended

    def goodbye(self) -> None:
        """Close in order."""
        self.call(Goodbye(), Done)
        self.drop()

    def drop(self) -> None:
        """Close without a word. Doing it again is harmless."""
        self.drop_after_end()
        self.world.pump()

    def drop_after_end(self) -> None:
        """As `drop`, when the agent is gone already."""
        if self.socket.fileno() >= 0:
            self.socket.close()
            if self.records is not None:
                self.records.close()
            if self.shortcut is not None:
                self.shortcut.close()
            for fd in self.descriptors:
                os.close(fd)
            self.descriptors.clear()

    # ---- what tests do often

    def attach(self, instance: Instance = INSTANCE, *, events: bool = False) -> InstanceState:
        """Be the scheduler of an instance."""
        return self.call(AttachInstance(instance, events=events), InstanceState)

    def register(self, instance: Instance = INSTANCE, **changes: Any) -> Registered:
        """Be a worker of an instance."""
        return self.call(register_message(instance, **changes), Registered)

    def prove(self, registration: int) -> None:
        """Report that the layout is right."""
        self.call(ProofReport(registration, True), Done)

    def submit(self, registration: int, hashes: bytes, blocks: Sequence[int] | None = None, **more: Any) -> SavePlan:
        """Have places granted for pages of group 0."""
        reply = self.call(SubmitSaves([save_request(registration, hashes, blocks, **more)]), SavesAccepted)
        return reply.plans[0]

    def commit(self, plan: SavePlan, *, copied: bool = True) -> None:
        """Report a save."""
        self.call(CommitSave(plan.save, copied), Done)

    def save(self, registration: int, hashes: bytes, **more: Any) -> SavePlan:
        """Save pages of group 0, from plan to commit."""
        plan = self.submit(registration, hashes, **more)
        self.commit(plan)
        return plan

    def query(
        self, hashes: bytes, *, operation: int = 1, revision: int = 1, instance: Instance = INSTANCE, **more: Any
    ) -> Ready | Loading | Nothing:
        """Ask for pages of group 0."""
        reply = self.ask(Query(instance, operation, revision, [GroupHashes(0, HASH_BYTES, hashes)], **more))
        assert isinstance(reply, Ready | Loading | Nothing), reply
        return reply

    def ready(self, hashes: bytes, **more: Any) -> Ready:
        """Ask for pages that must be there."""
        reply = self.query(hashes, **more)
        assert isinstance(reply, Ready), reply
        return reply

    def poll(self, operation: int = 1, revision: int = 1) -> Reply:
        """Ask again."""
        return self.ask(PollQuery(operation, revision))

    def cancel(self, *operations: int) -> None:
        """Withdraw queries."""
        self.send(CancelQuery(list(operations)))

    def release(self, *leases: int) -> None:
        """Return leases."""
        self.send(Release(list(leases)))

    def start(self, registration: int, lease: int, blocks: Sequence[int]) -> RestorePlan:
        """Start a restore of group 0."""
        return self.call(start_message(registration, lease, blocks), RestorePlan)

    def done(self, plan: RestorePlan, *, copied: bool = True) -> None:
        """Report a restore."""
        self.call(RestoreDone(plan.restore, copied), Done)


class Engine:
    """A serving engine with a scheduler's and a worker's connection."""

    def __init__(self, world: World, *, namespace: str = "", instance: Instance = INSTANCE, **layout: Any) -> None:
        self.world = world
        self.instance = instance
        self.control = world.client(namespace)
        self.worker = world.client(namespace)
        self.control.attach(instance)
        self.registration = self.worker.register(instance, **layout).registration
        self.worker.prove(self.registration)
        self._operations = itertools.count(1)

    def save(self, hashes: bytes, **more: Any) -> SavePlan:
        """Save pages of group 0, from plan to commit."""
        return self.worker.save(self.registration, hashes, **more)

    def query(self, hashes: bytes, **more: Any) -> Ready | Loading | Nothing:
        """Ask under a new operation number, or the one given."""
        more.setdefault("operation", next(self._operations))
        return self.control.query(hashes, instance=self.instance, **more)

    def ready(self, hashes: bytes, **more: Any) -> Ready:
        """Ask for pages that must be there."""
        reply = self.query(hashes, **more)
        assert isinstance(reply, Ready), reply
        return reply

    def start(self, ready: Ready) -> RestorePlan:
        """Start a restore of all leased pages into the first blocks."""
        return self.worker.start(self.registration, ready.leases[0], range(ready.pages[0].count))

    def restore(self, hashes: bytes) -> int:
        """Query, restore, report; return how many pages there were."""
        reply = self.query(hashes)
        if not isinstance(reply, Ready):
            return 0
        self.worker.done(self.start(reply))
        return reply.pages[0].count

    def close(self) -> None:
        """Close in order."""
        self.control.goodbye()
        self.worker.goodbye()


def hashes(*numbers: int) -> bytes:
    """Engine hashes that stand for these numbers."""
    return b"".join(number.to_bytes(8, "little") * (HASH_BYTES // 8) for number in numbers)


def ints(blob: bytes, dtype: str = "<u4") -> list[int]:
    """Numbers of a blob."""
    return [int(number) for number in np.frombuffer(blob, dtype)]


def blocks_blob(blocks: Sequence[int], group: int = 0) -> GroupBlocks:
    """Block ids of a group."""
    return GroupBlocks(group, np.array(list(blocks), "<i4").tobytes())


def group_geometry(
    group: int = 0, *, page: int = PAGE, blocks: int = BLOCKS, tokens: int = TOKENS, kind: str = "full", **layer: Any
) -> GroupGeometry:
    """A group of one layer that lies alone in allocation 0."""
    region: dict[str, Any] = {
        "name": f"layer{group}",
        "allocation": 0,
        "offset": 0,
        "block_count": blocks,
        "block_bytes": page,
        "block_stride": page,
        "dtype": "uint8",
    } | layer
    return GroupGeometry(group, kind, tokens, [LayerRegion(**region)])


def register_message(instance: Instance = INSTANCE, **changes: Any) -> Register:
    """A worker with one group of one layer; `changes` replace fields."""
    fields: dict[str, Any] = {
        "instance": instance,
        "ranks": Ranks(),
        "model_identity": "model",
        "model": "a model",
        "device": "host",
        "allocations": [Allocation(1 << 20)],
        "groups": [group_geometry()],
    } | changes
    return Register(**fields)


def save_request(
    registration: int, hashes: bytes, blocks: Sequence[int] | None = None, *, proof: bool = False
) -> SaveRequest:
    """Pages of group 0."""
    count = len(hashes) // HASH_BYTES
    chosen = range(count) if blocks is None else blocks
    return SaveRequest(registration, [GroupHashes(0, HASH_BYTES, hashes)], [blocks_blob(chosen)], proof=proof)


def start_message(registration: int, lease: int, blocks: Sequence[int]) -> StartRestore:
    """A restore of group 0."""
    return StartRestore(registration, lease, [blocks_blob(blocks)])
