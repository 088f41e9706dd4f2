"""A stand-in for an engine: plain memory, registered and proven, with no model. For benches and tests."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from orbitkv import (
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

SAVE_PAGES = 128
"""Pages in one save: the most that the connector puts into one."""


@contextmanager
def temporary_agent(**settings: Any) -> Iterator[AgentProcess]:
    """An agent of its own, in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="orbitkv-") as folder, AgentProcess(Path(folder), **settings) as agent:
        yield agent


class MemoryEngine:
    """Scheduler and only worker of one instance (or only the worker, of the instance `worker_of`).

    Attributes:
        kv: the engine's memory, (layers, blocks, block_bytes) uint8, filled with random bytes.
        client: its client.
        instance: its name.
        identity: its model identity; engines that share pages are given the same.
        registration: its registered and proven memory; there is none yet if it is to be made not `registered`.
    """

    def __init__(
        self,
        socket: Path | str,
        *,
        layers: int = 1,
        blocks: int = 64,
        block_bytes: int = 4096,
        identity: str = "",
        worker_of: Instance | None = None,
        registered: bool = True,
        **client: Any,
    ) -> None:
        self.identity = identity or uuid.uuid4().hex
        self.kv = np.random.default_rng(1).integers(0, 256, (layers, blocks, block_bytes), np.uint8)
        self.client = CacheManagerClient(str(socket), **{"timeout_ms": 60_000, **client})
        self.instance = worker_of or Instance("memory-engine", uuid.uuid4().hex)
        if worker_of is None:
            self.client.attach_instance(self.instance)
        if registered:
            self.registration = self.register()
            self.client.report_proof(self.registration, proven=True)

    def register(self, ranks: Ranks | None = None) -> GpuRegistration:
        """Register the memory as that of the worker at `ranks`."""
        layers, blocks, size = self.kv.shape
        regions = [LayerRegion(f"layer.{i}", 0, i * blocks * size, blocks, size, size, "uint8") for i in range(layers)]
        return self.client.register_context_batch(
            instance=self.instance,
            ranks=ranks or Ranks(),
            model_identity=self.identity,
            model=self.identity,
            groups=[GroupGeometry(0, "full", 16, regions)],
            allocations=[HostAllocation(self.kv.ctypes.data, self.kv.nbytes, self.kv)],
        )

    def save(self, hashes: BlockHashes, first: int = 0, *, deadline: float = 120) -> None:
        """Save block `first` and those after it (round and round) under `hashes`; return when all are visible.

        Pages are dropped while the agent still prepares memory for them; those are saved again.

        Raises:
            RuntimeError: it cannot be done within `deadline` seconds.
        """
        end = time.monotonic() + deadline
        blocks = (np.arange(len(hashes)) + first) % self.kv.shape[1]
        step = min(SAVE_PAGES, self.kv.shape[1])  # a save names each block once
        for start in range(0, len(hashes), step):
            part = slice(start, start + step)
            while True:
                handle = self.client.start_save(self.registration, [hashes[part]], [blocks[part]])
                status = self.client.wait_save(handle, timeout=60)
                if status is SaveStatus.COMMITTED and not handle.dropped:
                    break
                if status is not SaveStatus.COMMITTED or time.monotonic() > end:
                    raise RuntimeError(f"a save ended as {status.value}: {handle.error or handle.dropped}")

    def query(self, request: str, hashes: BlockHashes, **options: Any) -> QueryReady:
        """Ask for pages that are expected to need no waiting.

        Raises:
            RuntimeError: the answer is not there yet.
        """
        answer = self.client.query_prefetch(request, [hashes], instance=self.instance, **options)
        if isinstance(answer, QueryLoading):
            raise RuntimeError(f"request {request} is still loading")
        return answer

    def close(self) -> None:
        """Leave the agent."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def numbered_hashes(count: int, *, first: int = 0) -> BlockHashes:
    """Return `count` distinct 32-byte hashes that look as random as an engine's."""
    words = np.empty((count, 4), np.uint64)
    for column in range(4):
        x = np.arange(first, first + count, dtype=np.uint64) * np.uint64(4) + np.uint64(column)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words[:, column] = x ^ (x >> np.uint64(31))
    blob = words.tobytes()
    return BlockHashes([blob[i : i + 32] for i in range(0, len(blob), 32)])
