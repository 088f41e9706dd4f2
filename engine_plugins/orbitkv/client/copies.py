"""Copies between engine memory and pages, as arrays: planned once, merged, checked, then run in chunks.

The plan is the same whoever runs it: here each piece is one `memmove`, which releases the interpreter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from .layout import GroupLayout, Int64

CHUNK_BYTES = 36 << 20
"""A copy looks for more urgent work after this many bytes."""


class CopyPlan:
    """Pieces to copy: addresses and sizes in bytes, (pieces,) int64 each. Neighbours on both sides are one piece."""

    def __init__(self, sources: Int64, destinations: Int64, sizes: Int64) -> None:
        if sources.size > 1:
            joins = (sources[1:] == sources[:-1] + sizes[:-1]) & (destinations[1:] == destinations[:-1] + sizes[:-1])
            if joins.any():
                starts = np.flatnonzero(np.concatenate(([True], ~joins)))
                sizes = np.add.reduceat(sizes, starts)
                sources, destinations = sources[starts], destinations[starts]
        self.sources, self.destinations, self.sizes = sources, destinations, sizes
        self.bytes = int(sizes.sum())

    def __len__(self) -> int:
        return int(self.sizes.size)

    def chunks(self) -> Iterator[int]:
        """Copy piece by piece; yield the bytes done so far after every `CHUNK_BYTES` and at the end."""
        memmove = ctypes.memmove
        done = reported = 0
        for source, destination, size in zip(
            self.sources.tolist(), self.destinations.tolist(), self.sizes.tolist(), strict=True
        ):
            start = 0
            while size - start > CHUNK_BYTES:
                memmove(destination + start, source + start, CHUNK_BYTES)
                start += CHUNK_BYTES
                done += CHUNK_BYTES
                reported = done
                yield done
            memmove(destination + start, source + start, size - start)
            done += size - start
            if done - reported >= CHUNK_BYTES:
                reported = done
                yield done
        if done != reported or not done:
            yield done

    def run(self) -> None:
        """Copy everything."""
        for _ in self.chunks():
            pass


def plan_pages(
    layout: GroupLayout, blocks: Int64, pages: Int64, *, to_engine: bool, layer_order: bool = False
) -> CopyPlan:
    """Plan the copy between engine blocks and page images.

    Args:
        layout: the group's geometry.
        blocks: (n,) engine block ids, checked by the caller.
        pages: (n,) addresses of the page images.
        to_engine: restore (pages to blocks) or save (blocks to pages).
        layer_order: all pages of a layer before the next layer, for layer-wise readiness.
    """
    if blocks.size > 1 and not layer_order:
        order = np.argsort(pages, kind="stable")
        blocks, pages = blocks[order], pages[order]
    engine = layout.base[None, :] + blocks[:, None] * layout.stride[None, :]
    host = pages[:, None] + layout.offset[None, :]
    sizes = np.broadcast_to(layout.size[None, :], engine.shape)
    if layer_order:
        engine, host, sizes = engine.T, host.T, sizes.T
    engine, host, sizes = engine.ravel(), host.ravel(), np.ascontiguousarray(sizes).ravel()
    return CopyPlan(host, engine, sizes) if to_engine else CopyPlan(engine, host, sizes)
