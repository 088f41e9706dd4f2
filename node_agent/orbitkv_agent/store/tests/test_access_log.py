from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv_agent.store.access_log import BLOCK_MENTIONS, AccessLog, Entries


class Clock:
    """The entry table's part of the log: ticks that rise, and each entry's last one."""

    def __init__(self, entries: int) -> None:
        self.last: npt.NDArray[np.int64] = np.zeros(entries, np.int64)
        self.next = 1

    def touch(self, entries: Entries) -> npt.NDArray[np.int64]:
        ticks = np.arange(self.next, self.next + len(entries), dtype=np.int64)
        self.next += len(entries)
        self.last[entries] = ticks
        return ticks


def all_eligible(entries: Entries) -> npt.NDArray[np.bool_]:
    return np.ones(len(entries), np.bool_)


def one_each(entries: Entries) -> npt.NDArray[np.int32]:
    return np.ones(len(entries), np.int32)


def entries(*numbers: int) -> Entries:
    return np.array(numbers, np.int64)


def use(log: AccessLog, clock: Clock, numbers: Entries) -> None:
    log.mention(numbers, clock.touch(numbers))


def test_least_recently_used_comes_first() -> None:
    clock = Clock(10)
    log = AccessLog(clock.last)
    log.live = 4
    use(log, clock, entries(1, 2, 3))
    use(log, clock, entries(1, 4))
    assert log.oldest(2, all_eligible, one_each, 99).tolist() == [2, 3]
    assert log.oldest(9, all_eligible, one_each, 99).tolist() == [1, 4]
    assert log.oldest(9, all_eligible, one_each, 99).tolist() == []


def test_victims_stop_at_the_footprint_asked_for() -> None:
    clock = Clock(10)
    log = AccessLog(clock.last)
    log.live = 4
    use(log, clock, entries(1, 2, 3, 4))
    sizes = np.array([0, 5, 1, 7, 1], np.int32)
    assert log.oldest(9, all_eligible, lambda chosen: sizes[chosen], 6).tolist() == [1, 2]
    assert log.oldest(9, all_eligible, lambda chosen: sizes[chosen], 1).tolist() == [3], "the rest keeps its place"


def test_ineligible_entries_are_set_aside_until_mentioned_again() -> None:
    clock = Clock(10)
    log = AccessLog(clock.last)
    log.live = 3
    use(log, clock, entries(1, 2, 3))
    assert log.oldest(1, lambda chosen: chosen != 1, one_each, 99).tolist() == [2]
    assert clock.last[1] == 0, "its owner can see that no log mentions it"
    use(log, clock, entries(1))
    assert log.oldest(9, all_eligible, one_each, 99).tolist() == [3, 1]


def test_an_entry_that_moved_to_another_log_is_not_found_in_the_first() -> None:
    clock = Clock(10)
    probationary, retained = AccessLog(clock.last), AccessLog(clock.last)
    use(probationary, clock, entries(1, 2))
    use(retained, clock, entries(1))
    assert probationary.oldest(9, all_eligible, one_each, 99).tolist() == [2]
    assert retained.oldest(9, all_eligible, one_each, 99).tolist() == [1]


def test_the_log_stays_in_proportion_to_what_lives() -> None:
    clock = Clock(50_001)
    log = AccessLog(clock.last)
    log.live = 50_000
    random = np.random.default_rng(7)
    everyone = np.arange(1, 50_001, dtype=np.int64)
    use(log, clock, everyone)
    for _ in range(3_000):
        use(log, clock, random.integers(1, 50_001, 64).astype(np.int64))
        assert len(log) <= 3 * log.live + 2 * BLOCK_MENTIONS
    expected = everyone[np.argsort(clock.last[everyone])]
    found = [log.oldest(512, all_eligible, one_each, 512) for _ in range(98)]
    np.testing.assert_array_equal(np.concatenate(found), expected[: 98 * 512])


def test_a_log_of_stale_mentions_shrinks_to_nothing_much() -> None:
    clock = Clock(10)
    log = AccessLog(clock.last)
    log.live = 3
    for _ in range(3 * BLOCK_MENTIONS):
        use(log, clock, entries(1, 2, 3))
    assert len(log) <= 3 * BLOCK_MENTIONS
    assert log.oldest(9, all_eligible, one_each, 99).tolist() == [1, 2, 3]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=10), max_size=30), st.integers(1, 40))
def test_order_is_that_of_the_last_use(uses: list[list[int]], limit: int) -> None:
    clock = Clock(31)
    log = AccessLog(clock.last)
    log.live = 30
    order: list[int] = []
    for numbers in uses:
        use(log, clock, entries(*numbers))
        for number in numbers:
            if number in order:
                order.remove(number)
            order.append(number)
    assert log.oldest(limit, all_eligible, one_each, 10**6).tolist() == order[:limit]
