"""The real vLLM on a GPU: the tests of the real engine, as they run on the CPU, for its model runners and layouts.

They restore repeated prompts bit for bit, kill and restart engines, preempt requests, cancel them at every stage, and
run 64 at once in a cache of a third of their size; after each nothing may be left in flight in the agent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
NOT_HERE = "not loading and not evicted"
"""What needs an engine in host memory, and the sizes of its pages."""


@pytest.mark.parametrize("name", VARIANTS)
def test_real_engine(name: str, tmp_path: Path) -> None:
    arguments, environment, files = VARIANTS[name]
    given = json.loads(os.environ.get("ORBITKV_TEST_ENGINE_ARGUMENTS", "{}"))
    graphs = {"compilation_config": GRAPHS} if arguments.get("enforce_eager") is False else {}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "engine")),
            *("-k", NOT_HERE, *(str(TESTS / f"test_{file}.py") for file in files.split())),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            **environment,
            "ORBITKV_TEST_DEVICE": "cuda",
            "ORBITKV_TEST_ENGINE_ARGUMENTS": json.dumps({**given, **arguments, **graphs}),
        },
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, f"tests of the real engine failed with {name}:\n{done.stdout[-6000:]}"
