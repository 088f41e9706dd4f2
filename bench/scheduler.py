"""What OrbitKV costs the engine's loop while 500 requests wait for an answer.

The connector's scheduler half runs in the engine's own environment, against a real agent whose budget is taken, so
that every lookup is "loading" and is asked again in every step.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from bench.figures import Figure, percentile, say
from tools import engine_env
from tools.harness.memory_engine import MemoryEngine, numbered_hashes, temporary_agent

PAGES = 3072
POOL = 16 << 20
"""4,096 pages of 4 KiB: three quarters of them, which is the budget, are leased by another engine."""


def run() -> list[Figure]:
    """Measure steps with 500 waiting requests, each polled in every step."""
    python = engine_env.ensure()
    root = Path(__file__).parents[1]
    with (
        temporary_agent(pool=POOL) as agent,
        MemoryEngine(agent.socket_path, blocks=512, identity="bench") as engine,
    ):
        hashes = numbered_hashes(PAGES)
        engine.save(hashes)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "engine_plugins"), str(root)])}
        command = [str(python), "-m", "bench.scheduler_step", str(agent.socket_path)]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as steps:
            assert steps.stdout is not None
            if steps.stdout.readline().strip() != "ready":
                raise RuntimeError("the engine's side did not start")
            if engine.query("takes the budget", hashes).pages != PAGES:
                raise RuntimeError("the budget could not be taken, so no query would wait")
            say("  500 requests, all of them loading, polled in 2,000 steps")
            printed, _ = steps.communicate("go\n", timeout=200)
        if steps.returncode:
            raise RuntimeError(f"the engine's side ended with {steps.returncode}")
    samples = json.loads(printed.splitlines()[-1])
    return [
        Figure("step_500_waiting_p50_us", percentile(samples, 50), "us"),
        Figure("step_500_waiting_p99_us", percentile(samples, 99), "us", bound=1000),
    ]
