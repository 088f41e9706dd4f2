"""What a worker registers, checked once and kept as numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from orbitkv.cuda import HANDLE_BYTES
from orbitkv.protocol.geometry import padded
from orbitkv.protocol.messages import GroupGeometry, LayerRegion, Ranks, Register
from orbitkv_agent.sessions.errors import invalid, unsupported

MAX_RANKS = 64
MAX_LAYERS = 4096
MAX_GROUPS = 64
MAX_TEXT = 256
"""Characters of a name that is kept."""
_LAYER_BYTES = 512
"""About what a layer takes, beside its name."""


@dataclass(frozen=True)
class GroupLayout:
    """One KV cache group of one worker. Sizes in bytes."""

    group: int
    kind: str
    block_tokens: int
    block_count: int
    page_bytes: int
    layers: tuple[tuple[str, int, str], ...]
    """(name, bytes of a block's part, dtype), in the order of the page image."""

    @property
    def padded_bytes(self) -> int:
        """What a page takes in the pool."""
        return padded(self.page_bytes)


@dataclass(frozen=True)
class GroupPages:
    """A page of one group on all shards that keep it: `shard_bytes` are padded, in rank order."""

    block_tokens: int
    shard_bytes: tuple[int, ...]


@dataclass(frozen=True)
class WorkerLayout:
    """Everything about a worker's pages that must be equal on all workers of its pipeline stage.

    `placement` is a digest of where the layers lie in memory: with the rest, what a proof of layout proves.
    """

    groups: tuple[GroupLayout, ...]
    placement: bytes

    def by_id(self) -> dict[int, GroupLayout]:
        """The groups by their number."""
        return {group.group: group for group in self.groups}


def rank_count(ranks: Ranks) -> int:
    """Number of workers of an instance."""
    return ranks.tensor_size * ranks.pipeline_size * ranks.context_size


def shard_of(ranks: Ranks) -> int:
    """The worker's place in rank order: pipeline stage, then tensor rank, then context rank."""
    return (ranks.pipeline * ranks.tensor_size + ranks.tensor) * ranks.context_size + ranks.context


def check_register(message: Register, *, devices: Sequence[str], handles: bool, max_page_bytes: int) -> WorkerLayout:
    """Check a registration.

    Args:
        devices: names of those whose memory can be registered.
        handles: allocations come with a handle each (device memory), or else without.
        max_page_bytes: largest padded page that the pool can hold.

    Raises:
        Refused: with the field and its value.
    """
    _check_ranks(message.ranks)
    _check_text("model_identity", message.model_identity)
    if not message.model_identity:
        raise invalid("model_identity is empty; nothing can be kept for a model whose identity is not known")
    if message.device not in devices:
        raise unsupported(
            f"device {message.device!r} is not visible to this agent, which serves {list(devices)}; "
            + (
                "give both the same GPUs"
                if handles
                else "an agent in host mode keeps pages of engines that run on the CPU"
            )
        )
    for index, allocation in enumerate(message.allocations):
        if not handles and allocation.handle:
            raise unsupported(f"allocations[{index}].handle: this agent is in host mode and opens no device memory")
        if handles and len(allocation.handle) != HANDLE_BYTES:
            raise invalid(
                f"allocations[{index}].handle has {len(allocation.handle)} bytes; memory of a GPU is registered with "
                f"a handle of {HANDLE_BYTES}"
            )
        if allocation.size <= 0:
            raise invalid(f"allocations[{index}].size is {allocation.size}; it must be positive")
    if not message.groups:
        raise invalid("groups is empty; a worker registers all its layers at once")
    if len(message.groups) > MAX_GROUPS:
        raise invalid(f"{len(message.groups)} groups; at most {MAX_GROUPS} are accepted")
    layers = sum(len(group.layers) for group in message.groups)
    if layers > MAX_LAYERS:
        raise invalid(f"{layers} layers; at most {MAX_LAYERS} are accepted")
    names: set[str] = set()
    groups: list[GroupLayout] = []
    for group in message.groups:
        if any(known.group == group.group for known in groups):
            raise invalid(f"group {group.group} is registered twice")
        groups.append(_check_group(group, message, names, max_page_bytes))
    placement = hashlib.sha256(msgspec.msgpack.encode((message.allocations, message.groups))).digest()
    return WorkerLayout(tuple(groups), placement)


def kept_bytes(message: Register) -> int:
    """About how many bytes the agent keeps of a registration."""
    layers = [layer for group in message.groups for layer in group.layers]
    names = sum(len(layer.name) + len(layer.dtype) for layer in layers)
    return names + _LAYER_BYTES * (len(layers) + len(message.allocations))


def pages_of(layouts: list[WorkerLayout]) -> dict[int, GroupPages]:
    """Page sizes by group, of workers in rank order that agree on their groups."""
    by_rank = [layout.by_id() for layout in layouts]
    return {
        number: GroupPages(group.block_tokens, tuple(groups[number].padded_bytes for groups in by_rank))
        for number, group in by_rank[0].items()
    }


def storage_identity(model_identity: str, ranks: Ranks, layouts: list[WorkerLayout]) -> str:
    """Digest of all that gives stored bytes their meaning: the model, the workers, and what their pages consist of.

    Where pages lie in the engine's memory and how many it has do not count. The same after a restart of anything.
    """
    digest = hashlib.sha256(model_identity.encode())
    digest.update(f"|{ranks.tensor_size},{ranks.pipeline_size},{ranks.context_size}".encode())
    for layout in layouts:
        for group in layout.groups:
            digest.update(msgspec.msgpack.encode((group.group, group.kind, group.block_tokens, group.layers)))
    return digest.hexdigest()


def _check_ranks(ranks: Ranks) -> None:
    for name in ("tensor", "pipeline", "context"):
        rank, size = getattr(ranks, name), getattr(ranks, f"{name}_size")
        if not 1 <= size <= MAX_RANKS or not 0 <= rank < size:
            raise invalid(
                f"ranks.{name} is {rank} of {size}; it must be in 0 to size - 1, and size in 1 to {MAX_RANKS}"
            )
    if rank_count(ranks) > MAX_RANKS:
        raise invalid(f"ranks declare {rank_count(ranks)} workers; at most {MAX_RANKS} are accepted")


def _check_group(group: GroupGeometry, message: Register, names: set[str], max_page_bytes: int) -> GroupLayout:
    if group.kind != "full":
        raise unsupported(
            f"group {group.group}: kind {group.kind!r} cannot be restored yet, only 'full' (full attention); "
            "nothing is kept for this model"
        )
    if group.block_tokens < 1:
        raise invalid(f"group {group.group}: block_tokens is {group.block_tokens}; it must be positive")
    if not group.layers:
        raise invalid(f"group {group.group} has no layers")
    count = group.layers[0].block_count
    for layer in group.layers:
        _check_text("a layer's name", layer.name)
        _check_text("a layer's dtype", layer.dtype)
        if layer.name in names:
            raise invalid(f"layer {layer.name!r} is registered twice")
        names.add(layer.name)
        _check_layer(layer, message)
        if layer.block_count != count:
            raise invalid(
                f"layer {layer.name!r}: block_count is {layer.block_count}, and {count} for layer "
                f"{group.layers[0].name!r} of the same group {group.group}; they must be equal"
            )
    page_bytes = sum(layer.block_bytes for layer in group.layers)
    if padded(page_bytes) > max_page_bytes:
        raise unsupported(
            f"group {group.group}: a page takes {padded(page_bytes)} bytes; arenas of this agent hold at most "
            f"{max_page_bytes} (pool_bytes, arena_bytes)"
        )
    layers = tuple((layer.name, layer.block_bytes, layer.dtype) for layer in group.layers)
    return GroupLayout(group.group, group.kind, group.block_tokens, count, page_bytes, layers)


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise invalid(f"{name} has {len(text)} characters; at most {MAX_TEXT} are accepted")


def _check_layer(layer: LayerRegion, message: Register) -> None:
    name = f"layer {layer.name!r}"
    if layer.pieces != 1:
        raise unsupported(
            f"{name}: its part of a block is {layer.pieces} pieces; only layouts in which it is one piece are served "
            "(not LHBNC, BHLNC)"
        )
    if layer.replica_class != 0:
        raise unsupported(f"{name}: replica_class {layer.replica_class}: replicated shards are not there yet")
    if not 0 <= layer.allocation < len(message.allocations):
        raise invalid(f"{name}: allocation {layer.allocation} is not one of the {len(message.allocations)} allocations")
    if layer.block_count < 1 or layer.block_bytes < 1 or layer.offset < 0:
        raise invalid(
            f"{name}: block_count {layer.block_count}, block_bytes {layer.block_bytes}, offset {layer.offset}; "
            "the first two must be positive, and the offset not negative"
        )
    if layer.block_stride < layer.block_bytes:
        raise invalid(f"{name}: block_stride {layer.block_stride} is less than block_bytes {layer.block_bytes}")
    end = layer.offset + (layer.block_count - 1) * layer.block_stride + layer.block_bytes
    size = message.allocations[layer.allocation].size
    if end > size:
        raise invalid(f"{name}: its last block ends at byte {end}, outside its allocation of {size} bytes")
