"""The order in which tokens are reviewed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest

from orbitkv_agent.cluster import reviews
from orbitkv_agent.cluster.apiserver import ApiError, TokenInfo
from orbitkv_agent.cluster.reviews import MAX_WAITING, MAX_WAITING_OF_ONE, Answer, Reviews


class Desk:
    """Reviews whose owner thread is the test."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answered: list[bytes] = []
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.reviews = Reviews(self._ask, post=self._posted.put, clock=lambda: 0.0)

    def _ask(self, token: str, audience: str) -> TokenInfo:
        self.asked.append(token)
        raise ApiError("forged")

    def show(self, token: bytes, of: object) -> bool:
        def then(_: Answer) -> None:
            self.answered.append(token)

        return self.reviews.review(token, "audience", then, of)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._posted.get(timeout=10)()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(reviews, "SPACING_S", 0.0)
    made = Desk()
    yield made
    made.reviews.stop()
    made.reviews.join(10)


def test_a_flood_of_forged_tokens_of_one_peer_delays_others_by_one_review_each(desk: Desk) -> None:
    taken = [desk.show(f"forged-{number}".encode(), "crowd") for number in range(100)]
    assert taken.count(True) == 1 + MAX_WAITING_OF_ONE  # one of them is being looked at
    assert desk.show(b"engine", "engine") and desk.show(b"other", "other")
    desk.reviews.start()
    desk.run(5)
    assert desk.asked[:4] == ["forged-0", "forged-1", "engine", "other"]
    assert {b"engine", b"other"} <= set(desk.answered)


def test_tokens_of_open_sessions_are_looked_at_again_in_a_flood(desk: Desk) -> None:
    peers = 0
    while desk.show(f"forged-{peers}".encode(), peers):
        peers += 1
    assert peers == MAX_WAITING
    desk.reviews.start()
    desk.run(peers)
    for number in range(3 * MAX_WAITING_OF_ONE):
        assert desk.show(f"renewed-{number}".encode(), None)  # the agent itself has no limit of its own
    assert desk.show(b"engine", "engine")
    desk.run(3)
    assert "engine" in desk.asked


def test_one_token_that_two_show_is_asked_for_once(desk: Desk) -> None:
    assert desk.show(b"shared", "one") and desk.show(b"shared", "other")
    desk.reviews.start()
    desk.run(1)
    assert (desk.asked, desk.answered) == (["shared"], [b"shared", b"shared"])
