"""A handle of GPU memory says nothing about who shows it: memory is registered by who may write it."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from orbitkv.client import Ranks
from orbitkv.protocol.messages import Allocation, Instance, Register
from tests.gpu.children import environment
from tools.harness.agent import AgentProcess
from tools.harness.engine import ROOT

torch = pytest.importorskip("torch")

THIEF = """
import os, sys
from orbitkv.client.connection import Connection
from orbitkv.protocol.errors import OrbitKVError
from orbitkv.protocol.framing import request_decoder
from orbitkv.protocol.messages import AttachInstance, Challenge, ChallengeMet, Hello

request = request_decoder.decode(bytes.fromhex(sys.argv[2]))
connection = Connection(sys.argv[1], server_uid=None, timeout_ms=60000, on_late_reply=lambda reply: None)
connection.call_for_descriptors(Hello("", b"", "thief"), 60000)
connection.call(AttachInstance(request.instance), 60000)
challenge = connection.call(request, 60000)
assert isinstance(challenge, Challenge), challenge
try:
    print(connection.call(ChallengeMet(challenge.challenge), 60000))
except OrbitKVError as error:
    print(error)
"""
"""Another process that registers what it was told of, and writes nothing."""


def test_memory_of_another_process_is_refused_and_stays_as_it_was(agent: AgentProcess) -> None:
    from tools.harness.gpu_engine import GpuEngine, Shape

    with GpuEngine(agent.socket_path, Shape(layers=4, blocks=64)) as victim:
        assert victim.layout.gpu is not None
        before = [memory.clone() for memory in victim.memories]
        request = Register(
            instance=Instance("thief", "1"),
            ranks=Ranks(),
            model_identity="stolen",
            model="stolen",
            device=victim.layout.gpu.uuid,
            allocations=[Allocation(each.size, each.exported) for each in victim.layout.allocations],
            groups=list(victim.layout.groups),
        )
        done = subprocess.run(
            [sys.executable, "-c", THIEF, str(agent.socket_path), msgspec.msgpack.encode(request).hex()],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout.startswith("not-owner: "), done.stdout + done.stderr
        torch.cuda.synchronize()
        assert all(torch.equal(memory, old) for memory, old in zip(victim.memories, before, strict=True))
