"""What a thread may ask of the kernel's scheduler: how long its slices are.

Linux 6.12 and newer let every thread choose. It gets neither more nor less of a processor for it: a thread with short
slices is let in sooner when it wakes up, and one with long slices is the first to make room.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from typing import Final

SHORT_SLICE_S: Final = 300e-6
"""For a thread that answers others: less than any default (1.4 ms with two processors, 2.8 ms with eight)."""
LONG_SLICE_S: Final = 3.5e-3
"""For a thread that copies: more than any default."""

_SET_AND_GET: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime, deadline, period: `struct sched_attr` of the kernel."""
_SHARING: Final = (0, 3)
"""SCHED_OTHER and SCHED_BATCH: policies of threads that share a processor by time."""
_RESET_ON_FORK: Final = 1


def use_slices(seconds: float) -> bool:
    """Ask for slices of this length for the calling thread, not for those that it starts; return whether that was done.

    It is not where a sandbox forbids the call, or where somebody gave the thread a real-time policy: then all stays as
    it was. Older kernels accept it and know no slices.
    """
    set_call, _ = _SET_AND_GET.get(platform.machine(), (0, 0))
    current = _attributes(0)
    if not current or current[1] not in _SHARING:
        return False
    size, policy, flags, nice, priority, _, deadline, period = current
    asked = _ATTRIBUTES.pack(size, policy, flags | _RESET_ON_FORK, nice, priority, int(seconds * 1e9), deadline, period)
    return bool(ctypes.CDLL(None).syscall(set_call, 0, asked, 0) == 0)


def slice_s(thread: int = 0) -> float:
    """Length of a thread's slices in seconds, 0 where the kernel does not say.

    `thread` is its id for the kernel, 0 the calling thread.
    """
    current = _attributes(thread)
    return current[5] / 1e9 if current and current[1] in _SHARING else 0.0


def _attributes(thread: int) -> tuple[int, ...]:
    """Of a thread, as the kernel has them; empty when they cannot be had."""
    _, get_call = _SET_AND_GET.get(platform.machine(), (0, 0))
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if not get_call or ctypes.CDLL(None).syscall(get_call, thread, buffer, _ATTRIBUTES.size, 0) != 0:
        return ()
    return (_ATTRIBUTES.size, *_ATTRIBUTES.unpack(buffer.raw)[1:])
