"""Shows the main job on real parts: conversations whose attention state outlives the engine that computed it.

    python -m tools.demo [--engine vllm] [--json]

Starts the node agent and a real vLLM engine with OrbitKV as its connector, serves some conversations, kills the engine,
starts it again, and serves the next turns from the cache. A second engine, without OrbitKV, answers the same prompts.
Exits with 1 if their answers differ, or if nothing came from OrbitKV after the restart.

All of it runs on the CPU, or with ORBITKV_TEST_DEVICE=cuda, which `make demo` sets where there is one, on a GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from tools import cache, engine_env
from tools.demo.conversation import ANSWER_TOKENS, QUESTIONS, SYSTEM, TURNS, Step, Transcript, round_of
from tools.demo.progress import Progress
from tools.demo.report import Report, Turn
from tools.harness.agent import AgentProcess
from tools.harness.engine import (
    DEVICE,
    EngineProcess,
    EngineSpec,
    engine_environment,
    engine_python,
    orbitkv_connector,
)
from tools.harness.process import ProcessError

TURNS_BEFORE_KILL = TURNS - 2
GPU_BLOCKS = 48
"""So few blocks (of 32 tokens) that the conversations do not all fit:
then older ones leave the engine's memory, as on a busy GPU."""


def make_model(folder: Path) -> Path:
    """A tiny model with random weights. In 32 bits, so that a rounding error never decides between two tokens."""
    command = [engine_python(), str(Path(engine_env.TOOLS) / "tiny_model.py"), str(folder), "--dtype", "float32"]
    done = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProcessError(f"the tiny model could not be made: {' '.join(command)}\n{done.stderr[-3000:]}")
    return folder


def serve(engine: EngineProcess, transcript: Transcript, step: Step, which: str, turns: list[Turn]) -> list[int]:
    """One turn: asks the engine, notes where the prompt's tokens came from, and returns the answer."""
    answer = engine.ask(transcript.prompt(step), max_tokens=ANSWER_TOKENS)
    turns.append(
        Turn(
            session=step.session,
            turn=step.turn,
            engine="first" if which == "first" else "restarted",
            prompt_tokens=answer.prompt_tokens,
            hbm_tokens=answer.hbm_tokens,
            orbitkv_tokens=answer.orbitkv_tokens,
            recomputed_tokens=answer.recomputed_tokens,
            ttft_ms=round(answer.ttft_ms, 3),
        )
    )
    return answer.tokens


def run(folder: Path, progress: Progress) -> Report:
    """The whole demo, in `folder`. Raises ProcessError if a part does not do its work; all processes are gone
    afterwards."""
    with ExitStack() as stack:
        with progress.during("making a tiny model with random weights"):
            model = make_model(folder / "model")
        agent = stack.enter_context(AgentProcess(folder, pool="256Mi"))
        where = "copies to and from the GPU" if DEVICE == "cuda" else "serves, in host mode,"
        progress.say(f"the node agent {where} with 256 MiB")
        spec = EngineSpec(
            model,
            orbitkv_connector(agent.socket_path),
            {"max_model_len": 1024, "num_gpu_blocks_override": GPU_BLOCKS},
        )
        # A GPU's kernels add up in another order when they compute less at once, which can change an answer of random
        # weights. So there the other engine has a cache of its own, of which nothing is ever lost.
        plain = EngineSpec(model, None, {"max_model_len": 1024, "enable_prefix_caching": DEVICE == "cuda"})
        other = "one without it that keeps all in its own" if DEVICE == "cuda" else "one that knows no cache"
        with progress.during(f"starting two vLLM engines: one with OrbitKV, and {other}, to compare with"):
            reference = stack.enter_context(EngineProcess(folder, plain, "reference"))
            engine = stack.enter_context(EngineProcess(folder, spec, "first"))
            engine.ready()
            reference.ready()
        transcript = Transcript(
            engine.call("tokens_of", text=SYSTEM),
            [[engine.call("tokens_of", text=text) for text in texts] for texts in QUESTIONS],
        )
        turns: list[Turn] = []
        differing: list[tuple[int, int]] = []
        for turn in range(1, TURNS + 1):
            if turn == TURNS_BEFORE_KILL + 1:
                progress.say(
                    f"killing the engine (SIGKILL, process {engine.pid}): all that it had computed is lost to it"
                )
                engine.kill9()
                with progress.during("starting the engine again"):
                    engine = stack.enter_context(EngineProcess(folder, spec, "restarted")).ready()
            progress.say(
                f"turn {turn} of {TURNS}: {len(QUESTIONS)} sessions ask the engine with OrbitKV, then the one without"
            )
            for step in round_of(turn):
                prompt = transcript.prompt(step)
                answer = serve(engine, transcript, step, engine.name, turns)
                if reference.ask(prompt, max_tokens=ANSWER_TOKENS).tokens != answer:
                    differing.append((step.session, step.turn))
                transcript.heard(step, answer)
        progress.say("done; ending all processes")
    return Report(turns, differing)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Treats SIGTERM like Ctrl-C, so that it ends the children too."""
    raise KeyboardInterrupt


def main() -> int:
    """Reads the command line, runs the demo, prints what it found, and returns the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["vllm"], default="vllm", help="the engine to show it on")
    parser.add_argument("--json", action="store_true", help="end with one JSON object instead of a table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    progress = Progress()
    try:
        os.environ.setdefault("ORBITKV_ENGINE_PYTHON", str(engine_env.environment_path() / "bin" / "python"))
        if not Path(engine_python()).exists():
            os.environ["ORBITKV_ENGINE_PYTHON"] = str(engine_env.ensure())
        with tempfile.TemporaryDirectory(prefix="orbitkv-demo-") as folder:
            report = run(Path(folder), progress)
    except KeyboardInterrupt:
        progress.say("interrupted; all processes were ended")
        return 130
    except (ProcessError, TimeoutError, cache.SetUpError) as error:
        progress.say(f"FAILED: {error}")
        return 1
    print(json.dumps(report.as_object()) if options.json else "\n" + report.as_text())
    if options.json and not report.passed:
        print(report.as_text(), file=sys.stderr)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
