"""Bind mounts, through the C library: what is mounted, one more, one less."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Final, Protocol

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_DETACH, _NOFOLLOW = 2, 8
_TABLE: Final = Path("/proc/self/mountinfo")
_MOUNT_POINT: Final = 4
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")


class Mounts(Protocol):
    """What the driver does with folders. Every method raises OSError as the kernel does."""

    def count(self, target: str) -> int:
        """Return how many mounts lie on a path, one over the other."""

    def bind(self, source: str, target: str) -> None:
        """Have a folder appear on another one."""

    def protect(self, target: str) -> None:
        """Make a mount read-only, without devices or programs in it; harmless when repeated."""

    def unmount(self, target: str) -> None:
        """Take the topmost mount off a path, whoever uses it."""


class KernelMounts:
    """Those of this process's mount namespace."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        text = ctypes.c_char_p
        self._library.mount.argtypes = [text, text, text, ctypes.c_ulong, ctypes.c_void_p]
        self._library.umount2.argtypes = [text, ctypes.c_int]

    def count(self, target: str) -> int:
        """Return how many mounts lie on a path, one over the other."""
        return mounted(_TABLE.read_bytes(), target)

    def bind(self, source: str, target: str) -> None:
        """Have a folder appear on another one."""
        self._mount(source, target, _BIND)

    def protect(self, target: str) -> None:
        """Make a mount read-only, without devices or programs in it; harmless when repeated."""
        # A bind mount takes flags only once it is there.
        self._mount(None, target, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV | _NOEXEC)

    def unmount(self, target: str) -> None:
        """Take the topmost mount off a path, whoever uses it."""
        if self._library.umount2(os.fsencode(target), _DETACH | _NOFOLLOW):
            raise _failure(target)

    def _mount(self, source: str | None, target: str, flags: int) -> None:
        if self._library.mount(source and os.fsencode(source), os.fsencode(target), None, flags, None):
            raise _failure(target)


def mounted(table: bytes, target: str) -> int:
    """Return how many mounts lie on a path, according to what the kernel lists in `/proc/self/mountinfo`."""
    fields = (line.split(b" ") for line in table.splitlines())
    return sum(_ESCAPED.sub(_character, each[_MOUNT_POINT]) == os.fsencode(target) for each in fields)


def _character(escaped: re.Match[bytes]) -> bytes:
    return bytes([int(escaped[1], 8)])


def _failure(path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)
