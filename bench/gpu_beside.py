"""What restores and a real engine that decodes on the same GPU cost each other."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.figures import say

if TYPE_CHECKING:
    from bench.gpu import Bench, Limit, Report

STREAMS: Final = 16
WINDOWS: Final = 10
STEPS: Final = 200


def why_not() -> str:
    """Why this machine cannot run it, "" when it can."""
    return "" if importlib.util.find_spec("vllm") else "vllm is not installed"


def beside_engine(bench: Bench, limit: Limit, report: Report) -> None:
    """Windows of 200 steps of an engine that decodes 16 streams, by turns alone and beside restores at full speed."""
    from bench.ttft import Engine

    def steps() -> float:
        """Median ms of a step of a window."""
        return float(statistics.median(engine.call("decode", streams=STREAMS, steps=STEPS)))

    with tempfile.TemporaryDirectory() as folder, Engine(Path(folder), "beside", None) as engine:
        engine.begin()
        engine.ready()
        alone: list[float] = []
        beside: list[float] = []
        speeds: list[float] = []
        limits: list[float] = []
        steps()
        with ThreadPoolExecutor(1) as other:
            for _ in range(WINDOWS):
                limits.append(limit.restore())
                alone.append(steps())
                window = other.submit(steps)
                while not window.done():
                    speeds.append(bench.restore())
                beside.append(window.result())
    report.ratio("beside_engine_ratio", speeds, limits, 0.93, f"beside an engine that decodes {STREAMS} streams")
    each = [there / here for here, there in zip(alone, beside, strict=True)]
    slowdown = statistics.median(each)
    say(
        f"  a step of the engine: {statistics.median(alone):.2f} ms alone, {statistics.median(beside):.2f} ms beside it"
    )
    report.add("beside_engine_slowdown", slowdown, f"of a step ({statistics.median(alone):.2f} ms alone)", bound=1.15)
