"""The permit of a session: an agent hands copies to a GPU only while it holds it, and the client can take it away.

An agent whose process is stopped says nothing, and might go on at any moment. Once its client has the whole permit it
hands nothing over any more, however late it wakes up, and the records say when what it had handed over is through
(`RecordReader.drained`). A thread that is stopped in the very moment of handing over keeps its part of the permit: what
becomes of that copy nobody can know before the process goes on or ends.

It is a pipe with a byte for each part: the kernel lets each be taken once, whoever is stopped or killed meanwhile. The
two sides have file descriptions of their own, so that no client can make the agent wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from typing import Final

PARTS: Final = 64
"""More than an agent has threads that hand copies over: three for each GPU of a session, and its owner."""

_PIPE_BYTES: Final = 2 * mmap.PAGESIZE
"""The smallest pipe that never runs full: what is written goes behind the last byte of a page, and a page is free again
when it was read to its end, so that the first one is while the second one fills up."""

_libc: Final = ctypes.PyDLL(None)  # keeps the interpreter: these calls never wait
_scratch: Final = ctypes.create_string_buffer(1)  # what is read says nothing
for _call in (_libc.read, _libc.write):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    _call.restype = ctypes.c_ssize_t


class Permit:
    """The agent's side. For any thread."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.write(self._in, bytes(PARTS))

    def share(self) -> int:
        """A descriptor for the client, which the caller closes once it is passed on."""
        return os.open(f"/proc/self/fd/{self._out}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def take(self) -> bool:
        """Take a part; false when the client has them all."""
        return bool(_libc.read(self._out, _scratch, 1) == 1)

    def give_back(self) -> None:
        """Undo `take`. A client that fills the pipe itself loses a part."""
        _libc.write(self._in, b"\0", 1)

    def close(self) -> None:
        """Nobody takes a part any more."""
        os.close(self._out)
        os.close(self._in)


class Withdrawal:
    """The client's side: takes the permit away, for ever. For any thread.

    Args:
        fd: what the agent shared; -1 where an agent of the release before has no permit.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Invariant: `_left` parts were not taken. Held across reads that never wait.
        self._lock = threading.Lock()
        self._left = PARTS

    def complete(self) -> bool:
        """Take what nobody holds now; return whether that is all of it. Never waits.

        It is all, too, when nobody can give a part back: the agent has closed the session, or no thread of it runs.
        """
        if self._fd < 0:
            return False
        with self._lock:
            while self._left > 0:
                try:
                    parts = os.read(self._fd, self._left)
                except BlockingIOError:
                    return False
                self._left = self._left - len(parts) if parts else 0
        return True
