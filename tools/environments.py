"""The two environments that tests run in, and which part of the tree belongs to which.

`dev` is .venv. `engine` is the environment of the real vLLM: only the connector's tests need it, and there OrbitKV is
found on PYTHONPATH, as in an engine that it is injected into. `cluster` is .venv too, for the tests on Kubernetes.
Paths are relative to the root of the tree, where every command runs.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools import engine_env

Kind = Literal["dev", "engine", "cluster"]

ROOT = Path(__file__).resolve().parent.parent
ENGINE_TESTS = "engine_plugins/orbitkv/vllm"
CLUSTER_TESTS = "e2e"
CLUSTER_RUNS = {"nodes": "nodes", "apiservers": "not nodes"}
"""Tests on Kubernetes as two parts that may run side by side: those marked `nodes` (by e2e/conftest.py) share one
cluster, the others need only its programs."""

API_VERSIONS = ("e2e/test_crds.py", "e2e/chart/test_apiserver.py")
"""Tests on apiservers of several versions."""

PARTS: dict[str, str] = {
    "protocol": "engine_plugins/orbitkv/protocol",
    "client": "engine_plugins/orbitkv/client",
    "node_agent": "node_agent",
    "integration": "tests",
    "tools": "tools",
    "bench": "bench",
    "vllm": ENGINE_TESTS,
    "crds": "crds",
    "operator": "operator",
    "images": "images",
    "e2e": CLUSTER_TESTS,
    **dict.fromkeys(CLUSTER_RUNS, CLUSTER_TESTS),
    "chart": "e2e/chart",
    "api-versions": API_VERSIONS[0],
}
"""Name of a part, as in `make test ONLY=`, to its folder."""


class UnknownPartError(Exception):
    """Neither a part nor a path in the tree."""


@dataclass(frozen=True)
class Selection:
    """Tests that one pytest process runs: the environment, a path or test id, and which of its tests.

    `marked` is as in `-m`; `without` is a folder whose tests are left out.
    """

    kind: Kind
    path: str
    marked: str = ""
    without: str = ""

    @property
    def arguments(self) -> list[str]:
        """What pytest is told."""
        chosen = [f"-m={self.marked}"] if self.marked else []
        left_out = [f"--ignore={self.without}"] if self.without else []
        return [*chosen, *left_out, self.path]


def select(only: str | None) -> list[Selection]:
    """What to run for a part, a path or a test id (`path::test`); everything for None.

    Raises UnknownPartError with the names that exist.
    """
    if only == "api-versions":
        return [Selection("cluster", path) for path in API_VERSIONS]
    if only in CLUSTER_RUNS:
        return [Selection("cluster", CLUSTER_TESTS, CLUSTER_RUNS[only])]
    path = PARTS.get(only, only) if only else "."
    place = (ROOT / path.split("::")[0]).resolve()
    if not place.exists() or not place.is_relative_to(ROOT):
        raise UnknownPartError(f"no part and no path is called {only!r}. Parts: {', '.join([*PARTS, 'guards'])}")
    special: list[tuple[Kind, str]] = [("engine", ENGINE_TESTS), ("cluster", CLUSTER_TESTS)]
    for kind, folder in special:
        if place.is_relative_to(ROOT / folder):
            return [Selection(kind, path)]
    inside = [Selection(kind, folder) for kind, folder in special if (ROOT / folder).is_relative_to(place)]
    return [Selection("dev", path), *inside]


def pytest_command(kind: Kind) -> list[str]:
    """The start of a command that runs pytest in an environment. Raises cache.SetUpError."""
    if kind == "dev":
        return [sys.executable, "-m", "pytest", f"--ignore={ENGINE_TESTS}", f"--ignore={CLUSTER_TESTS}"]
    if kind == "cluster":
        return [sys.executable, "-m", "pytest", "--reruns=1", "-rR"]
    # What vLLM leaves behind when it is taken down is not ours to judge; and an engine takes up to a minute to start.
    options = ["-W", "default::pytest.PytestUnraisableExceptionWarning", "--timeout=300"]
    return [str(engine_env.ensure()), "-m", "pytest", *options]


def variables(kind: Kind) -> dict[str, str]:
    """The environment variables for a command in an environment."""
    if kind != "engine":
        return dict(os.environ)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "engine_plugins"), str(ROOT)]),
        "ORBITKV_AGENT_PYTHON": sys.executable,  # the agent of these tests is no part of the engine's environment
    }


def run_pytest(
    kind: Kind, arguments: list[str], *, quiet: bool = False, extra: dict[str, str] | None = None
) -> tuple[int, str]:
    """Runs pytest; returns its exit code and, if quiet, its output, which otherwise goes to stdout as it comes.

    `extra` are environment variables for this run alone. Raises cache.SetUpError.
    """
    done = subprocess.run(
        [*pytest_command(kind), *arguments],
        cwd=ROOT,
        env={**variables(kind), **(extra or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stdout or ""
