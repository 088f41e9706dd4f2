"""Random lives of many requests in the real scheduler: whatever the agent and the workers do, all of them end, and
none of them computes on anything but its own prefix."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from orbitkv.client import ErrorKind, OrbitKVError
from orbitkv.vllm.tests.fakes import FakeAgent
from orbitkv.vllm.tests.scheduling import Engine, Memory


def lose_the_client(engine: Engine, agent: FakeAgent) -> None:
    """The agent restarted: what it had is gone, and the client is of no more use."""
    client: Any = engine.half.link.client
    if client is None:
        return
    agent.boots += 1
    agent.leases.clear()
    agent.pages.clear()
    client.lost = OrbitKVError(ErrorKind.UNAVAILABLE, "the agent ended")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("asynchronous", "early"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["one step at a time", "one, told early", "two steps in flight", "two, told early"],
)
@pytest.mark.parametrize("one_process", [False, True], ids=["a worker elsewhere", "all in one process"])
def test_every_request_ends_and_nothing_is_left(
    start: Callable[..., Engine], agent: FakeAgent, seed: int, asynchronous: bool, early: bool, one_process: bool
) -> None:
    chance = random.Random(seed)
    # Longer than the test: what ends a wait here is the agent's answer, not the clock.
    engine = start(
        blocks=24,
        max_seqs=6,
        batched_tokens=96,
        asynchronous=asynchronous,
        early=early,
        one_process=one_process,
        extra={"orbitkv.max_wait_ms": 600_000},
    )
    memory = Memory(engine)
    workers, flying = engine.workers, list[Any]()
    requests: dict[str, Any] = {}
    prompts = [[(shape * 31 + i * 7) % 250 + 3 for i in range(chance.choice((40, 64, 90, 150)))] for shape in range(4)]

    for number in range(250):
        action = chance.random()
        if action < 0.22:
            name = f"r{number}"
            requests[name] = engine.add(name, chance.choice(prompts), answer=chance.randint(1, 20))
        elif action < 0.32 and requests:
            engine.abort(chance.choice(list(requests)))
        elif action < 0.38:
            agent.loading = not agent.loading
        elif action < 0.43:
            workers.hold_loads = not workers.hold_loads
        elif action < 0.48:
            workers.hold_saves = not workers.hold_saves
        elif action < 0.51:
            workers.fail_loads = not workers.fail_loads
        elif action < 0.515:
            lose_the_client(engine, agent)
        elif action < 0.57:
            engine.scheduler.reset_prefix_cache()  # it does nothing while requests hold blocks
        engine.step_beside(flying)
    agent.loading = workers.hold_loads = workers.hold_saves = False
    for _ in range(2000):
        if not engine.scheduler.has_requests() and not flying:
            break
        engine.step_beside(flying)
    assert not engine.scheduler.requests
    assert all(request.is_finished() for request in requests.values())
    engine.half.link.begin_step()
    engine.assert_at_rest()
    # And the cache still works.
    deadline = time.monotonic() + 10
    while engine.half.link._attachment.published is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers.fail_loads = False
    before = memory.restored_tokens
    for name in ("last but one", "last"):
        engine.reset_hbm()
        engine.serve(name, prompts[0])
    assert memory.restored_tokens > before
    engine.assert_at_rest()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("asynchronous", [False, True], ids=["one step at a time", "two steps in flight"])
def test_requests_that_begin_while_their_restores_land_compute_on_nothing_else_either(
    start: Callable[..., Engine], agent: FakeAgent, seed: int, asynchronous: bool
) -> None:
    """Few requests at once, because a restore lands only for one that is alone."""
    chance = random.Random(seed)
    engine = start(
        blocks=32,
        batched_tokens=96,
        asynchronous=asynchronous,
        early=True,
        one_process=True,
        extra={"orbitkv.max_wait_ms": 600_000, "orbitkv.overlap": "on"},
    )
    memory = Memory(engine)
    workers, flying = engine.workers, list[Any]()
    workers.lands = True
    common = [3 + i * 7 % 250 for i in range(48)]
    prompts = [common + [(shape * 31 + i * 5) % 250 + 3 for i in range(40 + 20 * shape)] for shape in range(4)]
    for shape, tokens in enumerate(prompts):
        engine.serve(f"first {shape}", tokens)
    requests: dict[str, Any] = {}
    for number in range(400):
        action, unfinished = chance.random(), len(engine.scheduler.requests)
        if action < (0.6, 0.1, 0.02)[min(unfinished, 2)]:
            if not unfinished and chance.random() < 0.7:
                engine.scheduler.reset_prefix_cache()
            name = f"r{number}"
            requests[name] = engine.add(name, chance.choice(prompts), answer=chance.randint(1, 6))
        elif action > 0.96 and requests:
            engine.abort(chance.choice(list(requests)))
        elif action > 0.9:
            workers.lose_landing = not workers.lose_landing
        engine.step_beside(flying)
    workers.lose_landing = False
    while engine.scheduler.has_requests() or flying:
        engine.step_beside(flying)
    assert all(request.is_finished() for request in requests.values())
    assert memory.lost and len(workers.landed) > memory.lost + 5
    engine.assert_at_rest()
