"""Frames on the Unix socket: an 8-byte header (body length, sequence number) and a msgpack body.

A request with sequence number 0 wants no reply. A reply carries its request's number. Descriptors travel with the first
byte of the frame that they belong to.
"""

from __future__ import annotations

import array
import socket
import struct
from typing import Any, Final

import msgspec

from orbitkv.protocol.messages import Reply, Request

HEADER: Final = struct.Struct("<II")
MAX_FRAME_BYTES: Final = 8 << 20
"""Largest body after the session is open: a query of a quarter of a million hashes fits."""
MAX_HELLO_BYTES: Final = 64 << 10
"""Largest body before."""
MAX_DESCRIPTORS: Final = 250
"""Descriptors in one frame (the kernel's limit is 253)."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)

_HEADER_BYTES: Final = HEADER.size
_unpack_header: Final = HEADER.unpack_from
_pack_header: Final = HEADER.pack
_encode: Final = msgspec.msgpack.Encoder().encode
request_decoder: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
reply_decoder: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


class FrameError(Exception):
    """The peer sent something that is no frame; the connection cannot be used any more."""


def encode(message: Request | Reply, sequence: int) -> bytes:
    """Return `message` as one frame."""
    body = _encode(message)
    return _pack_header(len(body), sequence) + body


def send_with_descriptors(sock: socket.socket, frame: bytes | bytearray, descriptors: list[int]) -> int:
    """Send a frame's first bytes and descriptors with them; return how many bytes went."""
    if not descriptors:
        return sock.send(frame)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    return sock.sendmsg([frame], rights)


def receive_with_descriptors(sock: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive up to `size` bytes and the descriptors that came with them, closed on exec."""
    data, ancillary, _, _ = sock.recvmsg(size, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            descriptors.extend(fds)
    return data, descriptors


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one incomplete frame."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[int, Any]]:
        """Return the (sequence number, body) of every frame completed by `data`; a body may be a view of it.

        Raises:
            FrameError: a frame is larger than `max_bytes`.
        """
        buffer = self._buffer
        size = len(data)
        if not buffer and size >= _HEADER_BYTES:
            length, sequence = _unpack_header(data)
            if length == size - _HEADER_BYTES <= self.max_bytes:  # the usual case: exactly one frame
                return [(sequence, memoryview(data)[_HEADER_BYTES:])]
        buffer += data
        frames: list[tuple[int, Any]] = []
        start = 0
        with memoryview(buffer) as view:
            while len(buffer) - start >= HEADER.size:
                length, sequence = HEADER.unpack_from(buffer, start)
                if length > self.max_bytes:
                    raise FrameError(f"a frame of {length} bytes; at most {self.max_bytes} are accepted here")
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                frames.append((sequence, bytes(view[start + HEADER.size : end])))
                start = end
        del buffer[:start]
        return frames

    @property
    def pending_bytes(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._buffer)
