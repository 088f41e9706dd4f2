"""What a bench returns and how it is printed."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One measured number. `baseline` is what it is compared to in the same run, `bound` what it must keep.

    `ratio` is value over baseline; `at_least` says on which side of the bound is good.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    bound: float | None = None
    at_least: bool = False

    @property
    def ratio(self) -> float | None:
        """The value over the baseline, where there is one."""
        return self.value / self.baseline if self.baseline else None

    @property
    def kept(self) -> bool | None:
        """Whether the bound is kept, where there is one."""
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, object]:
        """The figure as it stands in the JSON line."""
        figure: dict[str, object] = {"name": self.name, "value": round(self.value, 4), "unit": self.unit}
        if self.baseline is not None and self.ratio is not None:
            figure |= {"baseline": round(self.baseline, 4), "ratio": round(self.ratio, 4)}
        return figure


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the sample below which `percent` of them lie (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def say(text: str) -> None:
    """Progress, for people: on stderr, so that stdout keeps the results."""
    print(text, file=sys.stderr, flush=True)


def told(figures: list[Figure]) -> list[Figure]:
    """Say figures as soon as they are there, and return them: a long run may be cut before its end."""
    say(table(figures))
    return figures


def machine() -> str:
    """This machine in a few words."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}"


def table(figures: Sequence[Figure]) -> str:
    """The figures as a table for people."""
    rows = [("figure", "value", "unit", "baseline", "ratio", "bound", "")]
    for figure in figures:
        bound = "" if figure.bound is None else f"{'>=' if figure.at_least else '<='} {figure.bound:g}"
        kept = {None: "", True: "kept", False: "MISSED"}[figure.kept]
        rows.append(
            (
                figure.name,
                f"{figure.value:,.3g}" if figure.value < 1000 else f"{figure.value:,.0f}",
                figure.unit,
                "" if figure.baseline is None else f"{figure.baseline:,.3g}",
                "" if figure.ratio is None else f"{figure.ratio:.2f}",
                bound,
                kept,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def json_line(bench: str, figures: Sequence[Figure]) -> str:
    """The figures as one JSON object."""
    return json.dumps({"bench": bench, "machine": machine(), "figures": [figure.as_json() for figure in figures]})
