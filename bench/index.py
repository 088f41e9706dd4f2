"""Memory and speed of the agent's index: real agents, filled over their sockets to 100,000 and 2 million pages.

The pages are 4 KiB and the pool is not faulted in, so that only the index takes memory of the agent's own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure, percentile, say
from bench.query import latencies
from tools.harness.agent import AgentProcess
from tools.harness.memory_engine import MemoryEngine, numbered_hashes, temporary_agent

SMALL, LARGE = 100_000, 2_000_000
STEP = 20_480
ROUNDS, QUERIES = 50, 100
MACHINE_SECONDS = 20.0


def run() -> list[Figure]:
    """Fill two agents, one to 100,000 and one to 2 million pages, and ask them in turn."""
    with ExitStack() as stack:
        small, large = (stack.enter_context(_filled(pages)) for pages in (SMALL, LARGE))
        say(f"  {ROUNDS * QUERIES:,} queries of each, in turn")
        small_us, large_us = _latencies_in_turn(small.engine, large.engine)
        pause_ms = max(float(each.agent.status()["agent"]["longest_turn_ms"]) for each in (small, large))
    say(f"  how long this machine itself holds up a thread, in {MACHINE_SECONDS:.0f} s")
    machine_ms = _machine_pause_ms(MACHINE_SECONDS)
    return [
        Figure("bytes_per_page", max(small.page_bytes, large.page_bytes), "bytes", bound=400),
        Figure("bytes_per_page_100k", small.page_bytes, "bytes"),
        Figure("query_2m_us", large_us, "us", baseline=small_us),
        Figure("query_2m_ratio", large_us / small_us, "ratio", bound=1.2),
        Figure("longest_pause_ms", pause_ms, "ms", baseline=machine_ms, bound=2),
    ]


@dataclass(frozen=True)
class _Filled:
    """An agent with pages, the engine that saved them, and the memory that each took beside the pool."""

    agent: AgentProcess
    engine: MemoryEngine
    page_bytes: float


@contextmanager
def _filled(pages: int) -> Iterator[_Filled]:
    with (
        temporary_agent(pool="9GiB", prefault=False) as agent,
        MemoryEngine(agent.socket_path, blocks=4096, block_bytes=4096) as engine,
    ):
        empty, start = _own_bytes(agent), time.monotonic()
        for turn, begin in enumerate(range(0, pages, STEP)):
            engine.save(numbered_hashes(min(STEP, pages - begin), first=begin))
            if turn % 20 == 0:
                say(f"  {begin:,} of {pages:,} pages in {time.monotonic() - start:.0f} s")
        yield _Filled(agent, engine, (_own_bytes(agent) - empty) / pages)


def _latencies_in_turn(small: MemoryEngine, large: MemoryEngine) -> tuple[float, float]:
    """p50 of queries of 64 hashes, spread over everything that is stored.

    The speed of a machine changes by half within minutes, so the agents are asked in turn, some queries each.
    """
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS):
        for engine, pages, taken in ((small, SMALL, samples[0]), (large, LARGE, samples[1])):
            for turn in range(number * QUERIES, (number + 1) * QUERIES):
                first = turn * 7919 * 64 % (pages - 64)
                taken.extend(latencies(engine, numbered_hashes(64, first=first), 1))
    return percentile(samples[0], 50), percentile(samples[1], 50)


def _machine_pause_ms(seconds: float) -> float:
    """Longest step of a thread's own clock while the thread does nothing but read it, beside another one as busy.

    That is what a virtual machine's host, or an interrupt, takes from a thread and the kernel counts as its own time:
    the agent's longest turn, beside an engine, cannot be told apart from it.
    """
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            clock, end, longest = time.thread_time, time.monotonic() + seconds, 0.0
            last = clock()
            while time.monotonic() < end:
                now = clock()
                longest = max(longest, now - last)
                last = now
        finally:
            busy.kill()
    return longest * 1000


def _own_bytes(agent: AgentProcess) -> int:
    """Resident memory of the agent's own, without the pool."""
    for line in Path(f"/proc/{agent.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell the agent's RssAnon")
