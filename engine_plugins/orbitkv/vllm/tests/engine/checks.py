"""Prompts, and comparisons that say what was compared."""

import random
from collections.abc import Sequence

from tools.harness.agent import AgentProcess
from tools.harness.engine import Answer, EngineProcess

BLOCK = 32
"""Tokens in a block of the engines here."""
LOGPROB_TOLERANCE = 1e-3


def tokens(name: str, count: int) -> list[int]:
    """`count` tokens that only the prompt called `name` begins with."""
    return random.Random(name).choices(range(3, 259), k=count)


def full_blocks(prompt_tokens: int) -> int:
    """Tokens in the full blocks of a prompt of which one token at least is left to compute."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


def assert_same_answer(found: Answer, expected: Answer, what: str) -> None:
    """Same greedy tokens, and log probabilities that are as close as the promise says."""
    assert found.tokens == expected.tokens, f"{what}: greedy tokens {found.tokens} instead of {expected.tokens}"
    assert_close(found.logprobs, expected.logprobs, f"{what}: log probabilities of the answer")
    if expected.prompt_logprobs is not None:
        assert_close(found.prompt_logprobs, expected.prompt_logprobs, f"{what}: log probabilities of the prompt")


def assert_close(found: Sequence[float | None] | None, expected: Sequence[float | None] | None, what: str) -> None:
    """Log probabilities position by position."""
    assert found is not None and expected is not None, f"{what}: {found} and {expected}: one was not asked for"
    assert len(found) == len(expected), f"{what}: {len(found)} instead of {len(expected)}"
    apart = [
        abs(a - b) if a is not None and b is not None else 0.0 if a is b else float("inf")
        for a, b in zip(found, expected, strict=True)
    ]
    assert max(apart) <= LOGPROB_TOLERANCE, f"{what}: {max(apart):g} apart at position {apart.index(max(apart))}"


def assert_sources(answer: Answer, *, hbm: int, orbitkv: int, what: str) -> None:
    """Where the prompt's tokens came from, and that the counts add up."""
    assert (answer.hbm_tokens, answer.orbitkv_tokens) == (hbm, orbitkv), (
        f"{what}: {answer.hbm_tokens} tokens came from HBM and {answer.orbitkv_tokens} from OrbitKV, "
        f"not {hbm} and {orbitkv}, of {answer.prompt_tokens}"
    )
    assert_adds_up(answer, what)


def assert_adds_up(answer: Answer, what: str) -> None:
    """The counts by source add up to the prompt, and to vLLM's own number of cached tokens."""
    total = answer.hbm_tokens + answer.orbitkv_tokens + answer.recomputed_tokens
    assert total == answer.prompt_tokens, f"{what}: the sources add up to {total} of {answer.prompt_tokens} tokens"
    assert answer.hbm_tokens + answer.orbitkv_tokens == answer.cached_tokens, (
        f"{what}: vLLM counts {answer.cached_tokens} cached tokens, the sources add up to "
        f"{answer.hbm_tokens + answer.orbitkv_tokens}"
    )


def assert_bit_equal(found: dict[str, str], expected: dict[str, str], at_least: int, what: str) -> None:
    """Blocks that are in both snapshots of an engine's cache have the same bytes, and there are enough of them."""
    both = found.keys() & expected.keys()
    assert len(both) >= at_least, f"{what}: {len(both)} blocks could be compared, not {at_least}"
    wrong = [key for key in both if found[key] != expected[key]]
    assert not wrong, (
        f"{what}: {len(wrong)} of {len(both)} blocks have other bytes than when they were computed: {wrong[:3]}"
    )


def saved(engine: EngineProcess, agent: AgentProcess) -> None:
    """Waits until all that the engine computed is stored: then nothing is in flight in the agent."""
    engine.settle()
    agent.wait_at_rest()
