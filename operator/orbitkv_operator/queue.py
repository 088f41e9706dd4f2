"""One queue of keys, each at most once in it, and none handled by two threads at one time."""

from __future__ import annotations

import heapq
import threading
import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

LONG_SECONDS: Final = 0.1
"""A look that takes longer is followed by a rest."""
FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 30.0


class Key(NamedTuple):
    """What is to be looked at."""

    kind: str
    name: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace + '/' if self.namespace else ''}{self.name}"


@dataclass
class KeyedQueue:
    """Keys with times. Adding one that is there brings it forward and never back; a key that is added while it is
    handled is handled once more afterwards. A key that took long rests for as long: a pool of a thousand nodes, of
    which there is something new all the time, leaves half of a thread to others.

    The lock guards everything here and is held for bookkeeping only. Of those who wait one knows when the first key is
    due, so nobody is woken for a key that comes later.
    """

    _condition: threading.Condition = field(default_factory=threading.Condition)
    _due: dict[Key, float] = field(default_factory=dict)
    _heap: list[tuple[float, Key]] = field(default_factory=list)
    """(due, key), also outdated ones: only those that agree with `_due` count."""
    _running: dict[Key, float] = field(default_factory=dict)
    """Keys that are handled at present, and since when."""
    _resting: dict[Key, float] = field(default_factory=dict)
    """Keys that took long, and until when they rest."""
    _failures: dict[Key, int] = field(default_factory=dict)
    _closed: bool = False

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Have `key` handled in `delay` seconds, or when it has rested."""
        due = time.monotonic() + delay
        with self._condition:
            due = max(due, self._resting.get(key, due))
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                heapq.heappush(self._heap, (due, key))
                if self._heap[0] == (due, key):
                    self._condition.notify()

    def take(self) -> Key | None:
        """Wait for a key whose time has come and that nobody handles; None: the queue was closed."""
        with self._condition:
            while not self._closed:
                now = time.monotonic()
                wait: float | None = None
                held: list[tuple[float, Key]] = []
                found: Key | None = None
                while self._heap:
                    due, key = self._heap[0]
                    if self._due.get(key) != due:
                        heapq.heappop(self._heap)
                    elif due > now:
                        wait = due - now
                        break
                    else:
                        heapq.heappop(self._heap)
                        if key not in self._running:
                            found = key
                            break
                        held.append((due, key))  # its turn comes when the present one has ended
                for entry in held:
                    heapq.heappush(self._heap, entry)
                if found is not None:
                    del self._due[found]
                    self._resting.pop(found, None)
                    self._running[found] = now
                    self._condition.notify()  # another one is to wait for what is first now
                    return found
                self._condition.wait(wait)
            return None

    def done(self, key: Key, *, last: bool = False) -> None:
        """`key` was handled; its failures are forgotten. `last`: what it stands for is gone."""
        with self._condition:
            self._failures.pop(key, None)
            self._ended(key, rests=not last)

    def failed(self, key: Key, at_least: float = 0.0) -> float:
        """`key` could not be handled: try again, later each time. Returns after how many seconds."""
        with self._condition:
            count = self._failures.get(key, 0)
            self._failures[key] = min(count + 1, 16)
            self._ended(key, rests=True)
        delay = max(min(FIRST_BACKOFF * float(2**count), LONGEST_BACKOFF), at_least)
        self.add(key, delay)
        return delay

    def _ended(self, key: Key, *, rests: bool) -> None:
        """Called under the lock: nobody handles `key` any more. Others have passed over it if it came due."""
        now = time.monotonic()
        took = now - self._running.pop(key, now)
        if rests and took > LONG_SECONDS:
            self._resting[key] = now + took
        if key in self._due:
            if self._due[key] < now + took and key in self._resting:
                self._due[key] = now + took
                heapq.heappush(self._heap, (now + took, key))
            self._condition.notify()

    def longest_running(self) -> float:
        """Return for how many seconds the oldest handling at present has run."""
        with self._condition:
            now = time.monotonic()
            return now - min(self._running.values(), default=now)

    def overdue(self) -> float:
        """Return for how many seconds the key that should have been handled first has waited."""
        with self._condition:
            waiting = [due for key, due in self._due.items() if key not in self._running]
            return max(0.0, time.monotonic() - min(waiting, default=float("inf")))

    def close(self) -> None:
        """Let everybody who waits for a key go."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
