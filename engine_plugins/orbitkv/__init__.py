"""What engine processes import: the protocol, the client and one adapter for each engine.

`from orbitkv import CacheManagerClient` is the way in; the names are loaded on first use, so that importing the package
alone asks nothing of the environment that it is imported into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import (
        BlockHashes,
        CacheManagerClient,
        ErrorKind,
        GpuRegistration,
        GroupGeometry,
        HostAllocation,
        Instance,
        InstanceState,
        LayerRegion,
        OrbitKVError,
        QueryLoading,
        QueryReady,
        Ranks,
        RestoreHandle,
        RestoreStatus,
        SaveHandle,
        SaveNotSubmittedError,
        SaveStatus,
    )

__all__ = [
    "BlockHashes",
    "CacheManagerClient",
    "ErrorKind",
    "GpuRegistration",
    "GroupGeometry",
    "HostAllocation",
    "Instance",
    "InstanceState",
    "LayerRegion",
    "OrbitKVError",
    "QueryLoading",
    "QueryReady",
    "Ranks",
    "RestoreHandle",
    "RestoreStatus",
    "SaveHandle",
    "SaveNotSubmittedError",
    "SaveStatus",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
