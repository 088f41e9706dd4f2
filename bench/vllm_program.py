"""The real vLLM on a GPU as its users run it, asked over a socket: `python -m bench.vllm_program SOCKET`.

The first line says how to start it. A command is a line {"command": name, ...arguments}, its answer a line
{"result": ...} or {"error": text}. Times are taken here, where a user's program would take them: scheduler and model
are in a process of their own.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any, Final

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

STREAM_PROMPT: Final = 64
STREAM_TOKENS: Final = 1300
UNDISTURBED: Final = 20
"""Steps of the streams alone that are timed before each wave."""
RESET_S: Final = 30.0


class Program:
    """The engine. Public methods are commands."""

    def __init__(self, engine: dict[str, Any], connector: dict[str, Any] | None) -> None:
        transfer = KVTransferConfig(**connector) if connector else None
        self._llm = LLM(**engine, kv_transfer_config=transfer)
        self._engine = self._llm.llm_engine
        self._waves = 0

    def ask(self, tokens: int, seeds: list[int]) -> list[dict[str, Any]]:
        """Ask prompts one after another; of each the time to the first token in ms, the cached tokens, and the best
        log probabilities."""
        answers = []
        for seed in seeds:
            started = time.perf_counter()
            output = self._llm.generate([prompt(tokens, seed)], first_token(5), use_tqdm=False)[0]
            ms = (time.perf_counter() - started) * 1e3
            best = {str(token): entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
            answers.append({"ms": ms, "cached": output.num_cached_tokens or 0, "best": best})
        return answers

    def together(self, tokens: int, seeds: list[int]) -> dict[str, Any]:
        """Ask prompts at once; the time until all first tokens are there in ms, and the fewest cached tokens."""
        prompts = [prompt(tokens, seed) for seed in seeds]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, first_token(), use_tqdm=False)
        ms = (time.perf_counter() - started) * 1e3
        return {"ms": ms, "cached": min(output.num_cached_tokens or 0 for output in outputs)}

    def throughput(self, streams: int, tokens: int, answer: int, seed: int) -> float:
        """Prompts that are new, answered at once; generated tokens per second."""
        prompts = [prompt(tokens, seed + number) for number in range(streams)]
        parameters = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started)

    def wave(self, tokens: int, seeds: list[int], streams: int) -> dict[str, Any]:
        """Decode `streams` answers, then ask the prompts beside them.

        Returns the ms of steps alone, those of all steps from there until each prompt has its first token, when each
        of these came, and the fewest cached tokens.
        """
        names = self._begin_streams(streams)
        alone = [self._step()[0] for _ in range(UNDISTURBED)]
        for seed in seeds:
            self._engine.add_request(f"prompt-{self._waves}-{seed}", prompt(tokens, seed), first_token())
        steps: list[float] = []
        firsts: list[float] = []
        cached = tokens
        while len(firsts) < len(seeds):
            ms, finished = self._step()
            steps.append(ms)
            for output in finished:
                if not output.request_id.startswith("prompt-"):
                    raise RuntimeError("a stream ended before the prompts: not all steps were beside decoding streams")
                firsts.append(sum(steps))
                cached = min(cached, output.num_cached_tokens or 0)
        self._end(names)
        return {"alone": alone, "steps": steps, "firsts": firsts, "cached": cached}

    def decode(self, streams: int, steps: int) -> list[float]:
        """Decode `streams` answers; the ms of so many steps."""
        names = self._begin_streams(streams)
        found = [self._step()[0] for _ in range(steps)]
        self._end(names)
        return found

    def _begin_streams(self, streams: int) -> list[str]:
        self._waves += 1
        names = [f"stream-{self._waves}-{number}" for number in range(streams)]
        for number, name in enumerate(names):
            parameters = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True, detokenize=False)
            self._engine.add_request(name, prompt(STREAM_PROMPT, 9_000_000 + number), parameters)
        for _ in range(10):
            self._step()
        return names

    def _end(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def reset(self) -> None:
        """Drop the engine's own prefix cache, once no block is held by a save any more."""
        deadline = time.monotonic() + RESET_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine's prefix cache could not be dropped in {RESET_S:.0f} s")
            time.sleep(0.02)

    def write_calls(self) -> None:
        """Have `bench.timed_connector` write its calls down. What was kept so far is forgotten."""
        self._llm.reset_prefix_cache(reset_connector=True)

    def _step(self) -> tuple[float, list[Any]]:
        """A step in ms, and the requests that ended in it."""
        started = time.perf_counter()
        outputs: Iterable[Any] = self._engine.step()
        return (time.perf_counter() - started) * 1e3, [output for output in outputs if output.finished]


def prompt(tokens: int, seed: int) -> dict[str, list[int]]:
    """A prompt that no other seed's begins like."""
    draw = random.Random(seed)
    return {"prompt_token_ids": [draw.randrange(100, 150_000) for _ in range(tokens)]}


def first_token(logprobs: int | None = None) -> SamplingParams:
    """Ask for one token."""
    return SamplingParams(max_tokens=1, temperature=0, logprobs=logprobs, ignore_eos=True, detokenize=False)


def main() -> None:
    """Serve until the socket ends."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(sys.argv[1])
    lines = stream.makefile("r")
    program = Program(**json.loads(lines.readline()))
    stream.sendall(b'{"result": "ready"}\n')
    for line in lines:
        message = json.loads(line)
        try:
            answer = {"result": getattr(program, message.pop("command"))(**message)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        stream.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
