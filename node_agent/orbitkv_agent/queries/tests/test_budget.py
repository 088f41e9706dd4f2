from __future__ import annotations

import pytest

from orbitkv_agent.queries.budget import ByteBudget, Phase
from orbitkv_agent.queries.shares import Shares


def budget_of(limit: int, owner_limit: int, *, tenants: int = 1) -> ByteBudget:
    return ByteBudget(limit, owner_limit, Shares(lambda: tenants > 1))


def test_bytes_are_accounted_by_phase_until_they_are_released() -> None:
    budget = budget_of(100, 80)
    charge = budget.charge("a", "t", 30)
    assert budget.by_phase == [30, 0, 0]
    charge.move(Phase.READY)
    assert (budget.reserved, budget.of("a"), budget.by_phase[Phase.READY]) == (30, 30, 30)
    charge.release()
    assert (budget.reserved, budget.of("a"), sum(budget.by_phase)) == (0, 0, 0)
    assert (budget.peak, budget.owner_peak) == (30, 30)


def test_what_exceeds_a_limit_now_waits_and_what_exceeds_it_always_is_oversized() -> None:
    budget = budget_of(100, 80)
    budget.charge("a", "t", 70)
    assert not budget.fits("a", "t", 11)
    assert budget.fits("a", "t", 10)
    assert budget.fits("b", "t", 30)
    assert not budget.fits("b", "t", 31)
    assert budget.is_full(31)
    assert not budget.is_full(30)
    assert budget.oversized(81)
    assert not budget.oversized(80)


@pytest.mark.guard("budget-limit")
def test_a_charge_beyond_the_limit_is_a_defect() -> None:
    budget = budget_of(100, 80)
    budget.charge("a", "t", 80)
    with pytest.raises(AssertionError, match="is exceeded"):
        budget.charge("b", "t", 21)
    with pytest.raises(AssertionError, match="is exceeded"):
        budget_of(100, 80).charge("a", "t", 81)


def test_a_charge_is_released_once() -> None:
    charge = budget_of(100, 100).charge("a", "t", 1)
    charge.release()
    with pytest.raises(AssertionError, match="released twice"):
        charge.release()


def test_a_tenant_leaves_to_others_as_much_as_it_has() -> None:
    budget = budget_of(100, 100, tenants=2)
    assert budget.oversized(51)
    assert budget.fits("a", "t", 50) and not budget.fits("a", "t", 51)
    charges = [budget.charge(each, "t", 25) for each in ("a", "b")]
    assert not budget.fits("c", "t", 1), "whichever instance asks"
    assert budget.fits("d", "u", 25) and not budget.fits("d", "u", 26)
    assert not budget.shared("t", 1) and not budget.is_full(1)
    charges[0].release()
    assert budget.fits("c", "t", 12)
