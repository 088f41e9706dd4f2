"""A pytest plugin that runs the tests of each guard without that guard and writes down what became of them.

    pytest -p tools.pytest_guards --guard-report FILE ...

A test that is marked `@pytest.mark.guard("name")` pins something that must never happen. Only such tests are run: when
all are collected, which is most of the time that they take, each guard gets a process forked from this one, in which
ORBITKV_TEST_GUARD_OFF is its name. FILE becomes a JSON object, guard name to its `Attempt`.
"""

import dataclasses
import gc
import importlib
import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Attempt:
    """The tests of one guard without it.

    `exit_code` is that of their process, the negative signal number if one ended it. `outcomes` are test id to
    `passed`, `failed` (the test itself, not its set-up), `skipped` or `error`, without those that did not run.
    """

    tests: list[str]
    exit_code: int = 0
    seconds: float = 0.0
    outcomes: dict[str, str] = field(default_factory=dict)


def guard_names(item: pytest.Item) -> list[str]:
    """The guards that a test is marked with. Raises pytest.UsageError for a mark without exactly one name."""
    names = []
    for mark in item.iter_markers("guard"):
        if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs:
            raise pytest.UsageError(f'{item.nodeid}: write the mark as @pytest.mark.guard("name")')
        names.append(mark.args[0])
    return names


class GuardRun:
    """Selects, forks, listens and writes the report. In a forked process `file` is where its outcomes go."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.items: dict[str, list[pytest.Item]] = defaultdict(list)
        self.attempts: dict[str, Attempt] = {}
        self.mine: Attempt | None = None  # in a forked process, the attempt that it makes

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Notes the guards of all tests and leaves only those tests that have one."""
        others = []
        for item in items:
            names = guard_names(item)
            for name in names:
                self.items[name].append(item)
            if not names:
                others.append(item)
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Makes the attempts one after another. In a forked process it returns None: pytest runs the tests there."""
        gc.freeze()  # what is there by now is not looked through, and thereby copied, in each process
        for name, items in sorted(self.items.items()):
            attempt = Attempt([item.nodeid for item in items])
            outcomes = self.file.with_name(f"{self.file.name}.{name}")
            started = time.monotonic()
            child = os.fork()
            if child == 0:
                self.file, self.mine, session.items = outcomes, attempt, items
                self.leave_out(name)
                return None
            attempt.exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            attempt.seconds = time.monotonic() - started
            if outcomes.exists():
                attempt.outcomes = json.loads(outcomes.read_text())
                outcomes.unlink()
            self.attempts[name] = attempt
        return True

    @staticmethod
    def leave_out(name: str) -> None:
        """Switches a guard off in this process and in those that it starts."""
        os.environ["ORBITKV_TEST_GUARD_OFF"] = name
        importlib.reload(importlib.import_module("orbitkv.guards"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the outcome of a test; a set-up or tear-down that fails is an error."""
        if self.mine is None:
            return
        outcomes = self.mine.outcomes
        if report.when == "call" or report.outcome == "skipped":
            outcomes[report.nodeid] = report.outcome
        elif report.outcome == "failed":
            outcomes[report.nodeid] = "failed" if outcomes.get(report.nodeid) == "failed" else "error"

    def pytest_sessionfinish(self) -> None:
        """Writes the outcomes, or the report."""
        report = {name: dataclasses.asdict(attempt) for name, attempt in self.attempts.items()}
        self.file.write_text(json.dumps(report if self.mine is None else self.mine.outcomes))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.getgroup("guards").addoption(
        "--guard-report",
        metavar="FILE",
        type=Path,
        help="run the tests of each guard without it, and write what became of them to this file",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begins if a report is asked for."""
    file = config.getoption("--guard-report")
    if file is not None:
        config.pluginmanager.register(GuardRun(file), "guard-run")
