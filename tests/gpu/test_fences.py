"""Copies begin where the engine's stream has come to, never earlier; and neither side hangs the other's streams."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from orbitkv import RestoreStatus, SaveStatus
from tools.harness.agent import AgentProcess
from tools.harness.memory_engine import numbered_hashes
from tools.harness.process import wait_until

torch = pytest.importorskip("torch")

LONG = 200_000_000
"""Clock cycles of a kernel that only waits: about a tenth of a second."""


@pytest.fixture
def it(agent: AgentProcess) -> Any:
    from tools.harness.gpu_engine import GpuEngine, Shape

    with GpuEngine(agent.socket_path, Shape(layers=4, blocks=64)) as engine:
        engine.scramble()
        yield engine


def fill_late(it: Any, blocks: slice, value: int) -> None:
    """Write to blocks on the engine's stream, behind a kernel that takes long."""
    torch.cuda._sleep(LONG)
    for view in it.views:
        view[blocks].view(torch.uint8).fill_(value)


def holds(it: Any, blocks: slice, value: int) -> bool:
    torch.cuda.synchronize()
    return all(bool((view[blocks].view(torch.uint8) == value).all()) for view in it.views)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_save_reads_what_was_computed_before_its_point(it: Any, fenced: bool) -> None:
    hashes = numbered_hashes(8)
    fill_late(it, slice(0, 8), 7)
    it.save(hashes, np.arange(8), it.point() if fenced else None)
    for view in it.views:
        view[:8].view(torch.uint8).fill_(9)  # the engine uses its blocks again
    torch.cuda.synchronize()
    it.restore(hashes, np.arange(8) + 20, it.point())
    assert holds(it, slice(20, 28), 7) is fenced, "without the fence the test must see the older bytes"


@pytest.mark.parametrize("fenced", [True, False])
def test_a_restore_writes_only_after_the_blocks_last_user(it: Any, fenced: bool) -> None:
    hashes = numbered_hashes(8)
    for view in it.views:
        view[:8].view(torch.uint8).fill_(7)
    it.save(hashes, np.arange(8), it.point())
    fill_late(it, slice(20, 28), 9)  # whoever had the blocks before still writes to them
    it.restore(hashes, np.arange(8) + 20, it.point() if fenced else None)
    assert holds(it, slice(20, 28), 7) is fenced, "without the fence the late writer must win"


def test_a_copy_behind_its_point_can_be_withdrawn(it: Any) -> None:
    hashes = numbered_hashes(8)
    it.save(hashes, np.arange(8), it.point())
    torch.cuda._sleep(LONG)
    before = it.memory.clone()
    restore = it.start_restore(hashes, np.arange(8) + 20, it.point())
    saves = it.start_saves(numbered_hashes(8, first=100), np.arange(8), it.point())
    assert it.client.cancel_restore(restore) and restore.status is RestoreStatus.CANCELLED
    assert it.client.cancel_save(saves[0]) and saves[0].status is SaveStatus.CANCELLED
    torch.cuda.synchronize()
    time.sleep(0.05)
    assert torch.equal(before, it.memory)


def test_the_gpu_tells_the_end_of_a_restore_while_the_agent_is_stopped(own_agent: AgentProcess) -> None:
    from tools.harness.gpu_engine import GpuEngine, Shape

    with GpuEngine(own_agent.socket_path, Shape(blocks=64)) as it:
        hashes = numbered_hashes(8)
        it.save(hashes, np.arange(8), it.point())
        own_agent.wait(
            lambda status: status["pool"]["prefaulted_bytes"] == status["pool"]["capacity_bytes"], "all is pinned"
        )
        restore = it.start_restore(hashes, np.arange(8) + 20)
        assert it.client.wait_restore_enqueued(restore, timeout=10)
        own_agent.pause()
        try:
            wait_until(lambda: it.client.poll_restore(restore).final, "the GPU has said so", 5)
            assert restore.status is RestoreStatus.DONE
            for view in it.views:
                assert torch.equal(view[20:28].view(torch.uint8), view[:8].view(torch.uint8))
        finally:
            own_agent.resume()
        own_agent.wait_at_rest(10)
