"""One engine of `test_releases`, of the release that PYTHONPATH has: saves pages, restores them, and says how it went.

    python -m tests.engine_of_release SOCKET

Prints one JSON object: the versions of its messages, and how many blocks were restored rightly, or an error.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from orbitkv import OrbitKVError, RestoreStatus
from orbitkv.protocol.versions import MESSAGES
from tools.harness.memory_engine import MemoryEngine, numbered_hashes

PAGES = 8


def main() -> None:
    """Does it all once."""
    found: dict[str, object] = {"messages": str(MESSAGES)}
    try:
        with MemoryEngine(sys.argv[1]) as engine:
            found["right"] = saved_and_restored(engine)
    except OrbitKVError as error:
        found |= {"kind": error.kind.value, "error": str(error)}
    print(json.dumps(found))


def saved_and_restored(engine: MemoryEngine) -> int:
    """Save the first blocks and restore them into those after; return how many are right."""
    hashes, computed = numbered_hashes(PAGES), engine.kv[:, :PAGES].copy()
    engine.save(hashes)
    ready = engine.query("request", hashes)
    handle = engine.client.start_restore(engine.registration, ready.leases[0], [np.arange(PAGES, 2 * PAGES)])
    if engine.client.wait_restore(handle, 20) is not RestoreStatus.DONE:
        return 0
    engine.client.query_consumed("request")
    same = (engine.kv[:, PAGES : 2 * PAGES] == computed).all(axis=(0, 2))
    return int(same.sum())


if __name__ == "__main__":
    main()
