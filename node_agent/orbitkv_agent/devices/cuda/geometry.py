"""A registration's memory as arrays of addresses in this process, from which copies are planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.messages import GroupGeometry

Int64 = npt.NDArray[np.int64]

LAYER_PIECE_BYTES: Final = 256 << 10
"""Layers that lie one behind the other are joined up to this size where copies are made layer by layer: four pieces of
64 KiB take a GPU no longer than one of 256, but the thread that hands them over four times as long."""
FEW_PAGES: Final = 16
"""Whole pages up to this number are a piece each: looking for neighbours takes longer than copying them apart."""


@dataclass(frozen=True)
class GroupPlaces:
    """Where the segments of one group's pages lie: arrays over segments, a block's contiguous pieces.

    Attributes:
        base: (segments,) address of the segment in block 0.
        stride: (segments,) bytes from a block to the next.
        size: (segments,) bytes.
        offset: (segments,) where the segment lies in the page image.
        page_bytes: size of a page.
        starts: sorted addresses at which allocations begin: a copy never reaches across one.
        layers: the same of segments that end with a layer, of at most `LAYER_PIECE_BYTES` if they are more than one
            layer, for copies that are made layer by layer.
        layers_in_place: (segments of `layers`,) how many layers are in place with each.
        few_sizes: (FEW_PAGES,) sizes of pages that are copied whole.
    """

    base: Int64
    stride: Int64
    size: Int64
    offset: Int64
    page_bytes: int
    starts: Int64
    layers: tuple[Int64, Int64, Int64, Int64]
    layers_in_place: Int64
    few_sizes: Int64 = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "few_sizes", np.full(FEW_PAGES, self.page_bytes, np.int64))

    @property
    def segments(self) -> int:
        """Contiguous pieces of a page."""
        return int(self.size.size)

    @property
    def whole(self) -> bool:
        """Whether a page is one piece."""
        return self.segments == 1


def group_places(geometry: GroupGeometry, addresses: Mapping[int, int]) -> GroupPlaces:
    """Join a group's layers to segments: layers that follow one another in a block and in the page image are one.

    Args:
        geometry: the group, checked.
        addresses: where each allocation is mapped in this process, by its index.
    """
    layers = geometry.layers
    allocation = np.array([layer.allocation for layer in layers], np.int64)
    base = np.array([addresses[layer.allocation] + layer.offset for layer in layers], np.int64)
    stride = np.array([layer.block_stride for layer in layers], np.int64)
    size = np.array([layer.block_bytes for layer in layers], np.int64)
    offset = np.cumsum(size) - size
    follows = (base[1:] == base[:-1] + size[:-1]) & (stride[1:] == stride[:-1]) & (allocation[1:] == allocation[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    joined = _first_layers(size.tolist(), follows.tolist())
    return GroupPlaces(
        base=base[first],
        stride=stride[first],
        size=np.add.reduceat(size, first),
        offset=offset[first],
        page_bytes=int(size.sum()),
        layers=(base[joined], stride[joined], np.add.reduceat(size, joined), offset[joined]),
        layers_in_place=np.append(joined[1:], len(layers)),
        starts=np.unique(np.array([addresses[index] for index in sorted(set(allocation.tolist()))], np.int64)),
    )


def _first_layers(sizes: list[int], follows: list[bool]) -> Int64:
    """The first layer of each segment of a copy that is made layer by layer."""
    first, joined = [0], sizes[0]
    for layer, (size, behind) in enumerate(zip(sizes[1:], follows, strict=True), start=1):
        joined += size
        if not behind or joined > LAYER_PIECE_BYTES:
            first.append(layer)
            joined = size
    return np.array(first, np.int64)
