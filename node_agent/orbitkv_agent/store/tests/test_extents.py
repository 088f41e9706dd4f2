from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitkv_agent.store.extents import ExtentAllocator

CAPACITY = 96


def firsts(*units: int) -> np.ndarray:
    return np.array(units, np.int64)


class ExtentMachine(RuleBasedStateMachine):
    """The allocator against a naive one: a list of units, each free or part of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY)
        self.pages: dict[int, int] = {}

    def free_map(self) -> list[bool]:
        free = [True] * CAPACITY
        for first, units in self.pages.items():
            for unit in range(first, first + units):
                assert free[unit], "pages overlap"
                free[unit] = False
        return free

    def free_runs(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for unit, is_free in enumerate([*self.free_map(), False]):
            if is_free:
                runs = (
                    [*runs[:-1], (runs[-1][0], runs[-1][1] + 1)]
                    if runs and sum(runs[-1]) == unit
                    else [*runs, (unit, 1)]
                )
        return runs

    @rule(count=st.integers(1, 20), units=st.integers(1, 9), partial=st.booleans())
    def allocate(self, count: int, units: int, partial: bool) -> None:
        available = sum(length // units for _, length in self.free_runs())
        fits_in_one = [length for _, length in self.free_runs() if length >= count * units]
        runs = self.allocator.allocate_pages(count, units, partial=partial)
        placed = sum(pages for _, pages in runs)
        assert placed == (min(count, available) if partial or available >= count else 0)
        if fits_in_one:
            assert len(runs) == 1
        for first, pages in runs:
            for page in range(pages):
                self.pages[first + page * units] = units
        self.free_map()

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), units=st.integers(1, 9))
    def free(self, data: st.DataObject, units: int) -> None:
        of_this_size = [first for first, size in self.pages.items() if size == units]
        chosen = data.draw(st.lists(st.sampled_from(of_this_size), unique=True)) if of_this_size else []
        if chosen:
            self.allocator.free_pages(firsts(*chosen), units)
        for first in chosen:
            del self.pages[first]

    @rule(first=st.integers(-2, CAPACITY + 2), units=st.integers(1, 9))
    def wrong_release_is_refused(self, first: int, units: int) -> None:
        if self.pages.get(first) != units:
            with pytest.raises(ValueError, match="not the first of an allocated page"):
                self.allocator.free_pages(firsts(first), units)

    @invariant()
    def same_as_model(self) -> None:
        assert self.allocator.extents() == self.free_runs()
        assert self.allocator.used + self.allocator.free == CAPACITY
        assert self.allocator.used == sum(self.pages.values())
        assert self.allocator.largest_free == max((length for _, length in self.free_runs()), default=0)

    def teardown(self) -> None:
        for first, units in self.pages.items():
            self.allocator.free_pages(firsts(first), units)
        assert self.allocator.extents() == [(0, CAPACITY)]


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("count", [3, 40])
def test_double_release_is_refused_and_changes_nothing(count: int) -> None:
    allocator = ExtentAllocator(CAPACITY)
    allocator.allocate_pages(count, 2)
    pages = np.arange(0, 2 * count, 2, dtype=np.int64)
    with pytest.raises(ValueError, match="Unit 2 is not the first"):
        allocator.free_pages(np.append(pages, 2), 2)
    assert allocator.used == 2 * count
    allocator.free_pages(pages, 2)
    with pytest.raises(ValueError, match="released before"):
        allocator.free_pages(pages, 2)
    assert allocator.extents() == [(0, CAPACITY)]


@pytest.mark.parametrize("first", [-1, CAPACITY])
def test_release_outside_the_arena_is_refused(first: int) -> None:
    allocator = ExtentAllocator(CAPACITY)
    allocator.allocate_pages(CAPACITY, 1)
    with pytest.raises(ValueError):
        allocator.free_pages(np.append(np.arange(20, dtype=np.int64), first), 1)
    assert allocator.used == CAPACITY


def test_the_tightest_extent_is_taken() -> None:
    allocator = ExtentAllocator(20)
    allocator.allocate_pages(20, 1)
    allocator.free_pages(firsts(2, 3, 4), 1)
    allocator.free_pages(firsts(10, 11, 12, 13, 14), 1)
    assert allocator.allocate_pages(3, 1) == [(2, 3)]


def test_pages_are_split_over_the_largest_extents_when_none_holds_all() -> None:
    allocator = ExtentAllocator(20)
    allocator.allocate_pages(20, 1)
    allocator.free_pages(firsts(0, 5, 6, 7, 8, 15, 16), 1)
    assert allocator.allocate_pages(6, 1) == [(5, 4), (15, 2)]
    assert allocator.allocate_pages(2, 1, partial=False) == []


def test_an_allocator_without_units_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one unit"):
        ExtentAllocator(0)
