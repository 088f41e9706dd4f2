"""Latency of a query that hits, from the call in the engine's scheduler to its result.

The agent, the asking process (this one) and a third process that saves and restores at full speed are separate.
"""

from __future__ import annotations

import subprocess
import sys
import time
import timeit
from pathlib import Path

import numpy as np

from bench import processors
from bench.figures import Figure, percentile, say
from orbitkv import BlockHashes, QueryReady, RestoreStatus
from tools.harness.memory_engine import MemoryEngine, numbered_hashes, temporary_agent

ROUNDS = 10_000
BUSY_SECONDS = 10.0


def run() -> list[Figure]:
    """Measure queries of 64 and 1024 hashes, alone and beside a busy process."""
    begin = processors.now()
    with (
        temporary_agent(pool="1GiB", prefault=True, cache_namespaces="busy: {quota: 512MiB}") as agent,
        MemoryEngine(agent.socket_path, blocks=1024, block_bytes=4096) as engine,
    ):
        hashes = numbered_hashes(1024)
        engine.save(hashes)
        say(f"  {ROUNDS:,} queries of 64 hashes")
        hit_64 = latencies(engine, hashes[:64], ROUNDS)
        say(f"  {ROUNDS:,} queries of 1024 hashes")
        hit_1024 = latencies(engine, hashes, ROUNDS)
        say(f"  queries of 64 hashes for {BUSY_SECONDS:.0f} s beside a process that saves and restores all the time")
        busy = _busy_latencies(engine, hashes[:64], agent.socket_path)
        pending_us, done_us = _poll_restore(engine, hashes[:64])
    return [
        Figure("hit_64_p50_us", percentile(hit_64, 50), "us", bound=80),
        Figure("hit_1024_p50_us", percentile(hit_1024, 50), "us", bound=400),
        Figure("hit_64_p99_busy_us", percentile(busy, 99), "us", baseline=percentile(hit_64, 99), bound=2000),
        Figure("poll_restore_us", max(pending_us, done_us), "us", bound=1),
        Figure("others_busy", processors.others(begin, processors.now()), "processors of other programs"),
    ]


def latencies(engine: MemoryEngine, hashes: BlockHashes, rounds: int) -> list[float]:
    """Microseconds of each query: a different request each time, and the agent has nothing else to do for us."""
    client, instance, samples = engine.client, engine.instance, []
    for number in range(rounds):
        request = f"request-{number}"
        start = time.perf_counter()
        answer = client.query_prefetch(request, [hashes], instance=instance)
        samples.append((time.perf_counter() - start) * 1e6)
        if not isinstance(answer, QueryReady) or answer.pages != len(hashes):
            raise RuntimeError(f"expected {len(hashes)} pages, the agent answered {answer}")
        client.cancel_query(request)
        client.health()  # the lease is back before the next query begins
    return samples


def _busy_latencies(engine: MemoryEngine, hashes: BlockHashes, socket: Path) -> list[float]:
    command = [sys.executable, "-m", "bench.busy", str(socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdin is not None
        assert busy.stdout is not None
        try:
            if busy.stdout.readline().strip() != "running":
                raise RuntimeError("the busy process did not start")
            samples: list[float] = []
            end = time.monotonic() + BUSY_SECONDS
            while time.monotonic() < end:
                samples += latencies(engine, hashes, 100)
            if busy.poll() is not None:
                raise RuntimeError("the busy process ended early: nothing was measured beside it")
        finally:
            busy.stdin.close()  # it ends when its input does
    return samples


def _poll_restore(engine: MemoryEngine, hashes: BlockHashes) -> tuple[float, float]:
    """Microseconds of one poll while the restore is pending, and when it is done."""
    client = engine.client
    answer = client.query_prefetch("poll", [hashes], instance=engine.instance)
    assert isinstance(answer, QueryReady)
    handle = client.start_restore(engine.registration, answer.leases[0], [np.arange(len(hashes))])
    client.query_consumed("poll")
    client.wait_restore(handle, timeout=10)
    polls = 200_000

    def poll() -> float:
        return min(timeit.repeat(lambda: client.poll_restore(handle), number=polls, repeat=3)) / polls * 1e6

    done = poll()
    handle.advance(RestoreStatus.PENDING)  # the same read; nobody else uses this handle any more
    return poll(), done
