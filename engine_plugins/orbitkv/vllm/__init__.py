"""The vLLM adapter. `OrbitKVConnector` is loaded on first use, so that importing this package needs no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import OrbitKVConnector

__all__ = ["OrbitKVConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
