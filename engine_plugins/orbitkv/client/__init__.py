"""The client of the node agent: sessions, queries, restores and saves."""

from orbitkv.protocol.errors import ErrorKind, OrbitKVError, SaveNotSubmittedError
from orbitkv.protocol.messages import GroupGeometry, Instance, InstanceState, LayerRegion, Ranks

from .allocations import HostAllocation
from .handles import RestoreHandle, RestoreStatus, SaveHandle, SaveStatus
from .hashes import BlockHashes
from .manager import CacheManagerClient
from .queries import QueryLoading, QueryReady
from .registration import GpuRegistration

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
