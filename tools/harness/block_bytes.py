"""Digests of the engine's KV blocks, taken through the engine's own tensors. Runs in the engine's processes."""

import hashlib
from typing import Any


def cached_blocks(pool: Any) -> dict[str, int]:
    """ "group:hash" of every block in vLLM's prefix cache, to its block id (one of them, where several hold
    the same)."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

    found = {}
    for key, entry in pool.cached_block_hash_to_block._cache.items():
        block = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found[f"{get_group_id(key)}:{get_block_hash(key).hex()}"] = int(block.block_id)
    return found


def digests(worker: Any, blocks: list[int]) -> list[str]:
    """SHA-256 of each block over all layers of this worker."""
    import torch

    tensors = worker.model_runner.kv_caches
    count = min(tensor.shape[0] for tensor in tensors)
    if blocks and max(blocks) >= count:
        raise ValueError(
            f"block {max(blocks)} is not within the engine's tensors of {[tuple(t.shape) for t in tensors]}"
        )
    found = []
    for block in blocks:
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor[block].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def combined(ranks: list[list[str]]) -> list[str]:
    """One digest a block over all ranks."""
    return ["".join(parts) for parts in zip(*ranks, strict=True)]
