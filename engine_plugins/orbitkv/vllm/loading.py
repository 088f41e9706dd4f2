"""Lookups that are loading, looked at all together: hundreds of requests may ask for theirs in every step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Loading:
    """Which lookups are loading, by their records in the memory that the agent writes.

    Attributes:
        still: request id to the first token asked for, of those that were loading when the step began; empty between
            steps. An answer for one of them is "ask again".
    """

    def __init__(self) -> None:
        self.still: dict[str, int] = {}
        self._first_tokens: dict[str, int] = {}
        self._records: dict[str, tuple[int, int, float]] = {}  # slot, its word while loading, until when
        self._words = memoryview(b"")
        self._changed = False
        self._slots: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._pending: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._until: npt.NDArray[np.float64] = np.zeros(0)

    def add(self, request_id: str, first_token: int, watch: tuple[memoryview, int, int], until: float) -> None:
        """A lookup is loading: as long as its record says so (see `CacheManagerClient.query_watch`), but not longer
        than until `until`. All records are of one client."""
        self._words, slot, pending = watch
        self._first_tokens[request_id] = first_token
        self._records[request_id] = (slot, pending, until)
        self._changed = True

    def discard(self, request_id: str) -> None:
        """It is not loading any more, or does not matter any more."""
        if self._first_tokens.pop(request_id, None) is not None:
            del self._records[request_id]
            self._changed = True

    def clear(self) -> None:
        """Forget all, before their client is closed."""
        self.still = {}
        self._first_tokens.clear()
        self._records.clear()
        self._words = memoryview(b"")
        self._changed = False

    def begin_step(self, now: float) -> None:
        """See which are loading still at `now`; the others are forgotten."""
        if self._records:
            if self._changed:
                self._arrange()
            words = np.frombuffer(self._words.tobytes(), np.uint64)
            loading = (words[self._slots] == self._pending) & (self._until > now)
            if not loading.all():
                ids = list(self._records)
                for position in np.flatnonzero(~loading).tolist():
                    self.discard(ids[position])
        self.still = self._first_tokens

    def end_step(self) -> None:
        """What was seen is not looked at any more."""
        self.still = {}

    def _arrange(self) -> None:
        slots, pending, until = zip(*self._records.values(), strict=True)
        self._slots = np.array(slots, np.int64)
        self._pending = np.array(pending, np.uint64)
        self._until = np.array(until)
        self._changed = False
