"""A pytest plugin that picks the tests of one guard and writes down what became of them.

    pytest -p tools.pytest_guards --guard-report FILE [--guard NAME] ...

A test that is marked `@pytest.mark.guard("name")` pins something that must never happen. With --guard only the tests of
that guard are run. FILE becomes a JSON object: with --collect-only, guard name to test ids; otherwise test id to
outcome, which is `passed`, `failed` (the test itself, not its set-up), `skipped` or `error`.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest


def guard_names(item: pytest.Item) -> list[str]:
    """The guards that a test is marked with. Raises pytest.UsageError for a mark without exactly one name."""
    names = []
    for mark in item.iter_markers("guard"):
        if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs:
            raise pytest.UsageError(f'{item.nodeid}: write the mark as @pytest.mark.guard("name")')
        names.append(mark.args[0])
    return names


class GuardReport:
    """Selects, listens and writes the report."""

    def __init__(self, guard: str | None, file: Path) -> None:
        self.guard = guard
        self.file = file
        self.tests: dict[str, list[str]] = defaultdict(list)
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Notes the guards of all tests and leaves only those of the one guard that was asked for."""
        chosen: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            names = guard_names(item)
            for name in names:
                self.tests[name].append(item.nodeid)
            (chosen if self.guard in names else others).append(item)
        if self.guard is not None:
            items[:] = chosen
            config.hook.pytest_deselected(items=others)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the outcome of the test; a set-up or tear-down that fails is an error."""
        if report.when == "call" or report.outcome == "skipped":
            self.outcomes[report.nodeid] = report.outcome
        elif report.outcome == "failed":
            self.outcomes[report.nodeid] = "failed" if self.outcomes.get(report.nodeid) == "failed" else "error"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the report."""
        self.file.write_text(json.dumps(self.tests if session.config.option.collectonly else self.outcomes))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the two options."""
    group = parser.getgroup("guards")
    group.addoption("--guard", metavar="NAME", help="run only the tests of this guard")
    group.addoption("--guard-report", metavar="FILE", type=Path, help="write what became of the tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the report if one is asked for."""
    file = config.getoption("--guard-report")
    if file is not None:
        config.pluginmanager.register(GuardReport(config.getoption("--guard"), file), "guard-report")
