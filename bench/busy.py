"""The third process of a bench: saves and restores as fast as it can until its input ends."""

from __future__ import annotations

import select
import sys

import numpy as np

from orbitkv import QueryReady
from tools.harness.memory_engine import MemoryEngine, numbered_hashes

PAGES = 64
BLOCK_BYTES = 256 << 10


def main() -> None:
    """Print "running", then work until stdin is closed."""
    with MemoryEngine(sys.argv[1], blocks=2 * PAGES, block_bytes=BLOCK_BYTES, cache_namespace="busy") as engine:
        client, blocks, turn = engine.client, np.arange(PAGES), 0
        while True:
            # New pages each time; when the quota of this namespace is reached they push out its oldest.
            hashes = numbered_hashes(PAGES, first=turn * PAGES)
            engine.save(hashes)
            answer = client.query_prefetch(f"request-{turn}", [hashes], instance=engine.instance)
            if isinstance(answer, QueryReady) and answer.pages:
                handle = client.start_restore(engine.registration, answer.leases[0], [blocks[: answer.pages] + PAGES])
                client.wait_restore(handle, timeout=10)
                client.query_consumed(f"request-{turn}")
            if turn == 0:
                print("running", flush=True)
            turn += 1
            if select.select([sys.stdin], [], [], 0)[0]:
                return


if __name__ == "__main__":
    main()
