"""The lane: whose chunk goes next, and when a copy has ended."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from orbitkv_agent.devices.cuda import lanes
from orbitkv_agent.devices.cuda.geometry import GroupPlaces
from orbitkv_agent.devices.cuda.lanes import CHUNKS_IN_FLIGHT, CopyJob, Lane
from orbitkv_agent.devices.cuda.plans import PagesOfGroup
from orbitkv_agent.devices.cuda.tests.fake_gpu import FakeGpu

PAGE = 1 << 20
CHUNK = 36
"""Pages in a chunk."""


class Bench:
    """A lane with an owner's mailbox that the test empties."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.gpu.set_current(1000)
        self.engine = self.gpu.allocate(240 * PAGE)
        self.host = np.zeros(240 * PAGE, np.uint8)
        self.gpu.pin(self.host.ctypes.data, self.host.nbytes)
        self.mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.ended: list[tuple[str, str]] = []
        self.lost: list[str] = []
        one = np.array([0], np.int64)
        base = np.array([self.engine.ctypes.data], np.int64)
        self.places = GroupPlaces(base, one + PAGE, one + PAGE, one, PAGE, base)
        self.lane = Lane(self.gpu, 1000, "lane", to_device=True, post=self.mail.put, lost=self.lost.append)

    def job(self, name: str, pages: int, first: int = 0) -> CopyJob:
        """Submit a copy of pages that are no neighbours on the GPU (so that each is a piece)."""
        blocks = first + np.arange(pages, dtype=np.int64)[::-1]
        slots = self.host.ctypes.data + (first + np.arange(pages, dtype=np.int64)) * PAGE
        group = PagesOfGroup(self.places, blocks, slots, np.zeros(pages, np.bool_))
        job = CopyJob([group], lambda error: self.ended.append((name, error)))
        self.lane.submit(job)
        return job

    def until(self, condition: Callable[[], object]) -> None:
        """Be the owner thread until `condition` holds."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            with contextlib.suppress(queue.Empty):
                self.mail.get(timeout=0.01)()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.gpu.broken = False
    bench.gpu.release()
    bench.lane.close()


def test_a_small_restore_overtakes_a_large_one(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("large", 6 * CHUNK)
    bench.until(lambda: len(bench.gpu.calls) == CHUNKS_IN_FLIGHT)
    bench.job("small", 8, first=6 * CHUNK)
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == 2)
    assert bench.ended == [("small", ""), ("large", "")]
    # The small one went as the next or the one after.
    assert bench.gpu.calls.index(8) <= CHUNKS_IN_FLIGHT + 1


def test_a_large_restore_is_not_starved_by_small_ones(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("large", 4 * CHUNK)
    bench.until(lambda: len(bench.gpu.calls) == CHUNKS_IN_FLIGHT)
    for i in range(20):
        bench.job(f"small{i}", 1, first=4 * CHUNK + i)
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == 21)
    names = [name for name, _ in bench.ended]
    assert names.index("large") < 10, "every other chunk belongs to the oldest copy"


def test_the_gpu_has_two_chunks_at_most(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("large", 6 * CHUNK)
    bench.until(lambda: len(bench.gpu.calls) == CHUNKS_IN_FLIGHT)
    time.sleep(0.05)  # nothing more may come
    assert len(bench.gpu.calls) == CHUNKS_IN_FLIGHT


def test_what_is_abandoned_drains_and_then_ends(bench: Bench) -> None:
    bench.gpu.hold()
    job = bench.job("large", 6 * CHUNK)
    bench.until(lambda: len(bench.gpu.calls) == CHUNKS_IN_FLIGHT)
    job.abandon()
    time.sleep(0.05)
    while not bench.mail.empty():
        bench.mail.get()()
    assert not bench.ended, "chunks of it are still with the GPU"
    bench.gpu.release()
    bench.until(lambda: bench.ended)
    assert bench.ended == [("large", "nobody needs it any more")]
    assert len(bench.gpu.calls) == CHUNKS_IN_FLIGHT, "what was not submitted was left out"


def test_a_refused_copy_ends_with_the_reason_and_others_go_on(bench: Bench) -> None:
    bench.gpu.refuse = 1
    bench.job("bad", 2 * CHUNK)
    bench.until(lambda: bench.ended)
    name, error = bench.ended[0]
    assert name == "bad" and "CUDA_ERROR_INVALID_VALUE" in error
    bench.gpu.refuse = 0
    bench.job("good", 4)
    bench.until(lambda: len(bench.ended) == 2)
    assert bench.ended[1] == ("good", "")


def test_a_gpu_that_fails_proves_no_end(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("uncertain", CHUNK)
    bench.until(lambda: bench.gpu.calls)
    bench.gpu.broken = True
    bench.until(lambda: bench.lost)
    assert not bench.ended


def test_a_copy_of_nothing_ends_at_once(bench: Bench) -> None:
    bench.job("nothing", 0)
    bench.until(lambda: bench.ended)
    assert bench.ended == [("nothing", "")] and not bench.gpu.calls


def test_a_copy_that_is_planned_piece_by_piece_is_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "PLAN_PAGES", 7)
    bench.host[:] = bench.gpu.allocate(bench.host.nbytes)
    bench.job("many", 30)
    bench.job("few", 3, first=40)
    bench.until(lambda: len(bench.ended) == 2)
    assert sorted(bench.ended) == [("few", ""), ("many", "")]
    pages = bench.host.reshape(-1, PAGE)
    assert (bench.engine.reshape(-1, PAGE)[:30][::-1] == pages[:30]).all()
    assert (bench.engine.reshape(-1, PAGE)[40:43][::-1] == pages[40:43]).all()
    assert sum(bench.gpu.calls) == 33


def test_the_bytes_arrive(bench: Bench) -> None:
    bench.host[:] = bench.gpu.allocate(bench.host.nbytes)
    bench.job("all", 100)
    bench.until(lambda: bench.ended)
    pages = bench.host[: 100 * PAGE].reshape(100, PAGE)
    assert (bench.engine[: 100 * PAGE].reshape(100, PAGE)[::-1] == pages).all()
