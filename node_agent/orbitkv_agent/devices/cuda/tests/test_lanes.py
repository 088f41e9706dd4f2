"""Lanes and the express: whose chunk goes next, and when a copy has ended."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from orbitkv_agent.devices.base import Word
from orbitkv_agent.devices.cuda import lanes
from orbitkv_agent.devices.cuda.express import IN_FLIGHT, Express
from orbitkv_agent.devices.cuda.geometry import GroupPlaces
from orbitkv_agent.devices.cuda.lanes import CHUNKS_IN_FLIGHT, FIRST_PAGES, CopyJob, Lane
from orbitkv_agent.devices.cuda.plans import PagesOfGroup
from orbitkv_agent.devices.cuda.tests.fake_gpu import FakeGpu

PAGE = 1 << 20
CHUNK = 28
"""Pages in a chunk."""


class Said:
    """What is said of a copy, in two words of host memory: its end, and the chunks that are through.

    Attributes:
        begun: chunks that were handed over, or are about to be.
        open: of these, such whose handing over has not ended.
        wanted: more may be handed over.
    """

    def __init__(self, words: np.ndarray[Any, Any], value: int) -> None:
        self.words, self.value = words, value
        self.begun = self.open = 0
        self.wanted = True

    def begin(self) -> bool:
        self.begun += self.wanted
        self.open += self.wanted
        return self.wanted

    def end(self) -> None:
        self.open -= 1

    def word(self, *, last: bool, layers: int) -> Word:
        address = self.words.ctypes.data
        return Word(address, self.value) if last else Word(address + 8, self.begun)


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
        self.places = GroupPlaces(base, one + PAGE, one + PAGE, one, PAGE, base, (base, one + PAGE, one + PAGE, one))
        self.lane = Lane(self.gpu, 1000, "lane", to_device=True, post=self.mail.put, lost=self.lost.append)
        self.express = Express(self.gpu, 1000, "express", post=self.mail.put, lost=self.lost.append)
        self.word = np.zeros(2, np.uint64)
        self.gpu.pin(self.word.ctypes.data, 16)

    def says(self, value: int) -> Said:
        """What is said in the bench's words."""
        return Said(self.word, value)

    def copy(self, name: str, pages: int, first: int = 0, said: Said | None = None) -> CopyJob:
        """A copy of pages that are no neighbours on the GPU (so that each is a piece)."""
        blocks = first + np.arange(pages, dtype=np.int64)[::-1]
        slots = self.host.ctypes.data + (first + np.arange(pages, dtype=np.int64)) * PAGE
        group = PagesOfGroup(self.places, blocks, slots, np.zeros(pages, np.bool_))
        return CopyJob([group], lambda error: self.ended.append((name, error)), progress=said)

    def job(self, name: str, pages: int, first: int = 0, said: Said | None = None) -> CopyJob:
        """Submit such a copy."""
        job = self.copy(name, pages, first, said)
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
    bench.express.close()


def test_a_small_restore_overtakes_a_large_one(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("large", 6 * CHUNK)
    bench.until(lambda: len(bench.gpu.calls) == CHUNKS_IN_FLIGHT)
    bench.job("small", 8, first=6 * CHUNK)
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == 2)
    assert bench.ended == [("small", ""), ("large", "")]
    assert not bench.lane.copies
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


def test_the_gpu_has_a_few_chunks_at_most(bench: Bench) -> None:
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


def test_pages_are_planned_by_whole_chunks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "PLAN_PAGES", 2 * CHUNK + 5)
    bench.job("many", 6 * CHUNK + 3)
    bench.until(lambda: bench.ended)
    assert bench.gpu.calls == [CHUNK] * 6 + [3]


def test_the_bytes_arrive(bench: Bench) -> None:
    bench.host[:] = bench.gpu.allocate(bench.host.nbytes)
    bench.job("all", 100)
    bench.until(lambda: bench.ended)
    pages = bench.host[: 100 * PAGE].reshape(100, PAGE)
    assert (bench.engine[: 100 * PAGE].reshape(100, PAGE)[::-1] == pages).all()


@pytest.mark.parametrize("plan_pages", [lanes.PLAN_PAGES, 40])
def test_the_word_of_a_copy_comes_once_and_with_its_last_byte(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, plan_pages: int
) -> None:
    monkeypatch.setattr(lanes, "PLAN_PAGES", plan_pages)
    bench.gpu.hold()
    bench.job("large", 4 * CHUNK, said=(said := bench.says(7)))
    bench.until(lambda: len(bench.gpu.calls) == CHUNKS_IN_FLIGHT)
    assert bench.word.tolist() == [0, 0] and said.begun == CHUNKS_IN_FLIGHT
    bench.gpu.release()
    bench.until(lambda: bench.ended)
    chunks = len(bench.gpu.calls)
    assert bench.gpu.told == list(range(1, chunks + 1)) and sum(bench.gpu.calls) == 4 * CHUNK
    assert bench.word.tolist() == [7, chunks - 1] and said.begun == chunks and not said.open


def test_of_a_copy_that_is_not_wanted_any_more_no_chunk_is_handed_over(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("large", 6 * CHUNK, said=(said := bench.says(7)))
    bench.until(lambda: len(bench.gpu.calls) == CHUNKS_IN_FLIGHT)
    said.wanted = False
    small = bench.says(8)
    small.wanted = False
    assert bench.express.take(bench.copy("small", 8, 200, said=small)), "it ends there"
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == 2)
    assert all("took it back" in error for _, error in bench.ended)
    assert len(bench.gpu.calls) == CHUNKS_IN_FLIGHT and not said.open and not small.open
    assert bench.word.tolist() == [0, CHUNKS_IN_FLIGHT], "what was handed over is through, and said to be"


def test_a_copy_of_which_a_chunk_was_refused_has_no_word(bench: Bench) -> None:
    bench.gpu.refuse = 1
    bench.job("bad", CHUNK, said=bench.says(7))
    assert bench.express.take(bench.copy("bad too", 8, said=bench.says(8)))
    bench.until(lambda: len(bench.ended) == 2)
    assert all("CUDA_ERROR_INVALID_VALUE" in error for _, error in bench.ended)
    assert bench.word[0] == 0


def test_the_express_hands_a_copy_to_the_gpu_at_once(bench: Bench) -> None:
    bench.gpu.hold()
    assert bench.express.take(bench.copy("small", 8, said=bench.says(7)))
    assert bench.gpu.calls == [8]
    bench.gpu.release()
    bench.until(lambda: bench.ended)
    assert bench.ended == [("small", "")] and bench.word[0] == 7


def test_the_express_takes_small_copies_only_and_few_at_a_time(bench: Bench) -> None:
    bench.gpu.hold()
    assert not bench.express.take(bench.copy("nothing", 0))
    large = bench.copy("large", 37)
    assert not bench.express.take(large)
    for i in range(IN_FLIGHT):
        assert bench.express.take(bench.copy(f"small{i}", 2, first=2 * i + 100))
    late = bench.copy("late", 2, first=150)
    assert not bench.express.take(late)
    bench.lane.submit(large)
    bench.lane.submit(late)
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == IN_FLIGHT + 2)
    assert all(not error for _, error in bench.ended)
    assert bench.express.take(bench.copy("next", 2)), "there is room again"
    bench.until(lambda: bench.ended[-1] == ("next", ""))


def test_a_copy_in_more_pieces_than_one_call_takes_is_left_to_a_lane_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.devices.cuda.plans.CHUNK_PIECES", 4)
    bench.host[:] = bench.gpu.allocate(bench.host.nbytes)
    many = bench.copy("many", 10)
    assert not bench.express.take(many)
    bench.lane.submit(many)
    bench.until(lambda: bench.ended)
    assert bench.ended == [("many", "")] and bench.gpu.calls == [4, 4, 2]
    assert (bench.engine.reshape(-1, PAGE)[:10][::-1] == bench.host.reshape(-1, PAGE)[:10]).all()


def test_a_gpu_that_fails_under_the_express_proves_no_end(bench: Bench) -> None:
    bench.gpu.hold()
    assert bench.express.take(bench.copy("uncertain", 8, said=bench.says(7)))
    bench.gpu.broken = True
    bench.until(lambda: bench.lost)
    assert not bench.ended and bench.word[0] == 0


@pytest.mark.parametrize(
    ("plan_pages", "chunks"), [(lanes.PLAN_PAGES, [72, 72, 56]), (100, [FIRST_PAGES, 72, 72, 24])], ids=["one", "many"]
)
def test_saves_go_in_larger_chunks_because_nobody_waits_behind_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, plan_pages: int, chunks: list[int]
) -> None:
    """Of more pages than are planned at once the first few are planned by themselves: the GPU waits for no other."""
    monkeypatch.setattr(lanes, "PLAN_PAGES", plan_pages)
    bench.host[:] = 0
    lane = Lane(bench.gpu, 1000, "saves", to_device=False, post=bench.mail.put, lost=bench.lost.append)
    lane.submit(bench.copy("save", 200))
    bench.until(lambda: bench.ended)
    lane.close()
    assert bench.gpu.calls == chunks
    assert (bench.host.reshape(-1, PAGE)[:200] == bench.engine.reshape(-1, PAGE)[:200][::-1]).all()
