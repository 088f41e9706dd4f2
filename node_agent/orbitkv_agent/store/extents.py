"""Which units of an arena are free: best fit for contiguous runs, coalescing on release."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from orbitkv_agent.store.memory import lazy_zeros, some

UNIT_BYTES = 4096
"""Pages are padded to this size; places in an arena are counted in it."""

_SMALL_BATCH = 16  # below it, numpy's cost per call exceeds that of a Python loop


class ExtentAllocator:
    """Free extents of `capacity_units` units of 4 KiB.

    An extent is a maximal run of free units. `_tags` holds boundary tags, shifted by one unit so that both ends have a
    neighbour: `-length` at the first and the last unit of a free extent, `units_per_page` at the first unit of an
    allocated page, zero elsewhere. A release thus finds its free neighbours, or that it is wrong, in constant time.
    """

    def __init__(self, capacity_units: int) -> None:
        if capacity_units <= 0:
            raise ValueError(f"An allocator needs at least one unit, not {capacity_units}.")
        self.capacity = capacity_units
        self.used = 0
        self._tags: npt.NDArray[np.int32] = lazy_zeros(capacity_units + 2, np.int32)
        self._scalar_tags = self._tags.data  # single tags: three times as fast as through numpy
        self._starts_by_length: dict[int, set[int]] = {}
        self._lengths: list[int] = []  # the keys of _starts_by_length, ascending
        self._insert(0, capacity_units)

    @property
    def free(self) -> int:
        """Units that are free."""
        return self.capacity - self.used

    @property
    def largest_free(self) -> int:
        """Units of the largest free extent; 0 when all is used."""
        return self._lengths[-1] if self._lengths else 0

    def extents(self) -> list[tuple[int, int]]:
        """All free extents as (first unit, units), ascending. For tests and diagnosis."""
        return sorted((start, length) for length, starts in self._starts_by_length.items() for start in starts)

    def available_pages(self, units_per_page: int) -> int:
        """How many pages of `units_per_page` contiguous units could be allocated now."""
        return sum(
            length // units_per_page * len(self._starts_by_length[length])
            for length in self._lengths[bisect_left(self._lengths, units_per_page) :]
        )

    def allocate_pages(self, count: int, units_per_page: int, *, partial: bool = True) -> list[tuple[int, int]]:
        """Take `count` pages of `units_per_page` units in as few runs as possible.

        Returns (first unit, pages) for each run; a run's pages lie one after another. When fewer are free, the answer
        is what there is if `partial`, otherwise nothing is taken and the list is empty.
        """
        if not partial and self.available_pages(units_per_page) < count:
            return []
        runs: list[tuple[int, int]] = []
        while count > 0 and self.largest_free >= units_per_page:
            best = bisect_left(self._lengths, count * units_per_page)
            length = self._lengths[min(best, len(self._lengths) - 1)]
            pages = min(count, length // units_per_page)
            runs.append((self._take(length, pages, units_per_page), pages))
            count -= pages
        return runs

    def free_pages(self, first_units: npt.NDArray[np.int64], units_per_page: int) -> None:
        """Give back pages by their first units, in any order.

        Raises ValueError, and changes nothing, if one of them is not the first unit of an allocated page of this size
        (a double release) or is named twice.
        """
        if len(first_units) < _SMALL_BATCH:
            runs = self._untag_few(sorted(first_units.tolist()), units_per_page)
        else:
            runs = self._untag_many(np.sort(first_units), units_per_page)
        for start, length in runs:
            self._release(start, length)
        self.used -= len(first_units) * units_per_page

    def _untag_few(self, starts: list[int], units: int) -> list[tuple[int, int]]:
        tags = self._scalar_tags
        runs: list[tuple[int, int]] = []
        previous = -1
        for start in starts:
            if not 0 <= start < self.capacity or tags[start + 1] != units or start == previous:
                raise _not_allocated(start, units)
            previous = start
        for start in starts:
            tags[start + 1] = 0
            if runs and runs[-1][0] + runs[-1][1] == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + units)
            else:
                runs.append((start, units))
        return runs

    def _untag_many(self, starts: npt.NDArray[np.int64], units: int) -> list[tuple[int, int]]:
        if starts[0] < 0 or starts[-1] >= self.capacity:
            raise _not_allocated(int(starts[0] if starts[0] < 0 else starts[-1]), units)
        wrong = self._tags[starts + 1] != units
        steps = np.diff(starts)
        wrong[1:] |= steps == 0
        if some(wrong):
            raise _not_allocated(int(starts[wrong][0]), units)
        self._tags[starts + 1] = 0
        firsts = np.concatenate(([0], np.flatnonzero(steps != units) + 1))
        pages = np.diff(np.append(firsts, len(starts)))
        return list(zip(starts[firsts].tolist(), (pages * units).tolist(), strict=True))

    def _take(self, length: int, pages: int, units: int) -> int:
        # pop, not iter: a set remembers where it popped last, while iteration walks over all that was popped before
        start = self._starts_by_length[length].pop()
        self._untag_extent(start, length)
        taken = pages * units
        self._tags[start + 1 : start + 1 + taken : units] = units
        if taken < length:
            self._insert(start + taken, length - taken)
        self.used += taken
        return start

    def _release(self, start: int, length: int) -> None:
        before = -self._scalar_tags[start]
        if before > 0:
            self._remove(start - before, before)
            start -= before
            length += before
        after = -self._scalar_tags[start + length + 1]
        if after > 0:
            self._remove(start + length, after)
            length += after
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        starts = self._starts_by_length.get(length)
        if starts is None:
            self._starts_by_length[length] = {start}
            insort(self._lengths, length)
        else:
            starts.add(start)
        self._scalar_tags[start + 1] = -length
        self._scalar_tags[start + length] = -length

    def _remove(self, start: int, length: int) -> None:
        self._starts_by_length[length].remove(start)
        self._untag_extent(start, length)

    def _untag_extent(self, start: int, length: int) -> None:
        if not self._starts_by_length[length]:
            del self._starts_by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._scalar_tags[start + 1] = 0
        self._scalar_tags[start + length] = 0


def _not_allocated(start: int, units: int) -> ValueError:
    return ValueError(
        f"Unit {start} is not the first of an allocated page of {units} units: it was released before, or never."
    )
