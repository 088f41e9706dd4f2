"""Who is on the other end of a connection, and whether that process still exists; and what that one learns of this."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

_SO_PEERPIDFD = 77  # Linux 6.5; not yet in Python's socket module
_CREDENTIALS = struct.Struct("iII")
_PR_SET_DUMPABLE = 4


@dataclass(frozen=True)
class Peer:
    """The process that connected.

    Attributes:
        pid: its number in this process's namespace, 0 if it has none here.
        uid: its user.
        pidfd: becomes readable when the process exited; owned by whoever holds the `Peer`. None where the kernel cannot
            give one: then its exit cannot be observed.
        process: equal for connections of the same process, unequal for others. In another container's namespace it is
            known from Linux 6.9; None where it is not.
    """

    pid: int
    uid: int
    pidfd: int | None
    process: Hashable = None

    def exited(self) -> bool:
        """Whether the process is known to have exited. Not knowing is False."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd is not None:
            os.close(self.pidfd)


def keep_peers_out() -> None:
    """Keep this process's memory and descriptors from others of its user: only a tracer's right opens them then.

    Whoever connects has a pidfd of who listens, also from another container, and root in one is the same user as root
    in another. It leaves no core dumps either. (A user's own agent has no such peers; there files of this process in
    /proc would belong to root.)
    """
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that called `connect`. It may be gone, and a forked child may use the connection."""
    size = _CREDENTIALS.size
    pid, uid, _gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    pidfd = _pidfd(connection, pid)
    return Peer(pid, uid, pidfd, ("pid", pid) if pid > 0 else _identity(pidfd))


def _identity(pidfd: int | None) -> Hashable:
    """Tell processes apart that have no number here: from Linux 6.9 descriptors of each have their own inode."""
    if pidfd is None:
        return None
    found = os.fstat(pidfd)
    inode = (found.st_dev, found.st_ino)
    return None if inode == _shared_inode() else ("pidfd", *inode)


@cache
def _shared_inode() -> tuple[int, int]:
    """The inode that all descriptors without one of their own share."""
    descriptor = os.eventfd(0, os.EFD_CLOEXEC)
    found = os.fstat(descriptor)
    os.close(descriptor)
    return found.st_dev, found.st_ino


def _pidfd(connection: socket.socket, pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if pid > 0:
        # Before Linux 6.5. The number may have been given to another process since `connect`; then the wrong process is
        # watched, and memory is held for too long, never for too short a time.
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None
