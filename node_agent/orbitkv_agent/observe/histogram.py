"""A histogram of durations that its one writer keeps and anybody renders from a snapshot."""

from __future__ import annotations

from bisect import bisect_left

from orbitkv_agent.observe.snapshot import HistogramData

DEFAULT_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds: from one small page to a restore that the watchdog would report."""


class Histogram:
    """Counts durations in seconds by bucket. Used by one thread."""

    def __init__(self, bounds: tuple[float, ...] = DEFAULT_BOUNDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; a bound belongs to the bucket below it, as Prometheus has it."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def data(self) -> HistogramData:
        """Return a copy for the snapshot."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
