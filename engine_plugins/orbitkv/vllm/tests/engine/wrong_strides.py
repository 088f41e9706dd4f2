"""A connector that reads the engine's KV memory wrong, as after a change of its layout that nobody noticed."""

import dataclasses
from typing import Any

from orbitkv.vllm import layout
from orbitkv.vllm.connector import OrbitKVConnector

_read_layout = layout.read_layout


def read_layout_wrong(*args: Any) -> layout.Layout:
    """Takes blocks for half as large as they are: all of it lies within the engine's memory, and looks plausible."""
    right = _read_layout(*args)
    groups = []
    for group in right.groups:
        layers = []
        for region in group.layers:
            wrong = dict.fromkeys(("block_bytes", "block_stride"), region.block_bytes // 2)
            fields = {name: getattr(region, name) for name in region.__struct_fields__}
            layers.append(type(region)(**{**fields, **wrong}))
        fields = {name: getattr(group, name) for name in group.__struct_fields__}
        groups.append(type(group)(**{**fields, "layers": layers}))
    return dataclasses.replace(right, groups=tuple(groups))


class WrongStridesConnector(OrbitKVConnector):
    """OrbitKV with that mistake in it."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the wrong layout."""
        layout.read_layout = read_layout_wrong  # type: ignore[assignment]
        try:
            super().register_kv_caches(kv_caches)
        finally:
            layout.read_layout = _read_layout
