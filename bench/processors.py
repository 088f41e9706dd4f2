"""Processor time by program, of everything that runs on this machine."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

TICKS: Final = os.sysconf("SC_CLK_TCK")
LEAST: Final = 0.005
"""Share of the whole from which on a program is named."""


class Moment(NamedTuple):
    """Seconds so far: by the clock, and of processor time that all programs used, and that this one and those that it
    started and that have ended used."""

    clock: float
    everybody: float
    own: float


def now() -> Moment:
    """Return how much was used until now."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return Moment(time.monotonic(), (user + nice + system + irq + softirq) / TICKS, sum(os.times()[:4]))


def others(before: Moment, after: Moment) -> float:
    """Return how many processors other programs kept busy between two moments."""
    foreign = (after.everybody - before.everybody) - (after.own - before.own)
    return max(0.0, foreign / (after.clock - before.clock))


def used() -> dict[str, float]:
    """Return the processor seconds that the processes of this machine have used, by program."""
    found: dict[str, float] = defaultdict(float)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text(errors="replace").split("\0")
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        found[_program(words)] += (int(fields[11]) + int(fields[12])) / TICKS
    return found


def between(before: Mapping[str, float], after: Mapping[str, float], each: float) -> str:
    """Return in words what was used between two moments: milliseconds for each of `each`, the most first."""
    spent = {name: 1000 * (seconds - before.get(name, 0.0)) / each for name, seconds in after.items()}
    whole = total(before, after, each)
    most = sorted(spent, key=lambda name: -spent[name])
    named = [f"{name} {spent[name]:.1f}" for name in most if spent[name] > LEAST * whole]
    return f"{whole:.1f} ({', '.join(named)})"


def total(before: Mapping[str, float], after: Mapping[str, float], each: float) -> float:
    """Return the milliseconds that were used for each of `each`. What has ended meanwhile does not count."""
    return sum(max(0.0, 1000 * (seconds - before.get(name, 0.0)) / each) for name, seconds in after.items())


def _program(words: list[str]) -> str:
    """Return the name of a program from its command line; a script's is its own, not its interpreter's."""
    name = os.path.basename(words[0]) or "kernel"
    if not name.startswith("python"):
        return name
    first = next((place for place, word in enumerate(words[1:], 1) if word in ("-m", "-c") or word[:1] != "-"), 0)
    if words[first] == "-m":
        return words[first + 1].partition(".")[0]
    return name if words[first] in (words[0], "-c", "") else os.path.basename(words[first])
