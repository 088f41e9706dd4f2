"""kill -9 of either side among copies: nothing wrong is ever restored, nothing is written later, memory comes back.

ORBITKV_TEST_THOROUGH=1 kills 30 engines and 200 agents; without it there are a few of each.
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

import msgspec
import pytest

from tests.gpu.children import APART, AS_ANOTHER, MIB, begun, checked, child, environment, gpu_used
from tools.harness.agent import AgentProcess
from tools.harness.engine import ROOT
from tools.harness.process import wait_until

pytest.importorskip("torch")

THOROUGH = os.environ.get("ORBITKV_TEST_THOROUGH") == "1"
ENGINES_AT_ONCE = 3
ENGINE_ROUNDS = 10 if THOROUGH else 2
KILLERS = 10 if THOROUGH else 2
AGENTS_OF_A_KILLER = 20 if THOROUGH else 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["work", "hold"])
def test_engines_killed_among_copies_leave_nothing_behind(own_agent: AgentProcess, what: str) -> None:
    assert "checked 0" in checked(own_agent.socket_path)  # the agent's own context is there from now on
    before = gpu_used()
    rounds = 0
    for _ in range(ENGINE_ROUNDS if what == "work" else 1):
        engines = [child(own_agent.socket_path, what) for _ in range(ENGINES_AT_ONCE)]
        for engine in engines:
            begun(engine)
        for engine in engines:
            time.sleep(random.uniform(0.05, 0.4))
            engine.send_signal(signal.SIGKILL)
        for engine in engines:
            out, _ = engine.communicate()
            assert "WRONG" not in out, out
            rounds += out.count("round")
        wait_until(lambda: gpu_used() <= before + 64 * MIB, "the GPU's memory is back", 10)
        own_agent.wait_at_rest(10)
    assert rounds or what == "hold", "some copies came to their end"
    print(checked(own_agent.socket_path))


@pytest.mark.timeout(600)
def test_agents_killed_among_copies_write_nothing_after_their_exit(tmp_path: Path) -> None:
    from tests.gpu.agent_kills import Kills

    before = gpu_used()
    killers = []
    for number in range(KILLERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-m", "tests.gpu.agent_kills", str(folder), str(AGENTS_OF_A_KILLER)]
        killers.append(subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True))
    found = []
    for killer in killers:
        out, _ = killer.communicate(timeout=500)
        assert killer.returncode == 0, out
        found.append(msgspec.json.decode(out, type=Kills))
    print(*found, sep="\n")
    assert sum(each.kills for each in found) == KILLERS * AGENTS_OF_A_KILLER
    assert sum(each.late for each in found) == 0, f"something was written after an exit: {found}"
    assert sum(each.wrong for each in found) == 0, f"what was said to be restored was not: {found}"
    assert sum(each.among for each in found) * 4 > sum(each.kills for each in found), f"too few among copies: {found}"
    wait_until(lambda: gpu_used() <= before + 64 * MIB, "the GPU's memory is back", 10)


def test_an_agents_death_is_known_within_a_second(tmp_path: Path) -> None:
    from tests.gpu.agent_kills import Kills, kill_one

    agent = AgentProcess(tmp_path, mode="cuda", pool="2GiB")
    try:
        found = Kills()
        kill_one(agent, found)
        assert found.told_s < 1 and found.stream_s < 1, found
        assert not found.late and not found.wrong, found
    finally:
        agent.kill9()


NAMESPACES = pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root and unshare")


@NAMESPACES
@pytest.mark.parametrize("both", [False, True], ids=["engine apart", "both apart"])
def test_engine_and_agent_in_namespaces_of_their_own(tmp_path: Path, both: bool) -> None:
    with AgentProcess(tmp_path, mode="cuda", pool="2GiB", before=APART if both else []) as agent:
        assert "checked 0" in checked(agent.socket_path, *AS_ANOTHER)
        used = gpu_used()
        engine = child(agent.socket_path, "work", *AS_ANOTHER)
        begun(engine)
        assert engine.stdout is not None
        lines = [engine.stdout.readline() for _ in range(3)]
        assert all(line.startswith("round") for line in lines), lines
        engine.kill()  # and with it, by the kernel, what it runs
        engine.wait()
        agent.wait_at_rest(10)
        wait_until(lambda: gpu_used() <= used + 64 * MIB, "the GPU's memory is back", 10)
        out = checked(agent.socket_path, *AS_ANOTHER)
        assert "checked 0" not in out, out
        agent.kill9()  # unshare passes nothing else on


@NAMESPACES
def test_an_engine_with_the_agents_own_number_in_its_container_is_refused_by_name(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, mode="cuda", pool="2GiB", before=APART) as agent:
        engine = child(agent.socket_path, "check", *APART, stderr=subprocess.PIPE)
        _, error = engine.communicate(timeout=30)
        assert engine.returncode and "process number 1" in error, error
        assert "checked 0" in checked(agent.socket_path, *AS_ANOTHER), "others are served"
        agent.kill9()
