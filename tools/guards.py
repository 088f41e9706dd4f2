"""Shows that the tests of what must never happen can fail: runs them without their guard and wants to see them fail.

    python -m tools.guards [PART or PATH]

Such a test is marked `@pytest.mark.guard("name")`, and the code that it watches leaves its check out while the
environment variable ORBITKV_TEST_GUARD_OFF is that name. The tests of a guard have a process of their own. The exit
code is 0 only if every one of them failed by itself: not in its set-up, not by taking the process down with it.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tools import cache, environments
from tools.environments import Kind, Selection
from tools.pytest_guards import Attempt

TESTS_FAILED = 1
"""pytest's exit code when tests ran and some failed. Any other means that something else went wrong."""

NO_TESTS = 5
"""pytest's exit code when it found no test."""

TEST_SECONDS: dict[Kind, int] = {"dev": 60, "engine": 300, "cluster": 300}
"""How long a test may take with its guard off. One that hangs instead of failing is stopped, and counts as failed."""


def attempts(selection: Selection, scratch: Path) -> dict[str, Attempt]:
    """Runs the selected tests of each guard without it. Exits if the tests cannot be collected."""
    report = scratch / "report.json"
    report.unlink(missing_ok=True)
    arguments = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS[selection.kind]}"]
    arguments += ["-p", "tools.pytest_guards", "--guard-report", str(report), selection.path]
    # what hypothesis finds here is no find for the real runs
    extra = {"HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis")}
    code, output = environments.run_pytest(selection.kind, arguments, quiet=True, extra=extra)
    if code not in (0, NO_TESTS):
        sys.exit(f"guards: pytest could not collect the tests in {selection.path}:\n{output}")
    found = {name: Attempt(**each) for name, each in json.loads(report.read_text()).items()}
    if not all(each.outcomes for each in found.values()):
        print(output)  # a process ended before its tests did
    return found


def problem(attempt: Attempt) -> str:
    """What is wrong with an attempt, or nothing if each test failed."""
    outcomes = {test: attempt.outcomes.get(test, "did not run") for test in attempt.tests}
    wrong = [f"{test}: {outcome}" for test, outcome in outcomes.items() if outcome != "failed"]
    if attempt.exit_code != TESTS_FAILED:
        wrong.insert(0, f"pytest ended with exit code {attempt.exit_code} instead of {TESTS_FAILED}")
    return "\n".join(wrong)


def check(selections: list[Selection]) -> bool:
    """Tries every guard of the selected tests and prints a table. Returns whether all their tests fail without it."""
    rows: list[tuple[str, str, str, str]] = [("guard", "tests", "fails without it", "seconds")]
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="orbitkv-guards-") as folder:
        scratch = Path(folder)
        for selection in selections:
            print(f"guards: those of {selection.path} ({selection.kind} environment)", flush=True)
            for guard, attempt in attempts(selection, scratch).items():
                wrong = problem(attempt)
                rows.append((guard, str(len(attempt.tests)), "NO" if wrong else "yes", f"{attempt.seconds:.1f}"))
                if wrong:
                    problems.append(f"{guard}:\n{wrong}")
    if len(rows) == 1:
        print("guards: no test is marked with a guard here")
        return False
    print()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for each in problems:
        print(f"\nguards: tests that do not fail although what they watch is switched off, {each}")
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
