"""kill -9 of either side among copies: nothing wrong is ever restored, nothing is written later, memory comes back.

ORBITKV_GPU_KILLS is the number of kills of each kind (default 5).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from orbitkv import RestoreStatus
from orbitkv_agent.devices.cuda.nvml import used_bytes
from tools.harness.agent import AgentProcess
from tools.harness.engine import ROOT
from tools.harness.process import wait_until

KILLS = int(os.environ.get("ORBITKV_GPU_KILLS", "5"))
PAGES = 400
MIB = 1 << 20


def environment() -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "engine_plugins"), str(ROOT / "node_agent"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def child(socket: Path, what: str, *before: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "tests.gpu.plain_engine", str(socket), what, "--pages", str(PAGES)]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)


def checked(socket: Path, *before: str) -> str:
    """Have a fresh engine restore every page that the agent has; what it says."""
    process = child(socket, "check", *before)
    out, _ = process.communicate(timeout=110)
    assert process.returncode == 0, out
    assert "WRONG" not in out, out
    return out


def gpu_used() -> int:
    from orbitkv.cuda import LibCuda

    used = used_bytes(LibCuda().gpus()[0].uuid)
    assert used is not None
    return used


@pytest.mark.timeout(600)
def test_an_engine_killed_among_copies_leaves_nothing_behind(own_agent: AgentProcess) -> None:
    first = child(own_agent.socket_path, "check")
    first.communicate(timeout=60)  # the agent's own context is there from now on
    before = gpu_used()
    rounds = 0
    for _ in range(KILLS):
        engine = child(own_agent.socket_path, "work")
        assert engine.stdout is not None and engine.stdout.readline().strip() == "go"
        time.sleep(random.uniform(0.05, 0.6))
        engine.send_signal(signal.SIGKILL)
        out, _ = engine.communicate()
        assert "WRONG" not in out, out
        rounds += out.count("round")
        wait_until(lambda: gpu_used() <= before + 64 * MIB, "the GPU's memory is back", 10)
        own_agent.wait_at_rest(10)
    assert rounds, "some copies came to their end"
    print(checked(own_agent.socket_path))


@pytest.mark.timeout(600)
def test_an_agent_killed_among_copies_writes_nothing_after_its_exit(tmp_path: Path) -> None:
    from tests.gpu.plain_engine import BLOCKS, PlainEngine, names

    engine: PlainEngine | None = None
    ends = {RestoreStatus.DONE: 0, RestoreStatus.FAILED: 0}
    for turn in range(KILLS):
        agent = AgentProcess(tmp_path, f"agent{turn}", mode="cuda", pool="4GiB")
        try:
            if engine is None:
                engine = PlainEngine(str(agent.socket_path))
            else:
                engine.connect(str(agent.socket_path))
            numbers = list(range(200))
            engine.keep(numbers, numbers)
            blocks = [np.array(random.sample(range(200, BLOCKS), 200)) for _ in range(4)]
            client, registration, other = engine.client, engine.registration, names(list(range(1000, 1200)))
            leases = [engine.lease(numbers) for _ in blocks]
            assert all(pages == 200 for pages, _ in leases)
            handles = [
                client.start_restore(registration, lease, [chosen])
                for (_, lease), chosen in zip(leases, blocks, strict=True)
            ]
            save = client.start_save(registration, [other], [np.arange(200)])
            time.sleep(random.uniform(0.0, 0.03))
            agent.signal(signal.SIGKILL)
            for handle in handles:
                status = engine.client.wait_restore(handle, timeout=20)
                assert status.final, "the agent's exit is known"
                ends[status] += 1
            engine.snapshot()
            assert engine.client.wait_save(save, timeout=20).final
            time.sleep(0.12)
            assert not engine.differs_from_snapshot(), "something was written after the exit"
            engine.client.close()
        finally:
            agent.kill9()
    assert ends[RestoreStatus.FAILED], f"no kill fell among copies: {ends}"


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root and unshare")
def test_an_engine_in_namespaces_of_its_own_is_served(own_agent: AgentProcess) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--net", "--uts", "--mount"]
    engine = child(own_agent.socket_path, "work", *apart)
    assert engine.stdout is not None and engine.stdout.readline().strip() == "go"
    lines = [engine.stdout.readline() for _ in range(3)]
    assert all(line.startswith("round") for line in lines), lines
    subprocess.run(["pkill", "-KILL", "-P", str(engine.pid)], check=False)
    engine.kill()
    engine.wait()
    own_agent.wait_at_rest(10)
    assert "checked" in checked(own_agent.socket_path, *apart)
