"""Fixtures of the connector's tests that need no engine process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orbitkv.vllm.tests.fakes import FakeAgent, FakeClient

if TYPE_CHECKING:
    from orbitkv.vllm.tests.scheduling import Engine


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights."""
    from orbitkv.vllm.tests.scheduling import write_model_config

    return write_model_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def agent() -> FakeAgent:
    """An agent that holds nothing yet."""
    return FakeAgent()


@pytest.fixture
def start(model_folder: Path, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Starts engines on the fake agent."""
    from orbitkv.vllm import link
    from orbitkv.vllm.tests.scheduling import Engine

    monkeypatch.setattr(link, "connect", lambda config, name, timeout_ms: FakeClient(agent))
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(model_folder, agent, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.shutdown()
