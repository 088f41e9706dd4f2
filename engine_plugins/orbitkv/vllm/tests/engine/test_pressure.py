"""A GPU cache that is too small, and requests that run side by side."""

import pytest

from orbitkv.vllm.tests.engine.checks import BLOCK, assert_bit_equal, assert_sources, full_blocks, saved, tokens
from orbitkv.vllm.tests.engine.models import AgentMaker, EngineMaker
from tools.harness.agent import AgentProcess
from tools.harness.engine import DEVICE, Answer, EngineProcess, Prompt

pytestmark = pytest.mark.timeout(900)


def mismatches(found: list[Answer], expected: list[Answer]) -> list[int]:
    """The requests whose tokens differ."""
    return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a.tokens != b.tokens]


def test_preempted_requests_hit_again_and_answer_right(
    plain: EngineProcess, start_agent: AgentMaker, start_engine: EngineMaker
) -> None:
    agent = start_agent()
    prompts = [Prompt(tokens(f"preempted {number}", 150), max_tokens=80) for number in range(5)]
    alone = [plain.generate([prompt])[0] for prompt in prompts]
    engine = start_engine(agent, dtype="float32", num_gpu_blocks_override=24, max_model_len=512)

    answers = engine.generate(prompts)

    preempted = [number for number, answer in enumerate(answers) if answer.preemptions]
    assert preempted, "23 blocks were enough for 5 requests of 8 blocks: the test shows nothing"
    status = agent.wait_at_rest()
    assert status["transfer"]["load_bytes"] > 0, "no preempted request got its pages back from OrbitKV"
    assert not mismatches(answers, alone), f"answers differ from those of requests alone: {mismatches(answers, alone)}"
    again = [engine.ask(prompt.tokens, max_tokens=80) for prompt in prompts]
    assert not mismatches(again, alone), f"answers from the cache differ: {mismatches(again, alone)}"
    for answer in again:
        assert answer.cached_tokens >= full_blocks(150), f"only {answer.cached_tokens} of 150 tokens were cached"


def test_concurrent_requests_differ_no_more_often_than_without_orbitkv(
    plain: EngineProcess, agent: AgentProcess, start_engine: EngineMaker
) -> None:
    prefix = tokens("crowd", 3 * BLOCK)
    prompts = [Prompt(prefix + tokens(f"crowd {number}", 40 + 25 * number), max_tokens=24) for number in range(12)]
    alone = [plain.generate([prompt])[0] for prompt in prompts]
    engine = start_engine(agent, dtype="float32")
    engine.generate(prompts)
    saved(engine, agent)
    control = orbitkv = 0
    for _ in range(3):
        plain.reset()
        plain.generate(prompts[:1])
        control += len(mismatches(plain.generate(prompts), alone))
        engine.reset()
        answers = engine.generate(prompts)
        orbitkv += len(mismatches(answers, alone))
        assert any(answer.orbitkv_tokens for answer in answers), "nothing was restored: the test shows nothing"
        missing = [n for n, answer in enumerate(answers) if answer.cached_tokens < full_blocks(answer.prompt_tokens)]
        assert not missing, f"requests {missing} were computed although all of their pages had been saved"
    assert orbitkv <= control, f"{orbitkv} of 36 concurrent answers differ with OrbitKV, {control} without"


@pytest.mark.skipif(DEVICE != "cuda", reason="on a GPU only: on a CPU it takes minutes")
def test_64_requests_at_once_with_a_working_set_of_three_caches(
    start_agent: AgentMaker, start_engine: EngineMaker
) -> None:
    prompts = [Prompt(tokens(f"crowded {number}", 300), max_tokens=24) for number in range(64)]
    needed = 64 * (324 // BLOCK + 1)
    size = {"max_num_seqs": 64, "num_gpu_blocks_override": needed // 3}
    agent = start_agent()
    control = start_engine(None, dtype="float32", **size)
    alone = [control.generate([prompt])[0] for prompt in prompts]
    engine = start_engine(agent, dtype="float32", **size)
    without = with_cache = 0
    for _ in range(3):
        without += len(mismatches(control.generate(prompts, 300), alone))
        answers = engine.generate(prompts, 300)
        with_cache += len(mismatches(answers, alone))
        saved(engine, agent)
    assert any(answer.orbitkv_tokens for answer in answers), "nothing was restored: the test shows nothing"
    assert with_cache <= without + 2, f"{with_cache} of 192 concurrent answers differ with OrbitKV, {without} without"


def test_two_engines_share_what_either_computed(agent: AgentProcess, start_engine: EngineMaker) -> None:
    """The second one computes its prompts in chunks of 64 tokens."""
    whole = start_engine(agent, wait=False)
    chunked = start_engine(agent, wait=False, max_num_batched_tokens=64)
    ours, theirs = tokens("computed whole", 400), tokens("computed in chunks", 400)
    whole.ask(ours)
    chunked.ask(theirs)
    saved(whole, agent)
    saved(chunked, agent)
    before = whole.blocks() | chunked.blocks()
    found = whole.ask(theirs, logprobs=1), chunked.ask(ours, logprobs=1)
    for answer, what in zip(found, ("pages computed in chunks", "pages computed whole"), strict=True):
        assert_sources(answer, hbm=0, orbitkv=full_blocks(400), what=f"{what}, in the other engine")
    blocks = 400 // BLOCK
    assert_bit_equal(whole.blocks(), before, 2 * blocks, "pages computed in chunks, in the other engine")
    assert_bit_equal(chunked.blocks(), before, 2 * blocks, "pages computed whole, in the other engine")

    names = [f"both at once {number}" for number in range(6)]
    running = [(engine, engine.submit([Prompt(tokens(name, 300)) for name in names])) for engine in (whole, chunked)]
    first, second = (engine.results(ids) for engine, ids in running)
    assert [answer.tokens for answer in first] and len(first) == len(second) == len(names)
    for engine in (whole, chunked):
        saved(engine, agent)
        engine.reset()
        for name in names:
            prompt = tokens(name, 300)
            assert_sources(engine.ask(prompt), hbm=0, orbitkv=full_blocks(300), what=f"{name}, saved by both engines")


def test_chunked_prefill_restores_into_the_middle_of_a_prompt(agent: AgentProcess, start_engine: EngineMaker) -> None:
    engine = start_engine(agent, max_num_batched_tokens=64)
    prefix = tokens("chunks", 5 * BLOCK)
    engine.ask(prefix + tokens("first end", 200))
    saved(engine, agent)
    engine.reset()
    prompt = prefix + tokens("second end", 300)
    first = engine.ask(prompt, logprobs=1)
    assert_sources(first, hbm=0, orbitkv=len(prefix), what="a known prefix before chunks to compute")
    saved(engine, agent)
    before = engine.blocks()
    hbm = engine.ask(prompt, logprobs=1)
    engine.reset()
    restored = engine.ask(prompt, logprobs=1)
    assert_sources(restored, hbm=0, orbitkv=full_blocks(len(prompt)), what="chunks saved one after another")
    assert restored.tokens == hbm.tokens, "restored chunks against the engine's own hit"
    assert_bit_equal(engine.blocks(), before, len(prompt) // BLOCK, "chunks saved one after another")
