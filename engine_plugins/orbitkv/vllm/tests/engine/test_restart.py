"""What an engine saved is there for the next one, and only where its bytes mean the same."""

import shutil
from pathlib import Path

import pytest

from orbitkv.vllm.tests.engine.checks import (
    BLOCK,
    assert_bit_equal,
    assert_same_answer,
    assert_sources,
    full_blocks,
    saved,
    tokens,
)
from orbitkv.vllm.tests.engine.models import EngineMaker, Models
from tools.harness.agent import AgentProcess
from tools.harness.engine import Prompt

pytestmark = pytest.mark.timeout(900)


def test_killed_engine_finds_its_pages_again_when_it_is_back(agent: AgentProcess, start_engine: EngineMaker) -> None:
    prompts = [tokens(f"restart {number}", 150 + 90 * number) for number in range(3)]
    first = start_engine(agent)
    for prompt in prompts:
        first.ask(prompt)
    hits = [first.ask(prompt, logprobs=1) for prompt in prompts]
    saved(first, agent)
    before = first.blocks()
    engine = first
    for kill in (1, 2):
        engine.submit([Prompt(tokens(f"in the middle of it {kill}", 500), max_tokens=200)])
        engine.kill9()
        agent.wait_at_rest()
        engine = start_engine(agent)
        for number, (prompt, hit) in enumerate(zip(prompts, hits, strict=True)):
            restored = engine.ask(prompt, logprobs=1)
            what = f"prompt {number} after kill {kill} of the engine"
            assert_sources(restored, hbm=0, orbitkv=full_blocks(len(prompt)), what=what)
            assert_same_answer(restored, hit, what)
        assert_bit_equal(engine.blocks(), before, sum(len(prompt) // BLOCK for prompt in prompts), f"after kill {kill}")


def test_same_path_with_other_weights_finds_nothing(
    folder: Path, models: Models, agent: AgentProcess, start_engine: EngineMaker
) -> None:
    path = shutil.copytree(models.llama, folder / "same-path")
    prompt = tokens("other weights", 300)
    first = start_engine(agent, model=path)
    first.ask(prompt)
    saved(first, agent)
    first.reset()
    before = first.ask(prompt, logprobs=1)
    assert_sources(before, hbm=0, orbitkv=full_blocks(300), what="the first weights' own pages")
    first.stop()

    shutil.copytree(models.other, path, dirs_exist_ok=True)
    second = start_engine(agent, model=path)
    cold = second.ask(prompt, logprobs=1)
    assert_sources(cold, hbm=0, orbitkv=0, what="other weights in the same place")
    assert cold.tokens != before.tokens, "the two models cannot be told apart by their answers: the test shows nothing"
    hbm = second.ask(prompt, logprobs=1)
    saved(second, agent)
    second.reset()
    again = second.ask(prompt, logprobs=1)
    assert_sources(again, hbm=0, orbitkv=full_blocks(300), what="the other weights' own pages")
    assert_same_answer(again, hbm, "the other weights' own pages")
