"""How much of a GPU's memory is taken, asked without a context of our own."""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_bytes(uuid: str) -> int | None:
    """Memory of the GPU that is taken, by whomever; None where it cannot be told (no NVML, a part of a GPU)."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None
        try:
            device, memory = ctypes.c_void_p(), _Memory()
            if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
                return None
            if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                return None
            return int(memory.used)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
