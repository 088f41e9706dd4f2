"""Many engines on one agent: everybody is served, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbitkv import QueryReady, RestoreStatus
from tools.harness.agent import AgentProcess
from tools.harness.memory_engine import MemoryEngine, numbered_hashes
from tools.harness.process import wait_until

ENGINES = 8
PAGES = 64
PAGE_BYTES = 4096
POOL = 16 << 20


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    # The budget holds 48 leases at a time, of the 960 or 1600 that the engines want.
    with AgentProcess(tmp_path, pool=POOL) as process:
        yield process


def run_engines(agent: AgentProcess, identity: str, concurrent: int, queries: int) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "tests.query_engine",
        str(agent.socket_path),
        identity,
        str(concurrent),
        str(queries),
    ]
    engines = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(ENGINES)
    ]
    try:
        for engine in engines:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "ready\n"
        for engine in engines:
            assert engine.stdin is not None
            engine.stdin.write("go\n")
            engine.stdin.flush()
        return [json.loads(engine.communicate(timeout=60)[0]) for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()


@pytest.mark.parametrize("concurrent", [120, 200])
def test_every_query_of_eight_engines_resolves(agent: AgentProcess, concurrent: int) -> None:
    with MemoryEngine(agent.socket_path, block_bytes=PAGE_BYTES, identity="shared") as engine:
        engine.save(numbered_hashes(PAGES))
        for result in run_engines(agent, "shared", concurrent, queries=600):
            assert result["resolved"] == 600
            assert result["wrong"] == 0, "an answer was neither the whole prefix nor nothing for want of budget"
        status = agent.wait_at_rest()
        assert 0 < status["query"]["reserved_peak_bytes"] <= status["query"]["budget_bytes"]
        assert status["query"]["budget_waits"] > 0
        assert status["query"]["unadmitted"] > 0 or concurrent <= 128


def descriptors(process: AgentProcess) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def threads(process: AgentProcess) -> int:
    return len(os.listdir(f"/proc/{process.pid}/task"))


def resident(process: AgentProcess) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_four_thousand_aborted_requests_leave_nothing_behind(agent: AgentProcess) -> None:
    with MemoryEngine(agent.socket_path, block_bytes=PAGE_BYTES) as engine:
        hashes = numbered_hashes(PAGES)
        engine.save(hashes)

        def abort(number: int) -> None:
            """Abort at one stage after another: asked, answered, restoring, done; saving."""
            request, client = f"r{number}", engine.client
            answer = client.query_prefetch(request, [hashes], instance=engine.instance)
            stage = number % 4
            if stage == 1 and isinstance(answer, QueryReady):
                client.release(answer)
            elif stage == 2 and isinstance(answer, QueryReady) and answer.leases:
                handle = client.start_restore(engine.registration, answer.leases[0], [np.arange(PAGES)])
                client.cancel_restore(handle)
            elif stage == 3:
                save = client.prepare_save(
                    engine.registration, [numbered_hashes(1, first=9000 + number)], [np.arange(1)]
                )
                client.submit_saves([save])
                client.cancel_save(save)
            client.cancel_query(request)

        for number in range(500):
            abort(number)
        before = (descriptors(agent), threads(agent))
        memory = resident(agent)
        for number in range(500, 4500):
            abort(number)
        agent.wait_at_rest()
        # The sessions that asked for the status close a moment later.
        same = f"descriptors and threads as before, {before}"
        wait_until(lambda: (descriptors(agent), threads(agent)) == before, same, 10)
        assert resident(agent) - memory < 8 << 20


def test_a_pool_full_of_leased_pages_drops_saves_and_still_restores(tmp_path: Path) -> None:
    pages, parts = POOL // PAGE_BYTES, 8
    part = pages // parts
    with (
        AgentProcess(tmp_path, pool=POOL, query_budget_percent=100) as agent,
        MemoryEngine(agent.socket_path, blocks=part, block_bytes=PAGE_BYTES) as engine,
    ):
        client, hashes = engine.client, numbered_hashes(pages)
        engine.save(hashes)
        leased = [engine.query(f"r{i}", hashes[i * part : (i + 1) * part]) for i in range(parts)]
        assert [ready.pages for ready in leased] == [part] * parts

        more = numbered_hashes(part, first=pages)
        save = client.start_save(engine.registration, [more], [np.arange(part)])
        client.wait_save(save, 10)
        assert save.dropped == {"pool-full": part}
        assert agent.status()["transfer"]["save_dropped"]["pool-full"] == part

        engine.kv[:] = 0
        restore = client.start_restore(engine.registration, leased[3].leases[0], [np.arange(part)])
        assert client.wait_restore(restore, 10) is RestoreStatus.DONE
        assert engine.kv.any(axis=2).all(), "every block was filled"

        for i in range(parts):
            client.cancel_query(f"r{i}")
        agent.wait_at_rest()
        engine.save(more)
        assert engine.query("more", more).pages == part
