"""Who acts."""

from __future__ import annotations

import threading

import pytest

from orbitkv_crds import names
from orbitkv_operator.cluster.api import LEASES, ApiError, Resource
from orbitkv_operator.leader import Leader
from orbitkv_operator.tests.fakes import RELEASE, SETTINGS, FakeApi


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def leader(api: FakeApi, name: str, clock: Clock | None = None) -> Leader:
    settings = SETTINGS.model_copy(update={"pod_name": name, "retry_seconds": 0.01})
    return Leader(api, settings, lambda: [], clock or Clock())


def holder(api: FakeApi) -> str:
    lease = api.get(LEASES, RELEASE, names.OPERATOR)
    assert lease is not None
    return str(lease["spec"]["holderIdentity"])


def test_first_one_acts_and_the_other_waits() -> None:
    api = FakeApi()
    one, two = leader(api, "one"), leader(api, "two")
    assert one._try() and not two._try()
    assert holder(api) == "one"


def test_lease_is_taken_over_only_after_it_was_seen_unchanged_for_its_time() -> None:
    api, clock = FakeApi(), Clock()
    one, two = leader(api, "one"), leader(api, "two", clock)
    assert one._try()
    assert not two._try()
    clock.now += 14
    assert not two._try()
    assert one._try()  # renewed: two counts from here
    clock.now += 2
    assert not two._try()
    clock.now += 16
    assert two._try() and holder(api) == "two"


def test_holder_renews_without_reading_until_somebody_else_writes() -> None:
    api, asked = FakeApi(), list[str]()
    one = leader(api, "one")
    assert one._try()
    api.before = lambda verb, resource: asked.append(verb)
    assert one._try() and one._try()
    assert asked == ["update", "update"]
    lease = api.get(LEASES, RELEASE, names.OPERATOR)
    assert lease is not None
    api.replace(LEASES, RELEASE, lease | {"metadata": lease["metadata"] | {"labels": {"a": "b"}}})
    asked.clear()
    assert one._try()
    assert asked == ["update", "get", "update"]


def test_of_two_that_take_it_at_once_one_gets_it() -> None:
    api, clock = FakeApi(), Clock()
    one, two, gone = leader(api, "one", clock), leader(api, "two", clock), leader(api, "gone")
    assert gone._try()
    one._try()
    two._try()
    clock.now += 16

    def other_is_quicker(verb: str, resource: Resource) -> None:
        if verb == "update":
            api.before = lambda verb, resource: None
            assert two._try()

    api.before = other_is_quicker
    assert not one._try()
    assert holder(api) == "two"


class Running:
    """A leader in its thread."""

    def __init__(self, api: FakeApi, name: str, clock: Clock | None = None) -> None:
        self.leader = leader(api, name, clock)
        self.acts, self.lost = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.leader.run, args=(self.acts.set, self.lost.set))
        self.thread.start()

    def end(self) -> None:
        self.leader.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()


def test_loss_is_told_when_the_apiserver_stays_away() -> None:
    api, clock = FakeApi(), Clock()
    running = Running(api, "one", clock)
    assert running.acts.wait(5)

    def away(verb: str, resource: Resource) -> None:
        clock.now += 3
        raise ApiError(0, "away")

    api.before = away
    assert running.lost.wait(5)
    assert clock.now >= 110
    running.end()


def test_short_absence_of_the_apiserver_is_no_loss() -> None:
    api, clock = FakeApi(), Clock()
    running = Running(api, "one", clock)
    assert running.acts.wait(5)
    asked = threading.Event()
    tries = 0

    def away(verb: str, resource: Resource) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise ApiError(0, "away")
        asked.set()

    api.before = away
    assert asked.wait(5)
    assert not running.lost.is_set()
    running.end()


def test_loss_is_told_when_another_one_has_it() -> None:
    api = FakeApi()
    running = Running(api, "one")
    assert running.acts.wait(5)
    for _ in range(100):  # until no renewal comes between
        lease = api.get(LEASES, RELEASE, names.OPERATOR)
        assert lease is not None
        lease["spec"]["holderIdentity"] = "two"
        try:
            api.replace(LEASES, RELEASE, lease)
            break
        except ApiError:
            continue
    assert running.lost.wait(5)
    running.end()


def test_standby_takes_over_at_once_when_the_lease_is_given_back() -> None:
    api = FakeApi()
    one = Running(api, "one")
    assert one.acts.wait(5)
    two = Running(api, "two")
    one.end()
    one.leader.release()
    assert two.acts.wait(5)
    two.end()


def test_standby_that_is_stopped_never_acts() -> None:
    api = FakeApi()
    assert leader(api, "other")._try()
    running = Running(api, "one")
    running.end()
    running.leader.release()
    assert not running.acts.is_set() and holder(api) == "other"


def test_missing_right_is_no_end(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeApi()

    def forbidden(verb: str, resource: Resource) -> None:
        raise ApiError(403, "leases is forbidden")

    api.before = forbidden
    assert not leader(api, "one")._try()
    assert "forbidden" in str(caplog.records[-1].__dict__["error"])
