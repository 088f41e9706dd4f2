from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbitkv.client import BlockHashes
from tools.harness.agent import AgentProcess
from tools.harness.memory_engine import MemoryEngine

BLOCKS = 32


class Engine(MemoryEngine):
    """Three layers of pages that fill no whole number of disk blocks."""

    def __init__(self, agent: AgentProcess, identity: str = "", **client: Any) -> None:
        options = {"timeout_ms": 5000, **client}
        super().__init__(agent.socket_path, layers=3, blocks=BLOCKS, block_bytes=5000, identity=identity, **options)


def hashes(*names: int) -> BlockHashes:
    return BlockHashes([name.to_bytes(32, "little") for name in names])


@pytest.fixture(scope="session")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    folder = tmp_path_factory.mktemp("agent")
    with AgentProcess(folder, pool="64MiB", cache_namespaces="team-b: {}") as process:
        yield process


@pytest.fixture
def agent(shared_agent: AgentProcess) -> Iterator[AgentProcess]:
    """An agent that the test leaves as it found it."""
    yield shared_agent
    shared_agent.resume()
    shared_agent.wait_at_rest()


@pytest.fixture
def own_agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent that the test may end."""
    with AgentProcess(tmp_path, pool="64MiB") as process:
        yield process


@pytest.fixture
def engine(agent: AgentProcess) -> Iterator[Engine]:
    with Engine(agent) as engine:
        yield engine
