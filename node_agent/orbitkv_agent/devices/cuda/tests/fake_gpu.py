"""A CUDA driver without a GPU: device memory is memory of this process, and copies run when the test lets them.

It is stricter than the real one: a copy that leaves its allocation, or the piece of host memory that was pinned, fails.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from orbitkv.cuda import HANDLE_BYTES, CudaError, GpuInfo

UUIDS = ("GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002")


class FakeGpu:
    """See the module; the interface is `orbitkv.cuda.Driver`.

    Attributes:
        batches, words, busy: as a driver's.
        contexts: number of contexts made, by GPU.
        mapped: how often each allocation is mapped by an importer.
        pinned: size of each pinned piece of host memory, by address.
        calls: number of pieces of each call of `copy`, in order.
        threads: the name of the thread that made each of these calls.
        refuse: code with which the next copies fail, 0 for none.
        broken: waiting fails, as on a GPU that is lost.
        sleepers: threads that wait for an event now.
        compute_mode: of all GPUs; in any but "default" no second process gets a context.
        name: of all GPUs.
        pins: whether host memory can be pinned.
        told: for each word that was written, how many calls of `copy` had been carried out by then.
        strays: pieces and words for host memory that was not pinned, or no longer when their turn came.
    """

    def __init__(self, gpus: int = 1) -> None:
        self.batches = True
        self.words = True
        self.busy = False
        self.contexts: Counter[int] = Counter()
        self.mapped: Counter[int] = Counter()
        self.of_namesakes: set[int] = set()  # memory of processes with this one's number, in containers of their own
        self.pinned: dict[int, int] = {}
        self.calls: list[int] = []
        self.threads: list[str] = []
        self.refuse = 0
        self.broken = False
        self.sleepers = 0
        self.compute_mode = "default"
        self.name = "a fake"
        self.pins = True
        self.told: list[int] = []
        self.strays = 0
        self.memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._count = gpus
        self._current = threading.local()
        self._next = 1
        # Invariant: streams and events change under this lock only; it is never held while a test waits.
        self._changed = threading.Condition()
        self._held = False
        self._unobserved = False
        self._carried_out = 0
        self._streams: dict[int, deque[Any]] = {}
        self._done: set[int] = set()

    # --- what tests do

    def allocate(self, size: int) -> npt.NDArray[np.uint8]:
        """Device memory with random bytes."""
        piece = np.random.default_rng(self._next).integers(0, 256, min(size, (1 << 20) + 61), np.uint8)
        array = np.resize(piece, size)  # random enough, and quick
        self._next += 1
        self.memory[array.ctypes.data] = array
        return array

    def hold(self) -> None:
        """From now on copies are taken and not made."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Make the copies that were taken, and go on."""
        with self._changed:
            self._held = False
            for stream in self._streams:
                self._run(stream)
            self._changed.notify_all()

    def step(self, copies: int) -> None:
        """Make so many of the copies that are held, with what was enqueued on their streams right behind them."""
        with self._changed:
            end = self._carried_out + copies
            for stream in self._streams.values():
                while stream and (self._carried_out < end or not getattr(stream[0], "copies", False)):
                    self._do(stream.popleft())
            self._changed.notify_all()

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Meanwhile whoever waits for an event sleeps on, though the GPU has come to it."""
        with self._changed:
            self._unobserved = True
        yield
        with self._changed:
            self._unobserved = False
            self._changed.notify_all()

    def fill(self, stream: int, target: npt.NDArray[np.uint8], value: int) -> None:
        """Enqueue a write on a stream, as an engine's kernel would."""
        with self._changed:
            self._streams[stream].append(lambda: target.fill(value))
            self._run(stream)

    def _run(self, stream: int) -> None:
        queue = self._streams[stream]
        while queue and not self._held:
            self._do(queue.popleft())
        self._changed.notify_all()

    def _do(self, work: Any) -> None:
        if isinstance(work, int):
            self._done.add(work)
        else:
            work()

    # --- the driver

    def gpus(self) -> list[GpuInfo]:
        return [GpuInfo(i, UUIDS[i], self.name, 1 << 37, self.compute_mode) for i in range(self._count)]

    def retain_context(self, ordinal: int) -> int:
        if self.compute_mode != "default":
            raise CudaError("cuDevicePrimaryCtxRetain", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "busy")
        self.contexts[ordinal] += 1
        return 1000 + ordinal

    def release_context(self, ordinal: int) -> None:
        self.contexts[ordinal] -= 1

    def set_current(self, context: int) -> None:
        assert context, "no context"
        self._current.context = context

    def current_context(self) -> int:
        return getattr(self._current, "context", 0)

    def current_uuid(self) -> str:
        return UUIDS[self.current_context() - 1000]

    def memory_info(self) -> tuple[int, int]:
        return 1 << 36, 1 << 37

    def allocation_of(self, address: int) -> tuple[int, int]:
        for base, array in self.memory.items():
            if base <= address < base + array.nbytes:
                return base, array.nbytes
        raise CudaError("cuMemGetAddressRange", 1, "CUDA_ERROR_INVALID_VALUE", "unknown")

    def is_exportable(self, address: int) -> bool:
        return address in self.memory

    def export_memory(self, address: int) -> bytes:
        return address.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")

    def import_memory(self, handle: bytes) -> int:
        self._check_context()
        address = int.from_bytes(handle[:8], "little")
        if address in self.of_namesakes:
            raise CudaError("cuIpcOpenMemHandle_v2", 201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context")
        if address not in self.memory:
            raise CudaError("cuIpcOpenMemHandle_v2", 1, "CUDA_ERROR_INVALID_VALUE", "no such allocation")
        self.mapped[address] += 1
        return address

    def close_memory(self, address: int) -> None:
        self._check_context()
        self.mapped[address] -= 1

    def pin(self, address: int, size: int) -> None:
        self._check_context()
        if not self.pins:
            raise CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        self._check_context()
        del self.pinned[address]

    def make_stream(self) -> int:
        with self._changed:
            self._next += 1
            self._streams[self._next] = deque()
            return self._next

    def drop_stream(self, stream: int) -> None:
        with self._changed:
            assert not self._streams.pop(stream), "a stream was dropped with work on it"

    def make_event(self) -> int:
        self._next += 1
        return self._next

    def drop_event(self, event: int) -> None:
        self._done.discard(event)

    def record(self, event: int, stream: int) -> None:
        with self._changed:
            self._done.discard(event)
            self._streams[stream].append(event)
            self._run(stream)

    def reached(self, event: int) -> bool:
        return event in self._done

    def wait(self, event: int) -> None:
        with self._changed:
            self.sleepers += 1
            try:
                while event not in self._done or self._unobserved:
                    if self.broken:
                        raise CudaError("cuEventSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "the GPU is lost")
                    self._changed.wait(0.05)
            finally:
                self.sleepers -= 1

    def copy(
        self,
        destinations: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
        *,
        to_device: bool,
        soon: bool = False,
    ) -> None:
        self._check_context()
        if self.refuse:
            raise CudaError("cuMemcpyBatchAsync", self.refuse, "CUDA_ERROR_INVALID_VALUE", "refused")
        pieces = list(zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        for destination, source, size in pieces:
            device, host = (destination, source) if to_device else (source, destination)
            base, length = self.allocation_of(device)
            assert device + size <= base + length, "a copy leaves its allocation"
            assert self._is_pinned(host, size), "a copy leaves the host memory that was pinned"

        def work() -> None:
            for destination, source, size in pieces:
                if self._is_pinned(source if to_device else destination, size):
                    ctypes.memmove(destination, source, size)
            self._carried_out += 1

        work.copies = True  # type: ignore[attr-defined]
        with self._changed:
            self.calls.append(len(pieces))
            self.threads.append(threading.current_thread().name)
            self._streams[stream].append(work)
            self._run(stream)

    def write_word(self, stream: int, address: int, value: int) -> None:
        self._check_context()
        assert self._is_pinned(address, 8), "a word lies outside the host memory that was pinned"

        def work() -> None:
            self.told.append(self._carried_out)
            if self._is_pinned(address, 8):
                ctypes.c_uint64.from_address(address).value = value

        with self._changed:
            self._streams[stream].append(work)
            self._run(stream)

    def read(self, destination: int, source: int, size: int) -> None:
        self._check_context()
        ctypes.memmove(destination, source, size)

    def write(self, destination: int, source: int, size: int) -> None:
        self._check_context()
        ctypes.memmove(destination, source, size)

    def _is_pinned(self, address: int, size: int) -> bool:
        if any(at <= address and address + size <= at + most for at, most in self.pinned.items()):
            return True
        self.strays += 1
        return False

    def _check_context(self) -> None:
        if not self.current_context():
            raise CudaError("a call", 201, "CUDA_ERROR_INVALID_CONTEXT", "no context is current in this thread")
