"""A client that goes away at any stage of its request leaves nothing behind, and nothing wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orbitkv.client import QueryReady
from orbitkv.vllm.tests.engine.checks import assert_same_answer, full_blocks, saved, tokens
from orbitkv.vllm.tests.engine.models import PATIENT, Models, Pair
from orbitkv.vllm.tests.engine.stand_in import PAGE_BYTES, StandIn, chain
from tools.harness.agent import AgentProcess
from tools.harness.engine import (
    ENGINE_ARGUMENTS,
    Answer,
    EngineProcess,
    EngineSpec,
    Nursery,
    Prompt,
    orbitkv_connector,
)
from tools.harness.process import wait_until

pytestmark = pytest.mark.timeout(900)

BLOCKS = 66
PROMPT = tokens("cancelled", 400)


@pytest.fixture(scope="module")
def pair(folder: Path, nursery: Nursery, models: Models) -> Iterator[Pair]:
    """An engine of few blocks that steps on command, and an agent of its own that may be stopped."""
    with AgentProcess(folder, "cancellation-agent") as agent:
        connector = orbitkv_connector(agent.socket_path, on_missing="run")
        spec = EngineSpec(models.llama, connector, {"num_gpu_blocks_override": BLOCKS})
        with EngineProcess(folder, spec, "cancellation", nursery) as engine:
            engine.ready()
            yield Pair(engine, agent)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Answer:
    """The answer from the engine's own cache."""
    engine, agent = pair
    engine.ask(PROMPT)
    answer = engine.ask(PROMPT, logprobs=1)
    saved(engine, agent)
    return answer


@pytest.fixture
def cancelled(pair: Pair, expected: Answer) -> Iterator[Pair]:
    """The pair with the prompt in OrbitKV only, held between steps; afterwards nothing may be left of the
    test's requests."""
    engine, agent = pair
    wait_restored(engine)
    engine.reset()
    free = engine.call("free_blocks")
    engine.call("hold", held=True)
    yield pair
    engine.call("disarm")
    agent.resume()
    engine.call("hold", held=False)
    engine.settle()
    agent.wait_at_rest()
    assert engine.call("free_blocks") == free, "blocks of a cancelled request did not come back"
    answer = engine.ask(PROMPT, logprobs=1)
    if answer.cached_tokens < full_blocks(len(PROMPT)):  # the agent answered too late
        answer = wait_restored(engine)
    assert_same_answer(answer, expected, "the same prompt after a cancelled request")


def restored(engine: EngineProcess) -> Answer | None:
    """The answer if the prompt comes from OrbitKV when the engine has forgotten it."""
    engine.reset()
    answer = engine.ask(PROMPT, logprobs=1)
    return answer if answer.orbitkv_tokens == full_blocks(len(PROMPT)) else None


def wait_restored(engine: EngineProcess) -> Answer:
    """Asks until the prompt comes from OrbitKV; returns that answer."""
    return wait_until(lambda: restored(engine), "the prompt comes from OrbitKV again", 60)


def submit(engine: EngineProcess, tokens: list[int] = PROMPT, max_tokens: int = 8) -> str:
    """Hands one request over."""
    return engine.submit([Prompt(tokens, max_tokens=max_tokens)])[0]


def until_promised(pair: Pair, attempt: Callable[[], str | None]) -> str:
    """The request of the first attempt that has one: None says that the agent answered too late, so that this engine,
    which does not wait for it, computes."""
    engine, agent = pair

    def try_again() -> str | None:
        request = attempt()
        if request is None:
            engine.call("disarm")
            agent.resume()
            engine.settle()
            wait_restored(engine)
            engine.reset()
        return request

    return wait_until(try_again, "the agent promises the prompt's pages in time", 120)


def submit_pending(pair: Pair) -> str | None:
    """Hands the prompt over, with an agent that stops once it has promised the pages. None if it did not."""
    engine, agent = pair
    engine.call("stop_process_after_hit", pid=agent.pid)
    [request] = engine.submit([Prompt(PROMPT, logprobs=1)])
    engine.call("step", count=3)
    return request if engine.call("status", request=request) == "WAITING_FOR_REMOTE_KVS" else None


def test_cancelled_before_it_was_looked_up(cancelled: Pair) -> None:
    engine, _ = cancelled
    engine.call("abort", requests=[submit(engine)])


def test_cancelled_while_ready_and_waiting_for_blocks(cancelled: Pair) -> None:
    engine, agent = cancelled
    large = ""

    def attempt() -> str | None:
        nonlocal large
        large = submit(engine, tokens("takes nearly all blocks", 1700), max_tokens=200)
        engine.call("step_until", request=large, statuses=["RUNNING"], seconds=60)
        waiting = submit(engine)
        engine.call("step", count=3)
        assert engine.call("status", request=waiting) == "WAITING"
        return waiting if agent.status()["leases"]["live"] == 1 else None

    engine.call("abort", requests=[until_promised(cancelled, attempt)])
    engine.call("step", count=1)
    agent.wait(lambda status: status["leases"]["live"] == 0, "the lease of the cancelled request returns")
    engine.call("abort", requests=[large])


def test_cancelled_in_the_step_that_allocated_and_submitted_it(cancelled: Pair) -> None:
    engine, _ = cancelled
    restores = engine.metric("vllm:orbitkv_restores_total")

    def attempt() -> str | None:
        request = submit(engine)
        engine.call("abort_in_step", requests=[request])
        engine.call("step", count=2)  # what is counted leaves with a step
        return request if engine.metric("vllm:orbitkv_restores_total") > restores else None

    until_promised(cancelled, attempt)


def test_cancelled_while_its_restore_is_pending(cancelled: Pair) -> None:
    engine, agent = cancelled
    request = until_promised(cancelled, lambda: submit_pending(cancelled))
    engine.call("abort", requests=[request])
    engine.call("step", count=3)
    agent.resume()


def test_restore_that_the_agent_never_begins_is_computed_instead(cancelled: Pair, expected: Answer) -> None:
    """In host memory the engine withdraws it; on a GPU a stopped agent loses the right to copy. Others are served."""
    engine, _ = cancelled
    request = until_promised(cancelled, lambda: submit_pending(cancelled))
    [other] = engine.submit([Prompt(tokens("beside it", 100))])
    [beside] = engine.results([other])
    assert beside.recomputed_tokens == 100
    [answer] = engine.results([request])
    assert answer.tokens == expected.tokens, "the answer of a request whose restore was given up"


def test_cancelled_when_restored_and_not_scheduled(cancelled: Pair) -> None:
    engine, _ = cancelled
    # An early scheduler schedules it in the round in which it is restored.
    stage = "RUNNING" if "scheduler_cls" in ENGINE_ARGUMENTS else "RESTORED"

    def attempt() -> str | None:
        request = submit(engine)
        reached = engine.call("step_until", request=request, statuses=[stage, "RUNNING", "GONE"], seconds=60)
        return request if reached == stage else None

    engine.call("abort", requests=[until_promised(cancelled, attempt)])


def test_cancelled_while_running_with_saves(cancelled: Pair) -> None:
    engine, agent = cancelled
    agent.pause()
    request = submit(engine, tokens("running with saves", 500), max_tokens=100)
    engine.call("step_until", request=request, statuses=["RUNNING"], seconds=10)
    engine.call("step", count=5)
    engine.call("abort", requests=[request])
    engine.call("step", count=3)
    agent.resume()


def test_cancelled_after_its_end_while_its_blocks_are_held(cancelled: Pair) -> None:
    engine, agent = cancelled
    request = submit(engine, tokens("finished and held", 500), max_tokens=2)
    engine.call("step", count=1)  # looked up while the agent answers, so that what is computed is to be saved
    agent.pause()
    status = engine.call("step_until", request=request, statuses=["FINISHED_LENGTH_CAPPED", "GONE"], seconds=10)
    engine.call("abort", requests=[request])
    engine.call("step", count=3)
    agent.resume()
    assert status in ("FINISHED_LENGTH_CAPPED", "GONE")


def test_cancelled_while_its_lookup_is_loading(folder: Path, nursery: Nursery, models: Models) -> None:
    """A lookup loads while others hold the byte budget: here another engine, which keeps what it was promised."""
    with AgentProcess(folder, "loading-agent", pool="64Mi", query_budget_percent=1) as agent:
        connector = orbitkv_connector(agent.socket_path, max_wait_ms=60_000)
        spec = EngineSpec(models.llama, connector, {"num_gpu_blocks_override": BLOCKS}, PATIENT)
        with EngineProcess(folder, spec, "loading", nursery) as engine:
            engine.ready().ask(PROMPT)
            expected = engine.ask(PROMPT, logprobs=1)
            saved(engine, agent)
            holder = StandIn(str(agent.socket_path), "holder")
            pages = chain("held", (64 << 20) // 100 // PAGE_BYTES)
            holder.worker.wait_save(holder.start_save(pages, range(len(pages))), 20)
            promised = holder.query("held", pages)
            assert isinstance(promised, QueryReady) and promised.pages == len(pages), f"{promised}"

            engine.reset()
            engine.call("hold", held=True)
            request = submit(engine)
            engine.call("step", count=3)
            assert engine.call("status", request=request) == "WAITING", "the lookup did not stay loading"
            assert agent.status()["query"]["outstanding"] == 2
            other = tokens("computed meanwhile", 100)
            [meanwhile] = engine.submit([Prompt(other)])
            assert engine.results([meanwhile])[0].recomputed_tokens == 100, "a request behind the one that waits"
            engine.call("abort", requests=[request])
            engine.call("step", count=1)
            agent.wait(lambda status: status["query"]["outstanding"] == 1, "the cancelled lookup is gone")
            engine.call("hold", held=False)
            engine.settle()

            holder.client.release(promised)
            holder.close()
            agent.wait_at_rest()
            engine.reset()
            answer = engine.ask(PROMPT, logprobs=1)
            assert answer.orbitkv_tokens == full_blocks(len(PROMPT)), "the budget is free, and nothing was restored"
            assert_same_answer(answer, expected, "after a lookup that was cancelled")
