"""Memory and speed of the agent's index: a real agent, filled over its socket to 2 million pages.

The pages are 4 KiB and the pool is not faulted in, so that only the index takes memory of the agent's own.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.figures import Figure, percentile, say
from bench.query import latencies
from tools.harness.agent import AgentProcess
from tools.harness.memory_engine import MemoryEngine, numbered_hashes, temporary_agent

SMALL, LARGE = 100_000, 2_000_000
STEP = 20_480
MACHINE_SECONDS = 20.0


def run() -> list[Figure]:
    """Fill, measuring at 100,000 and at 2 million pages."""
    with (
        temporary_agent(pool="9GiB", prefault=False) as agent,
        MemoryEngine(agent.socket_path, blocks=4096, block_bytes=4096) as engine,
    ):
        empty = _own_bytes(agent)
        _fill(engine, 0, SMALL)
        small_bytes = (_own_bytes(agent) - empty) / SMALL
        small = _spread_latencies(engine, SMALL)
        _fill(engine, SMALL, LARGE)
        large_bytes = (_own_bytes(agent) - empty) / LARGE
        large = _spread_latencies(engine, LARGE)
        pause_ms = float(agent.status()["agent"]["longest_turn_ms"])
    say(f"  how long this machine itself holds up a thread, in {MACHINE_SECONDS:.0f} s")
    machine_ms = _machine_pause_ms(MACHINE_SECONDS)
    small_us, large_us = percentile(small, 50), percentile(large, 50)
    return [
        Figure("bytes_per_page", max(small_bytes, large_bytes), "bytes", bound=400),
        Figure("bytes_per_page_100k", small_bytes, "bytes"),
        Figure("query_2m_us", large_us, "us", baseline=small_us),
        Figure("query_2m_ratio", large_us / small_us, "ratio", bound=1.2),
        Figure("longest_pause_ms", pause_ms, "ms", baseline=machine_ms, bound=2),
    ]


def _fill(engine: MemoryEngine, first: int, last: int) -> None:
    start = time.monotonic()
    for begin in range(first, last, STEP):
        engine.save(numbered_hashes(min(STEP, last - begin), first=begin))
        if begin // STEP % 20 == 0:
            say(f"  {begin:,} pages in {time.monotonic() - start:.0f} s")


def _spread_latencies(engine: MemoryEngine, pages: int) -> list[float]:
    """Queries of 64 hashes, spread over everything that is stored."""
    samples: list[float] = []
    for turn in range(5_000):
        first = turn * 7919 * 64 % (pages - 64)
        samples += latencies(engine, numbered_hashes(64, first=first), 1)
    return samples


def _machine_pause_ms(seconds: float) -> float:
    """Longest step of a thread's own clock while the thread does nothing but read it.

    That is what a virtual machine's host, or an interrupt, takes from a thread and the kernel counts as its own time:
    the agent's longest turn cannot be told apart from it.
    """
    clock, end, longest = time.thread_time, time.monotonic() + seconds, 0.0
    last = clock()
    while time.monotonic() < end:
        now = clock()
        longest = max(longest, now - last)
        last = now
    return longest * 1000


def _own_bytes(agent: AgentProcess) -> int:
    """Resident memory of the agent's own, without the pool."""
    for line in Path(f"/proc/{agent.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell the agent's RssAnon")
