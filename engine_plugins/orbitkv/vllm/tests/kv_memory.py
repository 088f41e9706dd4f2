"""KV tensors as vLLM hands them over, in each of its layouts, and groups to go with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

HEADS, TOKENS, CONTENT = 2, 16, 64


def full_attention(**changes: Any) -> FullAttentionSpec:
    settings = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": CONTENT // 2, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**settings, **changes})


@dataclass
class FakeGroup:
    """As vLLM's KVCacheGroupSpec."""

    layer_names: list[str]
    kv_cache_spec: Any = field(default_factory=full_attention)


def kv_memory(
    layers: tuple[str, ...] = ("a", "b"), blocks: int = 8, layout: str = "LBHNC", *, kernel_blocks: int = 1
) -> dict[str, torch.Tensor]:
    """Return one view `[blocks, heads, tokens, content]` a layer, all in one storage, as `layout` orders it."""
    order = KVCacheLayout[layout].stride_order
    logical = (len(layers), blocks * kernel_blocks, HEADS, TOKENS // kernel_blocks, CONTENT)
    physical = torch.rand([logical[axis] for axis in order]).to(torch.bfloat16)
    back = [order.index(axis) for axis in range(5)]
    by_layer = physical.permute(back)
    return {name: by_layer[index] for index, name in enumerate(layers)}
