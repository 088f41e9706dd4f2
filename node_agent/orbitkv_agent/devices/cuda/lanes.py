"""A lane: the copies of one GPU in one direction.

Copies go chunk by chunk. Only a few chunks are with the GPU at a time, so that a small restore is not behind a large
one: the lane takes turns between the copy with the least left and the oldest one. A thread of its own sleeps until the
GPU has made the oldest chunk, and hands over the next: an event tells that, and nothing else counts as the end of a
chunk. It has the interpreter once a chunk, because each time that it has to get it back it may wait for the owner; and
less often where chunks are small: of many of one copy it sleeps for the middle one.

A copy for which the GPU has room at once is begun by the owner thread itself: waking another one up, and waiting until
that gets the interpreter, take as long as half of a small copy.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from orbitkv.cuda import CudaError, Driver
from orbitkv_agent.devices.base import Progress
from orbitkv_agent.devices.cuda.plans import (
    CHUNK_BYTES,
    LAYER_CHUNK_BYTES,
    SAVE_CHUNK_BYTES,
    PagesOfGroup,
    plan_copy,
    plan_layers,
)

logger = logging.getLogger(__name__)

PLAN_PAGES: Final = 256
"""Pages that are planned at once."""
FIRST_PAGES: Final = 64
"""Pages that are planned before the first chunk goes: the GPU waits for this plan, and for no other."""
CHUNKS_IN_FLIGHT: Final = 2
"""Chunks that the GPU always has, if there are any: one runs, the other is ready, because this process's threads take
turns and the next one may come a millisecond late."""
WHOLE_BYTES: Final = 2 << 30
"""What the GPU has at most of a lane that hands copies over whole: some 40 ms of its link. What another lane copies
meanwhile shares the link with it, or waits for it."""

_NO_PLAN: Final = plan_copy(())
_ALL: Final = 1 << 62


class CopyJob:
    """One restore or save on a lane.

    Args:
        groups: what to copy.
        ended: called once on the owner thread, when no byte of it moves any more: with "" when all of it was copied,
            otherwise with the reason.
        landed: called when all of it was copied, before `ended`, on the lane's thread.
        progress: told of each chunk.
        words: the GPU itself writes the words of `progress`.
        layered: one layer comes after the other.

    Attributes:
        pages: pages of all groups.
        unplanned: pages that no plan was made for yet.
        left: bytes that were not submitted.
    """

    def __init__(
        self,
        groups: Sequence[PagesOfGroup],
        ended: Callable[[str], None],
        landed: Callable[[], None] | None = None,
        progress: Progress | None = None,
        *,
        words: bool = True,
        layered: bool = False,
    ) -> None:
        self.ended = ended
        self.landed = landed
        self._progress = progress
        self._words = words
        self.layered = layered
        self.pages = self.unplanned = sum([group.blocks.size for group in groups])
        self._groups = groups
        self._slices: Iterator[PagesOfGroup] | None = None
        self.abandoned = False
        self.plan = _NO_PLAN
        self.next = 0
        self.left = sum([group.bytes for group in groups])
        self.flying = 0
        self.error = ""
        self.reported = False

    def plan_more(self, chunk_bytes: int) -> None:
        """Plan the next pages, in chunks of this size at most."""
        few = self.unplanned == self.pages <= PLAN_PAGES and self.left <= chunk_bytes
        if self.layered:
            plan, planned = plan_layers(self._groups, min(chunk_bytes, LAYER_CHUNK_BYTES)), self.unplanned
        elif few:
            plan, planned = plan_copy(self._groups, chunk_bytes), self.unplanned
        else:
            if self._slices is None:
                slices = [
                    group.slices(*(whole_chunks(pages, group, chunk_bytes) for pages in (FIRST_PAGES, PLAN_PAGES)))
                    for group in self._groups
                    if group.blocks.size
                ]
                self._slices = chain.from_iterable(slices)
            part = next(self._slices)
            plan, planned = plan_copy([part], chunk_bytes), part.blocks.size
        self.plan, self.next = plan, 0
        self.unplanned -= planned

    def submit(self, driver: Driver, stream: int, *, to_device: bool, soon: bool = False) -> int:
        """Submit the next chunk of the plan, `soon` to a GPU that has nothing to do; return its bytes. A word follows.

        A refusal becomes the copy's `error`: some of it may have been submitted all the same. So does it when nobody
        wants the copy any more; then the chunk was left out.
        """
        first, end, size = self.plan.chunks[self.next]
        host, device, sizes = self.plan.host[first:end], self.plan.device[first:end], self.plan.sizes[first:end]
        layers = self.plan.layers[self.next] if self.plan.layers else 0
        sources, destinations = (host, device) if to_device else (device, host)
        self.next += 1
        self.left -= size
        progress = self._progress
        if progress is not None and not progress.begin():
            self.error = "its engine took it back, because this agent did not answer in time"
            return size
        try:
            driver.copy(destinations, sources, sizes, stream, to_device=to_device, soon=soon)
            if progress is not None and self._words:
                driver.write_word(stream, *progress.word(last=self.whole, layers=layers))
        except CudaError as error:
            logger.error("a copy was refused: %s", error)
            self.error = str(error)
        finally:
            if progress is not None:
                progress.end(whole=self.layered and self._words and self.whole and not self.error)
        return size

    def abandon(self) -> None:
        """Nobody needs it any more: what is not submitted is left out. The rest drains, and `ended` is still called."""
        self.abandoned = True

    @property
    def submitted(self) -> bool:
        """Whether nothing more is to be submitted."""
        return self.whole or self.abandoned or bool(self.error)

    @property
    def whole(self) -> bool:
        """Whether all of it was submitted."""
        return self.next == len(self.plan.chunks) and not self.unplanned


def whole_chunks(pages: int, group: PagesOfGroup, chunk_bytes: int) -> int:
    """So many of these pages that they fill whole chunks, if they fill one."""
    fill = max(1, chunk_bytes // group.places.page_bytes)
    return pages - pages % fill if pages >= fill else pages


class _Chunk(NamedTuple):
    """A chunk that the GPU has."""

    job: CopyJob
    event: int
    size: int


class Lane:
    """Copies of one GPU in one direction. Made by a thread to which the context is current.

    Args:
        driver: the CUDA driver.
        context: of the GPU.
        to_device: restores, or else saves.
        whole: a copy is handed over at once, up to WHOLE_BYTES, and what is more as soon as there is room.
        post: has a callback called on the owner thread.
        lost: called on the owner thread when the GPU fails so that it cannot be known whether copies have ended.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        name: str,
        *,
        to_device: bool,
        whole: bool = False,
        post: Callable[[Callable[[], None]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._driver = driver
        self._context = context
        self._name = name
        self._to_device = to_device
        self._chunk_bytes = CHUNK_BYTES if to_device else SAVE_CHUNK_BYTES
        self._whole = whole
        self._post = post
        self._lost = lost
        # Invariant: `_jobs` have chunks to be handed over, `_flying` is what the GPU has, in its order. Lists, sizes
        # and flags change under this lock, which nobody holds who plans or calls the driver: a call may take long.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: list[CopyJob] = []
        self._flying: deque[_Chunk] = deque()
        self._flying_bytes = 0
        self._handing = False
        """A thread hands chunks over, and only that one: it alone takes events, and plans and submits copies."""
        # Those of a copy that is handed over whole are made before: each would cost the interpreter.
        self._events = [driver.make_event() for _ in range(WHOLE_BYTES // LAYER_CHUNK_BYTES + 1)] if whole else []
        self._smallest_next = True
        self._closing = False
        self._broken = False
        self._stream = driver.make_stream()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob, *, at_once: bool = False) -> None:
        """Take a copy. For the owner thread.

        `at_once`: hand over here and now what keeps the GPU at work until the lane's thread comes. The context is
        current to this thread.
        """
        with self._lock:
            self._jobs.append(job)
            if not at_once:
                self._changed.notify()
        if at_once:
            self._hand_over(self._chunk_bytes // 2)

    @property
    def waits(self) -> bool:
        """Whether there is more to hand over, for which the lane's thread will need the interpreter. For any thread."""
        return bool(self._jobs)

    def close(self) -> None:
        """Finish everything and end the thread."""
        with self._lock:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # ---------------------------------------------------------------------------------------- the lane's thread

    def _run(self) -> None:
        try:
            self._driver.set_current(self._context)
            while (event := self._next_event()) is not None:
                self._driver.wait(event)
                self._land(event)
        except Exception as error:
            self._fail(error)
        if self._broken:
            return
        for event in self._events:
            self._driver.drop_event(event)
        self._driver.drop_stream(self._stream)

    def _next_event(self) -> int | None:
        """Hand over what there is room for; the event to sleep for then, None when the lane is at its end."""
        while True:
            self._hand_over(_ALL)
            with self._lock:
                if self._broken:
                    return None
                if self._flying:
                    return self._awaited().event
                if not self._handing:
                    if self._jobs:  # it came meanwhile
                        continue
                    if self._closing:
                        return None
                self._changed.wait()

    def _land(self, event: int) -> None:
        """The GPU has made the chunk of this event, and so those that it had before."""
        with self._lock:
            chunk = None
            while chunk is None or chunk.event != event:
                chunk = self._flying.popleft()
                self._flying_bytes -= chunk.size
                self._events.append(chunk.event)
                chunk.job.flying -= 1
                self._end_if_drained(chunk.job)

    # --------------------------------------------------------------------------------- the thread that hands over

    def _hand_over(self, enough: int) -> None:
        """Hand chunks over until the GPU has `enough` bytes, or as many chunks as it may have.

        It waits for no other thread: where one hands over already, that one comes upon all copies, or wakes the lane's
        thread when it stops.
        """
        with self._lock:
            if self._handing or self._broken:
                return
            self._handing = True
        try:
            while (job := self._take(enough)) is not None:
                self._give(job)
        except Exception as error:
            self._fail(error)

    def _take(self, enough: int) -> CopyJob | None:
        """The copy whose next chunk goes now; None when it is enough, and from then on others may hand over."""
        with self._lock:
            job = None if self._broken or self._flying_bytes >= enough else self._pick()
            if job is not None:
                job.flying += 1  # from here on: it has not ended
            else:
                self._handing = False
                self._changed.notify()
            return job

    def _give(self, job: CopyJob) -> None:
        """Hand the next chunk of a copy over."""
        self._plan_more(job)
        if job.submitted:  # it could not be planned, or nobody needs it any more
            with self._lock:
                job.flying -= 1
            return
        event = self._events.pop() if self._events else self._driver.make_event()
        size = job.submit(self._driver, self._stream, to_device=self._to_device, soon=not self._flying)
        self._driver.record(event, self._stream)
        with self._lock:
            self._flying.append(_Chunk(job, event, size))
            self._flying_bytes += size
            if job.submitted:
                self._jobs.remove(job)
        self._plan_more(job)  # while the GPU is at work

    def _plan_more(self, job: CopyJob) -> None:
        """Plan the next pages of a copy when it needs them: the first chunk does not wait for the last one's plan."""
        if job.submitted or job.next < len(job.plan.chunks):
            return
        try:
            job.plan_more(self._chunk_bytes)
        except Exception as error:
            logger.exception("%s: a copy could not be planned; please report it", self._name)
            job.error = f"the copy could not be planned: {error!r}"

    # ------------------------------------------------------------------------------------------- under the lock

    def _awaited(self) -> _Chunk:
        """The chunk to sleep for: of the oldest copy's first ones not one beyond the middle of all that the GPU has."""
        place = 0
        while place < (len(self._flying) - 1) // 2 and self._flying[place].job is self._flying[place + 1].job:
            place += 1
        return self._flying[place]

    def _pick(self) -> CopyJob | None:
        """The copy whose next chunk goes now; None when the GPU has enough, or nothing is left to hand over."""
        for job in [each for each in self._jobs if each.submitted]:
            self._jobs.remove(job)
            self._end_if_drained(job)
        enough = WHOLE_BYTES if self._whole else self._chunk_bytes
        if not self._jobs or (len(self._flying) >= CHUNKS_IN_FLIGHT and self._flying_bytes >= enough):
            return None
        if len(self._jobs) == 1:
            self._smallest_next = True
            return self._jobs[0]
        job = min(self._jobs, key=lambda each: each.left) if self._smallest_next else self._jobs[0]
        self._smallest_next = not self._smallest_next
        return job

    def _end_if_drained(self, job: CopyJob) -> None:
        """End a copy of which nothing is with the GPU, and nothing more is to be handed over."""
        if job.reported or job.flying or not job.submitted:
            return
        job.reported = True
        whole = job.whole and not job.error
        if whole and job.landed is not None:
            job.landed()
        reason = "" if whole else job.error or "nobody needs it any more"
        self._post(lambda: job.ended(reason))

    # -------------------------------------------------------------------------------------------------- any thread

    def _fail(self, error: Exception) -> None:
        why = str(error)
        logger.critical("%s: the GPU failed, copies on it may or may not have ended: %s", self._name, why)
        with self._lock:
            self._broken, self._handing = True, False
            self._changed.notify()
        self._post(lambda: self._lost(why))
