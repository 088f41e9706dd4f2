"""Runs the tests: those of .venv, those inside the engine's environment, those on a cluster, and the guards.

    python -m tools.run_tests [--only PART or PATH]

Every run is made even if one before it failed. The exit code is 0 only if all of them passed, and a run without a
single test has not passed. While the tests on a cluster run, which mostly wait, those on apiservers and the guards run
beside them, at lower priorities. The operator's run beside those of .venv, on the core that these leave idle; nothing
runs beside tests on engines, which measure time by the millisecond.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster import programs
from e2e.cluster.cluster import Cluster, state_folder
from e2e.cluster.processes import ClusterError
from tools import cache, environments, guards

ASIDE = {"operator": 19, "apiservers": 5, "guards": 19}
"""What runs beside other tests, and how far it gives way to them, which have deadlines."""


@dataclass(frozen=True)
class Result:
    """One run: what it was, whether it passed, and how long it took; its output, if that was not shown yet."""

    name: str
    passed: bool
    seconds: float
    output: str = ""


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


def run_selection(selection: environments.Selection) -> Result:
    """Runs the selected tests."""
    words = f"{selection.kind} environment{', those marked ' * bool(selection.marked)}{selection.marked}"
    print(f"test: {selection.path} ({words})", flush=True)
    started = time.monotonic()
    if selection.kind == "cluster":
        programs.ensure()  # not within pytest, which gives up on what takes as many minutes as building does
    with cluster_ended_after("dev" if selection.marked == "not nodes" else selection.kind):
        code, _ = environments.run_pytest(selection.kind, selection.arguments)
    if code == guards.NO_TESTS:
        print(f"test: there is no test in {selection.path}")
    return Result(f"tests in the {words}", code == 0, time.monotonic() - started)


def run_guards() -> Result:
    """Tries every guard."""
    started = time.monotonic()
    return Result("guards", guards.check(environments.select(None)), time.monotonic() - started)


def run_aside(part: str) -> Result:
    """Runs a part in a process of its own, at a lower priority, and keeps its output."""
    started = time.monotonic()
    command = ["nice", "-n", str(ASIDE[part]), sys.executable, "-m", "tools.run_tests", "--only", part]
    done = subprocess.run(
        command,
        cwd=environments.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return Result(f"{part}, beside others", done.returncode == 0, time.monotonic() - started, done.stdout)


def run_beside(selection: environments.Selection, parts: list[str]) -> list[Result]:
    """Runs the selected tests, and these parts meanwhile; then shows what they printed."""
    with ThreadPoolExecutor(len(parts)) as lanes:
        aside: list[Future[Result]] = [lanes.submit(run_aside, part) for part in parts]
        results = [run_selection(selection)]
        for each in aside:
            result = each.result()
            print(f"\ntest: {result.name}\n{result.output}", flush=True)
            results.append(result)
    return results


def run_on_kubernetes(parts: list[str]) -> list[Result]:
    """Runs the tests on the cluster, and these parts meanwhile."""
    programs.ensure()  # once for all of them
    (nodes,) = environments.select("nodes")
    return run_beside(nodes, parts)


def run_all(only: str | None) -> list[Result]:
    """Runs what `only` names. Raises environments.UnknownPartError and cache.SetUpError."""
    if only == "guards":
        return [run_guards()]
    if only == "e2e":
        return run_on_kubernetes(["apiservers"])
    if only == "api-versions":
        os.environ["ORBITKV_TEST_API_VERSIONS"] = "1"
        programs.ensure(programs.tested_apiservers())
    selections = environments.select(only)
    if only is not None:
        return [run_selection(each) for each in selections]
    dev, engine, _ = selections
    results = run_beside(dataclasses.replace(dev, without=environments.PARTS["operator"]), ["operator"])
    return [*results, run_selection(engine), *run_on_kubernetes(["apiservers", "guards"])]


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
