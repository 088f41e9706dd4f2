"""The real vLLM on a GPU: the tests of the real engine, as they run on the CPU, for its model runners and layouts.

They restore repeated prompts bit for bit, kill and restart engines, preempt requests, cancel them at every stage, and
run 64 at once in a cache of a third of their size; after each nothing may be left in flight in the agent.
Each starts engines of its own: with pytest-xdist (`-n 12`) all of them run at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.harness.engine import ROOT

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="GPU tests: vllm is not installed"),
]

TESTS = Path("engine_plugins/orbitkv/vllm/tests/engine")
VARIANTS: dict[str, tuple[dict[str, object], dict[str, str], str]] = {
    "runner v2": ({}, {}, "restore restart pressure cancellation"),
    "runner v2, CUDA graphs": ({"enforce_eager": False}, {}, "restore pressure"),
    "runner v1": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "restore pressure cancellation"),
    "runner v1, CUDA graphs": ({"enforce_eager": False}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "restore"),
    "the engine's own layout": ({}, {"ORBITKV_KV_LAYOUT": "engine"}, "restore pressure"),
}
"""Name: vLLM's arguments, the environment, and which of the engine's tests run."""
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64], "backend": "eager"}
"""What the graphs are made of is not compiled, which takes most of an engine's start and changes nothing here."""
NOT_HERE = "not loading and not evicted"
"""What needs an engine in host memory, and the sizes of its pages."""


@pytest.mark.parametrize(("name", "file"), [(name, file) for name in VARIANTS for file in VARIANTS[name][2].split()])
def test_real_engine(name: str, file: str, tmp_path: Path) -> None:
    arguments, environment, _ = VARIANTS[name]
    given = json.loads(os.environ.get("ORBITKV_TEST_ENGINE_ARGUMENTS", "{}"))
    graphs = {"compilation_config": GRAPHS} if arguments.get("enforce_eager") is False else {}
    output = tmp_path / "output.txt"  # in a file, which is there when this test is ended too
    # The engines' sockets lie in a folder with a short name: theirs may have 107 characters at most.
    with output.open("w") as written, tempfile.TemporaryDirectory(prefix="engine-") as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=8"),
                *("--basetemp", str(Path(folder) / "t"), "-k", NOT_HERE),
                str(TESTS / f"test_{file}.py"),
            ],
            cwd=ROOT,
            env={
                **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
                **environment,
                "ORBITKV_TEST_DEVICE": "cuda",
                "ORBITKV_TEST_ENGINE_ARGUMENTS": json.dumps({**given, **arguments, **graphs}),
            },
            stdout=written,
            stderr=subprocess.STDOUT,
            timeout=380,
            check=False,
        )
    said = output.read_text()[-6000:]
    print(said)
    assert done.returncode == 0, f"tests of the real engine failed with {name}:\n{said}"
