"""Lanes: whose chunk goes next, by which thread, and when a copy has ended."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from orbitkv.cuda import CudaError
from orbitkv_agent.devices.base import Word
from orbitkv_agent.devices.cuda import lanes
from orbitkv_agent.devices.cuda.geometry import GroupPlaces
from orbitkv_agent.devices.cuda.lanes import CHUNKS_IN_FLIGHT, FIRST_PAGES, CopyJob, Lane
from orbitkv_agent.devices.cuda.plans import CHUNK_BYTES, PagesOfGroup
from orbitkv_agent.devices.cuda.tests.fake_gpu import FakeGpu

PAGE = 1 << 20
CHUNK = CHUNK_BYTES // PAGE
"""Pages in a chunk."""
OWNER = threading.current_thread().name


class Said:
    """What is said of a copy, in two words of host memory: its end, and the chunks that are through.

    Attributes:
        begun: chunks that were handed over, or are about to be.
        open: of these, such whose handing over has not ended.
        whole: all of it was handed over, after so many chunks.
        wanted: more may be handed over.
    """

    def __init__(self, words: np.ndarray[Any, Any], value: int) -> None:
        self.words, self.value = words, value
        self.begun = self.open = 0
        self.wanted = True
        self.whole = 0

    def begin(self) -> bool:
        self.begun += self.wanted
        self.open += self.wanted
        return self.wanted

    def end(self, *, whole: bool) -> None:
        self.open -= 1
        if whole:
            self.whole = self.begun

    def word(self, *, last: bool, layers: int) -> Word:
        address = self.words.ctypes.data
        return Word(address, self.value) if last else Word(address + 8, self.begun)


class Bench:
    """A lane with an owner's mailbox that the test empties."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.gpu.set_current(1000)
        self.engine = self.gpu.allocate(400 * PAGE)
        self.host = np.zeros(400 * PAGE, np.uint8)
        self.gpu.pin(self.host.ctypes.data, self.host.nbytes)
        self.mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.ended: list[tuple[str, str]] = []
        self.lost: list[str] = []
        one = np.array([0], np.int64)
        base = np.array([self.engine.ctypes.data], np.int64)
        self.places = GroupPlaces(
            base, one + PAGE, one + PAGE, one, PAGE, base, (base, one + PAGE, one + PAGE, one), one + 1
        )
        self.lane = Lane(self.gpu, 1000, "lane", to_device=True, post=self.mail.put, lost=self.lost.append)
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

    def job(self, name: str, pages: int, first: int = 0, said: Said | None = None, *, at_once: bool = False) -> CopyJob:
        """Submit such a copy."""
        job = self.copy(name, pages, first, said)
        self.lane.submit(job, at_once=at_once)
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
    bench.until(lambda: bench.lane._changed._waiters)  # type: ignore[attr-defined]
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


def test_the_gpu_has_a_few_chunks_at_most(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("large", 6 * CHUNK)
    bench.until(lambda: bench.gpu.sleepers)  # it waits for an end: nothing more comes
    assert len(bench.gpu.calls) == CHUNKS_IN_FLIGHT


def test_what_is_abandoned_drains_and_then_ends(bench: Bench) -> None:
    bench.gpu.hold()
    job = bench.job("large", 6 * CHUNK)
    bench.until(lambda: bench.gpu.sleepers)
    job.abandon()
    bench.gpu.step(1)
    bench.until(lambda: len(bench.lane._flying) == CHUNKS_IN_FLIGHT - 1 and bench.gpu.sleepers)
    while not bench.mail.empty():
        bench.mail.get()()
    assert not bench.ended, "a chunk of it is still with the GPU"
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
    monkeypatch.setattr(lanes, "FIRST_PAGES", CHUNK + 5)
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
    bench.job("small", 8, 6 * CHUNK, said=small)
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == 2)
    assert all("took it back" in error for _, error in bench.ended)
    assert len(bench.gpu.calls) == CHUNKS_IN_FLIGHT and not said.open and not small.open
    assert bench.word.tolist() == [0, CHUNKS_IN_FLIGHT], "what was handed over is through, and said to be"


def test_a_copy_of_which_a_chunk_was_refused_has_no_word(bench: Bench) -> None:
    bench.gpu.refuse = 1
    bench.job("bad", CHUNK, said=bench.says(7))
    bench.job("bad too", 8, said=bench.says(8), at_once=True)
    bench.until(lambda: len(bench.ended) == 2)
    assert all("CUDA_ERROR_INVALID_VALUE" in error for _, error in bench.ended)
    assert bench.word[0] == 0


def test_a_copy_for_which_there_is_room_is_handed_over_by_the_owner_itself(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("small", 8, said=bench.says(7), at_once=True)
    assert (bench.gpu.calls, bench.gpu.threads) == ([8], [OWNER])
    bench.gpu.release()
    bench.until(lambda: bench.ended)
    assert bench.ended == [("small", "")] and bench.word[0] == 7


def test_of_a_large_copy_the_owner_hands_over_one_chunk(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("large", 6 * CHUNK, at_once=True)
    bench.until(lambda: len(bench.gpu.calls) == CHUNKS_IN_FLIGHT)
    assert bench.gpu.threads == [OWNER, "lane"]
    bench.job("small", 8, first=6 * CHUNK, at_once=True)
    assert len(bench.gpu.calls) == CHUNKS_IN_FLIGHT, "there is no room"
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == 2)
    assert set(bench.gpu.threads[1:]) == {"lane"}


def test_of_a_copy_that_begins_with_little_the_owner_hands_over_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is not to have done all of it before the lane's thread has got the interpreter."""
    monkeypatch.setattr(lanes, "FIRST_PAGES", 8)
    monkeypatch.setattr(lanes, "PLAN_PAGES", 24)
    bench.gpu.hold()
    bench.job("large", 6 * CHUNK, at_once=True)
    bench.until(lambda: len(bench.gpu.calls) == 3)
    assert bench.gpu.calls == [8, 24, 24]
    assert bench.gpu.threads == [OWNER, OWNER, "lane"]


def test_a_copy_that_comes_while_the_last_chunk_runs_does_not_wait_for_its_end(bench: Bench) -> None:
    bench.gpu.hold()
    bench.job("first", 8)
    bench.until(lambda: bench.gpu.sleepers)
    bench.job("second", 8, first=8, at_once=True)
    assert bench.gpu.threads == ["lane", OWNER]
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == 2)


def test_the_owner_does_not_wait_while_the_driver_makes_the_lanes_thread_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go, copy = threading.Event(), threading.Event(), bench.gpu.copy

    def slow(*arguments: Any, **more: Any) -> None:
        entered.set()
        assert go.wait(10)
        copy(*arguments, **more)

    monkeypatch.setattr(bench.gpu, "copy", slow)
    bench.job("first", 8)
    assert entered.wait(10)
    start = time.monotonic()
    for number in range(3):
        bench.job(f"next {number}", 2, first=8 + 2 * number, at_once=True)
    assert time.monotonic() - start < 5 and bench.lane.waits
    go.set()
    bench.until(lambda: len(bench.ended) == 4)
    assert not any(error for _, error in bench.ended)
    assert set(bench.gpu.threads) == {"lane"}, "who hands over looks again before he stops"


def test_the_lanes_thread_leaves_it_to_the_owner_that_hands_over_and_is_told_when_that_stops(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, hand_over, came = bench.gpu.copy, bench.lane._hand_over, threading.Event()

    def copy_when_it_came(*arguments: Any, **more: Any) -> None:
        if not came.is_set():
            with bench.lane._lock:
                bench.lane._changed.notify()
            assert came.wait(10)
        copy(*arguments, **more)

    def come(enough: int) -> None:
        hand_over(enough)
        if threading.current_thread().name == "lane":
            came.set()

    monkeypatch.setattr(bench.gpu, "copy", copy_when_it_came)
    monkeypatch.setattr(bench.lane, "_hand_over", come)
    bench.job("large", 5 * CHUNK, at_once=True)
    bench.until(lambda: bench.ended)
    assert bench.ended == [("large", "")]
    assert bench.gpu.threads[0] == OWNER and sum(bench.gpu.calls) == 5 * CHUNK


def test_the_next_copy_after_a_large_one_by_itself_goes_first_if_it_is_smaller(bench: Bench) -> None:
    """A copy that was alone has used up no turn of others."""
    for chunks in (3, 4):
        bench.gpu.hold()
        before = len(bench.gpu.calls)
        bench.job("large", chunks * CHUNK)
        bench.until(lambda before=before: len(bench.gpu.calls) == before + CHUNKS_IN_FLIGHT)  # type: ignore[misc]
        bench.job("small", 8, first=5 * CHUNK)
        bench.gpu.release()
        bench.until(lambda: len(bench.ended) == 2)
        assert bench.gpu.calls[before + CHUNKS_IN_FLIGHT] == 8
        bench.ended.clear()


def test_a_copy_by_layer_is_handed_over_whole_where_the_lane_does_that_and_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LAYER_CHUNK_BYTES", 4 * PAGE)
    lane = Lane(bench.gpu, 1000, "whole", to_device=True, whole=True, post=bench.mail.put, lost=bench.lost.append)

    def submit(said: Said, *, layered: bool = False, words: bool = True) -> Said:
        pages = bench.copy("", 240)._groups
        ended = lambda error: bench.ended.append(("", error))  # noqa: E731
        lane.submit(CopyJob(pages, ended, progress=said, layered=layered, words=words))
        return said

    bench.gpu.hold()
    layered = submit(bench.says(7), layered=True)
    bench.until(lambda: layered.begun == 60 and not layered.open)
    assert layered.whole == 60 and not bench.ended
    bench.gpu.release()
    others = submit(bench.says(8)), submit(bench.says(9), layered=True, words=False)
    bench.until(lambda: len(bench.ended) == 3)
    assert [error for _, error in bench.ended] == 3 * [""]
    assert not any(other.whole for other in others), "this process would have to tell the end"
    bench.gpu.refuse = 1
    monkeypatch.setattr(lanes, "LAYER_CHUNK_BYTES", 240 * PAGE)
    monkeypatch.setattr(lane, "_chunk_bytes", 240 * PAGE)
    refused = submit(bench.says(10), layered=True)
    bench.until(lambda: len(bench.ended) == 4)
    lane.close()
    assert "refused" in bench.ended[-1][1] and refused.begun == 1 and not refused.whole


def test_of_copies_that_are_handed_over_whole_the_gpu_has_so_much_at_most(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LAYER_CHUNK_BYTES", 4 * PAGE)
    monkeypatch.setattr(lanes, "WHOLE_BYTES", 100 * PAGE)
    lane = Lane(bench.gpu, 1000, "whole", to_device=True, whole=True, post=bench.mail.put, lost=bench.lost.append)
    large, small = bench.says(7), bench.says(8)
    bench.gpu.hold()
    for said, pages in ((large, 240), (small, 8)):
        ended = lambda error: bench.ended.append(("", error))  # noqa: E731
        lane.submit(CopyJob(bench.copy("", pages)._groups, ended, progress=said, layered=True))
    bench.until(lambda: large.begun + small.begun >= 25 and not large.open and not small.open)
    assert (large.begun + small.begun, large.whole) == (25, 0)
    bench.gpu.release()
    bench.until(lambda: len(bench.ended) == 2)
    lane.close()
    assert [error for _, error in bench.ended] == ["", ""] and large.whole == 60 and small.whole == 2


def test_small_pieces_of_several_groups_are_one_chunk(bench: Bench) -> None:
    job = CopyJob(
        [*bench.copy("", 3)._groups, *bench.copy("", 4, first=10)._groups],
        lambda error: bench.ended.append(("both", error)),
    )
    bench.lane.submit(job, at_once=True)
    assert bench.gpu.calls == [7]
    bench.until(lambda: bench.ended)


def test_pieces_beyond_what_one_call_takes_go_in_the_next(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbitkv_agent.devices.cuda.plans.CHUNK_PIECES", 4)
    bench.host[:] = bench.gpu.allocate(bench.host.nbytes)
    bench.job("many", 10, at_once=True)
    bench.until(lambda: bench.ended)
    assert bench.ended == [("many", "")] and bench.gpu.calls == [4, 4, 2]
    assert (bench.engine.reshape(-1, PAGE)[:10][::-1] == bench.host.reshape(-1, PAGE)[:10]).all()


def awaited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events that the lane's thread sleeps for, as they come: how many are recorded by then tells which."""
    places: list[int] = []
    recorded: list[int] = []
    record, wait = bench.gpu.record, bench.gpu.wait

    def recording(event: int, stream: int) -> None:
        recorded.append(event)
        record(event, stream)

    def waiting(event: int) -> None:
        places.append(len(recorded) - 1 - recorded[::-1].index(event))
        wait(event)

    monkeypatch.setattr(bench.gpu, "record", recording)
    monkeypatch.setattr(bench.gpu, "wait", waiting)
    return places


def test_of_many_small_chunks_the_thread_sleeps_for_the_middle_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.devices.cuda.plans.CHUNK_PIECES", 4)
    places = awaited(bench, monkeypatch)
    bench.gpu.hold()
    bench.job("many", 40)
    bench.until(lambda: len(bench.gpu.calls) == 10 and places)
    bench.gpu.release()
    bench.until(lambda: bench.ended)
    assert bench.ended == [("many", "")] and places == [4, 7, 8, 9]


def test_the_thread_never_sleeps_beyond_the_end_of_a_copy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbitkv_agent.devices.cuda.plans.CHUNK_PIECES", 4)
    places = awaited(bench, monkeypatch)
    bench.gpu.hold()
    bench.job("few", 8, at_once=True)
    bench.until(lambda: places)
    bench.job("many", 32, first=8)
    bench.gpu.step(1)
    bench.until(lambda: len(bench.gpu.calls) == 10 and len(places) == 2)
    bench.gpu.step(1)
    bench.until(lambda: bench.ended)
    assert bench.ended == [("few", "")] and places[:2] == [0, 1]


def test_a_gpu_that_fails_under_the_owner_proves_no_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: int, stream: int) -> None:
        raise CudaError("cuEventRecord", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "the GPU is lost")

    bench.gpu.hold()
    with monkeypatch.context() as patch:
        patch.setattr(bench.gpu, "record", fail)
        bench.job("uncertain", 8, at_once=True)
    bench.until(lambda: bench.lost)
    bench.job("later", 8, first=8, at_once=True)
    bench.lane._thread.join(10)
    assert not bench.lane._thread.is_alive() and bench.mail.empty()
    assert not bench.ended and bench.gpu.calls == [8], "nothing more is handed over"
    bench.gpu.release()


@pytest.mark.parametrize(
    ("plan_pages", "chunks"), [(lanes.PLAN_PAGES, [72, 72, 56]), (100, [FIRST_PAGES, 72, 64])], ids=["one", "many"]
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


@pytest.mark.parametrize("seed", range(3))
def test_every_copy_ends_once_and_whole_unless_it_is_given_up(seed: int) -> None:
    """Copies of all sizes, given by the owner whatever the lane's thread does, on a GPU that stands still at times."""
    chance = random.Random(seed)
    page, pages = 1 << 12, 400
    gpu = FakeGpu()
    gpu.set_current(1000)
    engine, host = gpu.allocate(pages * page), np.zeros(pages * page, np.uint8)
    gpu.pin(host.ctypes.data, host.nbytes)
    one, base = np.array([0], np.int64), np.array([engine.ctypes.data], np.int64)
    places = GroupPlaces(base, one + page, one + page, one, page, base, (base, one + page, one + page, one), one + 1)
    mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    lane = Lane(gpu, 1000, "lane", to_device=False, post=mail.put, lost=pytest.fail)
    lane._chunk_bytes = 6 * page
    ended: dict[int, str] = {}
    given_up: set[int] = set()
    jobs: list[CopyJob] = []

    def over(number: int, error: str) -> None:
        assert number not in ended
        ended[number] = error

    slots = list(range(pages))
    chance.shuffle(slots)
    number = 0
    while slots:
        taken = np.array([slots.pop() for _ in range(min(len(slots), chance.choice((1, 2, 7, 40))))], np.int64)
        group = PagesOfGroup(places, taken, host.ctypes.data + taken * page, np.zeros(taken.size, np.bool_))
        jobs.append(CopyJob([group], lambda error, number=number: over(number, error)))  # type: ignore[misc]
        lane.submit(jobs[-1], at_once=chance.random() < 0.7)
        number += 1
        if chance.random() < 0.2:
            gpu.hold()
        if chance.random() < 0.2:
            given_up.add(number - 1)
            jobs[-1].abandon()
        if chance.random() < 0.3:
            gpu.release()
            time.sleep(chance.random() * 1e-3)  # for no state: so that the threads meet at other points
    gpu.release()
    deadline = time.monotonic() + 10
    while len(ended) < number:
        assert time.monotonic() < deadline, f"{number - len(ended)} copies have not ended"
        with contextlib.suppress(queue.Empty):
            mail.get(timeout=0.01)()
    lane.close()
    for index, job in enumerate(jobs):
        assert not ended[index] or index in given_up
        if not ended[index]:
            blocks = np.concatenate([group.blocks for group in job._groups])
            assert (host.reshape(-1, page)[blocks] == engine.reshape(-1, page)[blocks]).all()
    assert not lane.waits
