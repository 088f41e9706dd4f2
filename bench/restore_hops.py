"""From the calls of `bench.timed_connector`: what the connector takes of a step, and where a restore waits."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_UP = "get_num_new_matched_tokens"
BUILD = "build_connector_meta"
ALLOCATED = "update_state_after_alloc"
HEARD = "update_connector_output"


@dataclass(frozen=True)
class Hops:
    """Of a restore, in ms since its look-up began.

    Attributes:
        sent: the agent was asked to copy.
        seen: the scheduler was told that all is in place.
        scheduled: the engine gave its first tokens to compute to a step.
    """

    sent: float
    seen: float
    scheduled: float


@dataclass(frozen=True)
class Calls:
    """The calls of a connector, in order."""

    rows: Sequence[tuple[str, float, float, list[int]]]

    @classmethod
    def read(cls, file: Path) -> Calls:
        """What `bench.timed_connector` wrote."""
        rows: list[Any] = json.loads(file.read_text())
        return cls([(name, started, seconds, note) for name, started, seconds, note in rows])

    def microseconds_per_step(self) -> list[float]:
        """Of all calls together, for each step that computes something."""
        found, spent, computes = [], 0.0, False
        for name, _, seconds, note in self.rows:
            spent += seconds
            if name == BUILD:  # the calls after it belong to its step, those before it to its look-ups
                if computes:
                    found.append(spent * 1e6)
                spent, computes = 0.0, note[1] > 0
        return found

    def hops(self, tokens: int) -> list[Hops]:
        """Of all restores of so many tokens that ran alone."""
        found = []
        began = sent = seen = 0.0
        for name, started, seconds, note in self.rows:
            end = started + seconds
            if name == LOOK_UP and note[0]:
                began, sent, seen = (0.0, 0.0, 0.0) if began and not seen else (started, 0.0, 0.0)
                if note[0] != tokens:
                    began = 0.0
            elif name == ALLOCATED and began and not sent and note[0]:
                sent = end
            elif name == HEARD and sent and not seen and note[0]:
                seen = end
            elif name == BUILD and seen and note[1]:
                found.append(Hops(*((moment - began) * 1e3 for moment in (sent, seen, end))))
                began = sent = seen = 0.0
        return found


def medians(hops: Sequence[Hops]) -> Hops:
    """Of each hop."""
    return Hops(*(statistics.median(getattr(each, name) for each in hops) for name in ("sent", "seen", "scheduled")))
