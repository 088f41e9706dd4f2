"""Engine memory, as it is named when it is registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HostAllocation:
    """Engine memory in this process: `size` bytes at `address`. `owner` is kept alive as long as it may be copied."""

    address: int
    size: int
    owner: Any

    @property
    def exported(self) -> bytes:
        """The handle by which the agent opens it; empty where the engine's process copies by itself."""
        return b""


@dataclass(frozen=True)
class DeviceAllocation(HostAllocation):
    """One allocation of a GPU: `size` bytes at `address`, which the agent opens by `handle`."""

    handle: bytes = b""

    @property
    def exported(self) -> bytes:
        """See `HostAllocation`."""
        return self.handle
