"""Tests on a real GPU: `python -m pytest tests/gpu` on a machine with one. Without one they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbitkv.cuda import CudaUnavailableError, LibCuda
from tools.harness.agent import AgentProcess

POOL = "2GiB"


def why_not() -> str:
    """Why the tests cannot run here, "" when they can."""
    try:
        if not LibCuda().gpus():
            return "there is no GPU here"
    except CudaUnavailableError as error:
        return str(error)
    try:
        import torch  # noqa: F401
    except ImportError:
        return "torch is not installed"
    return ""


WHY_NOT = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if WHY_NOT:
                item.add_marker(pytest.mark.skip(reason=f"GPU tests: {WHY_NOT}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [each for each in terminalreporter.stats.get("skipped", ()) if "tests/gpu/" in each.nodeid]
    if skipped and WHY_NOT:
        terminalreporter.section("GPU")
        terminalreporter.line(f"{len(skipped)} tests of the CUDA data plane did NOT run: {WHY_NOT}.")
        terminalreporter.line("Run `python -m pytest tests/gpu` on a machine with an NVIDIA GPU and torch.")
    elif skipped:
        terminalreporter.section("GPU")
        for why in sorted({each.longrepr[2] for each in skipped}):
            terminalreporter.line(f"{sum(each.longrepr[2] == why for each in skipped)} tests did NOT run: {why}")


@pytest.fixture(scope="session")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """An agent in CUDA mode that all tests share which do no harm to it."""
    with AgentProcess(tmp_path_factory.mktemp("agent"), mode="cuda", pool=POOL) as agent:
        yield agent


@pytest.fixture
def agent(shared_agent: AgentProcess) -> Iterator[AgentProcess]:
    """The shared agent; after the test nothing may be left in flight."""
    yield shared_agent
    shared_agent.wait_at_rest(10)


@pytest.fixture
def own_agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent of the test's own."""
    with AgentProcess(tmp_path, mode="cuda", pool=POOL) as agent:
        yield agent
