from __future__ import annotations

import pytest

from orbitkv_agent.cluster.apiserver import Apiserver
from orbitkv_agent.cluster.metrics_gate import ALLOWED_S, DENIED_S, MetricsGate
from orbitkv_agent.cluster.tests.fake_apiserver import ACCESS_REVIEWS, TOKEN_REVIEWS, FakeApiserver
from orbitkv_agent.tests.harness import Clock

READER = "system:serviceaccount:monitoring:prometheus"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(api: FakeApiserver, clock: Clock) -> MetricsGate:
    api.token("reader", "prometheus-0", "monitoring", account="prometheus")
    api.readers.add(READER)
    return MetricsGate(Apiserver(api.kubeconfig).may_get, clock)


@pytest.mark.parametrize("header", ["", "Basic eDp5", "Bearer", "Bearer  "])
def test_without_a_token_nobody_reads(gate: MetricsGate, api: FakeApiserver, header: str) -> None:
    assert gate(header)[0] == 401
    assert not api.requests[TOKEN_REVIEWS]


def test_who_may_get_metrics_reads_and_is_asked_about_every_ten_minutes(
    gate: MetricsGate, api: FakeApiserver, clock: Clock
) -> None:
    assert [gate("Bearer reader")[0] for _ in range(5)] == [200] * 5
    assert (api.requests[TOKEN_REVIEWS], api.requests[ACCESS_REVIEWS]) == (1, 1)
    clock.now += ALLOWED_S
    api.readers.clear()
    assert gate("Bearer reader")[0] == 403
    assert api.requests[ACCESS_REVIEWS] == 2


def test_who_has_no_right_is_told_so_and_may_come_again_soon(
    gate: MetricsGate, api: FakeApiserver, clock: Clock
) -> None:
    assert gate("Bearer good") == (403, "this user may not GET /metrics (a ClusterRole with nonResourceURLs)")
    api.readers.add("system:serviceaccount:team-a:default")
    assert gate("Bearer good")[0] == 403
    clock.now += DENIED_S
    assert gate("Bearer good")[0] == 200


def test_a_token_that_the_apiserver_does_not_accept_is_turned_away(gate: MetricsGate) -> None:
    assert gate("Bearer forged")[0] == 401


def test_no_answer_is_not_remembered(gate: MetricsGate, api: FakeApiserver, clock: Clock) -> None:
    api.refuse = 500
    assert gate("Bearer reader")[0] == 503
    api.refuse = 0
    clock.now += 1
    assert gate("Bearer reader")[0] == 200


def test_a_flood_of_tokens_does_not_flood_the_apiserver(gate: MetricsGate, api: FakeApiserver, clock: Clock) -> None:
    statuses = [gate(f"Bearer forged-{number}")[0] for number in range(50)]
    assert statuses == [401] * 5 + [429] * 45
    clock.now += 0.5
    statuses = [gate(f"Bearer forged-again-{number}")[0] for number in range(50)]
    assert statuses == [401] * 2 + [429] * 48
    assert api.requests[TOKEN_REVIEWS] == 7
