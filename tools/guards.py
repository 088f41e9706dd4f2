"""Shows that the tests of what must never happen can fail: runs them without their guard and wants to see them fail.

    python -m tools.guards [PART or PATH]

Such a test is marked `@pytest.mark.guard("name")`, and the code that it watches leaves its check out while the
environment variable ORBITKV_TEST_GUARD_OFF is that name. One pytest process runs the tests of one guard. The exit code
is 0 only if every one of them failed by itself: not in its set-up, not by taking pytest down with it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tools import cache, environments
from tools.environments import Kind, Selection

TESTS_FAILED = 1
"""pytest's exit code when tests ran and some failed. Any other means that something else went wrong."""

NO_TESTS = 5
"""pytest's exit code when it found no test."""

TEST_SECONDS: dict[Kind, int] = {"dev": 60, "engine": 300, "cluster": 300}
"""How long a test may take with its guard off. One that hangs instead of failing is stopped, and counts as failed."""


def collect(selection: Selection, report: Path) -> dict[str, list[str]]:
    """The guards of the selected tests, with the ids of their tests. Exits if the tests cannot be collected."""
    arguments = ["-p", "tools.pytest_guards", "--guard-report", str(report), "--collect-only", "-q", selection.path]
    code, output = environments.run_pytest(selection.kind, arguments, quiet=True)
    if code not in (0, NO_TESTS):
        sys.exit(f"guards: pytest could not collect the tests in {selection.path}:\n{output}")
    found: dict[str, list[str]] = json.loads(report.read_text())
    return found


def run_without(guard: str, tests: list[str], kind: Kind, scratch: Path) -> str:
    """Runs the tests of a guard with the guard off. Returns what is wrong, or nothing if each of them failed."""
    report = scratch / "outcomes.json"
    report.unlink(missing_ok=True)
    arguments = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS[kind]}"]
    arguments += ["-p", "tools.pytest_guards", "--guard-report", str(report), "--guard", guard]
    arguments += sorted({test.split("::")[0] for test in tests})
    extra = {
        "ORBITKV_TEST_GUARD_OFF": guard,
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),  # its finds here are no finds for the real runs
    }
    code, output = environments.run_pytest(kind, arguments, quiet=True, extra=extra)
    outcomes: dict[str, str] = json.loads(report.read_text()) if report.exists() else {}
    wrong = [f"{test}: {outcomes.get(test, 'did not run')}" for test in tests if outcomes.get(test) != "failed"]
    if code != TESTS_FAILED:
        wrong.insert(0, f"pytest ended with exit code {code} instead of {TESTS_FAILED}")
        if not outcomes:
            wrong.append(output[-3000:])
    return "\n".join(wrong)


def check(selections: list[Selection]) -> bool:
    """Tries every guard of the selected tests and prints a table. Returns whether all their tests fail without it."""
    rows: list[tuple[str, str, str, str]] = [("guard", "tests", "fails without it", "seconds")]
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="orbitkv-guards-") as folder:
        scratch = Path(folder)
        for selection in selections:
            for guard, tests in sorted(collect(selection, scratch / "guards.json").items()):
                print(f"guards: {len(tests)} test(s) without {guard}", flush=True)
                started = time.monotonic()
                wrong = run_without(guard, tests, selection.kind, scratch)
                seconds = f"{time.monotonic() - started:.1f}"
                rows.append((guard, str(len(tests)), "NO" if wrong else "yes", seconds))
                if wrong:
                    problems.append(f"{guard}:\n{wrong}")
    if len(rows) == 1:
        print("guards: no test is marked with a guard here")
        return False
    print()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for problem in problems:
        print(f"\nguards: tests that do not fail although what they watch is switched off, {problem}")
    return not problems


def main() -> None:
    """Reads the command line and exits with 0 or 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="tools.guards", description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", metavar="PART or PATH")
    try:
        good = check(environments.select(parser.parse_args().only))
    except (environments.UnknownPartError, cache.SetUpError) as error:
        sys.exit(f"guards: {error}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
