"""A shortcut past the socket: memory through which a request and its reply pass without a system call.

It holds one frame each way, and only serves while both sides look: the agent says in the memory that it does, and a
client that looked for its reply in vain sends the same frame, under the same number, by the socket. The agent serves a
number once, and answers where the client waits. It takes a request only after all that its client had sent by the
socket before, so everything happens in the order of one stream.

Both sides write to the memory, so the agent copies a request before it looks at it and keeps its reply; a client that
writes nonsense there harms itself. The word that announces a frame is written after the frame. x86 keeps plain stores
in order, and plain loads; on other machines (ARM does not) clients leave the shortcut alone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
from typing import Final

from orbitkv.protocol.framing import HEADER

WATCHED: Final = 0
"""Word of the agent: not 0 while it looks for requests."""
BEFORE: Final = 1
"""Word of the client: how many bytes it had sent by the socket before its request."""
REQUEST: Final = 2
"""Word of the client: the number of the request that is there."""
REPLY: Final = 3
"""Word of the agent: the number of the request that is answered. An empty frame: the answer is on the socket."""

_WORDS_BYTES: Final = 64
REGION_BYTES: Final = 16 << 10
MOST_BYTES: Final = REGION_BYTES // 2 - _WORDS_BYTES
"""Largest frame, with its header."""
_FRAME_AT: Final = {REQUEST: _WORDS_BYTES, REPLY: REGION_BYTES // 2 + _WORDS_BYTES}
_unpack_header: Final = HEADER.unpack_from
_HEADER_BYTES: Final = HEADER.size

STORES_IN_ORDER: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether others see this machine's stores in the order in which a thread makes them."""


class Shortcut:
    """One side's mapping of the memory behind a descriptor, which may be closed then.

    Attributes:
        words: indexed by WATCHED, BEFORE, REQUEST and REPLY.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, REGION_BYTES)
        self._bytes = memoryview(self._map)
        self.words = self._bytes[:_WORDS_BYTES].cast("Q")

    def put(self, word: int, sequence: int, frame: bytes) -> None:
        """Write a frame of at most MOST_BYTES as REQUEST or REPLY, then its number."""
        start = _FRAME_AT[word]
        self._bytes[start : start + len(frame)] = frame
        self.words[word] = sequence

    def body(self, word: int) -> bytes:
        """Copy the body of the frame that is there as REQUEST or REPLY; empty if its length cannot be right."""
        start = _FRAME_AT[word]
        length, _ = _unpack_header(self._bytes, start)
        start += _HEADER_BYTES
        return bytes(self._bytes[start : start + length]) if length <= MOST_BYTES - _HEADER_BYTES else b""

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self._bytes.release()
        self._map.close()


def shortcut_memory() -> int:
    """Make the memory of one shortcut and return its descriptor. Nobody can make it smaller."""
    fd = os.memfd_create("orbitkv-shortcut", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, REGION_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd
