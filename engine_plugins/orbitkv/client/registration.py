"""Registered engine memory, and the arrays from which copies are planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import GroupGeometry

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostAllocation:
    """Engine memory in this process: `size` bytes at `address`. `owner` is kept alive as long as it may be copied."""

    address: int
    size: int
    owner: Any


class GroupLayout:
    """One group's geometry as arrays over its layers.

    Attributes:
        base: (layers,) address of block 0 of each layer.
        stride: (layers,) bytes from a block to the next.
        size: (layers,) bytes of a layer's part of a block.
        offset: (layers,) where that part lies in the page image.
        page_bytes: unpadded size of a page.
        blocks: number of blocks.
    """

    def __init__(self, geometry: GroupGeometry, addresses: Sequence[int]) -> None:
        layers = geometry.layers
        self.group = geometry.group
        self.base: Int64 = np.array([addresses[layer.allocation] + layer.offset for layer in layers], np.int64)
        self.stride: Int64 = np.array([layer.block_stride for layer in layers], np.int64)
        self.size: Int64 = np.array([layer.block_bytes for layer in layers], np.int64)
        ends = np.cumsum(self.size)
        self.offset: Int64 = ends - self.size
        self.page_bytes = int(ends[-1])
        self.blocks = min(layer.block_count for layer in layers)

    def check_blocks(self, blocks: Int64, *, destination: bool) -> None:
        """Refuse block ids that are out of range or, as destinations, named twice.

        Raises:
            OrbitKVError: INVALID.
        """
        if blocks.size == 0:
            return
        low, high = int(blocks.min()), int(blocks.max())
        if low < 0 or high >= self.blocks:
            raise OrbitKVError(
                ErrorKind.INVALID,
                f"blocks: group {self.group} has blocks 0 to {self.blocks - 1}, asked for {low if low < 0 else high}",
            )
        if destination and np.unique(blocks).size != blocks.size:
            raise OrbitKVError(ErrorKind.INVALID, f"blocks: a block of group {self.group} is named twice")


class GpuRegistration:
    """Engine memory that the agent knows. Keeps the exporting objects alive until it is unregistered and drained.

    Attributes:
        id: the agent's number for it.
        page_bytes: unpadded page size of each group, in bytes.
        proof_required: nothing hits until `report_proof` said that the layout is right.
        retired: it accepts nothing new.
    """

    def __init__(
        self,
        number: int,
        client: object,
        groups: Sequence[GroupGeometry],
        allocations: Sequence[HostAllocation],
        *,
        proof_required: bool,
    ) -> None:
        self.id = number
        self.client = client
        self.proof_required = proof_required
        self.retired = False
        self._allocations = tuple(allocations)
        addresses = [allocation.address for allocation in allocations]
        self.layouts = {geometry.group: GroupLayout(geometry, addresses) for geometry in groups}
        self.page_bytes = [layout.page_bytes for layout in self.layouts.values()]

    def image(self, group: int, block: int) -> npt.NDArray[np.uint8]:
        """Return the page image of one block, gathered as a save would: (page_bytes,) uint8.

        Raises:
            OrbitKVError: INVALID, no such block.
        """
        from .copies import plan_pages

        layout = self.layouts[group]
        image = np.empty(layout.page_bytes, np.uint8)
        plan = plan_pages(layout, np.array([block], np.int64), np.array([image.ctypes.data], np.int64), to_engine=False)
        plan.run()
        return image
