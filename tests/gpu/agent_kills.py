"""Kill agents among copies and look at what they leave, in an engine's process.

    python -m tests.gpu.agent_kills FOLDER KILLS

Each agent is killed at a random moment with restores and a save in flight. Once its exit is known nothing may write to
the engine's memory any more, what was said to be restored must be so, and the engine's stream must run on. Prints what
was found as one line of JSON, `Kills`.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from orbitkv import RestoreStatus
from tools.harness.agent import AgentProcess
from tools.harness.gpu_engine import GpuEngine, Shape
from tools.harness.memory_engine import numbered_hashes

PAGES = 64
RESTORES = 6
AFTER_S = (0.001, 0.02, 0.1)
"""When the memory is looked at after an exit."""


class Kills(msgspec.Struct):
    """What was found.

    Attributes:
        kills: agents killed.
        among: kills with copies in flight: at least one restore had not ended.
        done, failed: restores by their end.
        late: kills after whose exit something was still written.
        wrong: restores that were done with other bytes than the pages have.
        told_s: longest time from a kill until all restores and the save had ended.
        stream_s: longest time until the engine's stream had done work that it was given right after a kill.
    """

    kills: int = 0
    among: int = 0
    done: int = 0
    failed: int = 0
    late: int = 0
    wrong: int = 0
    told_s: float = 0.0
    stream_s: float = 0.0


def kill_one(agent: AgentProcess, found: Kills) -> None:
    """See the module."""
    blocks = np.random.default_rng().permutation(np.arange(PAGES, PAGES * (RESTORES + 1))).reshape(RESTORES, PAGES)
    with GpuEngine(agent.socket_path, Shape(blocks=PAGES * (RESTORES + 1))) as engine:
        client, hashes = engine.client, numbered_hashes(PAGES)
        engine.save(hashes, np.arange(PAGES), engine.point())
        pages = [view[:PAGES].view(torch.uint8).clone() for view in engine.views]
        restores = [engine.start_restore(hashes, chosen, engine.point()) for chosen in blocks]
        (save,) = engine.start_saves(numbered_hashes(PAGES, first=PAGES), np.arange(PAGES), engine.point())
        time.sleep(random.uniform(0.0, 0.02))
        agent.signal(signal.SIGKILL)
        killed = time.monotonic()
        busy = torch.ones(1 << 20, device="cuda") + 1
        torch.cuda.current_stream().synchronize()
        found.stream_s = max(found.stream_s, time.monotonic() - killed)
        ends = [client.wait_restore(restore, timeout=20) for restore in restores]
        if not all(end.final for end in ends) or not client.wait_save(save, timeout=20).final:
            raise RuntimeError(f"an agent ended and nobody was told: {ends}, {save.status}")
        found.told_s = max(found.told_s, time.monotonic() - killed)
        snapshot = engine.memory.clone()
        torch.cuda.synchronize()
        late = False
        for pause in AFTER_S:
            time.sleep(pause)
            late = late or not torch.equal(snapshot, engine.memory)
        found.kills += 1
        found.late += late
        found.among += RestoreStatus.FAILED in ends
        found.done += ends.count(RestoreStatus.DONE)
        found.failed += ends.count(RestoreStatus.FAILED)
        for end, chosen in zip(ends, blocks, strict=True):
            here = torch.from_numpy(chosen).cuda()
            if end is RestoreStatus.DONE and not all(
                torch.equal(view.view(torch.uint8)[here], page) for view, page in zip(engine.views, pages, strict=True)
            ):
                found.wrong += 1
        del busy


def main() -> None:
    """See the module."""
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    found = Kills()
    for turn in range(kills):
        agent = AgentProcess(folder, f"agent{turn}", mode="cuda", pool="2GiB")
        try:
            kill_one(agent, found)
        finally:
            agent.kill9()
        gc.collect()  # the engine's memory: its client's parts refer to one another
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
