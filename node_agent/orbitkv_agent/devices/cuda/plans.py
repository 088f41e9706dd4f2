"""Copy plans: what one restore or save copies, as arrays, cut into chunks of which each is one call of the driver."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from orbitkv_agent.devices.cuda.geometry import FEW_PAGES, GroupPlaces, Int64

CHUNK_BYTES: Final = 54 << 20
"""Most bytes in one call of a restore: what another one may have to wait for, 1 ms of PCIe Gen5. The word and the event
behind each call cost a GPU as much as half a megabyte, and this process's threads a turn with the interpreter."""
LAYER_CHUNK_BYTES: Final = 28 << 20
"""The same where an engine waits for one layer after the other."""
SAVE_CHUNK_BYTES: Final = 72 << 20
"""Most bytes in one call of a save, for which nobody waits."""
CHUNK_PIECES: Final = 256
"""Most pieces in one call: more do not make it faster, and fewer do not hide what a call costs."""


class PagesOfGroup(NamedTuple):
    """Pages of one group to copy.

    Attributes:
        places: where the group's blocks lie.
        blocks: (n,) block ids.
        pages: (n,) addresses of the page images.
        first: (n,) whether the image is the first in its arena: no copy reaches from one arena into the next.
    """

    places: GroupPlaces
    blocks: Int64
    pages: Int64
    first: npt.NDArray[np.bool_]

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.blocks.size * self.places.page_bytes

    def slices(self, first: int, count: int) -> Iterator[PagesOfGroup]:
        """The pages in the order in which they lie in host memory, made when they are asked for: `first` ones, then
        `count` at a time; all at once if they are no more than that."""
        if self.blocks.size <= count:
            yield self
            return
        ordered = in_order(self)
        start, end = 0, first
        while start < self.blocks.size:
            yield PagesOfGroup(
                self.places, ordered.blocks[start:end], ordered.pages[start:end], ordered.first[start:end]
            )
            start, end = end, end + count


def in_order(group: PagesOfGroup) -> PagesOfGroup:
    """The same pages in the order in which they lie in host memory. Those of one save mostly do already."""
    if (group.pages[1:] > group.pages[:-1]).all():
        return group
    order = np.argsort(group.pages, kind="stable")
    return PagesOfGroup(group.places, group.blocks[order], group.pages[order], group.first[order])


class CopyPlan(NamedTuple):
    """Pieces to copy between pages and blocks, and the chunks they are submitted in.

    Attributes:
        host: (pieces,) uint64 addresses in the arenas.
        device: (pieces,) uint64 addresses in the engine's memory.
        sizes: (pieces,) uint64 bytes.
        chunks: (first piece, end, bytes) of each chunk.
        layers: how many layers are in place after each chunk; empty when they are not copied one by one.
    """

    host: npt.NDArray[np.uint64]
    device: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    chunks: list[tuple[int, int, int]]
    layers: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """All bytes."""
        return sum(size for _, _, size in self.chunks)


def plan_copy(groups: Iterable[PagesOfGroup], chunk_bytes: int = CHUNK_BYTES) -> CopyPlan:
    """Plan the copy of pages. Neighbours on both sides become one piece (unless they are few), what is over
    `chunk_bytes` several."""
    copied = [group for group in groups if group.blocks.size]
    parts = [_pieces(group) for group in copied]
    if not parts:
        empty = np.empty(0, np.uint64)
        return CopyPlan(empty, empty, empty, [])
    if len(parts) == 1:
        ((host, device, sizes),) = parts
    else:
        host, device, sizes = (np.concatenate([part[i] for part in parts]) for i in range(3))
    size = sum([group.bytes for group in copied])
    if size <= chunk_bytes and sizes.size <= CHUNK_PIECES:
        chunks = [(0, sizes.size, size)]
    else:
        if int(sizes.max()) > chunk_bytes:
            host, device, sizes = _cut(host, device, sizes, chunk_bytes)
        chunks = _chunks(sizes, chunk_bytes)
    return CopyPlan(host.view(np.uint64), device.view(np.uint64), sizes.view(np.uint64), chunks)


def plan_layers(groups: Iterable[PagesOfGroup], chunk_bytes: int = CHUNK_BYTES) -> CopyPlan:
    """Plan the copy of pages so that one layer after the other is in place. No two pages become one piece."""
    parts: list[tuple[Int64, Int64, Int64]] = []
    ends, in_place = [0], [0]
    for group in groups:
        base, stride, size, offset = group.places.layers
        count = group.blocks.size
        device = (base[:, None] + group.blocks[None, :] * stride[:, None]).ravel()
        parts.append(((group.pages[None, :] + offset[:, None]).ravel(), device, np.repeat(size, count)))
        ends += (ends[-1] + np.cumsum(size * count)).tolist()
        in_place += (in_place[-1] + group.places.layers_in_place).tolist()
    if not parts or not ends[-1]:
        return plan_copy(())
    host, device, sizes = (np.concatenate([part[i] for part in parts]) for i in range(3))
    host, device, sizes = _cut(host, device, sizes, chunk_bytes)
    chunks = _chunks(sizes, chunk_bytes)
    copied = np.cumsum([size for _, _, size in chunks])
    layers = tuple(in_place[place] for place in np.searchsorted(ends[1:], copied, side="right").tolist())
    return CopyPlan(host.view(np.uint64), device.view(np.uint64), sizes.view(np.uint64), chunks, layers)


def _pieces(group: PagesOfGroup) -> tuple[Int64, Int64, Int64]:
    places = group.places
    if places.whole and group.blocks.size <= FEW_PAGES:
        return group.pages, places.base + group.blocks * places.stride, places.few_sizes[: group.blocks.size]
    _, blocks, pages, first = in_order(group)
    device = (places.base[None, :] + blocks[:, None] * places.stride[None, :]).ravel()
    host = (pages[:, None] + places.offset[None, :]).ravel()
    sizes = np.tile(places.size, blocks.size)
    if sizes.size == 1:
        return host, device, sizes
    joins = (host[1:] == host[:-1] + sizes[:-1]) & (device[1:] == device[:-1] + sizes[:-1])
    if joins.any():
        new_arena = np.zeros((blocks.size, places.segments), np.bool_)
        new_arena[:, 0] = first
        joins &= ~new_arena.ravel()[1:]
        joins &= ~np.isin(device[1:], places.starts)
        starts = np.flatnonzero(np.concatenate(([True], ~joins)))
        sizes = np.add.reduceat(sizes, starts)
        host, device = host[starts], device[starts]
    return host, device, sizes


def _cut(host: Int64, device: Int64, sizes: Int64, most: int) -> tuple[Int64, Int64, Int64]:
    """Cut what is larger than a chunk."""
    parts = -(-sizes // most)
    index = np.repeat(np.arange(sizes.size), parts)
    inner = np.arange(index.size) - np.repeat(np.cumsum(parts) - parts, parts)
    start = inner * most
    return host[index] + start, device[index] + start, np.minimum(sizes[index] - start, most)


def _chunks(sizes: Int64, most: int) -> list[tuple[int, int, int]]:
    ends: list[int] = np.cumsum(sizes).tolist()
    chunks = []
    first, done = 0, 0
    while first < len(ends):
        end = bisect_right(ends, done + most, first)
        end = min(max(end, first + 1), first + CHUNK_PIECES)
        chunks.append((first, end, ends[end - 1] - done))
        first, done = end, ends[end - 1]
    return chunks
