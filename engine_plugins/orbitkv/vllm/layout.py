"""From the engine's KV tensors to the geometry that is registered: strides are read, never assumed.

vLLM hands over one view a layer, `[blocks, heads, tokens, content]`, whose strides tell how it lies in memory. What is
needed of it is where a layer's part of block b starts and how long it is. Where a block's part is not one piece the
layout is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orbitkv.client import GroupGeometry, HostAllocation, LayerRegion, OrbitKVError
from orbitkv.client.gpu import EngineGpu

from .served import layer_specs


class LayoutRefusedError(Exception):
    """The KV memory lies in a way that is not served; the message names layer, shape and strides."""


@dataclass(frozen=True)
class Layout:
    """A worker's KV memory.

    Attributes:
        groups: geometry of each KV cache group.
        allocations: the memory that the geometry refers to.
        views: the engine's own view of each layer, a list a group, block ids of the cache manager first.
        digest: of all that a page's bytes mean by their place: equal digests, equal layout.
        blocks: number of blocks.
        gpu: the GPU that it is memory of; None for host memory.
    """

    groups: tuple[GroupGeometry, ...]
    allocations: tuple[HostAllocation, ...]
    views: tuple[tuple[Any, ...], ...]
    digest: str
    blocks: int
    gpu: EngineGpu | None = None

    def settle(self) -> None:
        """Wait until everything that the engine's streams were given is done, so that memory can be looked at."""
        if self.gpu is not None:
            import torch

            torch.cuda.synchronize(self.views[0][0].device)


def read_layout(kv_caches: Mapping[str, Any], groups: Sequence[Any], num_blocks: int) -> Layout:
    """Return the layout of a worker's KV memory.

    Args:
        kv_caches: layer name -> view, as the engine registers them.
        groups: the engine's KV cache groups (`KVCacheGroupSpec`).
        num_blocks: blocks that the engine's cache manager hands out.

    Raises:
        LayoutRefusedError: a layer is missing, its memory cannot be used or shared, or its part of a block is not one
            piece.
    """
    allocations: dict[int, tuple[int, HostAllocation]] = {}
    gpu = _gpu_of(kv_caches)
    geometries, views = [], []
    words = []
    for number, group in enumerate(groups):
        regions: list[LayerRegion] = []
        layer_views = []
        seen: set[int] = set()
        for name in group.layer_names:
            if name not in kv_caches:
                raise LayoutRefusedError(f"layer {name} of KV cache group {number} has no KV memory in this worker")
            tensor = kv_caches[name]
            if tensor.data_ptr() in seen:  # a layer that reads another layer's cache
                continue
            seen.add(tensor.data_ptr())
            view = _by_manager_block(name, tensor, num_blocks)
            regions.append(_region(name, view, allocations, gpu))
            layer_views.append(view)
            device = "" if gpu is None else f" {view.device.type}"
            words.append(f"{number}{device} {tuple(view.shape[1:])} {view.stride()[1:]} {view.dtype}")
        spec = next(iter(layer_specs(group)))
        geometries.append(GroupGeometry(number, "full", int(spec.block_size), regions))
        views.append(tuple(layer_views))
    _refuse_overlaps(geometries, [allocation for _, allocation in allocations.values()])
    return Layout(
        groups=tuple(geometries),
        allocations=tuple(allocation for _, allocation in allocations.values()),
        views=tuple(views),
        digest=hashlib.sha256("\n".join(words).encode()).hexdigest(),
        blocks=num_blocks,
        gpu=gpu,
    )


def _gpu_of(kv_caches: Mapping[str, Any]) -> EngineGpu | None:
    """The one GPU that all of the memory is on; None for host memory."""
    devices = {str(tensor.device): name for name, tensor in kv_caches.items()}
    if len(devices) != 1:
        raise LayoutRefusedError(f"the KV memory of this worker is on several devices: {sorted(devices)}")
    kind = next(iter(devices)).partition(":")[0]
    if kind == "cpu":
        return None
    if kind != "cuda":
        raise LayoutRefusedError(f"the KV memory is on {kind}: only host memory and NVIDIA GPUs are served")
    try:
        return EngineGpu()
    except OrbitKVError as error:
        raise LayoutRefusedError(str(error)) from error


def _by_manager_block(name: str, tensor: Any, num_blocks: int) -> Any:
    """Kernels may cut a block of the cache manager into smaller ones: put them together again, as a view."""
    count = tensor.shape[0]
    if count == num_blocks:
        return tensor
    if count % num_blocks:
        raise LayoutRefusedError(f"layer {name}: {count} kernel blocks do not divide into {num_blocks} blocks")
    return tensor.unflatten(0, (num_blocks, count // num_blocks))


def _region(
    name: str, view: Any, allocations: dict[int, tuple[int, HostAllocation]], gpu: EngineGpu | None
) -> LayerRegion:
    item = view.element_size()
    sizes, strides = view.shape[1:], view.stride()[1:]
    length = 1
    for size, stride in sorted(zip(sizes, strides, strict=True), key=lambda axis: axis[1]):
        if size == 1:
            continue
        if stride != length:
            raise LayoutRefusedError(
                f"layer {name}: its part of a block is not one piece of memory (shape {tuple(view.shape)}, strides "
                f"{view.stride()} elements), as in the layouts LHBNC and BHLNC; set VLLM_KV_CACHE_LAYOUT to another one"
            )
        length *= size
    index, allocation = _allocation(name, view.untyped_storage(), allocations, gpu)
    return LayerRegion(
        name=name,
        allocation=index,
        offset=view.data_ptr() - allocation.address,
        block_count=view.shape[0],
        block_bytes=length * item,
        block_stride=view.stride()[0] * item,
        dtype=str(view.dtype).removeprefix("torch."),
    )


def _allocation(
    name: str, storage: Any, allocations: dict[int, tuple[int, HostAllocation]], gpu: EngineGpu | None
) -> tuple[int, HostAllocation]:
    """The memory that a storage lies in, and its number. On a GPU that is all that its allocator got at once."""
    start = storage.data_ptr()
    for index, known in allocations.values():
        if known.address <= start < known.address + known.size:
            return index, known
    if gpu is None:
        allocation = HostAllocation(start, storage.nbytes(), storage)
    else:
        try:
            allocation = gpu.allocation(start, storage)
        except OrbitKVError as error:
            raise LayoutRefusedError(f"layer {name}: {error}") from error
    allocations[allocation.address] = len(allocations), allocation
    return allocations[allocation.address]


def _refuse_overlaps(groups: Sequence[GroupGeometry], allocations: Sequence[HostAllocation]) -> None:
    """A part that reaches over its block's stride or out of its memory would be another block's bytes."""
    for group in groups:
        for layer in group.layers:
            end = layer.offset + (layer.block_count - 1) * layer.block_stride + layer.block_bytes
            if layer.block_stride < layer.block_bytes or layer.offset < 0 or end > allocations[layer.allocation].size:
                raise LayoutRefusedError(
                    f"layer {layer.name}: blocks of {layer.block_bytes} bytes every {layer.block_stride} bytes from "
                    f"{layer.offset} do not fit into its memory of {allocations[layer.allocation].size} bytes"
                )
