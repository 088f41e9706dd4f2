from __future__ import annotations

import pytest

from orbitkv_agent.queries.budget import ByteBudget, Phase


def test_bytes_are_accounted_by_phase_until_they_are_released() -> None:
    budget = ByteBudget(100, 80)
    charge = budget.charge("a", 30)
    assert budget.by_phase == [30, 0, 0]
    charge.move(Phase.READY)
    assert (budget.reserved, budget.of("a"), budget.by_phase[Phase.READY]) == (30, 30, 30)
    charge.release()
    assert (budget.reserved, budget.of("a"), sum(budget.by_phase)) == (0, 0, 0)
    assert (budget.peak, budget.owner_peak) == (30, 30)


def test_what_exceeds_a_limit_now_waits_and_what_exceeds_it_always_is_oversized() -> None:
    budget = ByteBudget(100, 80)
    budget.charge("a", 70)
    assert not budget.fits("a", 11)
    assert budget.fits("a", 10)
    assert budget.fits("b", 30)
    assert not budget.fits("b", 31)
    assert budget.is_full(31)
    assert not budget.is_full(30)
    assert budget.oversized(81)
    assert not budget.oversized(80)


@pytest.mark.guard("budget-limit")
def test_a_charge_beyond_the_limit_is_a_defect() -> None:
    budget = ByteBudget(100, 80)
    budget.charge("a", 80)
    with pytest.raises(AssertionError, match="is exceeded"):
        budget.charge("b", 21)
    with pytest.raises(AssertionError, match="is exceeded"):
        ByteBudget(100, 80).charge("a", 81)


def test_a_charge_is_released_once() -> None:
    charge = ByteBudget(100, 100).charge("a", 1)
    charge.release()
    with pytest.raises(AssertionError, match="released twice"):
        charge.release()
