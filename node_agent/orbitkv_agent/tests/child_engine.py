"""An engine's process for tests: it is granted a save and a restore, says so on stdout, and waits to be killed.

    python -m orbitkv_agent.tests.child_engine SOCKET [fork]

With `fork` a forked child inherits the connection and lives on. Its process id is printed, too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TypeVar

from orbitkv.protocol import framing
from orbitkv.protocol.messages import (
    Arenas,
    AttachInstance,
    CommitSave,
    Done,
    GroupHashes,
    Hello,
    Instance,
    InstanceState,
    MapArenas,
    ProofReport,
    Query,
    Ready,
    Registered,
    Request,
    RestorePlan,
    SavesAccepted,
    SubmitSaves,
    Welcome,
)
from orbitkv_agent.tests.harness import HASH_BYTES, hashes, ints, register_message, save_request, start_message

R = TypeVar("R")


class Connection:
    """A blocking connection."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.reader = framing.FrameReader(framing.MAX_FRAME_BYTES)

    def call(self, request: Request, kind: type[R]) -> R:
        """Ask and wait."""
        self.socket.sendall(framing.encode(request, 1))
        while True:
            data, _ = framing.receive_with_descriptors(self.socket, 1 << 16)
            assert data, "the agent closed the connection"
            for _, body in self.reader.feed(data):
                reply = framing.reply_decoder.decode(body)
                assert isinstance(reply, kind), reply
                return reply


def main(path: str, fork: bool) -> None:
    """Get the grants, say so, wait."""
    connection = Connection(path)
    instance = Instance("child", str(os.getpid()))
    connection.call(Hello(client="child"), Welcome)
    connection.call(AttachInstance(instance), InstanceState)
    registration = connection.call(register_message(instance), Registered).registration
    connection.call(ProofReport(registration, True), Done)
    saved = connection.call(SubmitSaves([save_request(registration, hashes(1, 2))]), SavesAccepted).plans[0]
    connection.call(CommitSave(saved.save, True), Done)
    query = Query(instance, 1, 1, [GroupHashes(0, HASH_BYTES, hashes(1, 2))])
    ready = connection.call(query, Ready)
    plan = connection.call(start_message(registration, ready.leases[0], [0, 1]), RestorePlan)
    connection.call(SubmitSaves([save_request(registration, hashes(3))]), SavesAccepted)
    connection.call(MapArenas(ints(plan.pages[0].arenas)), Arenas)
    connection.call(Query(instance, 2, 1, [GroupHashes(0, HASH_BYTES, hashes(1))]), Ready)
    child = os.fork() if fork else 0
    if fork and not child:
        signal.pause()
    print(child, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], "fork" in sys.argv[2:])
