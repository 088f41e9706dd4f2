"""The agent's arenas as this process maps them (host mode). Used by the transfer thread only."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import Arenas, MapArenas, PagePlaces, RetiredArenas, SyncArenas

from .connection import Connection
from .layout import Int64


class ArenaMap:
    """Arenas mapped so far, by id."""

    def __init__(self, connection: Connection, timeout_ms: float) -> None:
        self._connection = connection
        self._timeout_ms = timeout_ms
        self._mapped: dict[int, tuple[mmap.mmap, npt.NDArray[np.uint8]]] = {}

    def addresses(self, places: PagePlaces, page_bytes: int) -> Int64:
        """Return the (n,) addresses of pages in this process, mapping arenas that are new.

        Raises:
            OrbitKVError: INTERNAL, the agent named a place that does not exist; or what the call raises.
        """
        arenas = np.frombuffer(places.arenas, "<u4").astype(np.int64)
        offsets = np.frombuffer(places.offsets, "<u8").astype(np.int64)
        if arenas.size != offsets.size:
            raise OrbitKVError(ErrorKind.INTERNAL, "the agent sent places whose arenas and offsets do not match")
        named = np.unique(arenas)
        self._map([arena for arena in named.tolist() if arena not in self._mapped])
        addresses = np.empty(arenas.size, np.int64)
        for arena in named.tolist():
            if arena not in self._mapped:
                raise OrbitKVError(ErrorKind.INTERNAL, f"the agent named arena {arena}, which it does not have")
            view = self._mapped[arena][1]
            here = arenas == arena
            if int(offsets[here].max()) + page_bytes > view.size:
                raise OrbitKVError(ErrorKind.INTERNAL, f"the agent named a place beyond the end of arena {arena}")
            addresses[here] = offsets[here] + view.ctypes.data
        return addresses

    def sync(self) -> None:
        """Unmap what the agent retired, and tell it. No copy is running (the transfer thread runs them all)."""
        reply = self._connection.call(SyncArenas([]), self._timeout_ms)
        if isinstance(reply, RetiredArenas) and reply.arenas:
            for arena in reply.arenas:
                if arena in self._mapped:
                    self._unmap(arena)
            self._connection.send_only(SyncArenas(reply.arenas))

    def close(self) -> None:
        """Unmap everything."""
        for arena in list(self._mapped):
            self._unmap(arena)

    def _map(self, arenas: list[int]) -> None:
        if not arenas:
            return
        reply, descriptors = self._connection.call_for_descriptors(MapArenas(arenas), self._timeout_ms)
        try:
            if not isinstance(reply, Arenas) or len(reply.arenas) != len(descriptors):
                raise OrbitKVError(ErrorKind.INTERNAL, "the agent sent arenas without their descriptors")
            for (arena, size), fd in zip(reply.arenas, descriptors, strict=True):
                mapping = mmap.mmap(fd, size)
                self._mapped[arena] = (mapping, np.frombuffer(mapping, np.uint8))
        finally:
            for fd in descriptors:
                os.close(fd)

    def _unmap(self, arena: int) -> None:
        mapping, view = self._mapped.pop(arena)
        del view
        mapping.close()
