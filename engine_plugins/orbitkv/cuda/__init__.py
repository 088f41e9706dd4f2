"""The CUDA driver as both sides use it: the engine's process exports memory, the agent imports it and copies."""

from .driver import HANDLE_BYTES, CudaError, CudaUnavailableError, Driver, GpuInfo, LibCuda

__all__ = ["HANDLE_BYTES", "CudaError", "CudaUnavailableError", "Driver", "GpuInfo", "LibCuda"]
