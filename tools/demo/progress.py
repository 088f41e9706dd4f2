"""Lines of progress on stderr, so that nobody has to wonder whether something still happens."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 10


class Progress:
    """Says what is being done, with the seconds since the start. `name` begins each line."""

    def __init__(self, name: str = "demo") -> None:
        self._name = name
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Prints one line."""
        print(f"{self._name}: {time.monotonic() - self._started:4.0f} s  {text}", file=sys.stderr, flush=True)

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Says what begins, and every ten seconds that it still goes on."""
        self.say(text)
        done = threading.Event()

        def remind() -> None:
            while not done.wait(PATIENCE_SECONDS):
                self.say(f"  still at it: {text}")

        thread = threading.Thread(target=remind, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
