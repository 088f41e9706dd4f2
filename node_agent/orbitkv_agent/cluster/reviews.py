"""Token reviews: one thread asks the apiserver, at most five times a second, once for each token, and it is remembered.

Whoever shows tokens has a turn after everybody else who does, so that a flood of forged ones only delays the next
forged one. Tokens and their hashes are kept in memory only and never logged.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from orbitkv_agent.cluster.apiserver import ApiError, TokenInfo

logger = logging.getLogger(__name__)

REMEMBERED_S: Final = 60.0
"""An answer is used for at most so long."""
SPACING_S: Final = 0.2
"""Time between two reviews."""
MAX_WAITING: Final = 256
"""Tokens that wait for a review; more are turned away,"""
MAX_WAITING_OF_ONE: Final = 16
"""and so are more than this of one peer."""
_MAX_REMEMBERED: Final = 4096

Answer = TokenInfo | ApiError
Ask = Callable[[str, str], TokenInfo]
"""Called with token and audience, in the thread of the reviews."""


_Job = tuple[bytes, str, str]
"""Digest, token, audience."""


@dataclass
class _Flight:
    waiting: list[Callable[[Answer], None]] = field(default_factory=list)


class Reviews:
    """Whose tokens are these? Used by the owner thread, but for its own thread.

    Args:
        ask: asks the apiserver; raises ApiError.
        post: hands a callable to the owner thread.
        clock: seconds, as the owner's loop has them.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._post = post
        self._clock = clock
        self._answers: dict[bytes, tuple[float, TokenInfo]] = {}
        self._flights: dict[bytes, _Flight] = {}
        # Who waits, in the order of their turns, each with what they asked; one job at a time is with the thread.
        self._waiting: OrderedDict[Hashable, deque[_Job]] = OrderedDict()
        self._asking = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orbitkv-reviews", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end."""
        self._stopping.set()
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def known(self, token: bytes, within_s: float = REMEMBERED_S) -> TokenInfo | None:
        """What was answered about a token in the last `within_s` seconds, if anything."""
        found = self._answers.get(_digest(token))
        return None if found is None or self._clock() - found[0] >= within_s else found[1]

    def review(self, token: bytes, audience: str, then: Callable[[Answer], None], of: Hashable = None) -> bool:
        """Ask anew, and call back on the owner thread. False: too many wait already, and nothing is asked.

        Args:
            of: who asks; each has a turn after all others. None: the agent itself, for sessions that are open.
        """
        digest = _digest(token)
        flight = self._flights.get(digest)
        if flight is None:
            jobs = self._waiting.get(of, ())
            if len(self._flights) >= MAX_WAITING or (of is not None and len(jobs) >= MAX_WAITING_OF_ONE):
                return False
            flight = self._flights[digest] = _Flight()
            self._waiting.setdefault(of, deque()).append((digest, token.decode("ascii", "replace"), audience))
            self._next()
        flight.waiting.append(then)
        return True

    def _next(self) -> None:
        if self._asking or not self._waiting:
            return
        of, jobs = self._waiting.popitem(last=False)
        self._asking = True
        self._jobs.put(jobs.popleft())
        if jobs:
            self._waiting[of] = jobs

    def _take(self, digest: bytes, answer: Answer) -> None:
        self._asking = False
        self._next()
        if isinstance(answer, TokenInfo):
            self._forget_old()
            self._answers[digest] = (self._clock(), answer)
        for then in self._flights.pop(digest).waiting:
            then(answer)

    def _forget_old(self) -> None:
        if len(self._answers) >= _MAX_REMEMBERED:
            oldest = self._clock() - REMEMBERED_S
            self._answers = {key: kept for key, kept in self._answers.items() if kept[0] > oldest}
            if len(self._answers) >= _MAX_REMEMBERED:
                self._answers.clear()

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stopping.is_set():
            digest, token, audience = job
            began = time.monotonic()
            answer: Answer
            try:
                answer = self._ask(token, audience)
            except ApiError as error:
                answer = error
            except Exception as error:
                logger.error("internal error in a token review (%s); please report it", type(error).__name__)
                answer = ApiError("internal error in the agent; its log has the details")
            self._deliver(digest, answer)
            self._stopping.wait(max(0.0, began + SPACING_S - time.monotonic()))

    def _deliver(self, digest: bytes, answer: Answer) -> None:
        self._post(lambda: self._take(digest, answer))


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
