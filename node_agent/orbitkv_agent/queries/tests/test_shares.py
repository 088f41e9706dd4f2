from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv_agent.queries.shares import Shares

LIMIT = 1024


def taken(shares: Shares, wishes: list[tuple[str, int]]) -> int:
    """How much is taken when these are asked for one after the other, each as much of its wish as is allowed."""
    free = LIMIT
    for tenant, wish in wishes:
        for size in (wish, wish // 2, 1):
            if size <= free and shares.allows(tenant, size, free):
                shares.take(tenant, size)
                free -= size
                break
    return LIMIT - free


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, LIMIT)), max_size=40))
def test_whatever_three_tenants_take_a_fourth_gets_something(wishes: list[tuple[str, int]]) -> None:
    shares = Shares(lambda: True)
    free = LIMIT - taken(shares, wishes)
    assert free >= LIMIT // 8 - 2 and shares.allows("d", free // 2, free)


def test_of_the_last_one_somebody_has_the_use() -> None:
    assert Shares(lambda: True).allows("a", 1, 1)


def test_a_tenant_that_is_alone_gets_everything_and_no_more_once_it_is_not() -> None:
    several = False
    shares = Shares(lambda: several)
    assert shares.allows_ever(LIMIT, LIMIT)
    assert taken(shares, [("a", LIMIT)]) == LIMIT
    several = True
    assert not shares.allows_ever(LIMIT, LIMIT) and shares.allows_ever(LIMIT // 2, LIMIT)
    shares.give_back("a", LIMIT // 2)
    assert not shares.allows("a", 1, LIMIT // 2)
    assert shares.allows("b", LIMIT // 4, LIMIT // 2)
