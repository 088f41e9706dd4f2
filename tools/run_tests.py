"""Runs the tests: those of .venv, those inside the engine's environment, those on a cluster, and the guards.

    python -m tools.run_tests [--only PART or PATH]

Every run is made even if one before it failed. The exit code is 0 only if all of them passed, and a run without a
single test has not passed.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster import programs
from e2e.cluster.cluster import Cluster, state_folder
from e2e.cluster.processes import ClusterError
from tools import cache, environments, guards


@dataclass(frozen=True)
class Result:
    """One run: what it was, whether it passed, and how long it took."""

    name: str
    passed: bool
    seconds: float


@contextmanager
def cluster_ended_after(kind: environments.Kind) -> Iterator[None]:
    """Ends the cluster that the tests started; one that ran before them is left."""
    if kind != "cluster" or Cluster.found() is not None:
        yield
        return
    try:
        yield
    finally:
        if state_folder().exists():
            Cluster.down()


def run_pytest(selection: environments.Selection) -> bool:
    """Runs the selected tests. Returns whether they passed."""
    code, _ = environments.run_pytest(selection.kind, [selection.path])
    if code == guards.NO_TESTS:
        print(f"test: there is no test in {selection.path}")
    return code == 0


def run_all(only: str | None) -> list[Result]:
    """Runs what `only` names. Raises environments.UnknownPartError and cache.SetUpError."""
    results: list[Result] = []
    if only == "api-versions":
        os.environ["ORBITKV_TEST_API_VERSIONS"] = "1"
        programs.ensure(programs.tested_apiservers())
    if only != "guards":
        for selection in environments.select(only):
            print(f"test: {selection.path} ({selection.kind} environment)", flush=True)
            started = time.monotonic()
            if selection.kind == "cluster":
                programs.ensure()  # not within pytest, which gives up on what takes as many minutes as building does
            with cluster_ended_after(selection.kind):
                passed = run_pytest(selection)
            results.append(Result(f"tests in the {selection.kind} environment", passed, time.monotonic() - started))
    if only in (None, "guards"):
        started = time.monotonic()
        passed = guards.check(environments.select(None))
        results.append(Result("guards", passed, time.monotonic() - started))
    return results


def main() -> None:
    """Reads the command line and exits with 0 or 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="make test", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PART or PATH", help=", ".join([*environments.PARTS, "guards"]))
    only: str | None = parser.parse_args().only
    try:
        results = run_all(only)
    except (environments.UnknownPartError, cache.SetUpError, ClusterError) as error:
        sys.exit(f"test: {error}")
    print()
    for result in results:
        print(f"test: {'passed' if result.passed else 'FAILED'}  {result.seconds:6.0f} s  {result.name}")
    sys.exit(0 if all(result.passed for result in results) else 1)


if __name__ == "__main__":
    main()
