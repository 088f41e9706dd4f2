"""How long the scheduler's thread may wait for the agent: a few milliseconds a step, none while it is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orbitkv.guards import guard
from orbitkv.protocol.errors import ErrorKind, OrbitKVError

STEP_S = 0.005
"""All calls of one step together."""
SMALLEST_S = 0.0003
"""With less than this left, a call is put off to the next step."""
TIMEOUTS_TO_OPEN = 2
"""One late answer may be the machine's fault; two in a row are the agent's."""
FIRST_PROBE_AFTER_S = 0.1
LAST_PROBE_AFTER_S = 1.0

T = TypeVar("T")


class Allowance:
    """Time of one step, and the breaker that opens when calls use it up without an answer.

    Attributes:
        now: the step's time (`time.monotonic`), read once a step; 0.0 between steps.
        trips: how often the breaker opened.
        open: the agent is not asked, because it did not answer in time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = 0.0
        self.trips = 0
        self._clock = clock
        self._spent = 0.0
        self._timeouts = 0
        self._probe_at = 0.0
        self._probe_after_s = FIRST_PROBE_AFTER_S
        self.open = False

    def begin(self) -> None:
        """A step begins."""
        self.now = self._clock()
        self._spent = 0.0

    def end(self) -> None:
        """The step ended."""
        self.now = 0.0

    @property
    def left_s(self) -> float:
        """What this step may still wait, in seconds; 0 when it is not worth a call."""
        left = STEP_S - self._spent
        return left if left > SMALLEST_S else 0.0

    def call(self, work: Callable[[float], T]) -> T:
        """Run `work(timeout in ms)` within what is left, and open the breaker if the agent does not answer again.

        Raises:
            OrbitKVError: TIMEOUT, or what `work` raises.
        """
        allowed_s = self.left_s if guard("vllm-step-allowance") else 30.0
        started = self._clock()
        try:
            result = work(allowed_s * 1000)
            self._timeouts = 0
            return result
        except OrbitKVError as error:
            if error.kind is ErrorKind.TIMEOUT:
                self._trip()
            raise
        finally:
            self._spent += self._clock() - started

    def probe_due(self) -> bool:
        """Whether the open breaker's next probe may be made now."""
        return self.open and self.now >= self._probe_at

    def close(self) -> None:
        """The agent answers again."""
        self.open = False
        self._timeouts = 0
        self._probe_after_s = FIRST_PROBE_AFTER_S

    def _trip(self) -> None:
        self._timeouts += 1
        if not self.open:
            if self._timeouts < TIMEOUTS_TO_OPEN:
                return
            self.open = True
            self.trips += 1
        else:
            self._probe_after_s = min(self._probe_after_s * 2, LAST_PROBE_AFTER_S)
        self._probe_at = self._clock() + self._probe_after_s
