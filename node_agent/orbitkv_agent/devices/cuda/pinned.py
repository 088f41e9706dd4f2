"""The agent's own pages: arenas mapped here and pinned, so that a GPU copies to and from them at full speed."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import resource
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from orbitkv.cuda import CudaError, Driver
from orbitkv_agent.store.arenas import Arena

logger = logging.getLogger(__name__)

LARGEST_ARENA: Final = 512 << 20
"""One arena is pinned by one call. Larger calls would keep the machine's other CUDA programs waiting."""


class PinnedArenas:
    """Pins arenas as the pool makes them, on the pool's own thread.

    Args:
        driver: the CUDA driver.
        context: returns a context of any GPU, 0 while there is none.

    Attributes:
        problem: why the last arena could not be pinned or unpinned, for people; "" when it was.
        addresses: int64, where each arena begins, by its id; 0 for one that is not pinned. Replaced as a whole, so that
            any thread may read it.
    """

    def __init__(self, driver: Driver, context: Callable[[], int]) -> None:
        self.problem = ""
        self.addresses = np.zeros(1, np.int64)
        self._driver = driver
        self._context = context
        self._mappings: dict[int, mmap.mmap] = {}

    def attach(self, arena: Arena) -> None:
        """Map an arena and pin it; sets its `address`.

        Raises:
            OSError: it cannot be mapped or pinned.
        """
        context = self._context()
        if not context:
            raise OSError(0, "no GPU is in use yet")
        mapping = mmap.mmap(arena.fd, arena.size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        started = time.monotonic()
        try:
            self._driver.set_current(context)
            self._driver.pin(address, arena.size)
        except CudaError as error:
            mapping.close()
            self.problem = f"memory for pages could not be pinned: {error} ({_may_lock()})"
            logger.error("%s", self.problem)
            raise OSError(errno.ENOMEM, str(error)) from None
        took = time.monotonic() - started
        self.problem = ""
        arena.address = address
        self._note(arena.id, address)
        self._mappings[arena.id] = mapping
        # While memory is pinned, other CUDA programs may wait for the driver: they get as much time as this took.
        time.sleep(min(took, 1.0))

    def detach(self, arena: Arena) -> bool:
        """Unpin and unmap an arena that holds no page, if it is attached; false when the driver does not let it go."""
        mapping = self._mappings.pop(arena.id, None)
        if mapping is None:
            return True
        try:
            self._driver.set_current(self._context())
            self._driver.unpin(arena.address)
        except CudaError as error:  # the driver may still have it: it stays mapped
            self.problem = (
                f"{arena.size >> 20} MiB of memory for pages could not be unpinned: {error}; the pool is smaller by as "
                "much until the agent starts again"
            )
            logger.error("%s", self.problem)
            self._mappings[arena.id] = mapping
            self._note(arena.id, 0)
            return False
        arena.address = 0
        self._note(arena.id, 0)
        mapping.close()
        return True

    def _note(self, number: int, address: int) -> None:
        addresses = np.zeros(max(self.addresses.size, number + 1), np.int64)
        addresses[: self.addresses.size] = self.addresses
        addresses[number] = address
        self.addresses = addresses


def _may_lock() -> str:
    """How much memory this process may lock, and where that is set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "its limit for locked memory, memlock, is unlimited"
    return f"its limit for locked memory, memlock, is {limit >> 10} KiB: a container has that of its runtime's service"
