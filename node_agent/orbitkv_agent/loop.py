"""The owner's event loop: descriptors, timers, and a mailbox for the other threads.

One thread runs it and owns everything that its callbacks touch, so none of that needs a lock. The mailbox is the only
way in from other threads and from signal handlers.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
_EVENTS_A_ROUND = 512
_SCRATCH_BYTES = 1 << 16
_MOST_LOOKOUTS = 8
_LONGEST_RUN_S = 300e-6  # without sleep, where other threads need the interpreter,
_WAY_S = 50e-6  # and so long they get it for sure: it takes a thread about as long to wake up
_DEFECT = "internal error in the agent's loop; please report it"  # logged, so that other sessions are served on


class Lookout(Protocol):
    """What the loop looks at, beside its descriptors, while it does not sleep."""

    def rings(self) -> bool:
        """Whether there may be something to do. Asked without end, and other threads want the interpreter too."""

    def look(self) -> bool:
        """Do something that is to be done; return whether there was anything."""

    def watched(self, *, watched: bool) -> None:
        """The loop calls `look` from now on, or does not any more."""


class Timer:
    """A callback that is due at `due` (seconds of the loop's clock)."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do not call it any more; harmless afterwards."""
        self.callback = None


class Loop:
    """An epoll loop.

    Args:
        clock: seconds; tests give one that they move themselves.
        busy_poll_s: while requests come one upon the other, look for the next one for so long before sleeping: waking
            up costs as much as an answer. Has no effect on one processor.

    Attributes:
        scratch: memory that a callback may use until it returns. What is received is read into it, a bounded piece at
            a time, so that one session cannot keep the loop for long.
        rounds: how often it has looked who is ready.
        longest_turn_s: most processor time that one turn took, while which nobody else was served.
        crowded: whether other threads need the interpreter now and then, and cannot wait long for it. A thread that
            gives it up for microseconds only, as the owner does with each system call, mostly has it back before
            another one has woken up; so the owner sleeps for a moment now and then while this is so.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, busy_poll_s: float = 0.0) -> None:
        self.now = clock
        self._busy_poll_s = busy_poll_s if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._in_a_row = False
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._lookouts: dict[Lookout, None] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._mail: deque[Callable[[], None]] = deque()
        self._next: deque[Callable[[], None]] = deque()  # the owner's own
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._running = False
        self._closed = False
        self._thread_time = math.inf  # at the end of the last turn
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.rounds = 0
        self.longest_turn_s = 0.0
        self.crowded: Callable[[], bool] = bool
        self._slept = 0.0  # when this thread last slept, by `time.perf_counter`
        self.watch(self._wake, select.EPOLLIN, self._deliver)

    # --------------------------------------------------------------------------------------- other threads

    def post(self, callback: Callable[[], None]) -> None:
        """Have the owner thread call `callback`. For any thread, and for signal handlers.

        After the loop was closed nothing is called any more.
        """
        self._mail.append(callback)
        with contextlib.suppress(OSError):  # closed meanwhile: nobody is left to wake
            os.eventfd_write(self._wake, 1)

    def soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` when everybody else who is ready has had a turn. For the owner thread only: nobody has to be
        woken up, which other threads would use to take the interpreter."""
        self._next.append(callback)

    @property
    def turn_s(self) -> float:
        """Processor time that this turn took so far, in seconds. For the owner thread only."""
        return time.thread_time() - self._thread_time

    # ----------------------------------------------------------------------------------------- descriptors

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` whenever one of `events` (select.EPOLL*) holds for `fd`, and on errors."""
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def change(self, fd: int, events: int) -> None:
        """Watch `fd` for other events."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching; call it before `fd` is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def look_also(self, lookout: Lookout) -> None:
        """Look at this, too, until the loop sleeps: at once if it would sleep now, or has enough to look at."""
        if self._in_a_row and lookout not in self._lookouts and len(self._lookouts) < _MOST_LOOKOUTS:
            self._lookouts[lookout] = None
            lookout.watched(watched=True)

    def look_no_more(self, lookout: Lookout) -> None:
        """Undo `look_also`."""
        if lookout in self._lookouts:
            del self._lookouts[lookout]
            lookout.watched(watched=False)

    # ---------------------------------------------------------------------------------------------- timers

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once, `seconds` from now."""
        timer = Timer(self.now() + seconds, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def run_due_timers(self) -> None:
        """Call what is due now."""
        timers = self._timers
        while timers and timers[0][0] <= self.now():
            callback = heapq.heappop(timers)[2].callback
            if callback is not None:
                self._guarded(callback)

    # ------------------------------------------------------------------------------------------------- run

    def run(self) -> None:
        """Serve until `stop`."""
        self._running = True
        while self._running:
            self.run_once(_LONGEST_WAIT_S)

    def run_once(self, longest_s: float) -> None:
        """Wait at most `longest_s` for something to do, and do it."""
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
        wait = max(0.0, min(longest_s, timers[0][0] - self.now())) if timers else longest_s
        ready = self._poll(0.0 if self._mail or self._next else wait)
        self.rounds += 1
        after = len(self._next)  # what is added from here on waits until the others were looked for again
        handlers = self._handlers
        for fd, events in ready:
            handler = handlers.get(fd)
            if handler is not None:  # an earlier handler of this round may have forgotten it
                try:
                    handler(events)
                except Exception:
                    logger.exception(_DEFECT)
                self._end_turn()
        for _ in range(after):
            self._guarded(self._next.popleft())
        if timers:
            self.run_due_timers()

    def _poll(self, longest_s: float) -> list[tuple[int, int]]:
        """Wait for events. Sleeps at once unless the last ones came soon."""
        poll, clock = self._epoll.poll, time.perf_counter
        start = clock()
        ready: list[tuple[int, int]] = []
        if self._in_a_row and longest_s > 0:
            end = start + min(self._busy_poll_s, longest_s)
            while not (ready := poll(0, _EVENTS_A_ROUND)) and clock() < end:
                for lookout in self._lookouts:
                    if lookout.rings() and self._look(lookout):
                        return []
                if self.crowded():
                    self._make_way()
            self._thread_time = time.thread_time()  # looking is nobody's turn
            if not ready and longest_s <= self._busy_poll_s:
                return []  # to look on afterwards
        if not ready:
            # What came just before its client was told that nobody looks any more is served, too.
            if longest_s > 0 and any([self._look(each) for each in self._stop_looking()]):
                return []
            asleep = clock()
            ready = poll(longest_s, _EVENTS_A_ROUND)
            if (now := clock()) - asleep > _WAY_S:
                self._slept = now
        # Twice, because one that was slept through came later by the time of waking up.
        self._in_a_row = clock() - start < 2 * self._busy_poll_s
        return ready

    def _make_way(self) -> None:
        """Let other threads have the interpreter."""
        time.sleep(_WAY_S)
        self._slept = time.perf_counter()

    def _look(self, lookout: Lookout) -> bool:
        """Look there; return whether there was something to do."""
        start = time.perf_counter()
        try:
            found = lookout.look()
        except Exception:
            logger.exception(_DEFECT)
            found = True
        if found:
            if lookout in self._lookouts:  # the others come first now
                self._lookouts[lookout] = self._lookouts.pop(lookout)
            self._end_turn(time.perf_counter() - start)
        return found

    def _stop_looking(self) -> list[Lookout]:
        lookouts = list(self._lookouts)
        for lookout in lookouts:
            self.look_no_more(lookout)
        return lookouts

    def stop(self) -> None:
        """Let `run` return after the current round."""
        self._running = False

    def close(self) -> None:
        """Close the loop's own descriptors."""
        if not self._closed:
            self._closed = True
            self._handlers.clear()
            self._epoll.close()
            os.close(self._wake)

    def _deliver(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for _ in range(len(self._mail)):
            self._guarded(self._mail.popleft())

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            logger.exception(_DEFECT)
        self._end_turn()

    def _end_turn(self, at_most: float = math.inf) -> None:
        # Asked once a turn, because it is a system call: what the loop itself took since the last turn is counted too,
        # except for looking, where the time by the clock says what the turn took at most.
        now = time.thread_time()
        took = min(now - self._thread_time, at_most)
        self._thread_time = now
        self.longest_turn_s = max(self.longest_turn_s, took)
        if self.crowded() and time.perf_counter() - self._slept > _LONGEST_RUN_S:
            self._make_way()


K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Many deadlines of one length: first in, first due, so adding and removing cost one dict operation.

    Args:
        seconds: time from `add` to expiry.
        on_expired: called with each key that was not discarded in time.
    """

    def __init__(self, loop: Loop, seconds: float, on_expired: Callable[[K], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_expired = on_expired
        self._due: dict[K, float] = {}
        self._timer: Timer | None = None

    def add(self, key: K) -> None:
        """Start the time of `key`, from the beginning if it runs already."""
        self._due.pop(key, None)
        self._due[key] = self._loop.now() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._check)

    def discard(self, key: K) -> None:
        """Forget `key`."""
        self._due.pop(key, None)

    def __len__(self) -> int:
        return len(self._due)

    def _check(self) -> None:
        now = self._loop.now()
        try:
            # The timer counts as running meanwhile, so that `add` does not start another one.
            while self._due:
                key, due = next(iter(self._due.items()))
                if due > now:
                    break
                del self._due[key]
                self._on_expired(key)
        finally:
            next_due = next(iter(self._due.values()), None)
            self._timer = None if next_due is None else self._loop.call_later(next_due - now, self._check)
