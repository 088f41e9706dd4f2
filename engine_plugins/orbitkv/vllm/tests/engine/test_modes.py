"""Other kinds of engines: several workers, speculation, a sliding window, a layout that was read wrong."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbitkv.cuda import LibCuda
from orbitkv.vllm.injected import EARLY_SCHEDULER, joined
from orbitkv.vllm.tests.engine.checks import (
    BLOCK,
    assert_bit_equal,
    assert_same_answer,
    assert_sources,
    full_blocks,
    saved,
    tokens,
)
from orbitkv.vllm.tests.engine.models import PATIENT, PATIENT_SETTINGS, AgentMaker, EngineMaker, Models
from tools.harness.agent import AgentProcess
from tools.harness.engine import DEVICE, EngineProcess, EngineSpec, Nursery, orbitkv_connector
from tools.harness.serve import installed_as_entry_point

pytestmark = pytest.mark.timeout(900)

ROOM_FOR_TWO = DEVICE == "cpu" or len(LibCuda().gpus()) > 1
"""An engine with two workers needs two GPUs."""
MLA: dict[str, Any] = (
    {"attention_backend": "TRITON_MLA", "attention_config": {"mla_prefill_backend": "CPU"}}
    if DEVICE == "cuda"
    else {"dtype": "float32"}
)
"""On a GPU: decoding in Triton and the rest in plain PyTorch need no library of kernels."""


@pytest.fixture(scope="module", autouse=True)
def two_workers(
    request: pytest.FixtureRequest, folder: Path, agent: AgentProcess, nursery: Nursery, models: Models
) -> Iterator[EngineProcess | None]:
    """An engine with two workers, which import vLLM anew: it starts beside the tests before the one that needs it."""
    asked = {getattr(item, "originalname", "") for item in request.session.items}
    if not ROOM_FOR_TWO or test_two_tensor_parallel_workers_restore_each_its_part.__name__ not in asked:
        yield None
        return
    environment = {**PATIENT, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    connector = orbitkv_connector(agent.socket_path, **PATIENT_SETTINGS)
    arguments = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    spec = EngineSpec(models.llama, connector, arguments, environment)
    with EngineProcess(folder, spec, "two-workers", nursery) as engine:
        engine.begin()
        yield engine


def test_speculation_saves_accepted_tokens_only(agent: AgentProcess, start_engine: EngineMaker) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = start_engine(agent, speculative_config=speculation)
    prompt = tokens("over and over", 20) * 6
    answer = engine.ask(prompt, max_tokens=120)
    assert engine.metric("vllm:spec_decode_num_draft_tokens_total") > 0, "nothing was drafted: the test shows nothing"
    saved(engine, agent)
    before = engine.blocks()
    turn = prompt + answer.tokens
    hbm = engine.ask(turn, logprobs=1, max_tokens=20)
    engine.reset()
    restored = engine.ask(turn, logprobs=1, max_tokens=20)
    assert_sources(restored, hbm=0, orbitkv=full_blocks(len(turn)), what="pages filled under speculation")
    assert_same_answer(restored, hbm, "pages filled under speculation")
    assert_bit_equal(engine.blocks(), before, len(turn) // BLOCK, "pages filled under speculation")


def assert_restores_the_same(engine: EngineProcess, agent: AgentProcess, lengths: list[int], what: str) -> None:
    """Prompts of so many tokens come back with the answers of hits in HBM, and bit for bit."""
    prompts = [tokens(f"{what} {number}", length) for number, length in enumerate(lengths)]
    hits = []
    for prompt in prompts:
        engine.ask(prompt)
        hits.append(engine.ask(prompt, logprobs=1))
    saved(engine, agent)
    before = engine.blocks()
    engine.reset()
    for prompt, hit in zip(prompts, hits, strict=True):
        restored = engine.ask(prompt, logprobs=1)
        assert_sources(restored, hbm=0, orbitkv=full_blocks(len(prompt)), what=what)
        assert_same_answer(restored, hit, what)
    assert_bit_equal(engine.blocks(), before, sum(length // BLOCK for length in lengths), what)


def test_an_injected_engine_restores_the_same(tmp_path: Path, agent: AgentProcess, start_engine: EngineMaker) -> None:
    """As in an annotated pod: nothing is said of OrbitKV but in the environment. The entry point sets the connector,
    and the scheduler class that is told of restores before it schedules."""
    environment = installed_as_entry_point(tmp_path)
    environment |= {"ORBITKV_INJECTED": "0.1.0", "ORBITKV_BOOTSTRAP_SOCKET": str(agent.socket_path)}
    environment |= {f"ORBITKV_{name.upper()}": str(value) for name, value in PATIENT_SETTINGS.items()}
    engine = start_engine(None, environment=environment)
    assert "OrbitKV: the scheduler class is set, too" in engine.log_text()
    assert_restores_the_same(engine, agent, 3 * [300], "injected")
    assert "OrbitKV: vLLM is told of restores" not in engine.log_text(), "it went on as vLLM's own"


LANDING = "orbitkv.vllm.tests.engine.landing"


def test_a_request_that_begins_before_its_restore_is_over_answers_the_same(
    agent: AgentProcess, start_engine: EngineMaker
) -> None:
    connector = {"kv_connector": "LandingConnector", "kv_connector_module_path": LANDING}
    engine = start_engine(agent, connector=connector, scheduler_cls=EARLY_SCHEDULER, settings={"overlap": "on"})
    assert_restores_the_same(engine, agent, [300, 800, 1300], "landing")
    assert engine.metric("vllm:orbitkv_restores_overlapped_total") == 3
    assert engine.metric("vllm:orbitkv_restore_failures_total") == 0


def test_what_was_computed_from_a_layer_that_did_not_come_is_dropped(
    agent: AgentProcess, start_engine: EngineMaker
) -> None:
    connector = {"kv_connector": "LosingConnector", "kv_connector_module_path": LANDING}
    engine = start_engine(agent, connector=connector, scheduler_cls=EARLY_SCHEDULER, settings={"overlap": "on"})
    prompt = tokens("losing", 300)
    cold = engine.ask(prompt, logprobs=1, max_tokens=20)
    hit = engine.ask(prompt, logprobs=1, max_tokens=20)
    saved(engine, agent)
    engine.reset()
    again = engine.ask(prompt, logprobs=1, max_tokens=20)
    assert again.preemptions == 1, "its first step was not taken back"
    assert engine.metric("vllm:orbitkv_restore_failures_total") == 1
    assert again.tokens == cold.tokens and len(again.tokens) == 20
    saved(engine, agent)
    engine.reset()
    restored = engine.ask(prompt, logprobs=1, max_tokens=20)
    assert restored.preemptions == 0 and restored.orbitkv_tokens == full_blocks(300)
    assert_same_answer(restored, hit, "after one that was lost")
    assert engine.metric("vllm:orbitkv_restores_overlapped_total") == 2
    assert "began before its restore was over, and that" in engine.log_text()


def test_sliding_window_model_is_restored_right_or_refused_by_name(
    models: Models, agent: AgentProcess, start_engine: EngineMaker
) -> None:
    engine = start_engine(agent, model=models.gemma)
    prompt = tokens("window", 300)
    cold = engine.ask(prompt, logprobs=1)
    hbm = engine.ask(prompt, logprobs=1)
    assert hbm.hbm_tokens > 0 and cold.tokens == hbm.tokens
    saved(engine, agent)
    engine.reset()
    again = engine.ask(prompt, logprobs=1)
    if again.orbitkv_tokens == 0:
        assert "window of 64 tokens" in engine.log_text(), "nothing is restored, and the log does not name the window"
        assert_same_answer(again, cold, "a model with a sliding window, computed again")
    else:
        assert_same_answer(again, hbm, "a model with a sliding window, restored")


def test_a_model_with_mla_is_restored(models: Models, agent: AgentProcess, start_engine: EngineMaker) -> None:
    engine = start_engine(agent, model=models.deepseek, **MLA)
    prompt = tokens("latent", 300)
    cold = engine.ask(prompt)
    hbm = engine.ask(prompt, logprobs=1)
    saved(engine, agent)
    before = engine.blocks()
    engine.reset()
    restored = engine.ask(prompt, logprobs=1)
    assert_sources(restored, hbm=0, orbitkv=full_blocks(300), what="a model with MLA")
    assert_same_answer(restored, hbm, "a model with MLA")
    if DEVICE == "cpu":  # vLLM has no prefix cache there, for such a model: what seems to be a hit was restored, too
        assert restored.tokens == cold.tokens, "other greedy tokens than when it was computed"
    else:
        assert hbm.hbm_tokens == full_blocks(300)
        assert_bit_equal(engine.blocks(), before, 300 // BLOCK, "latent vectors")


def test_wrong_strides_are_caught_and_the_engine_serves_on(start_agent: AgentMaker, start_engine: EngineMaker) -> None:
    agent = start_agent()
    engine = start_engine(
        agent,
        connector={
            "kv_connector": "WrongStridesConnector",
            "kv_connector_module_path": "orbitkv.vllm.tests.engine.wrong_strides",
        },
    )
    prompt = tokens("strides", 300)
    cold = engine.ask(prompt, logprobs=1)
    saved(engine, agent)
    engine.reset()
    again = engine.ask(prompt, logprobs=1)
    assert_sources(again, hbm=0, orbitkv=0, what="a connector that reads the layout wrong")
    assert_same_answer(again, cold, "computed twice")
    log = engine.log_text()
    assert "proof of layout: layer model.layers.0" in log and "strides (" in log, (
        "the log names neither layer nor strides"
    )
    status = agent.status()
    assert status["sessions"]["layout_proofs"] == {"mismatch": 1}, f"{status['sessions']['layout_proofs']}"
    assert status["cache"]["resident_bytes"] == 0, "pages were kept although the layout is not proven"
    reasons = [row["off"] for row in status["instances"]]
    assert len(reasons) == 1 and "proof of layout" in reasons[0], f"the agent's status says of the engine: {reasons}"


@pytest.mark.skipif(not ROOM_FOR_TWO, reason="on GPUs it needs two")
def test_two_tensor_parallel_workers_restore_each_its_part(agent: AgentProcess, two_workers: EngineProcess) -> None:
    engine = two_workers.ready()
    prompt = tokens("two workers", 300)
    engine.ask(prompt)
    hbm = engine.ask(prompt, logprobs=1)
    saved(engine, agent)
    before = engine.blocks()
    engine.reset()
    restored = engine.ask(prompt, logprobs=1)
    assert_sources(restored, hbm=0, orbitkv=full_blocks(300), what="two workers")
    assert_same_answer(restored, hbm, "two workers")
    assert_bit_equal(engine.blocks(), before, 300 // BLOCK, "pages of both workers")


def test_beside_a_connector_of_the_users_both_save_and_both_restore(
    folder: Path, agent: AgentProcess, start_engine: EngineMaker
) -> None:
    """As a pod with the annotation `multi-connector` has it: theirs is asked first, then ours."""
    storage = folder / "their-storage"
    theirs = {"shared_storage_path": str(storage)}
    both = joined({"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": theirs})
    ours = both["kv_connector_extra_config"]["connectors"][1]
    ours["kv_connector_extra_config"] |= orbitkv_connector(agent.socket_path, **PATIENT_SETTINGS)[
        "kv_connector_extra_config"
    ]
    engine = start_engine(None, connector=both)
    prompt = tokens("two connectors", 300)
    engine.ask(prompt)
    hbm = engine.ask(prompt, logprobs=1)
    saved(engine, agent)
    assert list(storage.iterdir()), "their connector kept nothing"
    engine.reset()
    by_theirs = engine.ask(prompt, logprobs=1)
    assert by_theirs.hbm_tokens == 0 and by_theirs.recomputed_tokens < 300, by_theirs
    restored = engine.metric("vllm:orbitkv_restores_total")
    assert_same_answer(by_theirs, hbm, "restored by their connector")
    shutil.rmtree(storage)
    engine.reset()
    by_ours = engine.ask(prompt, logprobs=1)
    assert_sources(by_ours, hbm=0, orbitkv=full_blocks(300), what="their connector has nothing any more")
    assert engine.metric("vllm:orbitkv_restores_total") == restored + 1
    assert_same_answer(by_ours, hbm, "restored by OrbitKV")
