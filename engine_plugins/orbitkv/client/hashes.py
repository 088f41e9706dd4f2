"""Hashes of a sequence of pages, as the engine names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import GroupHashes

MAX_HASH_BYTES = 32


class BlockHashes(Sequence[bytes]):
    """Engine hashes of consecutive pages of one KV group, stored as one piece. Slices share the bytes.

    Args:
        page_hashes: hashes of equal length (1 to 32 bytes), in page order.
        group: the engine's KV cache group.

    Raises:
        OrbitKVError: INVALID, lengths differ or are out of range.
    """

    __slots__ = ("_view", "group", "hash_bytes")

    def __init__(self, page_hashes: Sequence[bytes], group: int = 0) -> None:
        blob = b"".join(page_hashes)
        self.group = group
        self.hash_bytes = len(page_hashes[0]) if page_hashes else 1
        if page_hashes and not 0 < self.hash_bytes <= MAX_HASH_BYTES:
            raise OrbitKVError(
                ErrorKind.INVALID, f"page_hashes: a hash has 1 to {MAX_HASH_BYTES} bytes, not {self.hash_bytes}"
            )
        if len(blob) != self.hash_bytes * len(page_hashes) or any(len(h) != self.hash_bytes for h in page_hashes):
            raise OrbitKVError(ErrorKind.INVALID, "page_hashes: all hashes must have the same length")
        self._view = memoryview(blob)

    @classmethod
    def from_hex(cls, page_hashes: Sequence[str], group: int = 0) -> BlockHashes:
        """As the constructor, from hexadecimal strings.

        Raises:
            OrbitKVError: INVALID, a string is not hexadecimal.
        """
        try:
            return cls([bytes.fromhex(h) for h in page_hashes], group)
        except ValueError as error:
            raise OrbitKVError(ErrorKind.INVALID, f"page_hashes: not hexadecimal ({error})") from None

    @property
    def blob(self) -> bytes:
        """All hashes one after another."""
        return bytes(self._view)

    def wire(self) -> GroupHashes:
        """The hashes as a part of a message."""
        return GroupHashes(self.group, self.hash_bytes, bytes(self._view))

    def __len__(self) -> int:
        return len(self._view) // self.hash_bytes

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> BlockHashes: ...
    def __getitem__(self, index: int | slice) -> bytes | BlockHashes:
        size = self.hash_bytes
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise OrbitKVError(ErrorKind.INVALID, "a slice of BlockHashes is of consecutive pages")
            part = object.__new__(BlockHashes)
            part.group, part.hash_bytes = self.group, size
            part._view = self._view[start * size : max(start, stop) * size]
            return part
        count = len(self)
        if not -count <= index < count:
            raise IndexError(index)
        index %= count
        return bytes(self._view[index * size : (index + 1) * size])

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, BlockHashes)
            and self.group == other.group
            and self.hash_bytes == other.hash_bytes
            and self._view == other._view
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content, never a key

    def __repr__(self) -> str:
        return f"BlockHashes({len(self)} pages of group {self.group})"
