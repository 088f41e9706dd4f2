"""Agents and engines that die, stall, or are not there: the engine serves throughout, and comes back to the
cache by itself."""

import os
import random
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from orbitkv.client import QueryReady, SaveStatus
from orbitkv.vllm.tests.engine import stand_in
from orbitkv.vllm.tests.engine.checks import assert_same_answer, assert_sources, full_blocks, tokens
from orbitkv.vllm.tests.engine.models import AgentMaker, EngineMaker
from orbitkv.vllm.tests.engine.stand_in import StandIn, chain
from tools.harness.agent import AgentProcess, agent_environment
from tools.harness.engine import Answer, EngineProcess, Prompt
from tools.harness.process import ManagedProcess, ProcessError, wait_until
from tools.harness.releases import BEFORE, LONG_AFTER, plugin_with

pytestmark = pytest.mark.timeout(900)

THOROUGH = os.environ.get("ORBITKV_TEST_THOROUGH") == "1"
KILLS = int(os.environ.get("ORBITKV_TEST_KILLS", "30"))
STALL_SECONDS = (30, 10, 10)
STEP_MARGIN_MS = 20
ALIKE_TOKENS = 64
"""Steps that compute fewer tokens more than this are no more work."""
FEW_BLOCKS = {"num_gpu_blocks_override": 48, "max_model_len": 1024}
"""Fewer than the prompts of a load need, so that pages leave the engine's cache and are restored all the time."""


def restored_after_reset(engine: EngineProcess, prompt: list[int]) -> Answer | None:
    """The answer if the prompt's pages come from OrbitKV, after the engine forgot them; None if it was computed."""
    engine.reset()
    answer = engine.ask(prompt, logprobs=1)
    return answer if answer.orbitkv_tokens == full_blocks(len(prompt)) else None


def wait_restored(engine: EngineProcess, agent: AgentProcess, prompt: list[int], timeout: float = 60) -> Answer:
    """Asks until the prompt's pages come from OrbitKV, which an engine that has just attached may still have
    to save."""

    def ask() -> Answer | None:
        answer = restored_after_reset(engine, prompt)
        agent.wait_at_rest()
        return answer

    return wait_until(ask, "the engine hits in OrbitKV again", timeout)


class Load:
    """Requests that an engine always has some of, and the check that each is answered."""

    def __init__(self, engine: EngineProcess, name: str, *, prompts: int, at_once: int = 4) -> None:
        self._engine = engine
        self._name = name
        self._prompts = prompts
        self._at_once = at_once
        self._open: list[str] = []
        self.answered = 0
        self._number = 0

    def keep_up(self) -> None:
        """Collects what is answered and asks anew; after `prompts` different prompts they come round again."""
        for request in list(self._open):
            answers = self._engine.call("results", ids=[request])
            if answers is not None:
                self._open.remove(request)
                self.answered += 1
                assert answers[request]["finish_reason"] == "length", f"a request ended with {answers[request]}"
        new: list[Prompt] = []
        while len(self._open) + len(new) < self._at_once:
            self._number += 1
            prompt = tokens(f"{self._name} {self._number % self._prompts}", 200 + 40 * (self._number % 7))
            new.append(Prompt(prompt, max_tokens=16))
        self._open += self._engine.submit(new) if new else []

    def run(self, seconds: float) -> None:
        """Keeps up for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.keep_up()
            time.sleep(0.005)  # the pace of the clients

    def finish(self) -> None:
        """Waits for the answers to all requests."""
        self.answered += len(self._engine.results(self._open))
        self._open = []
        self._engine.settle()


def test_engine_without_an_agent_serves_and_attaches_when_it_comes(
    folder: Path, start_engine: EngineMaker, start_agent: AgentMaker
) -> None:
    engine = start_engine(folder / "comes-late.sock", settings={"on_missing": "run"}, patient=False)
    prompt = tokens("no agent yet", 300)
    cold = engine.ask(prompt, logprobs=1)
    assert_sources(cold, hbm=0, orbitkv=0, what="without an agent")
    log = engine.log_text()
    assert "comes-late.sock" in log, "the log does not name the socket that is missing"
    hbm = engine.ask(prompt, logprobs=1)
    # once by the scheduler's half and once by the worker's
    assert engine.log_text().count("is not attached") <= 2, "the missing agent is logged again and again"
    foreign = start_agent("comes-late", plugin=plugin_with(LONG_AFTER, folder))
    wait_until(lambda: "version-mismatch" in engine.log_text(), "the engine says that the releases do not fit", 30)
    assert f"speaks {LONG_AFTER}" in engine.log_text()
    assert_same_answer(engine.ask(prompt, logprobs=1), hbm, "beside an agent of another release")
    assert foreign.stop() == 0
    agent = start_agent("comes-late", plugin=plugin_with(BEFORE, folder))
    restored = wait_restored(engine, agent, prompt)
    assert_same_answer(restored, hbm, "restored after a late attachment, to an agent of the release before")


def test_engine_does_not_start_without_an_agent_when_told_so(folder: Path, start_engine: EngineMaker) -> None:
    with pytest.raises(ProcessError, match=r"nobody-there\.sock"):
        start_engine(folder / "nobody-there.sock", patient=False)


def test_stalled_agent_delays_no_step_and_every_request_finishes(
    start_agent: AgentMaker, start_engine: EngineMaker
) -> None:
    """Each step is compared with those of a control run just before, in which the agent answers.

    Other things that the machine does make a step longer too, now and then. What the agent does to it would come again:
    so where a step was held up, the comparison is made anew.
    """
    agent = start_agent()
    engine = start_engine(agent, settings={"on_missing": "run"}, patient=False, **FEW_BLOCKS)
    wait_restored(engine, agent, tokens("before the stall", 300))
    load = Load(engine, "stall", prompts=1 << 30)  # none comes again: with and without hits the steps are the same work
    load.run(5)  # whatever is slow only once happens here
    held_up: list[tuple[float, float]] = []
    for seconds in STALL_SECONDS:
        engine.call("steps")
        load.run(10)
        usual = engine.call("steps")
        agent.pause()
        answered, stopped = load.answered, time.monotonic()
        load.run(seconds)
        stalled = engine.call("steps")
        assert time.monotonic() - stopped >= seconds
        assert load.answered - answered > seconds / 2, f"{load.answered - answered} answers in {seconds} s"
        load.finish()
        agent.resume()
        by_connector = max(connector for _, connector, _ in stalled)
        longer = max(step - longest_alike(usual, computed) for step, _, computed in stalled)
        held_up.append((by_connector, longer))
        wait_restored(engine, agent, tokens("after the stall", 300))
        if max(held_up[-1]) <= STEP_MARGIN_MS:
            break
    assert max(held_up[-1]) <= STEP_MARGIN_MS, (
        "a step was held up: ms that it was in the connector, and that it was longer than any with as much work in the "
        f"control: {held_up}"
    )


def longest_alike(steps: list[tuple[float, float, int]], computed: int) -> float:
    """The longest in ms of the steps that are no more work than one of so many computed tokens."""
    return max(took for took, _, tokens_computed in steps if tokens_computed < computed + ALIKE_TOKENS)


def test_agent_killed_at_random_points_under_load(
    folder: Path, start_agent: AgentMaker, start_engine: EngineMaker
) -> None:
    chance = random.Random(3)
    agent = start_agent("killed-agent")
    engine = start_engine(agent, settings={"on_missing": "run"}, patient=False, **FEW_BLOCKS)
    probe = tokens("known answer", 300)
    engine.ask(probe)
    expected = engine.ask(probe, logprobs=1)
    load = Load(engine, "agent killed", prompts=7)
    load.run(1)
    wait_restored(engine, agent, probe)
    before = engine.call("threads")
    for kill in range(KILLS):
        load.run(chance.uniform(0, 0.4))
        agent.kill9()
        load.run(chance.uniform(0, 0.2))
        agent = start_agent("killed-agent")
        if kill % 5 == 4:
            load.finish()
            restored = wait_restored(engine, agent, probe)
            assert_same_answer(restored, expected, f"after kill {kill + 1} of the agent")
    load.finish()
    agent.wait_at_rest()
    restored = wait_restored(engine, agent, probe)
    assert_same_answer(restored, expected, "after all kills of the agent")
    after = wait_until(
        lambda: at_most(engine.call("threads"), before["descriptors"] + 2), "the engine's descriptors come back", 20
    )
    assert after["threads"] <= before["threads"] + 1, f"threads before {before}, after {after}"
    assert after["resident_kib"] <= before["resident_kib"] + 100 * 1024, f"memory before {before}, after {after}"


def test_engines_killed_at_random_points_under_load(folder: Path, start_agent: AgentMaker) -> None:
    """Stand-ins for engines die; one beside them lives on, and checks every page that it gets."""
    chance = random.Random(4)
    agent = start_agent("kills-engines", pool="4Mi")
    witness = start_stand_in(folder, agent, 0)
    before = threads = resident = 0
    for kill in range(1, KILLS + 1):
        victim = start_stand_in(folder, agent, kill)
        wait_until(partial(works_or_ended, victim), "the stand-in works", 20)
        time.sleep(chance.uniform(0, 0.15))  # the random point
        assert victim.running(), victim.failure("ended by itself")
        victim.kill9()
        assert witness.running(), witness.failure("got a wrong page, or was disturbed")
        if kill == KILLS // 3:  # the pool has all of its arenas
            before, threads, resident = fewest_descriptors(agent), threads_of(agent), resident_kib(agent)
    agent.wait(lambda status: len(status["instances"]) == 1, "all instances but the witness's are gone")
    wait_until(lambda: descriptors(agent) <= before, f"the agent has {before} open descriptors again", 20)
    assert threads_of(agent) <= threads, f"the agent has {threads_of(agent)} threads, before {threads}"
    grown = resident_kib(agent) - resident
    assert grown < 32 * 1024, f"the agent's memory grew by {grown} KiB"
    witness.kill9()
    assert "wrong" not in witness.log_text()
    agent.wait_at_rest()
    status = agent.wait(lambda status: not status["instances"], "no instance is left")
    assert status["transfer"]["load_bytes"] > 0, "nothing was restored: the test shows nothing"
    assert agent.stop() == 0, f"the agent did not drain: {agent.log_text()[-500:]}"


@pytest.mark.skipif(not THOROUGH, reason=f"starts {KILLS + 1} engines, minutes: set ORBITKV_TEST_THOROUGH=1")
@pytest.mark.timeout(1200)
def test_real_engines_killed_at_random_points_under_load(start_agent: AgentMaker, start_engine: EngineMaker) -> None:
    """Beside an engine that lives on others die: while they start, attach, save or restore. All ask the same, so each
    restores what others saved."""
    chance = random.Random(5)
    agent = start_agent("kills-real-engines")
    start = partial(start_engine, agent, settings={"on_missing": "run"}, patient=False, **FEW_BLOCKS)
    witness = start()
    probe = tokens("known answer", 300)
    witness.ask(probe)
    expected = witness.ask(probe, logprobs=1)
    witness_load = Load(witness, "shared", prompts=7)
    witness_load.run(1)
    coming: list[EngineProcess] = []  # the next one starts while this one lives
    restored = before = threads = resident = 0
    for kill in range(1, KILLS + 1):
        victim = coming.pop() if coming else start(wait=False).begin()
        if kill not in (KILLS // 3, KILLS):
            coming.append(start(wait=False).begin())
        if kill % 4 == 0:
            time.sleep(chance.uniform(0, 5))  # it dies while it starts
        else:
            already = agent.status()["transfer"]["load_bytes"]
            answer = victim.ask(probe, logprobs=1)
            assert_same_answer(answer, expected, f"from the engine that comes before kill {kill}")
            Load(victim, "shared", prompts=7).run(chance.uniform(0, 2))
            restored += agent.status()["transfer"]["load_bytes"] - already
        victim.kill9()
        witness_load.run(0.3)
        if kill % 5 == 0:
            witness_load.finish()
            assert_same_answer(wait_restored(witness, agent, probe), expected, f"after kill {kill} of an engine")
        if kill == KILLS // 3:
            before, threads, resident = fewest_descriptors(agent), threads_of(agent), resident_kib(agent)
    assert restored > 0, "no engine restored anything: the test shows nothing"
    agent.wait(lambda status: len(status["instances"]) == 1, "all instances but the witness's are gone")
    agent.wait_at_rest()
    wait_until(lambda: descriptors(agent) <= before, f"the agent has {before} open descriptors again", 20)
    assert threads_of(agent) <= threads, f"the agent has {threads_of(agent)} threads, before {threads}"
    grown = resident_kib(agent) - resident
    assert grown < 32 * 1024, f"the agent's memory grew by {grown} KiB"


def at_most(now: dict[str, int], descriptors: int) -> dict[str, int] | None:
    """The counts of an engine's process if it has no more open descriptors than this."""
    return now if now["descriptors"] <= descriptors else None


def works_or_ended(process: ManagedProcess) -> bool:
    """Whether a stand-in has saved or restored something, or is gone."""
    return "working" in process.log_text() or not process.running()


def test_what_a_stalled_agent_accepts_too_late_is_given_back_at_once(start_agent: AgentMaker) -> None:
    agent = start_agent()
    engine = StandIn(str(agent.socket_path), "stalled")
    pages = chain("too late", 4)
    agent.pause()
    save = engine.start_save(pages, range(4))
    assert engine.worker.wait_save(save, 20) is SaveStatus.NOT_SUBMITTED
    agent.resume()
    # The agent accepts it now, and nobody asks it anything after that.
    agent.wait(lambda status: sum(status["transfer"]["save_dropped"].values()) == 4, "the late save is given back")
    agent.wait_at_rest()
    answer = engine.query("too late", pages)
    assert isinstance(answer, QueryReady) and answer.pages == 0, f"pages that were never copied are found: {answer}"
    engine.close()


def start_stand_in(folder: Path, agent: AgentProcess, seed: int) -> ManagedProcess:
    """A stand-in for an engine at work."""
    python = os.environ.get("ORBITKV_AGENT_PYTHON") or sys.executable
    command = [python, "-m", stand_in.__name__, str(agent.socket_path), str(seed)]
    return ManagedProcess(f"stand-in-{seed}", command, folder / f"stand-in-{seed}.log", agent_environment())


def threads_of(agent: AgentProcess) -> int:
    """The agent's threads."""
    return len(os.listdir(f"/proc/{agent.pid}/task"))


def resident_kib(agent: AgentProcess) -> int:
    """The agent's memory, without that which it shares (the arenas)."""
    lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def descriptors(agent: AgentProcess) -> int:
    """The agent's open descriptors."""
    return len(os.listdir(f"/proc/{agent.pid}/fd"))


def fewest_descriptors(agent: AgentProcess) -> int:
    """The fewest that the agent has open within a second, once only the witness's instance is left."""
    agent.wait(lambda status: len(status["instances"]) == 1, "all instances but the witness's are gone")
    until = time.monotonic() + 1
    fewest = descriptors(agent)
    while time.monotonic() < until:
        fewest = min(fewest, descriptors(agent))
        time.sleep(0.02)
    return fewest
