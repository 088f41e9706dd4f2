"""What `bench.ttft` makes of what its engines answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.restore_hops import ALLOCATED, BUILD, HEARD, LOOK_UP
from bench.ttft import LONG, SHORT, Bench, apart, restored_bytes

HIT_MS = 30.0
LIMIT_GB_S = 50.0


class FakeEngine:
    """Restores at the speed of the limit and 3 ms; decodes in 5 ms, and 40 ms a wave are lost to a hit."""

    def __init__(self, folder: Path, *, cache: bool) -> None:
        self.calls = folder / "calls.json"
        self._cache = cache
        self._in_hbm: set[int] = set()
        self._answer = 0.0
        self.forgets = 0
        self.waits_ms = 0

    def ask(self, tokens: int, seed: int) -> dict[str, Any]:
        hit = seed in self._in_hbm
        over = 0.0 if hit else restored_bytes(tokens) / LIMIT_GB_S / 1e6 + 3 + self.waits_ms
        self._in_hbm.add(seed)
        best = {str(token): -1.0 - self._answer for token in range(5)}
        return {"ms": HIT_MS + over, "cached": (tokens - 1) // 16 * 16, "best": best}

    def call(self, command: str, **arguments: Any) -> Any:
        return getattr(self, f"_{command}")(**arguments)

    def _reset(self) -> None:
        self._in_hbm.clear()

    def _cached(self) -> int:
        self.forgets -= 1
        return 0 if self.forgets >= 0 else LONG - 16

    def _together(self, tokens: int, seeds: list[int]) -> dict[str, Any]:
        at_limit = len(seeds) * restored_bytes(tokens) / LIMIT_GB_S / 1e6
        return {"ms": 1.2 * at_limit, "cached": self._cached()}

    def _wave(self, tokens: int, seeds: list[int], streams: int) -> dict[str, Any]:
        hit = set(seeds) <= self._in_hbm
        self._in_hbm.update(seeds)
        steps = [5.0] * 29 + [5.0 + (40.0 if hit else 60.0)]
        return {"alone": [5.0] * 20, "steps": steps, "firsts": [sum(steps)] * len(seeds), "cached": self._cached()}

    def _throughput(self, **_: Any) -> float:
        return 99.0 if self._cache else 100.0

    def _write_calls(self) -> None:
        one = [
            (LOOK_UP, 1.0, 0.0, [1008]),
            (ALLOCATED, 1.001, 0.0, [1008]),
            (HEARD, 1.004, 0.0, [1]),
            (BUILD, 1.006, 0.0, [0, 16]),
        ]
        self.calls.write_text(json.dumps([*one, (BUILD, 1.01, 0.0, [0, 0])]))


class FakeLimit:
    def restore(self) -> float:
        return LIMIT_GB_S


def measured(bench: Bench) -> dict[str, float]:
    for _, stage in bench.stages():
        stage()
    return {figure.name: figure.value for figure in bench.figures}


@pytest.fixture
def ours(tmp_path: Path) -> FakeEngine:
    return FakeEngine(tmp_path, cache=True)


@pytest.fixture
def bench(ours: FakeEngine, tmp_path: Path) -> Bench:
    late, plain, theirs = (FakeEngine(tmp_path, cache=cache) for cache in (True, False, True))
    late.waits_ms = 2
    return Bench([ours, late, plain, theirs], FakeLimit())  # type: ignore[list-item, arg-type]


def test_figures_compare_what_the_bounds_are_about(bench: Bench) -> None:
    found = measured(bench)
    assert found["ttft_1k_over_hit_ms"] == pytest.approx(restored_bytes(SHORT) / LIMIT_GB_S / 1e6 + 3)
    assert found["ttft_8k_over_hit_ms"] == pytest.approx(restored_bytes(LONG) / LIMIT_GB_S / 1e6 + 3)
    assert found["ttft_1k_over_hit_own_scheduler_ms"] == pytest.approx(found["ttft_1k_over_hit_ms"] + 2)
    assert found["hbm_hit_8k_ratio"] == 1
    assert found["offloading_8k_restored_ms"] == found["ttft_8k_restored_ms"]
    assert found["batch_7x8k_limit_ratio"] == pytest.approx(1.2)
    assert found["decode_lost_ratio"] == pytest.approx(1.5), "60 ms a wave instead of 40"
    assert found["decode_p99_ratio"] == pytest.approx(65 / 45)
    assert found["first_tokens_limit_ratio"] == pytest.approx(210 / (190 + 7 * restored_bytes(LONG) / LIMIT_GB_S / 1e6))
    assert found["saving_throughput_ratio"] == pytest.approx(0.99)
    assert found["restore_1k_seen_ms"] == pytest.approx(4)
    assert found["batches_not_restored"] == 0


def test_a_batch_that_was_not_restored_is_not_counted(bench: Bench, ours: FakeEngine) -> None:
    ours.forgets = 4  # the first is computed anyway
    found = measured(bench)
    assert found["batches_not_restored"] == 3
    assert found["batch_7x8k_limit_ratio"] == pytest.approx(1.2)


def test_batches_that_are_never_restored_are_an_error(bench: Bench, ours: FakeEngine) -> None:
    ours.forgets = 1000
    with pytest.raises(RuntimeError, match="were not restored as a whole"):
        measured(bench)


def test_a_restored_prompt_with_another_answer_is_an_error(
    bench: Bench, ours: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset = ours._reset

    def wrong() -> None:
        reset()
        ours._answer = 0.5

    monkeypatch.setattr(ours, "_reset", wrong)
    with pytest.raises(RuntimeError, match="has another answer"):
        measured(bench)


def test_answers_with_other_tokens_are_far_apart() -> None:
    one = {"1": -0.1, "2": -0.2, "3": -0.3, "4": -0.4, "5": -0.5}
    assert apart(one, one) == 0
    assert apart(one, {**one, "1": -0.3}) == pytest.approx(0.2)
    assert apart(one, {"1": -0.1, "7": -0.2, "8": -0.3, "9": -0.4, "6": -0.5}) == float("inf")
