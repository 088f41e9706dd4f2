"""Arenas: the pieces of shared memory that hold pages, and the pool that makes and drops them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from orbitkv.scheduling import LONG_SLICE_S, use_slices
from orbitkv_agent.store.extents import UNIT_BYTES, ExtentAllocator
from orbitkv_agent.store.memory import lazy_zeros

_log = logging.getLogger(__name__)

MIB = 1 << 20
_MIN_ARENA = 64 * MIB
_MAX_ARENA = 1024 * MIB
_ARENA_GRAIN = 2 * MIB
_STEP = 64 * MIB  # faulted in or given back by one system call
_RETRY_SECONDS = 10.0  # after the kernel had no memory for an arena
_RETIRED_KEPT = 1 << 16

_MADV_POPULATE_WRITE = 23
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Arena:
    """One memfd of `size` bytes that belongs to one cache namespace for its whole life.

    It is sealed against shrinking and growing, so whoever maps it cannot be made to fault by whoever holds it. It takes
    pages once it is `ready` and neither `draining` nor `exposed`, and is `fresh` until it had one. `owners[unit]` is
    the entry whose page starts at that unit, 0 for none. `exposed`: somebody may hold it who may not use the namespace
    any more; what was passed cannot be taken back, so it is emptied and dropped.
    """

    def __init__(self, arena_id: int, namespace: str, size: int) -> None:
        self.id = arena_id
        self.namespace = namespace
        self.size = size
        self.allocator = ExtentAllocator(size // UNIT_BYTES)
        self.owners: npt.NDArray[np.int32] = lazy_zeros(self.allocator.capacity, np.int32)
        self.ready = False
        self.draining = False
        self.exposed = False
        self.fresh = True
        self.address = 0
        """Where it is mapped in this process, 0 when it is not."""
        self.fd = os.memfd_create(f"orbitkv-arena-{arena_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self.fd)
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes taken by pages, padding included."""
        return self.allocator.used * UNIT_BYTES

    @property
    def allocatable(self) -> bool:
        """Whether new pages may be placed here."""
        return self.ready and not self.draining and not self.exposed


class _Worker:
    """A thread that does what takes the kernel long, in order: faulting memory in and giving it back."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stopping = threading.Event()

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="orbitkv-arenas", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        self.stopping.set()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        use_slices(LONG_SLICE_S)
        while (job := self._jobs.get()) is not None:
            job()


class ArenaMemory(Protocol):
    """What a device does with arenas: it maps and pins them. Called on the pool's worker thread."""

    def attach(self, arena: Arena) -> None:
        """Make an arena usable for copies; sets its `address`. Raises OSError."""

    def detach(self, arena: Arena) -> bool:
        """Undo `attach`, where that was done; false when it cannot be undone, and the memory stays taken."""


class ArenaPool:
    """The arenas of all cache namespaces, within `capacity_bytes`.

    Arenas are made when a namespace first needs one. With `prefault` a worker thread faults them in, which charges the
    memory to this process, and they are ready when `poll` says so; `notify` is called in that thread when there is
    something to poll. Without it they are ready at once and cost memory as they are touched. A dropped arena's memory
    goes back to the kernel, also where a client still maps it, and counts against the capacity until that is done.

    Everything but the worker's system calls happens in the owner's thread. `threaded=False` does these inline, too.

    With `memory` every arena is attached to it before it is ready, on the worker's thread.
    """

    def __init__(
        self,
        capacity_bytes: int,
        arena_bytes: int | None = None,
        prefault: bool = True,
        *,
        notify: Callable[[], None] | None = None,
        threaded: bool = True,
        memory: ArenaMemory | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.arena_bytes = default_arena_bytes(capacity_bytes) if arena_bytes is None else arena_bytes
        if self.arena_bytes % UNIT_BYTES or not 0 < self.arena_bytes <= capacity_bytes:
            raise ValueError(
                f"An arena of {self.arena_bytes} bytes does not fit a pool of {capacity_bytes} bytes: it must be a"
                f" multiple of {UNIT_BYTES} and no larger than the pool."
            )
        self.prefault = prefault or memory is not None
        self.ahead = memory is not None
        """Have everything made before it is needed: pinning is slow, and a burst of saves must not wait for it."""
        self._memory = memory
        self.committed_bytes = 0
        self.discarding = 0
        self.failures = 0
        self._notify = notify
        self._worker = _Worker() if threaded else None
        self._finished: queue.SimpleQueue[tuple[Arena, OSError | None]] = queue.SimpleQueue()
        self._arenas: dict[int, Arena] = {}
        self._by_namespace: dict[str, list[Arena]] = {}
        self._held_bytes: dict[str, int] = {}
        self._preparing: dict[str, int] = {}
        self._next_id = 1
        self._retired: deque[int] = deque(maxlen=_RETIRED_KEPT)
        self._retired_count = 0
        self._not_before = 0.0

    def __iter__(self) -> Iterator[Arena]:
        return iter(self._arenas.values())

    def get(self, arena_id: int) -> Arena | None:
        """The arena, or None when it was dropped."""
        return self._arenas.get(arena_id)

    def of(self, namespace: str) -> list[Arena]:
        """The arenas of a namespace, oldest first, also those not ready yet."""
        return self._by_namespace.get(namespace, [])

    def is_preparing(self, namespace: str) -> bool:
        """Whether an arena of this namespace is being faulted in."""
        return self._preparing.get(namespace, 0) > 0

    def held_bytes(self, namespace: str) -> int:
        """Size of all arenas of a namespace."""
        return self._held_bytes.get(namespace, 0)

    @property
    def room_bytes(self) -> int:
        """Size of the arena that could be made now; 0 when the capacity is given out or memory ran short lately."""
        if self._not_before and time.monotonic() < self._not_before:
            return 0
        remaining = (self.capacity_bytes - self.committed_bytes) // UNIT_BYTES * UNIT_BYTES
        if remaining >= self.arena_bytes:
            return self.arena_bytes
        # The end of the pool makes a smaller arena, unless that were too small to be worth a mapping.
        return remaining if remaining >= self.arena_bytes // 4 else 0

    def request(self, namespace: str) -> Arena | None:
        """Make another arena for `namespace`; None when the capacity does not allow it or the kernel refuses."""
        size = self.room_bytes
        if size == 0:
            return None
        try:
            arena = Arena(self._next_id, namespace, size)
        except OSError as error:
            self._failed(error, size)
            return None
        self._next_id += 1
        self.committed_bytes += size
        self._arenas[arena.id] = arena
        self._by_namespace.setdefault(namespace, []).append(arena)
        self._held_bytes[namespace] = self.held_bytes(namespace) + size
        if not self.prefault:
            arena.ready = True
            return arena
        self._preparing[namespace] = self._preparing.get(namespace, 0) + 1
        if self._worker is None:
            self._populate(arena)
            self.poll()
        else:
            self._worker.submit(lambda: self._populate(arena))
        return arena if arena.id in self._arenas else None

    def drop(self, arena: Arena) -> None:
        """Give an empty arena's memory back. Its id is logged as retired and never used again."""
        if arena.allocator.used:
            raise ValueError(f"Arena {arena.id} still holds {arena.used_bytes} bytes of pages.")
        self._forget(arena)
        self.discarding += 1
        if self._worker is None:
            self._discard(arena)
            self.poll()
        else:
            self._worker.submit(lambda: self._discard(arena))

    def drop_empty(self, *, but_of: str | None) -> None:
        """Drop arenas without pages, except those of one namespace, until another arena could be made.

        Fresh ones stay: whoever asked for them is about to use them; but for those that were only made `ahead`.
        """
        if self.room_bytes or self.discarding or self._not_before > time.monotonic():
            return
        for arena in [a for a in self if a.namespace != but_of and a.allocator.used == 0]:
            if arena.fresh and not self._is_spare(arena):
                continue
            self.drop(arena)
            if self.committed_bytes - arena.size + self.arena_bytes <= self.capacity_bytes:
                return

    def _is_spare(self, arena: Arena) -> bool:
        return self.ahead and arena.ready and sum(a.allocator.used == 0 for a in self.of(arena.namespace)) > 1

    def poll(self) -> bool:
        """Take note of what the worker finished; returns whether there was anything."""
        changed = False
        while True:
            try:
                arena, error = self._finished.get_nowait()
            except queue.Empty:
                return changed
            changed = True
            if arena.id not in self._arenas:  # discarded
                os.close(arena.fd)
                if error is None:  # otherwise its memory stays taken
                    self.committed_bytes -= arena.size
                self.discarding -= 1
                continue
            self._preparing[arena.namespace] -= 1
            if error is None:
                arena.ready = True
            else:
                self._failed(error, arena.size)
                self.drop(arena)

    def wait(self, timeout: float) -> bool:
        """Block until the worker finishes something, then `poll`. For start-up and tests, not for the owner's loop."""
        try:
            self._finished.put(self._finished.get(timeout=timeout))
        except queue.Empty:
            return False
        return self.poll()

    @property
    def retired_sequence(self) -> int:
        """How many arenas were dropped so far."""
        return self._retired_count

    def retired_since(self, sequence: int) -> list[int]:
        """Ids of the arenas dropped after `retired_sequence` was `sequence`, in order.

        Raises LookupError if that is so long ago that the log does not reach back.
        """
        missed = self._retired_count - sequence
        if missed > len(self._retired):
            raise LookupError(f"The log of dropped arenas starts after {sequence}: compare with the arenas that exist.")
        return list(islice(self._retired, len(self._retired) - missed, None))

    def close(self) -> None:
        """Stop the worker and close all arenas, whatever they hold."""
        if self._worker is not None:
            self._worker.close()
        while not self._finished.empty():
            arena, _ = self._finished.get()
            if arena.id not in self._arenas:
                os.close(arena.fd)
        for arena in self:
            if self._memory is not None:
                self._memory.detach(arena)
            os.close(arena.fd)
        self._arenas.clear()
        self._by_namespace.clear()

    def _forget(self, arena: Arena) -> None:
        del self._arenas[arena.id]
        siblings = self._by_namespace[arena.namespace]
        siblings.remove(arena)
        self._held_bytes[arena.namespace] -= arena.size
        if not siblings:
            del self._by_namespace[arena.namespace], self._held_bytes[arena.namespace]
            self._preparing.pop(arena.namespace, None)
        self._retired.append(arena.id)
        self._retired_count += 1

    def _failed(self, error: OSError, size: int) -> None:
        self.failures += 1
        self._not_before = time.monotonic() + _RETRY_SECONDS
        _log.warning(
            "The kernel refused %d MiB for cache pages (%s). The cache goes on with what it has and asks again in %d s;"
            " raise the memory limit or lower the pool's capacity.",
            size // MIB,
            os.strerror(error.errno or 0),
            int(_RETRY_SECONDS),
        )

    # ---- in the worker's thread, on an arena that the owner does not touch meanwhile

    def _populate(self, arena: Arena) -> None:
        error: OSError | None = None
        try:
            for offset in range(0, arena.size, _STEP):
                if self._worker is not None and self._worker.stopping.is_set():
                    break
                _fault_in(arena.fd, offset, min(_STEP, arena.size - offset))
            else:
                if self._memory is not None:
                    self._memory.attach(arena)
        except OSError as failure:
            error = failure
        self._finish(arena, error)

    def _discard(self, arena: Arena) -> None:
        if self._memory is not None and not self._memory.detach(arena):
            self._finish(arena, OSError(errno.EBUSY, os.strerror(errno.EBUSY)))
            return
        # Punching holes frees the memory also where a client still maps the arena, and in steps that no one waits for.
        for offset in range(0, arena.size, _STEP):
            length = min(_STEP, arena.size - offset)
            if _libc.fallocate(arena.fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, length):
                _log.warning("Arena %d: giving memory back failed: %s", arena.id, os.strerror(ctypes.get_errno()))
                break
        self._finish(arena, None)

    def _finish(self, arena: Arena, error: OSError | None) -> None:
        self._finished.put((arena, error))
        if self._notify is not None:
            self._notify()


def default_arena_bytes(capacity_bytes: int) -> int:
    """A sixteenth of the pool, within 64 MiB and 1 GiB, in whole 2 MiB; never more than the pool."""
    size = min(max(capacity_bytes // 16, _MIN_ARENA), _MAX_ARENA) // _ARENA_GRAIN * _ARENA_GRAIN
    return min(size, capacity_bytes // UNIT_BYTES * UNIT_BYTES)


def _fault_in(fd: int, offset: int, length: int) -> None:
    """Allocate and zero this part of a memfd, charged to this process. Raises OSError."""
    with mmap.mmap(fd, length, offset=offset) as memory:
        first = ctypes.c_char.from_buffer(memory)
        try:
            # ctypes lets other threads run meanwhile; mmap.madvise would not.
            while (failure := _madvise(ctypes.addressof(first), length)) in (errno.EINTR, errno.EAGAIN):
                pass
        finally:
            del first
    if failure == errno.EINVAL:  # before Linux 5.14: allocated now, zeroed by the kernel at the first touch
        os.posix_fallocate(fd, offset, length)
    elif failure:
        raise OSError(failure, os.strerror(failure))


def _madvise(address: int, length: int) -> int:
    return ctypes.get_errno() if _libc.madvise(address, length, _MADV_POPULATE_WRITE) else 0
