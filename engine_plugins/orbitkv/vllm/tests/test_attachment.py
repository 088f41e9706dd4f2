"""Late and repeated attachment, without an engine and without an agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from orbitkv.client import ErrorKind, OrbitKVError
from orbitkv.config import PluginConfig
from orbitkv.vllm import attachment
from orbitkv.vllm.attachment import Attachment, Off, connect


class Thing:
    """What is attached."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.here = True
        self.closed = 0

    def alive(self) -> bool:
        return self.here

    def close(self) -> None:
        self.closed += 1


class Maker:
    """Makes things while there is an agent."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.made: list[Thing] = []
        self.attempts = 0
        self.thread = ""

    def __call__(self) -> Thing:
        self.attempts += 1
        self.thread = threading.current_thread().name
        if self.error is not None:
            raise self.error
        self.made.append(Thing(f"boot-{len(self.made)}"))
        return self.made[-1]


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def attached(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attachment[Thing]]:
    monkeypatch.setattr(attachment, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(attachment, "WATCH_S", 0.01)
    made = Attachment("test", maker)
    yield made
    if made._thread.is_alive():
        made.stop()
    assert not made._thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


GONE = OrbitKVError(ErrorKind.UNAVAILABLE, "no OrbitKV agent at /nowhere.sock")


def test_it_is_made_on_a_thread_of_its_own(attached: Attachment[Thing], maker: Maker) -> None:
    attached.start()
    assert attached.wait_first(10)
    assert attached.take() is maker.made[0]
    assert maker.thread == "orbitkv-test"


def test_it_comes_late(attached: Attachment[Thing], maker: Maker) -> None:
    maker.error = GONE
    attached.start()
    assert attached.wait_first(10)
    assert attached.published is None
    assert attached.last_error is GONE
    maker.error = None
    until(lambda: attached.published is not None)
    assert attached.last_error is None


def test_the_same_complaint_is_logged_once(
    attached: Attachment[Thing], maker: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    maker.error = GONE
    attached.start()
    until(lambda: maker.attempts >= 3)
    attached.stop()
    assert caplog.text.count("no OrbitKV agent at") == 1


def test_a_lost_agent_is_noticed_and_replaced(attached: Attachment[Thing], maker: Maker) -> None:
    attached.start()
    attached.wait_first(10)
    first = attached.take()
    assert first is not None
    first.here = False
    until(lambda: attached.published is not None and attached.published is not first)
    assert not first.closed, "the engine's thread still has it"
    attached.give_back(first)
    until(lambda: first.closed == 1)


def test_what_the_engine_never_took_is_closed_when_it_is_lost(attached: Attachment[Thing], maker: Maker) -> None:
    attached.start()
    attached.wait_first(10)
    maker.made[0].here = False
    until(lambda: len(maker.made) == 2)
    assert maker.made[0].closed == 1


def test_renewal_takes_it_away_at_once(attached: Attachment[Thing], maker: Maker) -> None:
    attached.start()
    attached.wait_first(10)
    first = attached.take()
    assert first is not None
    maker.error = GONE
    attached.renew(first, "it answered with another boot")
    assert attached.published is None
    attached.give_back(first)
    maker.error = None
    until(lambda: attached.published is not None)
    assert attached.take() is maker.made[1]


def test_off_is_final(attached: Attachment[Thing], maker: Maker) -> None:
    maker.error = Off("dummy weights")
    attached.start()
    assert attached.wait_first(10)
    assert attached.off == "dummy weights"
    done = threading.Event()
    attached.post(done.set)
    assert done.wait(10)
    assert maker.attempts == 1


def test_a_defect_turns_it_off_and_raises_nowhere(attached: Attachment[Thing], maker: Maker) -> None:
    maker.error = KeyError("a defect")
    attached.start()
    assert attached.wait_first(10)
    assert "a defect" in attached.off


def test_a_failing_task_does_not_end_the_thread(attached: Attachment[Thing]) -> None:
    attached.start()

    def fails() -> None:
        raise OrbitKVError(ErrorKind.TIMEOUT, "late")

    done = threading.Event()
    attached.post(fails)
    attached.post(done.set)
    assert done.wait(10)


def test_stopping_closes_what_is_published(attached: Attachment[Thing], maker: Maker) -> None:
    attached.start()
    attached.wait_first(10)
    attached.stop()
    assert maker.made[0].closed == 1


def test_a_token_that_cannot_be_read_is_named() -> None:
    config = PluginConfig(token_path="/nowhere/token")
    with pytest.raises(OrbitKVError, match=r"the token in /nowhere/token \(orbitkv.token_path\)"):
        connect(config, "test", 100)
