"""A lane: the copies of one GPU in one direction.

Copies go chunk by chunk. Only a few chunks are with the GPU at a time, so that a small restore is not behind a large
one: the lane takes turns between the copy with the least left and the oldest one. One thread submits chunks, another
sleeps until the GPU has made them: an event tells that, and nothing else counts as the end of a chunk.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from orbitkv.cuda import CudaError, Driver
from orbitkv_agent.devices.base import Progress
from orbitkv_agent.devices.cuda.plans import (
    CHUNK_BYTES,
    SAVE_CHUNK_BYTES,
    CopyPlan,
    PagesOfGroup,
    plan_copy,
    plan_layers,
)

logger = logging.getLogger(__name__)

PLAN_PAGES: Final = 256
"""Pages that are planned at once."""
FIRST_PAGES: Final = 32
"""Pages that are planned before the first chunk goes: the GPU waits for this plan, and for no other."""
CHUNKS_IN_FLIGHT: Final = 3
"""Chunks that the GPU always has, if there are any: one runs, the others are ready, because this process's threads take
turns and the next one may come a millisecond late."""

_NO_PLAN: Final = plan_copy(())


class CopyJob:
    """One restore or save on a lane.

    Args:
        groups: what to copy.
        ended: called once on the owner thread, when no byte of it moves any more: with "" when all of it was copied,
            otherwise with the reason.
        landed: called when all of it was copied, before `ended`, on a thread of the lane.
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

    def plan_all(self, chunk_bytes: int) -> CopyPlan:
        """Plan all of it at once. For a copy that nobody has planned of, of `PLAN_PAGES` at most."""
        self.plan, self.next, self.unplanned = plan_copy(self._groups, chunk_bytes), 0, 0
        return self.plan

    def plan_more(self, chunk_bytes: int) -> None:
        """Plan the next pages, in chunks of this size at most."""
        if self.layered:
            self.plan, self.next, self.unplanned = plan_layers(self._groups, chunk_bytes), 0, 0
            return
        if self._slices is None:
            slices = [
                group.slices(*(whole_chunks(pages, group, chunk_bytes) for pages in (FIRST_PAGES, PLAN_PAGES)))
                for group in self._groups
                if group.blocks.size
            ]
            self._slices = chain.from_iterable(slices)
        part = next(self._slices)
        self.plan, self.next = plan_copy([part], chunk_bytes), 0
        self.unplanned -= part.blocks.size

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
                progress.end()
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
    """A chunk that the GPU has. `last` of its copy: when it has ended, so have those before it, on the same stream."""

    job: CopyJob
    event: int
    size: int
    last: bool


class Lane:
    """Copies of one GPU in one direction. Made by a thread to which the context is current.

    Args:
        driver: the CUDA driver.
        context: of the GPU.
        to_device: restores, or else saves.
        post: has a callback called on the owner thread.
        lost: called on the owner thread when the GPU fails so that it cannot be known whether copies have ended.

    Attributes:
        copies: those that have not ended. For the owner thread.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        name: str,
        *,
        to_device: bool,
        post: Callable[[Callable[[], None]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._driver = driver
        self._context = context
        self._name = name
        self._to_device = to_device
        self._chunk_bytes = CHUNK_BYTES if to_device else SAVE_CHUNK_BYTES
        self._post = post
        self._lost = lost
        self.copies = 0
        self._mail: queue.SimpleQueue[CopyJob | _Chunk | None] = queue.SimpleQueue()
        self._flying: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._jobs: list[CopyJob] = []
        self._flying_chunks = 0
        self._flying_bytes = 0
        self._events: list[int] = []
        self._stream = driver.make_stream()
        self._smallest_next = True
        self._closing = False
        self._broken = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for work, name in ((self._submit_all, name), (self._land_all, f"{name}-ends"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: CopyJob) -> None:
        """Take a copy. For the owner thread."""
        self.copies += 1
        self._mail.put(job)

    def close(self) -> None:
        """Finish everything and end the threads."""
        self._mail.put(None)
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            self._driver.set_current(self._context)
            work()
        except Exception as error:
            why = str(error)
            logger.critical("%s: the GPU failed, copies on it may or may not have ended: %s", self._name, why)
            self._post(lambda: self._lost(why))
            self._broken = True
            self._mail.put(None)
            self._flying.put(None)

    # ------------------------------------------------------------------------ the thread that knows of ends

    def _land_all(self) -> None:
        while (chunk := self._flying.get()) is not None:
            self._driver.wait(chunk.event)
            job = chunk.job
            if chunk.last and not job.error:
                if job.landed is not None:
                    job.landed()
                self._report(job, "")
            self._mail.put(chunk)

    def _report(self, job: CopyJob, reason: str) -> None:
        job.reported = True
        self._post(lambda: self._ended(job, reason))

    def _ended(self, job: CopyJob, reason: str) -> None:
        self.copies -= 1
        job.ended(reason)

    # -------------------------------------------------------------------------------- the thread that submits

    def _submit_all(self) -> None:
        while (self._jobs or self._flying_chunks or not self._closing) and not self._broken:
            job = self._pick()
            if job is not None:
                self._submit(job)
            else:
                self._take(self._mail.get())
            while not self._mail.empty():
                self._take(self._mail.get())
        if self._broken:
            return
        self._flying.put(None)
        for event in self._events:
            self._driver.drop_event(event)
        self._driver.drop_stream(self._stream)

    def _take(self, item: CopyJob | _Chunk | None) -> None:
        if item is None:
            self._closing = True
        elif isinstance(item, CopyJob):
            self._accept(item)
        else:
            self._flying_chunks -= 1
            self._flying_bytes -= item.size
            self._events.append(item.event)
            item.job.flying -= 1
            self._end_if_drained(item.job)

    def _accept(self, job: CopyJob) -> None:
        self._plan_more(job)
        if job.submitted:
            self._end_if_drained(job)
        else:
            self._jobs.append(job)

    def _plan_more(self, job: CopyJob) -> None:
        """Plan the next pages of a copy when it needs them: the first chunk does not wait for the last one's plan."""
        if job.next < len(job.plan.chunks) or not job.unplanned:
            return
        try:
            job.plan_more(self._chunk_bytes)
        except Exception as error:
            logger.exception("%s: a copy could not be planned; please report it", self._name)
            job.error = f"the copy could not be planned: {error!r}"

    def _pick(self) -> CopyJob | None:
        """The copy whose next chunk goes now; None when the GPU has enough, or nothing is left to submit."""
        for job in [each for each in self._jobs if each.abandoned]:
            self._retire(job)
        if not self._jobs or (self._flying_chunks >= CHUNKS_IN_FLIGHT and self._flying_bytes >= self._chunk_bytes):
            return None
        job = min(self._jobs, key=lambda each: each.left) if self._smallest_next else self._jobs[0]
        self._smallest_next = not self._smallest_next
        return job

    def _submit(self, job: CopyJob) -> None:
        event = self._events.pop() if self._events else self._driver.make_event()
        size = job.submit(self._driver, self._stream, to_device=self._to_device)
        self._driver.record(event, self._stream)
        job.flying += 1
        self._flying_chunks += 1
        self._flying_bytes += size
        last = job.whole
        if not last:
            self._plan_more(job)
        if job.submitted:
            self._jobs.remove(job)
        self._flying.put(_Chunk(job, event, size, last))

    def _retire(self, job: CopyJob) -> None:
        self._jobs.remove(job)
        self._end_if_drained(job)

    def _end_if_drained(self, job: CopyJob) -> None:
        """End a copy that was not ended by its last chunk: nothing to copy, refused, or abandoned half-way."""
        if job.reported or job.flying or not job.submitted:
            return
        whole = job.whole and not job.error
        if whole and job.landed is not None:
            job.landed()
        self._report(job, "" if whole else job.error or "nobody needs it any more")
