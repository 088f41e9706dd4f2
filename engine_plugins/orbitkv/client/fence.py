"""Work that has to wait until one of the engine's streams has come to a point.

The points of a stream are reached in the order in which they were made, so one thread waits for them one after another.
Nothing is ever enqueued on a stream to wait for us: neither side can hang the other's streams.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .gpu import StreamPoint

T = TypeVar("T")


class Fence(Generic[T]):
    """Passes items on, in order, each when its point is reached.

    Args:
        pass_on: called with each item, on this thread or the caller's.
        failed: called with what went wrong; then nothing is passed on any more.
    """

    def __init__(self, pass_on: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        self._pass_on = pass_on
        self._failed = failed
        # Invariant: `_items` are in order of arrival, and the thread takes only the first. Never held while waiting.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._items: deque[tuple[StreamPoint, T]] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, point: StreamPoint, item: T) -> None:
        """Pass `item` on when `point` is reached; at once if it is and nothing waits."""
        if not self._items and point.reached():
            self._pass_on(item)
            return
        with self._lock:
            self._items.append((point, item))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="orbitkv-fence", daemon=True)
                self._thread.start()
            self._changed.notify()

    def withdraw(self, item: Any) -> StreamPoint | None:
        """Take an item back; its point, or None when it was passed on."""
        with self._lock:
            for entry in self._items:
                if entry[1] is item:
                    self._items.remove(entry)
                    return entry[0]
        return None

    def items(self) -> list[T]:
        """What waits now."""
        with self._lock:
            return [item for _, item in self._items]

    def take_all(self) -> list[T]:
        """Take everything back."""
        with self._lock:
            items = [item for _, item in self._items]
            self._items.clear()
        return items

    def close(self) -> None:
        """End the thread. What still waits stays, to be taken back."""
        with self._lock:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._items and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                head = self._items[0]
            try:
                head[0].wait()
            except Exception as error:
                self._failed(error)
                return
            if self.withdraw(head[1]) is not None:
                self._pass_on(head[1])
