"""A stand-in for an engine on a GPU: KV tensors as vLLM lays them out, registered and proven, with no model.

For the benches and tests that run on a machine with a GPU; torch has to be there.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Self

import numpy as np
import torch

from orbitkv import (
    BlockHashes,
    CacheManagerClient,
    Instance,
    QueryReady,
    Ranks,
    RestoreHandle,
    RestoreStatus,
    SaveHandle,
    SaveStatus,
)
from orbitkv.client.gpu import StreamPoint
from orbitkv.vllm.layout import read_layout
from orbitkv.vllm.proof import prove_on_empty_cache

ORDERS: Final = {
    "LBNHC": (0, 1, 3, 2, 4),
    "LBHNC": (0, 1, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
}
"""Axes (layer, block, head, token, content) in the order in which they lie in memory."""
MARGIN: Final = 1 << 20
"""Bytes before and after the KV memory that nobody may touch."""
SAVE_PAGES: Final = 128


@dataclass(frozen=True)
class Shape:
    """KV memory of one group. The default is Qwen3-8B's: pages of 2.25 MiB, 64 KiB of each layer.

    `kernel_blocks` is how many blocks of the attention kernel make one of the cache manager, layer outermost only;
    `apart`: each layer is an allocation of its own, as most backends without a common buffer have it.
    """

    layout: str = "BLNHC"
    layers: int = 36
    blocks: int = 64
    heads: int = 8
    tokens: int = 16
    content: int = 256
    dtype: torch.dtype = torch.bfloat16
    kernel_blocks: int = 1
    apart: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return int(self.layers * self.heads * self.tokens * self.content * self.dtype.itemsize)


@dataclass
class _Group:
    """As vLLM's KVCacheGroupSpec."""

    layer_names: list[str]
    kv_cache_spec: Any = field(default_factory=lambda: SimpleNamespace(block_size=16))


def _memory(shape: Shape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """New memory, and the views of its layers."""
    order = ORDERS[shape.layout]
    kernel = shape.kernel_blocks
    layers = 1 if shape.apart else shape.layers
    logical = (layers, shape.blocks * kernel, shape.heads, shape.tokens // kernel, shape.content)
    size = shape.page_bytes * shape.blocks // shape.layers * layers
    memories = [torch.empty(size + 2 * MARGIN, dtype=torch.uint8, device="cuda") for _ in range(shape.layers // layers)]
    views: list[torch.Tensor] = []
    for memory in memories:
        physical = memory[MARGIN : MARGIN + size].view(shape.dtype).view([logical[axis] for axis in order])
        views += physical.permute([order.index(axis) for axis in range(5)]).unbind(0)
    return memories, views


class GpuEngine:
    """Scheduler and only worker of one instance.

    Attributes:
        memories: all of its memory, margins included, uint8: one tensor, or one a layer.
        views: one view `[blocks, heads, tokens, content]` a layer, of the attention kernel's blocks.
        client: its client.
        instance: its name.
        registration: its registered and proven memory.
    """

    def __init__(
        self, socket: Path | str, shape: Shape | None = None, *, identity: str = "", prove: bool = True, **client: Any
    ) -> None:
        self.shape = shape = shape or Shape()
        self.memories, self.views = _memory(shape)
        self.scramble()
        names = {f"layer.{i}": view for i, view in enumerate(self.views)}
        self.layout = read_layout(names, [_Group(list(names))], shape.blocks)
        self.client = CacheManagerClient(str(socket), **{"timeout_ms": 60_000, **client})
        self.instance = Instance("gpu-engine", uuid.uuid4().hex)
        self.client.attach_instance(self.instance)
        self.registration = self.client.register_context_batch(
            instance=self.instance,
            ranks=Ranks(),
            model_identity=identity or uuid.uuid4().hex,
            model="random bytes",
            groups=self.layout.groups,
            allocations=self.layout.allocations,
            gpu=self.layout.gpu,
        )
        if prove:
            prove_on_empty_cache(self.layout, self.client, self.registration, self.instance, 0)
        self.client.report_proof(self.registration, proven=True)
        self._queries = 0

    @property
    def memory(self) -> torch.Tensor:
        """All of its memory, where it is one piece."""
        (memory,) = self.memories
        return memory

    def scramble(self) -> None:
        """Fill all memory, margins included, with random bytes."""
        for memory in self.memories:
            memory.random_(0, 256)
        torch.cuda.synchronize()

    def point(self) -> StreamPoint:
        """Where the current stream is now."""
        assert self.layout.gpu is not None
        return self.layout.gpu.point(torch.cuda.current_stream().cuda_stream)

    def start_saves(
        self, hashes: BlockHashes, blocks: np.ndarray[Any, Any], after: StreamPoint | None = None
    ) -> list[SaveHandle]:
        """Submit saves of these blocks, as many in each as the connector puts there."""
        handles = [
            self.client.prepare_save(
                self.registration, [hashes[i : i + SAVE_PAGES]], [blocks[i : i + SAVE_PAGES]], after=after
            )
            for i in range(0, len(hashes), SAVE_PAGES)
        ]
        self.client.submit_saves(handles)
        return handles

    def save(self, hashes: BlockHashes, blocks: np.ndarray[Any, Any], after: StreamPoint | None = None) -> None:
        """Save blocks; return when all are visible. What was dropped for want of memory is saved again.

        Raises:
            RuntimeError: a save failed.
        """
        for _ in range(1000):
            handles = self.start_saves(hashes, blocks, after)
            for handle in handles:
                if self.client.wait_save(handle, timeout=60) is not SaveStatus.COMMITTED:
                    raise RuntimeError(f"a save ended as {handle.status.value}: {handle.error or handle.dropped}")
            if not any(handle.dropped for handle in handles):
                return
        raise RuntimeError(f"pages are dropped again and again: {handles[-1].dropped}")

    def lease(self, hashes: BlockHashes) -> tuple[str, int]:
        """Ask for pages that are all there; return (request, lease).

        Raises:
            RuntimeError: they are not.
        """
        self._queries += 1
        request = f"request-{self._queries}"
        answer = self.client.query_prefetch(request, [hashes], instance=self.instance)
        if not isinstance(answer, QueryReady) or answer.pages != len(hashes):
            raise RuntimeError(f"{len(hashes)} pages were expected, the agent answered {answer}")
        self.client.query_consumed(request)
        return request, answer.leases[0]

    def start_restore(
        self, hashes: BlockHashes, blocks: np.ndarray[Any, Any], after: StreamPoint | None = None
    ) -> RestoreHandle:
        """Lease pages and start to restore them into these blocks."""
        _, lease = self.lease(hashes)
        return self.client.start_restore(self.registration, lease, [blocks], after=after)

    def restore(self, hashes: BlockHashes, blocks: np.ndarray[Any, Any], after: StreamPoint | None = None) -> None:
        """Restore pages into these blocks.

        Raises:
            RuntimeError: it failed.
        """
        handle = self.start_restore(hashes, blocks, after)
        if self.client.wait_restore(handle, timeout=60) is not RestoreStatus.DONE:
            raise RuntimeError(f"a restore ended as {handle.status.value}: {handle.error}")

    def close(self) -> None:
        """Leave the agent."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
