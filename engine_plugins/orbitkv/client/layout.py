"""A KV group's geometry as arrays, from which copies are planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import GroupGeometry

Int64 = npt.NDArray[np.int64]

FEW: Final = 32
"""Block ids up to this number are looked at one by one."""


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
        few = blocks.size <= FEW  # then a call of numpy costs as much as a dozen of them
        ordered: Any = sorted(blocks.tolist()) if few else np.sort(blocks)
        low, high = int(ordered[0]), int(ordered[-1])
        if low < 0 or high >= self.blocks:
            raise OrbitKVError(
                ErrorKind.INVALID,
                f"blocks: group {self.group} has blocks 0 to {self.blocks - 1}, asked for {low if low < 0 else high}",
            )
        if destination and (len(set(ordered)) < len(ordered) if few else (ordered[1:] == ordered[:-1]).any()):
            raise OrbitKVError(ErrorKind.INVALID, f"blocks: a block of group {self.group} is named twice")
