"""KV events for cache-aware routers: which pages the external cache holds for this engine.

They say `medium=CPU`, so that a router can tell them from the engine's own (`GPU`). A page is announced once all of it
is visible. When the cache loses pages in a way that cannot be listed, everything announced is taken back: a router may
miss a hit, and never expects one in vain.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

REMOVALS_AN_EVENT = 1024


class CacheEvents:
    """Collects events between two calls of `take`.

    Args:
        block_tokens: tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._events: list[Any] = []
        self._announced: dict[bytes, None] = {}

    def plan(self, request: Any, first: int, hashes: list[bytes]) -> list[tuple[bytes, Any]]:
        """Return what `stored` will announce when a save of consecutive blocks from `first` on is kept."""
        size = self._block_tokens
        planned = []
        for index, block_hash in enumerate(hashes, first):
            parent = request.block_hashes[index - 1] if index else None
            planned.append(
                (
                    block_hash,
                    BlockStored(
                        block_hashes=[maybe_convert_block_hash(block_hash)],
                        parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
                        token_ids=list(request.all_token_ids[index * size : (index + 1) * size]),
                        block_size=size,
                        lora_id=None,
                        medium=MEDIUM_CPU,
                        lora_name=None,
                        # A salt is a part of the first block's key only; adapters and media are not served.
                        extra_keys=[(request.cache_salt,)] if request.cache_salt and index == 0 else None,
                        group_idx=0,
                    ),
                )
            )
        return planned

    def stored(self, planned: list[tuple[bytes, Any]]) -> None:
        """These pages are visible now. Those that were announced before are not announced again."""
        for block_hash, event in planned:
            if block_hash not in self._announced:
                self._announced[block_hash] = None
                self._events.append(event)

    def removed(self, hashes: list[bytes]) -> None:
        """These pages left the cache. Pages that were never announced are no news."""
        known = [block_hash for block_hash in hashes if self._announced.pop(block_hash, self) is None]
        for start in range(0, len(known), REMOVALS_AN_EVENT):
            part = known[start : start + REMOVALS_AN_EVENT]
            self._events.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in part],
                    medium=MEDIUM_CPU,
                    group_idx=0,
                )
            )

    def cleared(self) -> None:
        """Nothing that was announced can be relied on: the cache was reset, or the agent is gone.

        vLLM's own "all cleared" names no medium and would take back the engine's own blocks too.
        """
        self.removed(list(self._announced))

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
