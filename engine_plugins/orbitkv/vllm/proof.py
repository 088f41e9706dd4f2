"""Proof of layout: what the copies move is what the engine sees.

Copies go by base address and strides, the check goes through the engine's own tensor views, so an error in how a
layout was read cannot hide. On an empty cache random bytes go all the way: through the views into a block, saved,
restored into another block, and compared through the views. On a used cache one computed block is compared, and nothing
is written.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from orbitkv.client import BlockHashes, CacheManagerClient, GpuRegistration, OrbitKVError, QueryReady, SaveStatus
from orbitkv.client.handles import RestoreStatus
from orbitkv.protocol.messages import Instance

from .layout import Layout

if TYPE_CHECKING:
    import numpy.typing as npt

PROOF_S = 20.0
"""Longest time for one step of the proof: other ranks must have come this far too."""

ROOM_S = 5.0
"""Longest wait for room for the proof's pages in the agent's memory, which grows as it is used."""

_proven: set[str] = set()


class LayoutDisprovenError(Exception):
    """The copies do not move what the engine sees; the message names layer and strides."""


class ProofUnfinishedError(Exception):
    """The proof could not be carried out; the message says what was missing. It can be tried again."""


def proven_before(layout: Layout) -> bool:
    """Whether this process has proven this layout already."""
    return layout.digest in _proven


def remember(layout: Layout) -> None:
    """This process has proven this layout."""
    _proven.add(layout.digest)


def block_bytes(view: Any, block: int) -> npt.NDArray[np.uint8]:
    """Return a layer's part of a block in memory order, read through the engine's view: (bytes,) uint8."""
    import torch

    part = view[block]
    order = sorted(range(part.dim()), key=lambda axis: -part.stride(axis))
    flat = part.permute(order).contiguous().view(torch.uint8).reshape(-1)
    array: npt.NDArray[np.uint8] = flat.cpu().numpy()
    return array


def compare_block(layout: Layout, registration: GpuRegistration, group: int, block: int) -> None:
    """Compare what a save would gather of one block with the engine's views; writes nothing.

    Raises:
        LayoutDisprovenError: they differ.
    """
    layout.settle()
    image = registration.image(layout.groups[group].group, block)
    start = 0
    for region, view in zip(layout.groups[group].layers, layout.views[group], strict=True):
        seen = block_bytes(view, block)
        if not np.array_equal(image[start : start + seen.size], seen):
            raise _disproven(region.name, view, f"block {block} as it would be saved is not what the engine computed")
        start += seen.size
    if start != image.size:
        raise LayoutDisprovenError(f"group {group}: a page has {image.size} bytes, the engine sees {start}")


def prove_on_empty_cache(
    layout: Layout, client: CacheManagerClient, registration: GpuRegistration, instance: Instance, rank: int
) -> None:
    """Save random bytes from one block of each group, restore them into another, compare, and leave both zero.

    Raises:
        LayoutDisprovenError: the bytes arrived wrong.
        ProofUnfinishedError: the agent did not do its part in time, or the cache has too few blocks.
    """
    if layout.blocks < 3:  # block 0 is the engine's own, and two are needed
        raise ProofUnfinishedError(f"the engine has {layout.blocks} KV blocks; a proof of layout needs 3")
    source, target = layout.blocks - 1, layout.blocks - 2
    try:
        for views in layout.views:
            for view in views:
                _fill(view, source)
        layout.settle()
        _there_and_back(layout, client, registration, instance, rank, source, target)
        for geometry, views in zip(layout.groups, layout.views, strict=True):
            for region, view in zip(geometry.layers, views, strict=True):
                if not np.array_equal(block_bytes(view, source), block_bytes(view, target)):
                    raise _disproven(region.name, view, "random bytes came back different after a save and a restore")
            compare_block(layout, registration, geometry.group, source)
    finally:
        for views in layout.views:
            for view in views:
                view[source].zero_()
                view[target].zero_()
        layout.settle()


def _there_and_back(
    layout: Layout,
    client: CacheManagerClient,
    registration: GpuRegistration,
    instance: Instance,
    rank: int,
    source: int,
    target: int,
) -> None:
    request_id = f"orbitkv-proof-{rank}"
    # All ranks use the same hash, as for a real page: the entry is complete, and can be leased, when each has saved.
    digest = hashlib.sha256(f"orbitkv-proof {instance}".encode()).digest()
    hashes = [BlockHashes([digest], geometry.group) for geometry in layout.groups]
    deadline = time.monotonic() + PROOF_S
    try:
        _save(client, registration, hashes, source)
        ready = _ask(client, request_id, hashes, instance, deadline)
        # Pages of a proof are the worker's own: one lease. (An agent that joins the ranks gives one a rank.)
        lease = ready.leases[rank] if len(ready.leases) > 1 else ready.leases[0]
        restore = client.start_restore(registration, lease, [np.array([target])] * len(hashes))
        client.query_consumed(request_id)
        if client.wait_restore(restore, PROOF_S) is not RestoreStatus.DONE:
            raise ProofUnfinishedError(f"its page was not restored ({restore.status.value}: {restore.error})")
    except OrbitKVError as error:
        raise ProofUnfinishedError(f"the agent did not do its part: {error}") from error


def _save(client: CacheManagerClient, registration: GpuRegistration, hashes: list[BlockHashes], source: int) -> None:
    """Save the block, again as long as there is no room for a page of it."""
    deadline = time.monotonic() + ROOM_S
    pause_s = 0.002
    while True:
        save = client.prepare_save(registration, hashes, [np.array([source])] * len(hashes), proof=True)
        client.submit_saves([save])
        status = client.wait_save(save, PROOF_S)
        if status is not SaveStatus.COMMITTED:
            raise ProofUnfinishedError(f"its page was not kept ({status.value}: {save.error})")
        if not save.dropped:
            return
        if time.monotonic() > deadline:
            raise ProofUnfinishedError(f"the agent has no room for its page ({', '.join(save.dropped)})")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.1)


def _ask(
    client: CacheManagerClient, request_id: str, hashes: list[BlockHashes], instance: Instance, deadline: float
) -> QueryReady:
    """Ask until the page is complete: the other ranks save theirs at the same time."""
    pause_s = 0.002
    while True:
        answer = client.query_prefetch(request_id, hashes, instance=instance, proof=True)
        if isinstance(answer, QueryReady) and answer.pages:
            return answer
        if time.monotonic() > deadline:
            client.cancel_query(request_id)
            why = answer.reason if isinstance(answer, QueryReady) else "still loading"
            raise ProofUnfinishedError(f"its page was not found ({why})")
        time.sleep(pause_s)  # the agent has no notice for it: an answer of nothing is final for a query
        pause_s = min(pause_s * 2, 0.1)


def _fill(view: Any, block: int) -> None:
    import torch

    part = view[block]
    noise = torch.frombuffer(bytearray(os.urandom(part.numel() * part.element_size())), dtype=torch.uint8)
    part.copy_(noise.view(part.dtype).reshape(part.shape))


def _disproven(name: str, view: Any, what: str) -> LayoutDisprovenError:
    return LayoutDisprovenError(
        f"layer {name}: {what} (shape {tuple(view.shape)}, strides {tuple(view.stride())} elements, {view.dtype})"
    )
