"""One engine of `test_many_engines`: keeps a number of queries open for a while and says how it went."""

from __future__ import annotations

import json
import sys
import time
from collections import deque

from orbitkv import QueryLoading
from tools.harness.memory_engine import MemoryEngine, numbered_hashes

PAGES = 64
HOLD_SECONDS = 0.02
"""How long a lease is kept: as long as a restore may take."""


def main() -> None:
    """Arguments: socket, identity, concurrent queries, seconds. Prints "ready", waits for a line, prints JSON."""
    socket, identity, concurrent, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    hashes = numbered_hashes(PAGES)
    with MemoryEngine(socket, identity=identity) as engine:
        print("ready", flush=True)
        sys.stdin.readline()
        started: dict[str, float] = {}
        holding: deque[tuple[float, str]] = deque()
        number = resolved = wrong = 0
        slowest = 0.0
        end = time.monotonic() + seconds
        while started or holding or time.monotonic() < end:
            while holding and holding[0][0] <= time.monotonic():
                engine.client.cancel_query(holding.popleft()[1])
            while len(started) < concurrent and time.monotonic() < end:
                started[f"request-{number}"] = time.monotonic()
                number += 1
            for request in list(started):
                answer = engine.client.query_prefetch(
                    request, [hashes], instance=engine.instance, max_wait_ms=5000, timeout_ms=5000
                )
                if isinstance(answer, QueryLoading):
                    continue
                slowest = max(slowest, time.monotonic() - started.pop(request))
                resolved += 1
                wrong += answer.pages not in (0, PAGES) or (answer.pages == 0 and answer.reason != "budget")
                holding.append((time.monotonic() + HOLD_SECONDS, request))
        print(json.dumps({"resolved": resolved, "slowest_s": slowest, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
