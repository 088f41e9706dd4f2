"""A stand-in for an engine: plain memory, registered and proven, without a model."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np

from orbitkv import (
    BlockHashes,
    CacheManagerClient,
    GroupGeometry,
    HostAllocation,
    Instance,
    LayerRegion,
    Ranks,
    SaveStatus,
)
from tools.harness.agent import AgentProcess

SAVE_PAGES = 512
"""Pages in one save: as many as a large prefill step may bring."""


@contextmanager
def temporary_agent(pool: str, *, prefault: bool = True) -> Iterator[AgentProcess]:
    """An agent of its own for one bench."""
    with (
        tempfile.TemporaryDirectory(prefix="orbitkv-bench-") as folder,
        AgentProcess(Path(folder), pool=pool, prefault=prefault) as agent,
    ):
        yield agent


class MemoryEngine:
    """`blocks` blocks of `block_bytes` bytes in one layer, attached to the agent at `socket`."""

    def __init__(self, socket: str, *, blocks: int, block_bytes: int, identity: str = "bench") -> None:
        self.client = CacheManagerClient(socket, name="bench", timeout_ms=60_000)
        self.memory = np.ones((blocks, block_bytes), np.uint8)  # touched, so that no page fault is measured
        self.instance = Instance("bench", uuid.uuid4().hex)
        self.client.attach_instance(self.instance)
        layer = LayerRegion("layer.0", 0, 0, blocks, block_bytes, block_bytes, "uint8")
        self.registration = self.client.register_context_batch(
            instance=self.instance,
            ranks=Ranks(),
            model_identity=identity,
            model="bench",
            groups=[GroupGeometry(0, "full", 16, [layer])],
            allocations=[HostAllocation(self.memory.ctypes.data, self.memory.nbytes, self.memory)],
        )
        self.client.report_proof(self.registration, proven=True)

    def save(self, hashes: BlockHashes) -> None:
        """Save pages under `hashes`, whatever their blocks hold, and wait until all are visible.

        Pages are dropped while the agent still prepares memory for them; those are saved again.
        """
        blocks = np.arange(self.memory.shape[0])
        deadline = time.monotonic() + 120
        for start in range(0, len(hashes), SAVE_PAGES):
            part = hashes[start : start + SAVE_PAGES]
            while True:
                handle = self.client.start_save(self.registration, [part], [np.resize(blocks, len(part))])
                status = self.client.wait_save(handle, timeout=60)
                if status is SaveStatus.COMMITTED and not handle.dropped:
                    break
                if status is not SaveStatus.COMMITTED or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"saving {len(part)} pages ended as {status.value}: {handle.error or handle.dropped}"
                    )

    def close(self) -> None:
        """Leave the agent."""
        self.client.close()

    def __enter__(self) -> MemoryEngine:
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
