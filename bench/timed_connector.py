"""OrbitKV's connector, with the time of its calls: what it costs the engine's main thread, and where a restore waits.

Named to vLLM by `kv_connector_module_path`. Where scheduler and worker share a process, as on one GPU, both halves are
seen. A reset of the external cache writes all down: to the file that ORBITKV_BENCH_CALLS names, as JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from orbitkv.vllm.connector import OrbitKVConnector as Connector
from tools.harness.connector_time import SCHEDULER, WORKER

CALLS: Final = "ORBITKV_BENCH_CALLS"

_calls: deque[tuple[str, float, float, list[int]]] = deque(maxlen=100_000)
"""Name, begin and seconds of the last calls, and what there is to say about each: see `_note`."""


def _note(name: str, args: tuple[Any, ...], result: Any) -> list[int]:
    """Tokens found; tokens to restore; loads and tokens of a step; restores that ended."""
    if name == "get_num_new_matched_tokens":
        return [result[0] or 0]
    if name == "update_state_after_alloc":
        return [args[2]]
    if name == "build_connector_meta":
        return [len(result.loads), args[0].total_num_scheduled_tokens]
    if name == "update_connector_output":
        return [len(args[0].finished_recving or ())]
    return []


def _timed(name: str) -> Any:
    inner = getattr(Connector, name)

    def call(self: Connector, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = inner(self, *args, **kwargs)
        _calls.append((name, started, time.perf_counter() - started, _note(name, args, result)))
        return result

    call.__name__ = name
    return call


def _reset_cache(self: Connector) -> bool | None:
    """Write the calls down, then reset."""
    if file := os.environ.get(CALLS):
        Path(file).write_text(json.dumps(list(_calls)))
    _calls.clear()
    return Connector.reset_cache(self)


OrbitKVConnector: Any = type(
    "OrbitKVConnector",
    (Connector,),
    {
        "__module__": __name__,
        "reset_cache": _reset_cache,
        **{name: _timed(name) for name in (*SCHEDULER, "take_restored", *WORKER)},
    },
)
