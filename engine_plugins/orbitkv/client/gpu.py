"""A GPU as the engine's process uses it: memory exported to the agent, and points of its streams to wait for."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from orbitkv.cuda import CudaError, CudaUnavailableError, Driver, LibCuda
from orbitkv.protocol.errors import ErrorKind, OrbitKVError

from .allocations import DeviceAllocation


def _address_of(piece: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


class StreamPoint:
    """A point of one of the engine's streams: reached when all that was enqueued before it is done."""

    def __init__(self, gpu: EngineGpu, event: int) -> None:
        self._gpu = gpu
        self._event = event

    def reached(self) -> bool:
        """Whether the stream has come this far. Never waits."""
        return self._gpu.driver.reached(self._event)

    def wait(self) -> None:
        """Sleep until the stream has come this far."""
        self._gpu.enter()
        self._gpu.driver.wait(self._event)

    def __del__(self) -> None:
        self._gpu.events.append(self._event)


class EngineGpu:
    """The GPU that is current in the thread that makes this.

    Attributes:
        uuid: as the agent names it.

    Raises:
        OrbitKVError: UNSUPPORTED, the CUDA driver cannot be used, or no GPU is current.
    """

    def __init__(self, driver: Driver | None = None) -> None:
        try:
            self.driver = driver or LibCuda()
            self._context = self.driver.current_context()
            if not self._context:
                raise OrbitKVError(ErrorKind.UNSUPPORTED, "no GPU is current in this thread")
            self.uuid = self.driver.current_uuid()
        except (CudaUnavailableError, CudaError) as error:
            raise OrbitKVError(ErrorKind.UNSUPPORTED, f"the GPU cannot be used: {error}") from None
        self.events: deque[int] = deque()

    def enter(self) -> None:
        """Make the GPU current in this thread."""
        self.driver.set_current(self._context)

    def allocation(self, address: int, owner: Any) -> DeviceAllocation:
        """Export the allocation that `address` lies in; `owner` keeps it alive.

        Raises:
            OrbitKVError: UNSUPPORTED, memory of this kind cannot be exported.
        """
        try:
            base, size = self.driver.allocation_of(address)
            if self.driver.is_exportable(base):
                return DeviceAllocation(base, size, owner, self.driver.export_memory(base))
            why = "its allocator uses virtual memory"
        except CudaError as error:
            why = str(error)
        raise OrbitKVError(
            ErrorKind.UNSUPPORTED,
            f"this GPU memory cannot be shared with the agent ({why}): start the engine without "
            "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF), and without sleep mode",
        )

    def point(self, stream: int) -> StreamPoint:
        """The point that a stream of this GPU (its address) has reached when all enqueued so far is done."""
        try:
            event = self.events.popleft()
        except IndexError:
            event = self.driver.make_event()
        self.driver.record(event, stream)
        return StreamPoint(self, event)

    def write(self, destination: int, source: int, size: int) -> None:
        """Copy host memory to GPU memory and wait for it. For a few bytes, while nothing computes there."""
        self.enter()
        self.driver.write(destination, source, size)
        landed = bytearray(size)
        self.driver.read(_address_of(landed), destination, size)

    def read(self, destination: int, source: int, size: int) -> None:
        """Copy GPU memory to host memory, for checks."""
        self.enter()
        self.driver.read(destination, source, size)
