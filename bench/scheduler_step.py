"""The engine's side of the scheduler bench: steps of the connector's scheduler half, in the engine's environment."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from orbitkv import Instance
from orbitkv.config import PluginConfig
from orbitkv.vllm.scheduler import SchedulerHalf
from tools.harness.memory_engine import MemoryEngine, numbered_hashes

REQUESTS = 500
STEPS = 2_000
BLOCK_TOKENS = 16
BLOCKS = 64


def main() -> None:
    """Print "ready", wait for a line, print the microseconds that the connector took in each step as a JSON list."""
    socket = sys.argv[1]
    instance = Instance("bench", "scheduler")
    config = PluginConfig.load({"orbitkv.bootstrap_socket": socket, "orbitkv.max_wait_ms": 600_000}, {})
    half = SchedulerHalf(config, instance, block_tokens=BLOCK_TOKENS, workers=1)
    half.start()
    with MemoryEngine(socket, blocks=64, identity="bench", worker_of=instance):
        hashes = numbered_hashes(BLOCKS)
        requests = [waiting_request(f"request-{number}", list(hashes)) for number in range(REQUESTS)]
        for request in requests:
            half.on_new_request(request)
        nothing_scheduled = SimpleNamespace(
            preempted_req_ids=None, num_scheduled_tokens={}, scheduled_spec_decode_tokens={}
        )

        def step() -> int:
            """One step of the engine's scheduler; returns how many requests were answered "ask again"."""
            loading = sum(half.get_num_new_matched_tokens(request, 0) == (None, False) for request in requests)
            half.build_step_metadata(nothing_scheduled)
            return loading

        print("ready", flush=True)
        sys.stdin.readline()  # the budget is taken now
        samples: list[float] = []
        deadline = time.monotonic() + 120
        while len(samples) < STEPS:
            start = time.perf_counter()
            loading = step()
            microseconds = (time.perf_counter() - start) * 1e6
            # Before all have asked, and while the breaker is open on a busy machine, it is not the step to measure.
            if loading == REQUESTS:
                samples.append(microseconds)
            elif time.monotonic() > deadline:
                raise RuntimeError(f"only {len(samples)} steps in which all {REQUESTS} requests were loading")
            time.sleep(0.001)  # the engine computes
        half.shutdown()
    print(json.dumps(samples))


def waiting_request(name: str, hashes: list[bytes]) -> Any:
    """One of vLLM's own requests, waiting with nothing computed."""
    return Request(
        request_id=name,
        prompt_token_ids=[1] * (BLOCKS * BLOCK_TOKENS + 1),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=lambda request: [] if request.block_hashes else hashes,
    )


if __name__ == "__main__":
    main()
