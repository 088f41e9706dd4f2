"""That an agent stays within what its pod asks for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from orbitkv_crds.agent_memory import BASE_BYTES, PAGE_BYTES, SMALLEST_PAGE, agent_memory, agent_overhead

MIB = 1 << 20
PAGES = 300_000
SCRIPT = """
import sys
from orbitkv_agent.cluster.cluster import Cluster
from orbitkv_agent.agent import Agent
from orbitkv_agent.store.arenas import ArenaPool
from orbitkv_agent.store.cache import PageCache
import os

def own():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) * 1024

base = own()
count = int(sys.argv[1])
cache = PageCache(ArenaPool(count * 4096 + (64 << 20), 64 << 20, prefault=False, threaded=False))
space = cache.open_key_space("n", "model", 0, shards=1, hash_bytes=32)
for _ in range(0, count, 500):
    reservation = cache.reserve(space, 0, os.urandom(32 * 500), 0, 4096)
    assert len(reservation) == 500
    cache.commit(reservation)
print(base, (own() - base) / count)
"""


def test_the_process_and_its_pages_stay_within_what_the_pod_asks_for() -> None:
    """Nothing is written to the pages, so the pool itself takes no memory here."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(PAGES)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=100)
    base, a_page = map(float, done.stdout.split())
    assert base < BASE_BYTES * 0.6  # the rest is for sessions and the cluster's lists
    assert a_page < PAGE_BYTES * 1.1  # tables grow in steps


@pytest.mark.parametrize("pool", [1 << 20, 1 << 30, (1 << 40) + 1])
def test_what_a_pod_asks_for_is_the_pool_and_its_overhead(pool: int) -> None:
    overhead = agent_overhead(pool)
    assert overhead % MIB == 0
    assert overhead >= BASE_BYTES + pool // SMALLEST_PAGE * PAGE_BYTES
    assert overhead - BASE_BYTES <= pool // 100 + MIB  # less than a hundredth
    assert agent_memory(pool) == pool + overhead
