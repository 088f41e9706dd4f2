"""What the driver's management library says: how many GPUs there are, and how much of one's memory who has taken.

It is asked without a context of our own, which would take memory of each GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """`nvmlProcessInfo_t`, since version 3 of the call."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_MOST_PROCESSES: Final = 256
_NOT_KNOWN: Final = (1 << 64) - 1


@contextmanager
def _library() -> Iterator[Any]:
    """Raises OSError: there is none, or it cannot be used."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if library.nvmlInit_v2():
        raise OSError("NVML cannot be initialised")
    try:
        yield library
    finally:
        library.nvmlShutdown()


def device_count() -> int | None:
    """How many GPUs this process sees, whole ones; None where it cannot be told (no NVML)."""
    try:
        with _library() as library:
            count = ctypes.c_uint()
            return None if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value
    except (OSError, AttributeError):
        return None


def used_bytes(uuid: str) -> int | None:
    """Memory of the GPU that is taken, by whomever; None where it cannot be told (no NVML, a part of a GPU)."""
    try:
        with _library() as library:
            device, memory = ctypes.c_void_p(), _Memory()
            if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
                return None
            if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                return None
            return int(memory.used)
    except (OSError, AttributeError):
        return None


def used_by_process(uuid: str) -> dict[int, int]:
    """Memory of the GPU by process that computes there, in bytes; empty where it cannot be told.

    The numbers of processes are the machine's: in a container this process has another one there.
    """
    try:
        with _library() as library:
            device, count = ctypes.c_void_p(), ctypes.c_uint(_MOST_PROCESSES)
            found = (_Process * _MOST_PROCESSES)()
            if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
                return {}
            if library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found):
                return {}
            return {each.pid: each.used for each in found[: count.value] if each.used != _NOT_KNOWN}
    except (OSError, AttributeError):
        return {}
