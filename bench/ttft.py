"""What restores cost a real vLLM on a GPU, and what they save: time to the first token, and the others' decoding.

Engines of the same model and settings take turns on the GPU, because clocks drift: with OrbitKV as an annotated pod has
it, with OrbitKV and vLLM's own scheduler, without a connector, and with vLLM's own offloading to host memory. The model
has Qwen3-8B's shape and random weights: time does not depend on them, and a restored prompt must have the answer that
it had when it was computed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from bench import gpu
from bench.figures import Figure, percentile, say
from bench.restore_hops import Calls, medians
from orbitkv.vllm.injected import EARLY_SCHEDULER
from tools.harness.engine import ROOT, Stream, accept, engine_python, listen, orbitkv_connector
from tools.harness.memory_engine import temporary_agent
from tools.harness.process import ManagedProcess

LOGS: Final = "ORBITKV_BENCH_LOGS"
"""Names a folder for the logs of engines and agent."""
CALLS: Final = "ORBITKV_BENCH_CALLS"
RESULTS: Final = gpu.RESULTS.with_name("gpu_ttft.json")
START_S: Final = 240.0
ANSWER_S: Final = 120.0
SHORT: Final = 1024
LONG: Final = 8192
MOST_TOKENS: Final = 16384
SHORT_TURNS: Final = 25
LONG_TURNS: Final = 15
TURNS_AT_ONCE: Final = 3
"""Prompts that an engine is asked before it is another's turn."""
BATCH: Final = 7
BATCH_TURNS: Final = 3
STREAMS: Final = 16
STEPS_BESIDE: Final = 300
"""Steps beside restores that the waves go on for."""
MOST_WAVES: Final = 30
MOST_MISSED: Final = 10
"""Batches that were not restored as a whole: then something is wrong."""
CROWD: Final = 64
CROWD_PROMPT: Final = 512
CROWD_ANSWER: Final = 128
CROWD_TURNS: Final = 8
BLOCK: Final = 16
PAGE_BYTES: Final = 36 * 65536
"""Of a block of 16 tokens in the model's 36 layers."""
PEER_8K_MS: Final = 47.4
"""A prompt of 8,192 tokens restored by the fastest other cache for vLLM that was measured on an H200 (PegaFlow 0.25.1,
2026-11-29; vLLM's own CPU offloading: 52.8 ms)."""
APART: Final = 0.1
"""Log probabilities of the same answer are no further apart: kernels add up in another order."""

SHAPE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OFFLOADING: Final[dict[str, Any]] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 20 << 30},
}
"""vLLM's own connector for host memory."""
GRAPHS: Final = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
"""Sizes of CUDA graphs: those of vLLM's own list that occur here, so that an engine starts in half of the time."""


def why_not() -> str:
    """Why this machine cannot run it, "" when it can."""
    if gpu.why_not():
        return gpu.why_not()
    try:
        import vllm  # noqa: F401
    except ImportError:
        return "vllm is not installed"
    return ""


class Engine:
    """A real vLLM. It starts when it is made, builds its model from `begin` on, and serves after `ready`."""

    def __init__(
        self, folder: Path, name: str, connector: dict[str, Any] | None, arguments: dict[str, Any] | None = None
    ) -> None:
        self._connector = connector
        self._arguments = arguments or {}
        self._folder = folder
        self._listener = listen(folder / f"{name}.sock")
        self.calls = folder / f"{name}-calls.json"
        self._process = ManagedProcess(
            name,
            [engine_python(), "-m", "bench.vllm_program", str(folder / f"{name}.sock")],
            folder / f"{name}.log",
            {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(ROOT), str(ROOT / "engine_plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                CALLS: str(self.calls),
            },
        )
        self._stream: Stream | None = None

    def begin(self) -> None:
        """Have it build the model.

        Raises:
            ProcessError: it did not start; with its log.
        """
        stream = self._stream = Stream(accept(self._listener, self._process, START_S), self._process)
        attention = os.environ.get("ORBITKV_BENCH_ATTENTION")
        stream.write(
            {
                "engine": {
                    "model": str(model_folder(self._folder)),
                    "load_format": "dummy",
                    "skip_tokenizer_init": True,
                    "max_model_len": MOST_TOKENS,
                    "gpu_memory_utilization": 0.2,  # only looked at before the start: that of the cache is given
                    "kv_cache_memory_bytes": ((BATCH * LONG + STREAMS * 1400) // BLOCK + 64) * PAGE_BYTES,
                    "compilation_config": {"cudagraph_capture_sizes": GRAPHS},
                    **({"attention_backend": attention} if attention else {}),
                    **self._arguments,
                },
                "connector": self._connector,
            }
        )

    def ready(self) -> Self:
        """Wait until it can be asked.

        Raises:
            ProcessError: it did not start; with its log.
        """
        assert self._stream is not None
        self._stream.read(START_S)
        return self

    def call(self, command: str, **arguments: Any) -> Any:
        """One command of `bench.vllm_program.Program`.

        Raises:
            ProcessError: it failed; with the engine's log.
        """
        assert self._stream is not None
        self._stream.write({"command": command, **arguments})
        return self._stream.read(ANSWER_S)

    def ask(self, tokens: int, seed: int) -> dict[str, Any]:
        """One prompt alone."""
        answer: dict[str, Any] = self.call("ask", tokens=tokens, seeds=[seed])[0]
        return answer

    def keep_log(self, folder: Path) -> None:
        """Copy its log to a folder, and the calls of its connector if they were written down."""
        (folder / self._process.log.name).write_text(self._process.log_text())
        if self.calls.exists():
            shutil.copy(self.calls, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        self._process.stop()
        self._listener.close()


def model_folder(folder: Path) -> Path:
    """A folder with the model's shape: its weights are drawn by vLLM."""
    made = folder / "model"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(SHAPE))
    return made


def restored_tokens(tokens: int) -> int:
    """What is restored of a prompt: its full blocks, of which one token at least is left to compute."""
    return (tokens - 1) // BLOCK * BLOCK


def restored_bytes(tokens: int) -> int:
    """The same in bytes."""
    return (tokens - 1) // BLOCK * PAGE_BYTES


class Bench:
    """The engines (ours, ours with vLLM's own scheduler, one without a connector, one with vLLM's own), and the figures
    so far."""

    def __init__(self, engines: Sequence[Engine], limit: gpu.Limit) -> None:
        self.figures: list[Figure] = []
        self._ours, self._late, self._plain, self._theirs = engines
        self._limit = limit
        self._seeds = itertools.count(1_000_000, 1000)
        self._missed = 0
        self._batch: list[int] = []

    def _add(self, *figure: Any, **more: Any) -> None:
        added = Figure(*figure, **more)
        self.figures.append(added)
        say(f"    {json.dumps(added.as_json())}")

    def stages(self) -> list[tuple[str, Callable[[], None]]]:
        """What is measured, in order: words for people, and what does it."""
        return [
            ("one prompt of 1,024 tokens alone", lambda: self.first_tokens("1k", SHORT, SHORT_TURNS, bound=5)),
            ("one prompt of 8,192 tokens alone", lambda: self.first_tokens("8k", LONG, LONG_TURNS, bound=26)),
            ("the first two restored by vLLM's own offloading", self.offloading),
            ("seven prompts of 8,192 tokens at once", self.batch),
            ("the same beside decoding streams", self.beside_streams),
            ("saving", self.throughput),
            ("the engine's main thread", self.main_thread),
        ]

    def _at_limit_ms(self, size: int) -> float:
        speeds = [self._limit.restore() for _ in range(5)]
        return size / statistics.median(speeds) / 1e6

    def warm(self) -> None:
        """Have every kernel compiled that is measured below."""
        for engine in (self._ours, self._late, self._plain, self._theirs):
            for tokens in (SHORT, LONG):
                for _ in range(2):
                    engine.ask(tokens, 500 + tokens)
                    engine.call("reset")
        for engine in (self._ours, self._plain, self._theirs):
            engine.call("throughput", streams=CROWD, tokens=CROWD_PROMPT, answer=16, seed=next(self._seeds))
            engine.call("wave", tokens=SHORT, seeds=[1, 2, 3], streams=STREAMS)
            engine.call("reset")

    def first_tokens(self, name: str, tokens: int, turns: int, bound: float) -> None:
        """One prompt alone: computed, restored, and found in HBM."""
        first = next(self._seeds)
        seeds = range(first, first + turns)
        computed = {seed: self._ours.ask(tokens, seed) for seed in seeds}
        for seed in seeds:
            self._plain.ask(tokens, seed)
        restored, hits, plain = [], [], []
        late: list[tuple[float, float]] = []
        # A few prompts each in turn: an engine is slower right after another process used the GPU.
        for start in range(0, turns, TURNS_AT_ONCE):
            some = seeds[start : start + TURNS_AT_ONCE]
            for seed in some:
                restored.append(self._restored_ms(self._ours, tokens, seed, computed[seed]))
                hits.append(self._ours.ask(tokens, seed)["ms"])
            for seed in some:
                slow = self._restored_ms(self._late, tokens, seed, computed[seed])
                late.append((slow, self._late.ask(tokens, seed)["ms"]))
            for seed in some:
                self._plain.ask(tokens, seed)  # as above the second of two asked one after the other counts
                plain.append(self._plain.ask(tokens, seed)["ms"])
        hit = statistics.median(hits)
        self._add(f"ttft_{name}_computed_ms", statistics.median(each["ms"] for each in computed.values()), "ms")
        self._add(f"ttft_{name}_hit_ms", hit, "ms")
        self._add(f"ttft_{name}_restored_ms", statistics.median(restored), "ms", baseline=hit)
        over = statistics.median(restored) - hit
        at_limit = self._at_limit_ms(restored_bytes(tokens))
        self._add(f"ttft_{name}_over_hit_ms", over, "ms", baseline=at_limit, bound=bound)
        late_ms, late_hit = (statistics.median(each) for each in zip(*late, strict=True))
        self._add(f"ttft_{name}_over_hit_own_scheduler_ms", late_ms - late_hit, "ms", baseline=over)
        without = statistics.median(plain)
        self._add(f"hbm_hit_{name}_ratio", hit / without, "ratio", bound=1.03 if tokens == LONG else None)
        if tokens == LONG:
            self._add(f"ttft_{name}_peer_ratio", statistics.median(restored) / PEER_8K_MS, "ratio", bound=0.9)

    @staticmethod
    def _restored_ms(engine: Engine, tokens: int, seed: int, cold: dict[str, Any]) -> float:
        """Time to the first token of a prompt that HBM has not.

        Raises:
            RuntimeError: it was not restored as a whole, or has another answer than when it was computed.
        """
        engine.call("reset")
        warm = engine.ask(tokens, seed)
        if warm["cached"] != restored_tokens(tokens):
            raise RuntimeError(f"only {warm['cached']} of {tokens} tokens were restored")
        if apart(cold["best"], warm["best"]) > APART:
            raise RuntimeError(f"a restored prompt of {tokens} tokens has another answer: {cold} and {warm}")
        return float(warm["ms"])

    def offloading(self) -> None:
        """The same restored by vLLM's own offloading, which leaves one token to compute, and not a block."""
        for name, tokens, turns in (("1k", SHORT, SHORT_TURNS), ("8k", LONG, LONG_TURNS)):
            first = next(self._seeds)
            seeds = range(first, first + turns)
            for seed in seeds:
                self._theirs.ask(tokens, seed)
            restored = []
            for seed in seeds:
                self._theirs.call("reset")
                found = self._theirs.ask(tokens, seed)
                if found["cached"] < tokens - BLOCK:
                    raise RuntimeError(f"vLLM's offloading restored {found['cached']} of {tokens} tokens")
                restored.append(found["ms"])
            self._add(f"offloading_{name}_restored_ms", statistics.median(restored), "ms")

    def batch(self) -> None:
        """Seven long prompts restored at once."""
        first = next(self._seeds)
        seeds = self._batch = list(range(first, first + BATCH))
        self._ours.call("together", tokens=LONG, seeds=seeds)
        times: list[float] = []
        while len(times) < BATCH_TURNS:
            self._ours.call("reset")
            found = self._ours.call("together", tokens=LONG, seeds=seeds)
            if self._restored(found):
                times.append(found["ms"])
        at_limit = self._at_limit_ms(BATCH * restored_bytes(LONG))
        self._add("batch_7x8k_ms", statistics.median(times), "ms", baseline=at_limit)
        self._add("batch_7x8k_limit_ratio", statistics.median(times) / at_limit, "ratio", bound=1.25)

    def _restored(self, found: dict[str, Any]) -> bool:
        """Whether all prompts of a batch came from a cache as far as they can; one that did not is no measure.

        Raises:
            RuntimeError: that happens too often.
        """
        if found["cached"] == restored_tokens(LONG):
            return True
        self._missed += 1
        say(f"  only {found['cached']} of {LONG} tokens of a prompt came from a cache: not counted")
        if self._missed > MOST_MISSED:
            raise RuntimeError(
                f"{self._missed} batches were not restored as a whole; see the agent's and engine's logs"
            )
        return False

    def beside_streams(self) -> None:
        """The prompts of the batch beside 16 decoding streams: restored, and by turns found in HBM."""
        seeds = self._batch
        busy: list[dict[str, Any]] = []
        control: list[dict[str, Any]] = []
        while sum(len(wave["steps"]) for wave in busy) < STEPS_BESIDE and len(busy) < MOST_WAVES:
            self._ours.call("reset")
            pair = [self._ours.call("wave", tokens=LONG, seeds=seeds, streams=STREAMS) for _ in range(2)]
            if all(self._restored(wave) for wave in pair):  # the first leaves the prompts in HBM for the second
                busy.append(pair[0])
                control.append(pair[1])
        alone = statistics.median(step for wave in busy + control for step in wave["alone"])
        steps, control_steps = ([step for wave in waves for step in wave["steps"]] for waves in (busy, control))
        self._add("decode_alone_ms", alone, "ms a token of 16 streams")
        self._add("decode_beside_p50_ms", statistics.median(steps), "ms", baseline=alone)
        p99 = percentile(control_steps, 99)
        self._add("decode_beside_p99_ms", percentile(steps, 99), "ms", baseline=p99)
        self._add("decode_p99_ratio", percentile(steps, 99) / p99, "ratio", bound=1.1)
        lost, control_lost = (
            statistics.median(sum(wave["steps"]) - alone * len(wave["steps"]) for wave in waves)
            for waves in (busy, control)
        )
        self._add("decode_lost_ms", lost, "ms a wave", baseline=control_lost)
        self._add("decode_lost_ratio", lost / control_lost, "ratio", bound=2)
        last, control_last = (statistics.median(wave["firsts"][-1] for wave in waves) for waves in (busy, control))
        limit = control_last + self._at_limit_ms(BATCH * restored_bytes(LONG))
        self._add("first_token_median_ms", statistics.median(ms for wave in busy for ms in wave["firsts"]), "ms")
        self._add("first_tokens_ms", last, "ms", baseline=limit)
        self._add("first_tokens_limit_ratio", last / limit, "ratio", bound=1.3)
        self._add("batches_not_restored", self._missed, f"of {BATCH_TURNS + 2 * len(busy) + self._missed}")

    def throughput(self) -> None:
        """64 streams whose prompts and answers are saved, against an engine that saves nothing."""
        ours: list[float] = []
        plain: list[float] = []
        for _ in range(CROWD_TURNS):
            for engine, found in ((self._ours, ours), (self._plain, plain)):
                engine.call("reset")
                arguments = {"streams": CROWD, "tokens": CROWD_PROMPT, "answer": CROWD_ANSWER}
                found.append(engine.call("throughput", seed=next(self._seeds), **arguments))
        best = statistics.median(plain)
        self._add("saving_tokens_s", statistics.median(ours), "tokens/s", baseline=best)
        self._add("saving_throughput_ratio", statistics.median(ours) / best, "ratio", bound=0.98, at_least=True)

    def main_thread(self) -> None:
        """What the connector takes of a step, and the hops of a restore alone."""
        self._ours.call("write_calls")
        calls = Calls.read(self._ours.calls)
        spent = calls.microseconds_per_step()
        self._add("connector_us_per_step", statistics.median(spent), "us")
        self._add("connector_us_per_step_p99", percentile(spent, 99), "us")
        for name, tokens in (("1k", SHORT), ("8k", LONG)):
            if hops := calls.hops(restored_tokens(tokens)):
                middle = medians(hops)
                self._add(f"restore_{name}_sent_ms", middle.sent, "ms since the look-up")
                self._add(f"restore_{name}_seen_ms", middle.seen, "ms since the look-up")
                self._add(f"restore_{name}_scheduled_ms", middle.scheduled, "ms since the look-up")


def apart(one: dict[str, float], other: dict[str, float]) -> float:
    """How far the best log probabilities of two answers are apart; those that only one of them names count not, as
    long as most are in both."""
    both = one.keys() & other.keys()
    if len(both) < 3:
        return float("inf")
    return max(abs(one[token] - other[token]) for token in both)


@contextlib.contextmanager
def engines(
    folder: Path, kinds: Sequence[tuple[dict[str, Any] | None, dict[str, Any] | None]]
) -> Iterator[list[Engine]]:
    """Engines that are ready, one for each connector and vLLM's arguments with it."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Engine(folder, f"engine-{number}", *kind)) for number, kind in enumerate(kinds)]
        try:
            for engine in made:
                engine.begin()
            yield [engine.ready() for engine in made]
        finally:
            if logs := os.environ.get(LOGS):
                for engine in made:
                    engine.keep_log(Path(logs))


def run() -> list[Figure]:
    """See the module.

    Raises:
        RuntimeError: there is no GPU or no vLLM here, or something restored was wrong.
        ProcessError: an engine failed.
    """
    if why_not():
        raise RuntimeError(f"bench ttft: {why_not()}")
    with temporary_agent(mode="cuda", pool="40GiB", prefault=True) as agent, tempfile.TemporaryDirectory() as name:
        ours = orbitkv_connector(agent.socket_path, model_fingerprint="bench")
        ours["kv_connector_module_path"] = "bench.timed_connector"
        say("  starting four engines: minutes")
        early = {"scheduler_cls": EARLY_SCHEDULER}
        one_prompt = {"kv_cache_memory_bytes": (MOST_TOKENS // BLOCK + 64) * PAGE_BYTES}  # it is asked no more at once
        with engines(Path(name), [(ours, early), (ours, one_prompt), (None, None), (OFFLOADING, None)]) as started:
            agent.wait(
                lambda status: status["pool"]["prefaulted_bytes"] >= 0.99 * status["pool"]["capacity_bytes"],
                "all of the agent's memory is there",
                START_S,
            )
            bench = Bench(started, gpu.Limit())
            say("  the agent and the engines are ready")
            try:
                bench.warm()
                for what, stage in bench.stages():
                    say(f"  {what}")
                    stage()
                    gpu.keep(bench.figures, "ttft", RESULTS)  # what is measured is kept, whatever comes next
            finally:
                if logs := os.environ.get(LOGS):
                    (Path(logs) / "agent.log").write_text(agent.log_text())
    return bench.figures
