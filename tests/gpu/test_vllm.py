"""The real vLLM on a GPU: the tests of the real engine, as they run on the CPU, for its model runners and layouts.

They restore repeated prompts bit for bit, kill and restart engines and agents, preempt requests, cancel them at every
stage, and run 64 at once in a cache of a third of their size; after each nothing may be left in flight in the agent.
Every case here is a session of those tests with engines of its own. All of them start at once, as far as there are
processors, and take their engines from one process that has imported vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orbitkv.vllm.injected import EARLY_SCHEDULER
from tools.harness.engine import NURSERY, ROOT, Nursery

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="GPU tests: vllm is not installed"),
]

TESTS = Path("engine_plugins/orbitkv/vllm/tests/engine")
SESSION_S = 480
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64], "backend": "eager"}
"""What the graphs are made of is not compiled, which takes most of an engine's start and changes nothing here."""
NOT_HERE = "not loading and not evicted"
"""What needs an engine in host memory, and the sizes of its pages."""


@dataclass(frozen=True)
class Variant:
    """An engine: vLLM's arguments, the environment, and which tests run: a file's, or `file:some|others`."""

    tests: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def graphs(arguments: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"enforce_eager": False, "compilation_config": {**GRAPHS, **more}, **(arguments or {})}


def layout(name: str) -> dict[str, str]:
    return {"ORBITKV_KV_LAYOUT": "engine", "VLLM_KV_CACHE_LAYOUT": name}


EARLY = {"scheduler_cls": EARLY_SCHEDULER}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
KILLS = {"ORBITKV_TEST_THOROUGH": "1", "ORBITKV_TEST_KILLS": "3"}
VARIANTS = {
    "runner v2": Variant("restore restart pressure cancellation modes:strides|beside"),
    "runner v2, CUDA graphs": Variant("restore pressure", graphs()),
    "runner v2, piecewise CUDA graphs": Variant("restore", graphs(cudagraph_mode="PIECEWISE")),
    "runner v2, kills": Variant("faults:real_engines_killed|agent_killed", {}, KILLS),
    "runner v1": Variant("restore pressure cancellation", {}, V1),
    "runner v1, CUDA graphs": Variant("restore", graphs(), V1),
    "the engine's own layout": Variant("restore pressure modes:strides|beside", {}, {"ORBITKV_KV_LAYOUT": "engine"}),
    "layout LBHNC": Variant("restore modes:strides", {}, layout("LBHNC")),
    "layout BLHNC": Variant("restore modes:strides", {}, layout("BLHNC")),
    "two GPUs": Variant("modes:two_tensor"),
    "told before it schedules": Variant("restore cancellation", EARLY),
    "told before it schedules, CUDA graphs": Variant("pressure", graphs(EARLY)),
    "MLA": Variant("modes:mla"),
    "injected": Variant("modes:injected|before_its_restore|did_not_come"),
    "injected, CUDA graphs": Variant("modes:injected|before_its_restore|did_not_come", graphs()),
    "landing, runner v1": Variant("modes:before_its_restore|did_not_come", {}, V1),
    "KV cache of 8 bits": Variant("restore", {"kv_cache_dtype": "fp8"}),
}
CASES = [(name, tests) for name, variant in VARIANTS.items() for tests in variant.tests.split()]
LONGEST_FIRST = ("pressure", "restart", "faults", "cancellation")


@dataclass(frozen=True)
class Sessions:
    """The sessions of all chosen cases, which run in the background."""

    folder: Path
    environment: dict[str, str]

    def run(self, name: str, tests: str) -> tuple[int, Path]:
        """One session, to its end: exit code and output."""
        variant = VARIANTS[name]
        file, _, expression = tests.partition(":")
        output = self.folder / f"{name} {file}.txt".replace(" ", "-").replace(",", "")
        chosen = f"({NOT_HERE}) and ({expression.replace('|', ' or ')})" if expression else NOT_HERE
        given = json.loads(os.environ.get("ORBITKV_TEST_ENGINE_ARGUMENTS", "{}"))
        # The engines' sockets lie in a folder with a short name: theirs may have 107 characters at most.
        with output.open("w") as written, tempfile.TemporaryDirectory(prefix="engine-") as folder:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist"),
                    *("--durations=8", "--basetemp", str(Path(folder) / "t"), "-k", chosen),
                    str(TESTS / f"test_{file}.py"),
                ],
                cwd=ROOT,
                env={
                    **self.environment,
                    **variant.environment,
                    "ORBITKV_TEST_DEVICE": "cuda",
                    "ORBITKV_TEST_ENGINE_ARGUMENTS": json.dumps({**given, **variant.arguments}),
                },
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(SESSION_S), output
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it left behind


@pytest.fixture(scope="session")
def sessions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[tuple[int, Path]]]]:
    """All chosen cases, running."""
    from orbitkv.vllm.tests.engine.models import MODELS, make_models

    chosen = [
        (str(item.callspec.params["name"]), str(item.callspec.params["tests"]))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_real_engine.__name__
    ]
    chosen.sort(key=lambda case: case[1].partition(":")[0] not in LONGEST_FIRST)
    kept = Path(os.environ.get("ORBITKV_TEST_LOGS") or tmp_path_factory.mktemp("sessions"))
    with tempfile.TemporaryDirectory(prefix="nursery-") as name:
        folder = Path(name)
        nursery = Nursery(folder, "cuda")  # imports vLLM while the models are made
        make_models(folder / "models")
        nursery.ready()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment |= {NURSERY: str(nursery.socket), MODELS: str(folder / "models")}
        running = Sessions(kept, environment)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield {case: pool.submit(running.run, *case) for case in chosen}
            pool.shutdown(cancel_futures=True)
        nursery.close()


@pytest.mark.parametrize(("name", "tests"), CASES)
def test_real_engine(name: str, tests: str, sessions: dict[tuple[str, str], Future[tuple[int, Path]]]) -> None:
    code, output = sessions[name, tests].result()
    said = output.read_text()[-6000:]
    print(said)
    assert code == 0, f"tests of the real engine failed with {name}:\n{said}"
