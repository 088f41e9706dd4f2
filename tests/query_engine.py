"""One engine of `test_many_engines`: keeps several queries open until enough have resolved, and says how it went."""

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
    """Arguments: socket, identity, concurrent queries, all queries. Prints "ready", waits for a line, prints JSON."""
    socket, identity, concurrent, queries = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    hashes = numbered_hashes(PAGES)
    with MemoryEngine(socket, identity=identity) as engine:
        print("ready", flush=True)
        sys.stdin.readline()
        started: set[str] = set()
        holding: deque[tuple[float, str]] = deque()
        number = resolved = wrong = 0
        while started or holding or number < queries:
            while holding and holding[0][0] <= time.monotonic():
                engine.client.cancel_query(holding.popleft()[1])
            while len(started) < concurrent and number < queries:
                started.add(f"request-{number}")
                number += 1
            for request in list(started):
                answer = engine.client.query_prefetch(request, [hashes], instance=engine.instance, max_wait_ms=5000)
                if isinstance(answer, QueryLoading):
                    continue
                started.remove(request)
                resolved += 1
                wrong += answer.pages not in (0, PAGES) or (answer.pages == 0 and answer.reason != "budget")
                holding.append((time.monotonic() + HOLD_SECONDS, request))
        print(json.dumps({"resolved": resolved, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
