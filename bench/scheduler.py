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
        if engine.query("takes the budget", hashes).pages != PAGES:
            raise RuntimeError("the budget could not be taken, so no query would wait")
        say("  500 requests, all of them loading, polled in 2,000 steps")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "engine_plugins"), str(root)])}
        steps = subprocess.run(
            [python, "-m", "bench.scheduler_step", str(agent.socket_path)],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
    samples = json.loads(steps.stdout.splitlines()[-1])
    return [
        Figure("step_500_waiting_p50_us", percentile(samples, 50), "us"),
        Figure("step_500_waiting_p99_us", percentile(samples, 99), "us", bound=1000),
    ]
