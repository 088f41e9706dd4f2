from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orbitkv.client import (
    BlockHashes,
    CacheManagerClient,
    GpuRegistration,
    GroupGeometry,
    HostAllocation,
    Instance,
    LayerRegion,
    QueryLoading,
    QueryReady,
    Ranks,
    SaveStatus,
)
from tools.harness.agent import AgentProcess

LAYERS, BLOCKS, BLOCK_BYTES = 3, 32, 5000


class Engine:
    """Plain memory that plays scheduler and worker of one instance."""

    def __init__(self, agent: AgentProcess, identity: str = "", **client: object) -> None:
        self.identity = identity or uuid.uuid4().hex  # by default nobody else's pages
        self.client = CacheManagerClient(str(agent.socket_path), **client)  # type: ignore[arg-type]
        self.kv = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, BLOCK_BYTES), np.uint8)
        self.instance = Instance("engine", uuid.uuid4().hex)
        self.client.attach_instance(self.instance)
        self.registration = self.register()
        self.client.report_proof(self.registration, proven=True)

    def register(self, ranks: Ranks | None = None) -> GpuRegistration:
        span = BLOCKS * BLOCK_BYTES
        layers = [LayerRegion(f"l{i}", 0, i * span, BLOCKS, BLOCK_BYTES, BLOCK_BYTES, "uint8") for i in range(LAYERS)]
        return self.client.register_context_batch(
            instance=self.instance,
            ranks=ranks or Ranks(),
            model_identity=self.identity,
            model=self.identity,
            groups=[GroupGeometry(0, "full", 16, layers)],
            allocations=[HostAllocation(self.kv.ctypes.data, self.kv.nbytes, self.kv)],
        )

    def save(self, hashes: BlockHashes, first: int = 0) -> None:
        handle = self.client.start_save(self.registration, [hashes], [np.arange(first, first + len(hashes))])
        assert self.client.wait_save(handle, timeout=10) is SaveStatus.COMMITTED, handle.error

    def query(self, request: str, hashes: BlockHashes, **options: object) -> QueryReady:
        answer = self.client.query_prefetch(request, [hashes], instance=self.instance, **options)  # type: ignore[arg-type]
        assert not isinstance(answer, QueryLoading)
        return answer


def hashes(*names: int) -> BlockHashes:
    return BlockHashes([name.to_bytes(32, "little") for name in names])


@pytest.fixture(scope="session")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path_factory.mktemp("agent"), pool="64MiB", cache_namespaces="team-b: {}") as process:
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
    engine = Engine(agent)
    yield engine
    engine.client.close()
