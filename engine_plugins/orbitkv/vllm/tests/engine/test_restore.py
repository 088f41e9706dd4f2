"""Pages that leave the engine's cache and come back: the same bytes, and the same answers as from the engine's
own cache."""

from collections.abc import Callable
from pathlib import Path

import pytest

from orbitkv.vllm.tests.engine.checks import (
    BLOCK,
    assert_adds_up,
    assert_bit_equal,
    assert_same_answer,
    assert_sources,
    full_blocks,
    saved,
    tokens,
)
from orbitkv.vllm.tests.engine.models import AgentMaker, EngineMaker, Pair
from tools.harness.engine import EngineProcess, Prompt
from tools.harness.process import wait_until

pytestmark = pytest.mark.timeout(900)  # the first test of the session starts the nursery, the models and the engine


def test_repeated_prompt_comes_back_bit_equal_after_an_hbm_reset(shared: Pair) -> None:
    engine, agent = shared
    prompt = tokens("repeat", 300)
    cold = engine.ask(prompt, logprobs=1)
    assert_sources(cold, hbm=0, orbitkv=0, what="the prompt asked for the first time")
    hbm = engine.ask(prompt, logprobs=1)
    assert_sources(hbm, hbm=full_blocks(300), orbitkv=0, what="the prompt asked again")
    saved(engine, agent)
    before = engine.blocks()

    assert engine.reset(), "the engine refused to reset its own cache"
    restored = engine.ask(prompt, logprobs=1)

    assert_sources(restored, hbm=0, orbitkv=full_blocks(300), what="after a reset of HBM")
    assert_same_answer(restored, hbm, "restored against the engine's own hit")
    assert_bit_equal(engine.blocks(), before, at_least=300 // BLOCK, what="restored pages")


def test_shared_prefix_is_restored_and_the_rest_computed(shared: Pair) -> None:
    engine, agent = shared
    prefix = tokens("prefix", 6 * BLOCK)
    questions = [prefix + tokens(f"question {number}", 50 + 30 * number) for number in range(3)]
    for question in questions:
        engine.ask(question)
    saved(engine, agent)
    mixed = prefix + tokens("another question", 70)
    engine.reset()
    first = engine.ask(mixed, logprobs=1)
    assert_sources(first, hbm=0, orbitkv=len(prefix), what="a new question after a known prefix")
    second = engine.ask(questions[2], logprobs=1)
    assert_sources(
        second,
        hbm=len(prefix),
        orbitkv=full_blocks(len(questions[2])) - len(prefix),
        what="a known question whose prefix is in HBM again",
    )
    hbm = engine.ask(questions[2], logprobs=1)
    assert_sources(hbm, hbm=full_blocks(len(questions[2])), orbitkv=0, what="the same once more")
    assert_same_answer(second, hbm, "part from HBM, part from OrbitKV, against all from HBM")


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_prompt_of_exactly_n_pages_answers_the_same(shared: Pair, blocks: int) -> None:
    engine, agent = shared
    prompt = tokens(f"exactly {blocks}", blocks * BLOCK)
    engine.ask(prompt)
    hbm = engine.ask(prompt, logprobs=1)
    saved(engine, agent)
    engine.reset()
    restored = engine.ask(prompt, logprobs=1)
    assert restored.orbitkv_tokens == full_blocks(len(prompt)), "the last page is computed, as after a hit in HBM"
    assert_adds_up(restored, f"a prompt of {blocks} pages")
    assert_same_answer(restored, hbm, f"a prompt of exactly {blocks} pages")


def test_prompt_shorter_than_a_page_is_computed(shared: Pair) -> None:
    engine, agent = shared
    prompt = tokens("short", BLOCK - 1)
    first = engine.ask(prompt, logprobs=1, max_tokens=1)
    saved(engine, agent)
    engine.reset()
    assert_sources(engine.ask(prompt, max_tokens=1), hbm=0, orbitkv=0, what="a prompt of less than a page")
    assert first.tokens


def test_cache_salt_keeps_pages_apart(shared: Pair) -> None:
    engine, agent = shared
    prompt = tokens("salted", 200)
    engine.ask(prompt, salt="red")
    hbm = engine.ask(prompt, salt="red", logprobs=1)
    saved(engine, agent)
    engine.reset()
    for salt in ("blue", None):
        other = engine.ask(prompt, salt=salt)
        assert_sources(other, hbm=0, orbitkv=0, what=f"salt {salt} after the prompt was saved under red")
    same = engine.ask(prompt, salt="red", logprobs=1)
    assert_sources(same, hbm=0, orbitkv=full_blocks(200), what="the same salt")
    assert_same_answer(same, hbm, "restored under its salt")


def test_prompt_logprobs_skip_the_cache_and_stay_right(shared: Pair) -> None:
    engine, agent = shared
    prompt = tokens("prompt logprobs", 250)
    plain = engine.ask(prompt, logprobs=1, prompt_logprobs=1)
    assert plain.prompt_logprobs is not None and len(plain.prompt_logprobs) == 250
    saved(engine, agent)
    engine.reset()
    again = engine.ask(prompt, logprobs=1, prompt_logprobs=1)
    assert_adds_up(again, "a request for log probabilities of the prompt")
    assert again.cached_tokens == 0, "log probabilities of the prompt need every token to be computed"
    assert_same_answer(again, plain, "a request for log probabilities of the prompt")
    engine.reset()
    assert_sources(
        engine.ask(prompt), hbm=0, orbitkv=full_blocks(250), what="pages saved by a request that skips the cache"
    )


def test_decoded_tokens_are_restored_for_the_next_turn(shared: Pair) -> None:
    engine, agent = shared
    prompt = tokens("conversation", 100)
    answer = engine.ask(prompt, max_tokens=100)
    saved(engine, agent)
    turn = prompt + answer.tokens + tokens("next turn", 20)
    engine.reset()
    restored = engine.ask(turn, logprobs=1)
    # The last token of an answer is never computed, so the page that it completes is not there yet.
    expected = full_blocks(len(prompt) + len(answer.tokens))
    assert_sources(restored, hbm=0, orbitkv=expected, what="the next turn of a conversation")
    hbm = engine.ask(turn, logprobs=1)
    assert_same_answer(restored, hbm, "the next turn of a conversation")


def test_request_can_decide_for_itself(shared: Pair) -> None:
    engine, agent = shared
    unsaved = tokens("not to be saved", 200)
    engine.ask(unsaved, kv_transfer_params={"orbitkv.save": False})
    saved(engine, agent)
    engine.reset()
    assert_sources(engine.ask(unsaved), hbm=0, orbitkv=0, what="after a request with orbitkv.save false")
    saved(engine, agent)
    engine.reset()
    refused = engine.ask(unsaved, kv_transfer_params={"orbitkv.load": False})
    assert_sources(refused, hbm=0, orbitkv=0, what="a request with orbitkv.load false")
    part = tokens("part of it saved", 200)
    engine.ask(part, kv_transfer_params={"orbitkv.max_save_tokens": 3 * BLOCK})
    saved(engine, agent)
    engine.reset()
    assert_sources(
        engine.ask(part), hbm=0, orbitkv=3 * BLOCK, what="after a request with orbitkv.max_save_tokens of three pages"
    )


def test_token_counts_by_source_are_those_of_vllms_metrics(shared: Pair) -> None:
    engine, agent = shared
    names = {"hbm": "local_cache_hit", "orbitkv": "external_kv_transfer", "recomputed": "local_compute"}

    def counters() -> dict[str, float]:
        return {
            name: engine.metric("vllm:prompt_tokens_by_source_total", source=source) for name, source in names.items()
        }

    before, total_before = counters(), engine.metric("vllm:prompt_tokens_total")
    prompt = tokens("counted", 290)
    answers = [engine.ask(prompt), engine.ask(prompt), engine.ask(prompt, prompt_logprobs=1)]
    saved(engine, agent)
    engine.reset()
    answers += [engine.ask(prompt), engine.ask(prompt + tokens("more", 40)), engine.ask(prompt, prompt_logprobs=1)]
    after = counters()
    for name in names:
        counted = sum(getattr(answer, f"{name}_tokens") for answer in answers)
        assert after[name] - before[name] == counted, f"vLLM's metric counts {name} otherwise than its outputs"
    for number, answer in enumerate(answers):
        assert_adds_up(answer, f"request {number}")
    assert engine.metric("vllm:prompt_tokens_total") - total_before == sum(answer.prompt_tokens for answer in answers)
    assert sum(answer.orbitkv_tokens for answer in answers) == full_blocks(290)


def wait_heard(engine: EngineProcess, holds: Callable[[set[str], set[str]], bool], what: str) -> None:
    """Waits until `holds` is true of what a subscriber takes to be in HBM and in OrbitKV."""

    def hear() -> bool:
        engine.ask(tokens("one more step", 10), max_tokens=1)  # events leave with a step
        heard = engine.call("events")
        return holds(set(heard.get("GPU", [])), set(heard.get("CPU", [])))

    wait_until(hear, what, 60)


def test_kv_events_tell_a_subscriber_what_is_cached(shared: Pair) -> None:
    engine, agent = shared
    prompt = tokens("events", 10 * BLOCK + 5)
    engine.reset()
    engine.ask(prompt, max_tokens=1)
    saved(engine, agent)
    in_hbm = {key[-16:] for key in engine.blocks()}
    assert len(in_hbm) == 10
    wait_heard(engine, lambda gpu, _: gpu == in_hbm, "the events on the engine's own cache say what it holds")
    wait_heard(engine, lambda _, cpu: in_hbm <= cpu, "blocks in HBM that were saved are said to be in OrbitKV")
    engine.reset()
    wait_heard(
        engine,
        lambda gpu, cpu: not in_hbm & gpu and in_hbm <= cpu,
        "after a reset of HBM nothing of it is said to be in HBM, and OrbitKV's pages stay",
    )


def test_kv_events_tell_what_was_evicted(start_agent: AgentMaker, start_engine: EngineMaker, folder: Path) -> None:
    agent = start_agent(pool="1Mi")  # 64 pages
    engine = start_engine(agent, kv_events_endpoint=f"ipc://{folder}/evictions")
    for number in range(12):
        engine.ask(tokens(f"evicted {number}", 10 * BLOCK + 5), max_tokens=1)
        saved(engine, agent)
    kept = sum(agent.status()["cache"]["resident_blocks"].values())
    assert 0 < kept < 120, f"{kept} of 120 pages are kept in a pool of 64: the test shows nothing"
    wait_heard(engine, lambda _, cpu: len(cpu) == kept, f"by the events {kept} pages are cached, as the agent says")


def test_external_reset_forgets_and_hbm_reset_does_not(shared: Pair) -> None:
    engine, agent = shared
    prompt = tokens("external reset", 200)
    engine.ask(prompt)
    saved(engine, agent)
    assert engine.reset(connector=True), "an idle engine refused to reset the external cache"
    assert_sources(engine.ask(prompt), hbm=0, orbitkv=0, what="after a reset of the external cache")
    saved(engine, agent)
    engine.reset()
    assert_sources(engine.ask(prompt), hbm=0, orbitkv=full_blocks(200), what="saved again after the reset")


def test_external_reset_is_refused_while_requests_are_tracked(shared: Pair) -> None:
    engine, agent = shared
    prompt = tokens("reset while busy", 200)
    engine.call("hold", held=True)
    try:
        ids = engine.submit([Prompt(prompt, max_tokens=30)])
        engine.call("step", count=3)
        assert not engine.reset(connector=True), "the external cache was reset under a running request"
    finally:
        engine.call("hold", held=False)
    engine.results(ids)
    saved(engine, agent)
    engine.reset()
    assert_sources(engine.ask(prompt), hbm=0, orbitkv=full_blocks(200), what="after the refused reset")
