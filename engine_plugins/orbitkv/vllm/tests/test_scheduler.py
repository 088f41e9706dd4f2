"""The scheduler's half inside vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from orbitkv.vllm.early import EarlyScheduler
from orbitkv.vllm.stats import OrbitKVStats
from orbitkv.vllm.tests.fakes import FakeAgent
from orbitkv.vllm.tests.scheduling import BLOCK, Engine, Memory

Start = Callable[..., Engine]
OVERLAP = {"orbitkv.overlap": "on"}


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 250 + 3 for i in range(count)]


def test_a_repeated_prompt_is_restored(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.add("again", prompt(70))
    engine.step()
    (load,) = engine.workers.started
    assert load.request_id == "again"
    assert len(load.blocks) == 4
    output = engine.step()
    assert output.num_scheduled_tokens == {"again": 70 - 64}
    engine.run()
    engine.assert_at_rest()


def test_a_repeated_prompt_of_an_mla_model_is_restored(start: Start) -> None:
    engine = start(mla=True)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.serve("again", prompt(70))
    assert len(engine.workers.started[0].blocks) == 4
    engine.assert_at_rest()


def test_a_prompt_of_exactly_n_pages_leaves_its_last_page_to_compute(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(4 * BLOCK))
    engine.reset_hbm()
    engine.add("again", prompt(4 * BLOCK))
    engine.step()
    output = engine.step()
    assert output.num_scheduled_tokens == {"again": BLOCK}
    engine.run()
    engine.assert_at_rest()


def test_pages_of_generated_tokens_are_kept_as_well(start: Start) -> None:
    engine = start()
    request = engine.serve("first", prompt(20), answer=40)
    # The last sampled token was never computed.
    assert len(engine.agent.pages) == (20 + 40 - 1) // BLOCK
    assert set(request.block_hashes[:3]) == engine.agent.pages


def test_save_decode_off_keeps_the_prompt_only(start: Start) -> None:
    engine = start(extra={"orbitkv.save_decode": False})
    engine.serve("first", prompt(20), answer=40)
    assert len(engine.agent.pages) == 1


@pytest.mark.guard("vllm-computed-only")
def test_a_chunk_saves_only_what_is_computed(start: Start) -> None:
    engine = start(batched_tokens=40)
    engine.add("long", prompt(200))
    seen = 0
    while not engine.agent.pages or seen < 200:
        output = engine.step()
        seen += output.num_scheduled_tokens.get("long", 0)
        assert sum(len(save.blocks) for save in engine.workers.saved) == min(seen, 200) // BLOCK
    engine.run()
    engine.assert_at_rest()


def test_draft_tokens_are_never_saved(start: Start) -> None:
    engine = start(ngram=True)
    request = engine.add("spec", prompt(30), answer=60)
    while engine.scheduler.has_requests():
        if request.request_id in engine.scheduler.requests and request.num_output_tokens:
            request.spec_token_ids = [7, 8, 9]
        output = engine.schedule()
        for save in output.kv_connector_metadata.saves:
            saved_to = sum(len(each.blocks) for each in [*engine.workers.saved, save])
            drafts = len(output.scheduled_spec_decode_tokens.get("spec", ()))
            assert saved_to * BLOCK <= request.num_computed_tokens - drafts
            assert saved_to * BLOCK <= request.num_tokens
        engine.finish_step(output, accept=1)
    assert engine.agent.pages == set(request.block_hashes[: (request.num_tokens - 1) // BLOCK])
    engine.assert_at_rest()


def test_async_scheduling(start: Start) -> None:
    engine = start(asynchronous=True)
    engine.add("first", prompt(70), answer=20)
    behind: list[Any] = []
    for _ in range(200):
        if not engine.scheduler.has_requests():
            break
        behind.append(engine.schedule())
        if len(behind) == 2 or not behind[-1].num_scheduled_tokens:
            engine.finish_step(behind.pop(0))
    for output in behind:
        engine.finish_step(output)
    engine.run()
    assert len(engine.agent.pages) == (70 + 20 - 1) // BLOCK
    engine.assert_at_rest()
    engine.reset_hbm()
    engine.add("again", prompt(70))
    engine.run()
    assert len(engine.workers.started[0].blocks) == 4
    engine.assert_at_rest()


def test_a_restore_starts_as_soon_as_its_blocks_are_allocated(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(one_process=True)
    monkeypatch.setattr(engine.half._allowance, "_clock", lambda: 1000.0)
    for seed in (1, 2):
        engine.serve(f"first {seed}", prompt(70, seed=seed))
    engine.reset_hbm()
    engine.add("a", prompt(70, seed=1))
    engine.add("b", prompt(70, seed=2))
    seen: list[int] = []
    ask = engine.connector.get_num_new_matched_tokens

    def asking(request: Any, computed: int) -> tuple[int | None, bool]:
        seen.append(len(engine.workers.started))
        return ask(request, computed)

    engine.connector.get_num_new_matched_tokens = asking  # type: ignore[method-assign, assignment]
    output = engine.schedule()
    assert seen == [0, 1], "a's restore runs while b is looked up"
    assert len(engine.workers.started) == 2
    assert not output.kv_connector_metadata.loads, "and the step does not start it again"
    engine.finish_step(output)
    engine.run()
    engine.assert_at_rest()


def test_a_restore_beside_running_requests_starts_with_a_step(start: Start) -> None:
    """Behind the launch of that step, which it would hold up before."""
    engine = start(one_process=True)
    engine.serve("first", prompt(70, seed=1))
    engine.reset_hbm()
    engine.add("running", prompt(70, seed=2), answer=20)
    engine.step()
    engine.add("again", prompt(70, seed=1))
    output = engine.schedule()
    assert not engine.workers.started
    assert [load.request_id for load in output.kv_connector_metadata.loads] == ["again"]
    engine.finish_step(output)
    engine.run()
    engine.assert_at_rest()


def test_one_of_several_workers_is_not_told_before_the_others(start: Start) -> None:
    engine = start(one_process=True)
    assert engine.half._worker_here() is not None
    engine.half._workers = 2
    assert engine.half._worker_here() is None


def test_a_restore_that_ended_is_scheduled_although_its_step_is_still_in_flight(start: Start) -> None:
    engine = start(one_process=True, asynchronous=True)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.workers.hold_loads = True
    engine.add("again", prompt(70))
    first, second = engine.schedule(), engine.schedule()
    engine.workers.hold_loads = False
    engine.finish_step(first)
    third = engine.schedule()
    assert third.num_scheduled_tokens == {"again": 70 - 64}, "told with the output of an earlier step"
    for output in (second, third):
        engine.finish_step(output)
    engine.run()
    engine.assert_at_rest()


def test_an_early_scheduler_schedules_a_restore_in_the_round_in_which_it_ended(start: Start) -> None:
    engine = start(one_process=True, asynchronous=True, early=True)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.workers.hold_loads = True
    engine.add("again", prompt(70))
    flying = [engine.schedule(), engine.schedule()]
    engine.finish_step(flying.pop(0))
    assert engine.workers.asked == [(False, True)], "its end is not asked for a second time, after the step"
    engine.workers.hold_loads = False
    flying.append(engine.schedule())
    assert flying[-1].num_scheduled_tokens == {"again": 70 - 64}
    for output in flying:
        engine.finish_step(output)
    engine.run()
    engine.assert_at_rest()


def test_an_early_scheduler_waits_for_no_restore_while_there_is_other_work(start: Start) -> None:
    engine = start(one_process=True, asynchronous=True, early=True)
    engine.serve("first", prompt(70, seed=1))
    engine.reset_hbm()
    engine.workers.hold_loads = True
    engine.add("again", prompt(70, seed=1))
    engine.step()
    engine.add("new", prompt(70, seed=2), answer=20)
    engine.step()
    engine.step()
    assert engine.workers.asked == [(False, False), (True, True)], "one is to be scheduled; it runs"
    engine.workers.hold_loads = False
    engine.run()
    engine.assert_at_rest()


def test_a_restore_of_an_aborted_request_ends_under_an_early_scheduler(start: Start) -> None:
    engine = start(one_process=True, asynchronous=True, early=True)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.workers.hold_loads = True
    engine.add("again", prompt(70))
    engine.step()
    engine.abort("again")
    engine.workers.hold_loads = False
    engine.run()
    engine.assert_at_rest()


def test_an_early_scheduler_elsewhere_than_its_worker_is_vllms_own(start: Start) -> None:
    engine = start(asynchronous=True, early=True)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.serve("again", prompt(70))
    assert len(engine.workers.started) == 1
    assert not engine.workers.asked
    engine.assert_at_rest()


@pytest.mark.parametrize("told", [False, True], ids=["before it was told", "after"])
def test_what_goes_wrong_in_an_early_scheduler_makes_it_vllms_own(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    engine = start(one_process=True, early=True)
    for seed in (1, 2):
        engine.serve(f"first {seed}", prompt(70, seed=seed))
    engine.reset_hbm()
    update = EarlyScheduler._update_from_kv_xfer_finished

    def broken(self: Any, output: Any) -> None:
        if self.in_a_step or told:
            update(self, output)
        if not self.in_a_step:
            raise RuntimeError("another vLLM")

    monkeypatch.setattr(EarlyScheduler, "_update_from_kv_xfer_finished", broken)
    scheduler: Any = engine.scheduler
    finish_step = engine.finish_step

    def finish(output: Any, accept: int = 0) -> None:
        scheduler.in_a_step = True
        finish_step(output, accept)
        scheduler.in_a_step = False

    scheduler.in_a_step = False
    engine.finish_step = finish  # type: ignore[method-assign]
    for seed in (1, 2):
        again = engine.serve(f"again {seed}", prompt(70, seed=seed))
        assert again.num_output_tokens == 3
    assert len(engine.workers.started) == 2
    assert caplog.text.count("vLLM is told of restores with the steps' outputs from now on") == 1
    engine.assert_at_rest()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_early_scheduler_is_the_one_of_vllms_that_the_engine_needs(start: Start, asynchronous: bool) -> None:
    engine = start(asynchronous=asynchronous, early=True)
    assert isinstance(engine.scheduler, EarlyScheduler)
    assert isinstance(engine.scheduler, AsyncScheduler) is asynchronous
    assert not engine.half._gate, "it schedules restored requests first, as vLLM's does"


def test_a_lone_request_begins_before_its_restore_is_over(start: Start) -> None:
    engine = start(one_process=True, early=True, asynchronous=True, extra=OVERLAP)
    memory = Memory(engine)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.workers.lands = True
    engine.add("again", prompt(70))
    assert engine.step().num_scheduled_tokens == {}
    landing = engine.schedule()
    assert landing.num_scheduled_tokens == {"again": 70 - 64} and engine.workers.landed == ["again"]
    engine.add("another", prompt(70, seed=1))
    assert not engine.scheduler.has_requests(), "nothing more is scheduled before that step is over"
    engine.finish_step(landing)
    assert engine.scheduler.has_requests()
    engine.run()
    assert memory.restored_tokens == 64
    engine.assert_at_rest()


@pytest.mark.guard("vllm-landed-only")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_step_computed_from_pages_that_did_not_come_is_dropped(
    start: Start, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    engine = start(one_process=True, early=True, asynchronous=asynchronous, extra=OVERLAP)
    memory, counted = Memory(engine), list[str]()
    add = OrbitKVStats.add

    def count(self: OrbitKVStats, name: str, amount: int = 1) -> None:
        counted.append(name)
        add(self, name, amount)

    monkeypatch.setattr(OrbitKVStats, "add", count)
    first = engine.serve("first", prompt(128))
    engine.reset_hbm()
    engine.workers.lands = engine.workers.lose_landing = True
    engine.agent.pages.remove(first.block_hashes[7])
    again = engine.add("again", prompt(128), answer=5)
    engine.step()
    landing = engine.schedule()
    kept = set(engine.agent.pages)
    engine.finish_step(landing)
    assert not engine.outputs[-1] or not any(each.new_token_ids for each in engine.outputs[-1][0].outputs)
    assert again.num_preemptions == 1 and engine.agent.pages == kept, "nothing of that step is kept"
    engine.workers.lose_landing = False
    engine.agent.pages.clear()
    other = engine.add("other", prompt(128), answer=5)
    while engine.scheduler.has_requests():
        engine.step()
    assert again.num_output_tokens == other.num_output_tokens == 5
    assert memory.restored_tokens == 0
    assert counted.count("restore_failures") == 1
    engine.assert_at_rest()


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("how", ["has no room", "is not looked at", "is not told"])
def test_a_request_that_is_not_scheduled_with_its_restore_begins_when_that_is_over(
    start: Start, monkeypatch: pytest.MonkeyPatch, how: str, lost: bool
) -> None:
    engine = start(one_process=True, early=True, asynchronous=True, extra=OVERLAP)
    memory = Memory(engine)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.workers.lands, engine.workers.lose_landing = True, lost
    again = engine.add("again", prompt(70), answer=5)
    engine.step()
    with monkeypatch.context() as patch:
        if how == "has no room":
            patch.setattr(engine.scheduler.kv_cache_manager, "allocate_slots", lambda *_, **__: None)
        elif how == "is not looked at":
            patch.setattr(engine.scheduler, "_handle_blocked_waiting_request", lambda request: False)
        else:
            patch.setattr(EarlyScheduler, "_update_from_kv_xfer_finished", lambda *_: 1 / 0)
        output = engine.schedule()
    assert not output.num_scheduled_tokens and engine.workers.landed == ["again"]
    engine.agent.pages.clear()
    engine.finish_step(output)
    if how == "has no room":  # it was looked at, so it holds its blocks for itself
        assert bool(engine.scheduler.kv_cache_manager.get_block_ids("again")[0]) is not lost
    else:
        assert ("again" in engine.scheduler.failed_recving_kv_req_ids) is lost
    engine.run()
    assert again.num_output_tokens == 5
    assert memory.restored_tokens == (0 if lost else 64)
    assert engine.agent.pages == (set(again.block_hashes[:4]) if lost else set()), "what was computed is kept"
    engine.assert_at_rest()


@pytest.mark.parametrize("how", ["it was aborted", "another one came", "it was not alone before", "much is to compute"])
def test_a_restore_lands_only_for_a_request_that_is_alone_and_has_little_to_compute(
    start: Start, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    engine = start(one_process=True, early=True, asynchronous=True, extra=OVERLAP)
    monkeypatch.setattr(engine.half._allowance, "_clock", lambda: 1000.0)
    memory = Memory(engine)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.workers.lands = True
    if how == "much is to compute":
        monkeypatch.setattr("orbitkv.vllm.scheduler.MOST_REST_TOKENS", 5)
    again = engine.add("again", prompt(70))
    if how == "it was not alone before":
        engine.add("beside", prompt(10, seed=2))
    engine.step()
    assert engine.workers.by_layer == ({"again"} if how in ("it was aborted", "another one came") else set())
    if how == "it was aborted":
        engine.abort("again")
    elif how == "another one came":
        engine.add("beside", prompt(10, seed=2))
    engine.run()
    assert not engine.workers.landed and memory.lost == 0
    assert again.num_output_tokens == (0 if how == "it was aborted" else 3)
    engine.assert_at_rest()


@pytest.mark.parametrize("how", ["vllm's own scheduler", "another vllm", "not wanted"])
def test_a_restore_lands_only_where_that_is_wanted_and_a_step_can_be_taken_back(
    start: Start, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "another vllm":
        monkeypatch.setattr("orbitkv.vllm.early.can_take_back", lambda: False)
    extra = {} if how == "not wanted" else OVERLAP
    engine = start(one_process=True, early=how != "vllm's own scheduler", extra=extra)
    engine.workers.lands = True
    for seed in (1, 2):
        engine.serve(f"first {seed}", prompt(70, seed=seed))
    engine.reset_hbm()
    for seed in (1, 2):
        engine.serve(f"again {seed}", prompt(70, seed=seed))
    assert len(engine.workers.started) == 2 and not engine.workers.by_layer and not engine.workers.landed


@pytest.mark.parametrize("early", [False, True])
def test_a_restore_started_at_once_that_fails_is_computed(start: Start, early: bool) -> None:
    engine = start(one_process=True, early=early)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.workers.fail_loads = True
    again = engine.serve("again", prompt(70))
    assert len(engine.workers.started) == 1
    assert again.num_output_tokens == 3
    engine.assert_at_rest()


def test_no_step_waits_for_a_restore(start: Start) -> None:
    """The next test says why."""
    engine = start(asynchronous=True)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.add("again", prompt(70))
    outputs = [engine.step() for _ in range(4)]
    assert engine.workers.started
    assert not any(output.has_sync_kv_loads for output in outputs)
    engine.run()


def test_vllm_keeps_a_token_that_was_computed_after_a_failed_load_that_a_step_waited_for(start: Start) -> None:
    """Once vLLM does not any more, restores of a lone request can begin in its first step, and save a round."""
    engine = start(asynchronous=True)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    ask = engine.connector.get_num_new_matched_tokens
    engine.connector.get_num_new_matched_tokens = lambda *args: (ask(*args)[0], False)  # type: ignore[method-assign]
    engine.workers.hold_loads = True
    request = engine.add("again", prompt(70), answer=30)
    loading, behind = engine.schedule(), engine.schedule()
    assert loading.has_sync_kv_loads
    assert behind.num_scheduled_tokens == {"again": 1}
    (load,) = loading.kv_connector_metadata.loads

    def finish(output: Any, invalid: set[int]) -> None:
        result = ModelRunnerOutput(
            req_ids=["again"],
            req_id_to_index={"again": 0},
            sampled_token_ids=[[42]],
            kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid),
        )
        engine.scheduler.update_from_output(output, result)

    finish(loading, set(load.blocks))
    assert request.num_computed_tokens == 0, "the pages are to be computed"
    assert not request.output_token_ids
    finish(behind, set())
    assert list(request.output_token_ids) == [42], "computed from pages that never came"


def test_a_lookup_is_repeated_without_effect(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    monkeypatch.setattr(engine.half._allowance, "_clock", lambda: 1000.0)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    request = engine.add("again", prompt(70))
    answers = {engine.connector.get_num_new_matched_tokens(request, 0) for _ in range(50)}
    assert answers == {(64, True)}
    assert len(engine.agent.queries) == 2  # one for each request
    assert len(engine.agent.leases) == 1
    engine.abort("again")
    engine.assert_at_rest()


def test_a_loading_query_holds_the_request_while_others_run(start: Start) -> None:
    engine = start(extra={"orbitkv.max_wait_ms": 600_000})
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.agent.loading = True
    engine.add("again", prompt(70))
    engine.step()
    engine.agent.loading = False
    engine.add("other", prompt(10, seed=3))
    engine.agent.loading = True
    output = engine.step()
    assert set(output.num_scheduled_tokens) == {"other"}
    engine.agent.loading = False
    engine.run()
    assert [load.request_id for load in engine.workers.started] == ["again"]
    engine.assert_at_rest()


@pytest.mark.guard("vllm-max-wait")
def test_a_request_is_held_no_longer_than_max_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(extra={"orbitkv.max_wait_ms": 50})
    engine.agent.loading = True
    engine.agent.pages.add(b"x")
    now = [1000.0]
    monkeypatch.setattr(engine.half._allowance, "_clock", lambda: now[0])
    engine.add("waits", prompt(70))
    output = engine.step()
    assert not output.num_scheduled_tokens
    now[0] += 0.04
    assert not engine.step().num_scheduled_tokens
    now[0] += 0.02
    assert engine.step().num_scheduled_tokens == {"waits": 70}
    engine.run()
    engine.assert_at_rest()


def test_what_the_lookup_took_is_taken_off_the_restores_patience(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(extra={"orbitkv.max_wait_ms": 2000})
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    now = [1000.0]
    monkeypatch.setattr(engine.half._allowance, "_clock", lambda: now[0])
    engine.agent.loading = True
    engine.add("waits", prompt(70))
    engine.step()
    assert not engine.workers.started
    now[0] += 1.5
    engine.agent.loading = False
    engine.step()
    (load,) = engine.workers.started
    assert load.patience_s == pytest.approx(0.5)
    engine.run()
    engine.assert_at_rest()


@pytest.mark.guard("vllm-step-allowance")
def test_a_silent_agent_costs_a_step_at_most_five_milliseconds(start: Start) -> None:
    engine = start()
    engine.agent.silent = True
    for number in range(20):
        engine.add(f"r{number}", prompt(70, seed=number))
    steps = 0
    while engine.scheduler.has_requests():
        before = len(engine.agent.waited_ms)
        engine.step()
        assert sum(engine.agent.waited_ms[before:]) <= 5
        steps += 1
    assert engine.agent.waited_ms
    assert steps < 20, "two calls without an answer, then nobody waits"
    assert max(engine.agent.waited_ms) <= 5
    assert engine.half._allowance.open
    engine.agent.silent = False
    deadline = engine.half._allowance._probe_at
    engine.half._allowance._clock = lambda: deadline + 1
    engine.serve("later", prompt(70))
    assert not engine.half._allowance.open
    assert engine.agent.pages
    engine.assert_at_rest()


def test_one_late_answer_is_not_a_miss(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.agent.silent = True
    engine.add("again", prompt(70))
    assert not engine.step().num_scheduled_tokens
    engine.agent.silent = False
    engine.run()
    assert len(engine.workers.started) == 1
    assert not engine.half._allowance.open
    engine.assert_at_rest()


def test_a_lookup_without_an_answer_is_taken_back_when_its_request_ends(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.agent.silent = True
    engine.add("cut", prompt(70), answer=30)
    engine.step()
    engine.agent.silent = False
    engine.abort("cut")
    assert "cut" in engine.agent.cancelled, "who knows what the agent holds for it"
    engine.run()
    engine.assert_at_rest()


@pytest.mark.guard("vllm-hash-slice")
def test_a_changed_hash_slice_is_not_restored(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    request = engine.add("again", prompt(70))
    asked = engine.connector.get_num_new_matched_tokens
    assert asked(request, 0) == (64, True)
    request.block_hashes[2] = b"another page altogether, 32 byte"
    engine.step()
    (load,) = engine.workers.started
    assert load.leases == ()
    request.block_hashes[2:] = []
    request.update_block_hashes()
    engine.run()
    engine.assert_at_rest()


@pytest.mark.guard("vllm-legal-boundary")
def test_a_hit_needs_a_lease_of_every_shard(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.half._workers = 2
    request = engine.add("again", prompt(70))
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.half._workers = 1
    engine.run()
    assert not engine.workers.started
    engine.assert_at_rest()


@pytest.mark.guard("vllm-admission")
def test_a_finished_restore_is_not_starved_where_the_scheduler_has_one_queue(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 blocks wanted and 127 free: the request at the head waits for a restored one that holds as many behind it."""
    engine = start(blocks=256, batched_tokens=8192)
    monkeypatch.setattr(type(engine.scheduler), "_holds_kv_blocks", staticmethod(lambda request: False))
    engine.half._gate = True
    _restored_request_behind_a_cold_one(engine)


def test_a_finished_restore_is_not_starved(start: Start) -> None:
    engine = start(blocks=256, batched_tokens=8192)
    assert not engine.half._gate
    _restored_request_behind_a_cold_one(engine)


def _restored_request_behind_a_cold_one(engine: Engine) -> None:
    long = prompt(128 * BLOCK - 5)
    engine.serve("seed", long)
    engine.reset_hbm()
    engine.workers.hold_loads = True
    engine.add("small", prompt(3, seed=9), answer=12)  # it runs all the time, in one block
    engine.step()
    engine.add("restored", long)
    engine.step()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 127
    cold = engine.request("cold", prompt(128 * BLOCK - 5, seed=5))
    engine.scheduler.add_request(cold)
    queue = engine.scheduler.waiting
    queue.remove_requests([cold])
    queue.prepend_request(cold)
    engine.step()
    engine.workers.hold_loads = False
    engine.step()
    output = engine.step()
    assert output.num_scheduled_tokens.get("restored"), "the restored request does not get to compute"
    engine.run()
    engine.assert_at_rest()


def test_a_failed_load_is_computed_and_kept_again(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.workers.fail_loads = True
    request = engine.add("again", prompt(70))
    engine.step()
    engine.workers.saved.clear()
    output = engine.step()
    assert output.num_scheduled_tokens == {"again": 70}
    assert [len(save.blocks) for save in engine.workers.saved] == [4]
    assert request.num_preemptions == 0
    engine.run()
    assert len(engine.workers.started) == 1, "it is not tried a second time"
    engine.assert_at_rest()


def test_a_preempted_request_looks_up_again(start: Start) -> None:
    engine = start(blocks=12, batched_tokens=512)
    for name, seed in (("a", 1), ("b", 2)):
        engine.add(name, prompt(78, seed), answer=40)
    preempted: set[str] = set()
    for _ in range(300):
        if not engine.scheduler.has_requests():
            break
        preempted |= engine.step().preempted_req_ids or set()
    assert preempted
    assert preempted <= set().union(*engine.workers.preempted)
    assert preempted <= {load.request_id for load in engine.workers.started}
    engine.assert_at_rest()


def test_priority_scheduling(start: Start) -> None:
    engine = start(blocks=12, policy="priority")
    engine.add("low", prompt(78, 1), answer=40, priority=9)
    engine.step()
    engine.add("high", prompt(78, 2), answer=40, priority=0)
    engine.run()
    engine.assert_at_rest()


def test_salted_prompts_have_other_hashes(start: Start) -> None:
    engine = start()
    engine.serve("plain", prompt(70))
    engine.serve("salted", prompt(70), cache_salt="mine")
    assert len(engine.agent.pages) == 8
    engine.reset_hbm()
    engine.serve("other salt", prompt(70), cache_salt="yours")
    assert not engine.workers.started
    engine.serve("same salt", prompt(70), cache_salt="mine")
    assert len(engine.workers.started) == 1
    engine.assert_at_rest()


def test_prompt_logprobs_skip_the_load(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    queries = len(engine.agent.queries)
    engine.serve("scored", prompt(70), prompt_logprobs=1)
    assert not engine.workers.started
    assert len(engine.agent.queries) == queries
    engine.assert_at_rest()


def test_a_request_can_decline_and_limit(start: Start) -> None:
    engine = start()
    engine.serve("unsaved", prompt(70), params={"orbitkv.save": False})
    assert not engine.agent.pages
    engine.serve("limited", prompt(70), params={"orbitkv.max_save_tokens": 40})
    assert len(engine.agent.pages) == 2
    engine.reset_hbm()
    engine.serve("unloaded", prompt(70), params={"orbitkv.load": False})
    assert not engine.workers.started
    engine.serve("odd", prompt(70), params={"orbitkv.load": "maybe", "orbitkv.max_save_tokens": -1})
    engine.assert_at_rest()


def test_min_load_tokens(start: Start) -> None:
    engine = start(extra={"orbitkv.min_load_tokens": 48})
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.serve("long enough", prompt(70))
    assert len(engine.workers.started) == 1
    engine.reset_hbm()
    engine.serve("too short", prompt(40))
    assert len(engine.workers.started) == 1
    engine.assert_at_rest()


def test_save_only_never_asks(start: Start) -> None:
    engine = start(extra={"orbitkv.mode": "save_only"})
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.serve("again", prompt(70))
    assert engine.agent.pages
    assert not engine.agent.queries
    engine.assert_at_rest()


def test_under_multi_connector(start: Start) -> None:
    settings = {"orbitkv.bootstrap_socket": "/nowhere.sock"}
    ours = {"kv_connector": "OrbitKVConnector", "kv_connector_module_path": "orbitkv.vllm", "kv_role": "kv_both"}
    engine = start(
        transfer={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "connectors": [
                    {**ours, "kv_connector_extra_config": {**settings, "orbitkv.mode": "save_only"}},
                    {**ours, "kv_connector_extra_config": settings},
                ]
            },
        }
    )
    saver, loader = engine.scheduler.connector.sub_connectors
    workers = engine.workers

    def run(step: Any) -> dict[str, Any]:
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata

        fields = [workers_of.run(part) for workers_of, part in zip(both, step.metadata, strict=True)]
        merged = dict(fields[1])
        merged["kv_connector_worker_meta"] = MultiKVConnectorWorkerMetadata(
            tuple(each["kv_connector_worker_meta"] for each in fields)
        )
        merged["finished_sending"] = None
        return merged

    both = [type(workers)(engine.agent), workers]
    engine.workers = type("Both", (), {"run": staticmethod(run), "land": workers.land})()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.serve("again", prompt(70))
    assert not both[0].started
    assert len(workers.started) == 1
    assert both[0].saved
    for connector in (saver, loader):
        assert not connector._scheduler._tracked
        assert not connector._scheduler._saves
    assert not engine.agent.leases


def test_blocks_are_held_until_their_saves_ended(start: Start) -> None:
    engine = start()
    engine.workers.hold_saves = True
    engine.add("first", prompt(70))
    for _ in range(10):
        engine.step()
    assert "first" in engine.scheduler.requests, "its blocks are still held"
    assert engine.scheduler.has_requests()
    assert engine.connector.has_pending_block_frees()
    assert engine.connector.reset_cache() is False
    engine.workers.hold_saves = False
    engine.run()
    assert not engine.connector.has_pending_block_frees()
    engine.assert_at_rest()


def test_an_idle_engine_sees_its_last_saves_end_so_that_it_can_be_reset(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    now = [1000.0]
    monkeypatch.setattr("orbitkv.vllm.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))
    engine.workers.hold_commits = True
    engine.add("first", prompt(70))
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.requests and engine.scheduler.has_requests()
    assert engine.connector.reset_cache() is False
    now[0] += 2.1  # longer than max_wait_ms
    assert not engine.scheduler.has_requests(), "an agent that stands still does not keep an idle engine at work"
    now[0] -= 2.1
    engine.workers.hold_commits = False
    engine.run()
    assert engine.connector.reset_cache() is True
    engine.assert_at_rest()


@pytest.mark.parametrize(
    "stage", ["loading", "ready", "allocated", "submitted", "done", "running", "finished with delayed free"]
)
def test_cancellation(start: Start, stage: str) -> None:
    engine = start(blocks=12)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    if stage == "loading":
        engine.agent.loading = True
    if stage == "ready":
        engine.add("full", prompt(100, seed=8), answer=30)
        engine.step()
    if stage in ("allocated", "submitted"):
        engine.workers.hold_loads = True
    if stage in ("running", "finished with delayed free"):
        engine.workers.hold_saves = True
    engine.add("cut", prompt(70), answer=1 if stage.startswith("finished") else 30)
    if stage == "allocated":
        engine.finish_step(engine.schedule())
    elif stage == "ready":
        engine.step()
        engine.step()
    else:
        steps = {"loading": 1, "submitted": 2, "done": 1, "running": 4, "finished with delayed free": 4}[stage]
        for _ in range(steps):
            engine.step()
    engine.abort("cut")
    engine.agent.loading = False
    engine.step()
    engine.workers.hold_loads = engine.workers.hold_saves = False
    engine.run()
    engine.assert_at_rest()


def test_external_reset_is_refused_while_anything_is_tracked_and_forgets_when_idle(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.add("open", prompt(30, seed=2))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    engine.run()
    engine.agent.busy = True
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    engine.agent.busy = False
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    assert engine.agent.generation == 1
    engine.serve("again", prompt(70))
    assert not engine.workers.started
    engine.assert_at_rest()


def test_a_reset_without_an_answer_is_made_up_for_before_the_next_lookup(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.agent.silent = True
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    engine.agent.silent = False
    _wait_for(lambda: engine.agent.generation == 1)
    _wait_for(lambda: engine.half.link._attachment.published is not None)
    engine.serve("again", prompt(70))
    assert not engine.workers.started
    engine.assert_at_rest()


def _wait_for(condition: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_lost_agent_is_a_miss_and_comes_back(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.agent.gone = True
    engine.reset_hbm()
    engine.serve("alone", prompt(70))
    assert not engine.workers.started
    engine.agent.gone, engine.agent.boots = False, 1
    _wait_for(lambda: engine.half.link._attachment.published is not None)
    engine.reset_hbm()
    engine.serve("again", prompt(70))
    (load,) = engine.workers.started
    assert load.boot_id == "boot-1"
    engine.assert_at_rest()


def test_leases_of_a_lost_agent_are_not_used(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    request = engine.add("again", prompt(70))
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (64, True)
    engine.agent.gone = True
    engine.agent.leases.clear()
    client: Any = engine.half.link.client
    client.lost = RuntimeError("ended")
    engine.half._allowance.end()
    engine.run()
    assert not engine.workers.started
    engine.assert_at_rest()


@pytest.mark.parametrize("earlier", [False, True])
def test_the_agent_hears_which_engine_it_serves_and_one_that_does_not_listen_serves_too(
    start: Start, agent: FakeAgent, earlier: bool
) -> None:
    agent.earlier = earlier
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    engine.serve("again", prompt(70))
    assert engine.workers.started
    assert [name.partition(" ")[0] for name in agent.engines] == ([] if earlier else ["vllm"])


def test_no_agent_at_start(start: Start, agent: FakeAgent) -> None:
    agent.gone = True
    with pytest.raises(RuntimeError, match="no OrbitKV agent at /nowhere"):
        start()
    engine = start(extra={"orbitkv.on_missing": "run"})
    engine.serve("alone", prompt(70))
    agent.gone = False
    _wait_for(lambda: engine.half.link._attachment.published is not None)
    engine.serve("second", prompt(70))
    assert agent.pages
    engine.assert_at_rest()


def test_not_serving_is_a_miss_but_saves_go_on(start: Start, agent: FakeAgent) -> None:
    agent.serving = False
    engine = start()
    engine.serve("first", prompt(70))
    assert agent.pages
    engine.reset_hbm()
    engine.serve("again", prompt(70))
    assert not agent.queries
    engine.assert_at_rest()


@pytest.mark.guard("vllm-contained")
@pytest.mark.parametrize(
    "method",
    [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_step_metadata",
        "update_connector_output",
        "request_finished",
        "has_pending_block_frees",
        "take_events",
        "take_stats",
    ],
)
def test_a_defect_in_the_cache_never_fails_a_request(
    start: Start, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(blocks=12)

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(engine.half, method, broken)
    for seed in range(2):
        request = engine.add(f"r{seed}", prompt(70, seed), answer=40)
    for _ in range(200):
        if not engine.scheduler.has_unfinished_requests():
            break
        engine.step()
    assert request.num_output_tokens == 40


@pytest.mark.guard("vllm-contained")
def test_a_defect_after_a_hit_was_promised_means_compute(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.reset_hbm()

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(engine.half, "_load", broken)
    request = engine.serve("again", prompt(70))
    assert request.num_output_tokens == 3
    engine.assert_at_rest()


def test_token_sources_follow_vllm_and_add_up(start: Start) -> None:
    engine = start()
    engine.serve("first", prompt(70))
    engine.serve("hbm", prompt(70))
    engine.reset_hbm()
    engine.serve("restored", prompt(70))
    totals: dict[str, int] = {}
    for outputs in engine.outputs:
        for each in outputs.values():
            payload = each.scheduler_stats.kv_connector_stats if each.scheduler_stats else None
            for name, value in (payload or {}).items():
                totals[name] = totals.get(name, 0) + value
    assert totals["prompt_tokens_hbm"] == 64
    assert totals["prompt_tokens_restored"] == 64
    assert totals["prompt_tokens_computed"] == 3 * 70 - 128
    assert totals["restores"] == 1


def test_the_hit_is_reported_as_host_memory(start: Start) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    engine = start()
    request = engine.request("any", prompt(70))
    assert engine.connector.get_external_cache_hit_sources(request, 64) == {CacheHitSource.HOST: 64}
    assert engine.connector.get_external_cache_hit_sources(request, 0) == {}
    assert engine.connector.requires_kv_delivery is False


def test_thousands_of_aborts_leak_nothing(start: Start) -> None:
    engine = start(blocks=40, max_seqs=16)
    engine.serve("first", prompt(70))
    engine.reset_hbm()
    for number in range(4000):
        engine.add(f"r{number}", prompt(70, seed=number % 3), answer=10)
        engine.agent.loading = number % 5 == 0
        engine.workers.hold_loads = number % 7 < 3
        if number % 4:
            engine.step()
        engine.abort(f"r{number}")
    engine.agent.loading = engine.workers.hold_loads = False
    engine.run()
    engine.assert_at_rest()
    client: Any = engine.half.link.client
    assert not client._ready
    assert not client._loading
