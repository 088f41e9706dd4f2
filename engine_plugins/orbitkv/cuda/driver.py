"""The functions of the CUDA driver (libcuda) that OrbitKV uses, typed.

They are called through ctypes: the library comes with the driver, its interface is stable across CUDA versions, and the
calls take numpy arrays as they are. They let other Python threads run meanwhile, but for those that hand work to a GPU
while nothing can make them wait: these take microseconds, and a thread that has to get the interpreter back after each
of them waits for others much longer than that. No kernel is ever launched.

Addresses, streams, events and contexts are plain integers. Every function acts on the context that is current in the
calling thread.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

HANDLE_BYTES: Final = 64
"""Length of a memory handle that another process can open."""

_NOT_READY: Final = 600
_BLOCKING_SYNC: Final = 4  # of a context: threads that wait sleep
_STREAM_NON_BLOCKING: Final = 1
_EVENT_BLOCKING_SYNC_WITHOUT_TIMING: Final = 1 | 2
_HOST_REGISTER_PORTABLE: Final = 1
_IPC_LAZY_PEER_ACCESS: Final = 1
_SOURCE_ORDER_STREAM: Final = 1
_ATTRIBUTE_LEGACY_IPC: Final = 10
_ATTRIBUTE_COMPUTE_MODE: Final = 20
_ATTRIBUTES_OF_WORDS: Final = (91, 122)  # host addresses serve as they are; streams write 64-bit words
_COMPUTE_MODES: Final = {0: "default", 2: "prohibited", 3: "exclusive-process"}


class CudaError(Exception):
    """A call of the driver failed. `code` is the driver's, `name` its name for it."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({text})")
        self.call = call
        self.code = code
        self.name = name


class CudaUnavailableError(Exception):
    """There is no CUDA driver, or no GPU that this process may use; the message says which."""


@dataclass(frozen=True)
class GpuInfo:
    """A GPU that this process sees. `uuid` is "GPU-…" as `nvidia-smi -L` prints it; memory in bytes."""

    ordinal: int
    uuid: str
    name: str
    total_bytes: int
    compute_mode: str


class Driver(Protocol):
    """What is used of the driver. All functions raise CudaError."""

    batches: bool
    """Whether a set of copies can be submitted by one call (drivers since CUDA 12.8)."""
    words: bool
    """Whether a stream can write a word to host memory when it comes to it."""

    @property
    def busy(self) -> bool:
        """Whether a call runs that others may have to wait for: memory is being pinned, mapped, read, or given back."""

    def gpus(self) -> list[GpuInfo]:
        """The GPUs that this process sees."""

    def retain_context(self, ordinal: int) -> int:
        """Make the device's primary context, or share it; its threads sleep while they wait."""

    def release_context(self, ordinal: int) -> None:
        """Undo `retain_context`."""

    def set_current(self, context: int) -> None:
        """Make a context current in this thread."""

    def current_context(self) -> int:
        """The context that is current in this thread, 0 when there is none."""

    def current_uuid(self) -> str:
        """UUID of the GPU that is current in this thread."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current GPU."""

    def allocation_of(self, address: int) -> tuple[int, int]:
        """(address, size) of the allocation that an address belongs to."""

    def is_exportable(self, address: int) -> bool:
        """Whether memory handles exist for the allocation at `address` (not for virtual-memory allocations)."""

    def export_memory(self, address: int) -> bytes:
        """A handle of `HANDLE_BYTES` with which another process can open the allocation at `address`."""

    def import_memory(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here."""

    def close_memory(self, address: int) -> None:
        """Undo `import_memory`. No copy may be running on it."""

    def pin(self, address: int, size: int) -> None:
        """Lock host memory and make it known to all GPUs."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def make_stream(self) -> int:
        """A stream that does not wait for the default stream."""

    def drop_stream(self, stream: int) -> None:
        """Forget a stream."""

    def make_event(self) -> int:
        """An event; threads that wait for it sleep."""

    def drop_event(self, event: int) -> None:
        """Forget an event."""

    def record(self, event: int, stream: int) -> None:
        """Let `event` stand for everything that `stream` was given so far."""

    def reached(self, event: int) -> bool:
        """Whether what the event stands for is done."""

    def wait(self, event: int) -> None:
        """Sleep until what the event stands for is done."""

    def copy(
        self,
        destinations: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: int,
        *,
        to_device: bool,
        soon: bool = False,
    ) -> None:
        """Submit copies between pinned host memory and device memory, (n,) each, in no particular order.

        `soon`: the GPU has nothing else to do. It gets the first one by itself, and begins while the others follow.
        """

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Have a 64-bit word of pinned host memory written once all that was enqueued on the stream before is done."""

    def read(self, destination: int, source: int, size: int) -> None:
        """Copy device memory to host memory and wait for it."""

    def write(self, destination: int, source: int, size: int) -> None:
        """Copy host memory to device memory; done when a `read` after it is."""


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("destination", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_POINTER = ctypes.c_void_p
_U64 = ctypes.c_uint64
_SIZE = ctypes.c_size_t
_UINT = ctypes.c_uint
_INT = ctypes.c_int

_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (_UINT,),
    "cuGetErrorName": (_INT, _POINTER),
    "cuGetErrorString": (_INT, _POINTER),
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetName": (_POINTER, _INT, _INT),
    "cuDeviceGetUuid_v2": (_POINTER, _INT),
    "cuDeviceTotalMem_v2": (_POINTER, _INT),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxSetFlags_v2": (_INT, _UINT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxGetDevice": (_POINTER,),
    "cuMemGetInfo_v2": (_POINTER, _POINTER),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _U64),
    "cuPointerGetAttribute": (_POINTER, _INT, _U64),
    "cuIpcGetMemHandle": (_POINTER, _U64),
    "cuIpcOpenMemHandle_v2": (_POINTER, _Handle, _UINT),
    "cuIpcCloseMemHandle": (_U64,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _UINT),
    "cuMemHostUnregister": (_POINTER,),
    "cuStreamCreate": (_POINTER, _UINT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventDestroy_v2": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventSynchronize": (_POINTER,),
    "cuMemcpyHtoDAsync_v2": (_U64, _POINTER, _SIZE, _POINTER),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _U64, _SIZE, _POINTER),
    "cuMemcpyDtoH_v2": (_POINTER, _U64, _SIZE),
    "cuMemcpyHtoD_v2": (_U64, _POINTER, _SIZE),
}
_OPTIONAL: Final[dict[str, tuple[Any, ...]]] = {
    "cuMemcpyBatchAsync_v2": (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER),
    # Before CUDA 13 it also told which of the copies failed.
    "cuMemcpyBatchAsync": (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER),
}
_WRITE_WORD: Final = "cuStreamWriteValue64_v2"

FUNCTION_NAMES: Final = tuple(_FUNCTIONS)
"""What a library has to have to be taken for the driver's."""


class LibCuda:
    """The driver of this machine (`Driver`).

    Raises:
        CudaUnavailableError: there is none, or it cannot be initialised.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._quick = ctypes.PyDLL("libcuda.so.1")  # calls keep the interpreter
        except OSError as error:
            raise CudaUnavailableError(f"there is no CUDA driver here ({error})") from None
        try:
            for name, arguments in _FUNCTIONS.items():
                self._declare(name, arguments)
        except AttributeError as error:
            raise CudaUnavailableError(f"the CUDA driver is too old: {error}") from None
        self._long: dict[object, None] = {}  # calls that run and may keep others waiting
        self._batch = ""
        self._tells_failed = False
        for name, arguments in _OPTIONAL.items():
            if not self._batch and hasattr(self._library, name):
                self._declare(name, arguments)
                self._batch = name
                self._tells_failed = len(arguments) == 9
        self.batches = bool(self._batch)
        try:
            self._call("cuInit", 0)
        except CudaError as error:
            raise CudaUnavailableError(f"the CUDA driver cannot be used ({error})") from None
        self.words = hasattr(self._library, _WRITE_WORD) and all(
            self._integer("cuDeviceGetAttribute", attribute, self._integer("cuDeviceGet", ordinal))
            for ordinal in range(self._integer("cuDeviceGetCount"))
            for attribute in _ATTRIBUTES_OF_WORDS
        )
        if self.words:
            self._declare(_WRITE_WORD, (_POINTER, _U64, _U64, _UINT))
        self._attributes = _Attributes(_SOURCE_ORDER_STREAM)
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)

    def _declare(self, name: str, arguments: tuple[Any, ...]) -> None:
        for library in (self._library, self._quick):
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise self._error(name, code)

    def _submit(self, name: str, *arguments: Any) -> None:
        """Call what hands work to a GPU."""
        code = getattr(self._library if self._long else self._quick, name)(*arguments)
        if code:
            raise self._error(name, code)

    @contextmanager
    def _may_take_long(self) -> Iterator[None]:
        call = object()
        self._long[call] = None
        try:
            yield
        finally:
            del self._long[call]

    @property
    def busy(self) -> bool:
        """See `Driver`."""
        return bool(self._long)

    def _error(self, call: str, code: int) -> CudaError:
        words = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            known = getattr(self._library, function)(code, ctypes.byref(text)) == 0
            words.append(text.value.decode() if known and text.value else f"error {code}")
        return CudaError(call, code, words[0], words[1])

    def _integer(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def _address(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_uint64()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    # --- devices and contexts

    def gpus(self) -> list[GpuInfo]:
        """See `Driver`."""
        found = []
        for ordinal in range(self._integer("cuDeviceGetCount")):
            device = self._integer("cuDeviceGet", ordinal)
            name = ctypes.create_string_buffer(256)
            self._call("cuDeviceGetName", name, 256, device)
            total = ctypes.c_size_t()
            self._call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
            mode = self._integer("cuDeviceGetAttribute", _ATTRIBUTE_COMPUTE_MODE, device)
            found.append(
                GpuInfo(
                    ordinal, self._uuid(device), name.value.decode(), total.value, _COMPUTE_MODES.get(mode, str(mode))
                )
            )
        return found

    def _uuid(self, device: int) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def retain_context(self, ordinal: int) -> int:
        """See `Driver`."""
        device = self._integer("cuDeviceGet", ordinal)
        self._call("cuDevicePrimaryCtxSetFlags_v2", device, _BLOCKING_SYNC)
        with self._may_take_long():
            return self._address("cuDevicePrimaryCtxRetain", device)

    def release_context(self, ordinal: int) -> None:
        """See `Driver`."""
        with self._may_take_long():
            self._call("cuDevicePrimaryCtxRelease_v2", self._integer("cuDeviceGet", ordinal))

    def set_current(self, context: int) -> None:
        """See `Driver`."""
        self._call("cuCtxSetCurrent", context)

    def current_context(self) -> int:
        """See `Driver`."""
        return self._address("cuCtxGetCurrent")

    def current_uuid(self) -> str:
        """See `Driver`."""
        return self._uuid(self._integer("cuCtxGetDevice"))

    def memory_info(self) -> tuple[int, int]:
        """See `Driver`."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # --- memory of other processes, and for them

    def allocation_of(self, address: int) -> tuple[int, int]:
        """See `Driver`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def is_exportable(self, address: int) -> bool:
        """See `Driver`."""
        return bool(self._integer("cuPointerGetAttribute", _ATTRIBUTE_LEGACY_IPC, address))

    def export_memory(self, address: int) -> bytes:
        """See `Driver`."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def import_memory(self, handle: bytes) -> int:
        """See `Driver`."""
        with self._may_take_long():
            return self._address("cuIpcOpenMemHandle_v2", _Handle.from_buffer_copy(handle), _IPC_LAZY_PEER_ACCESS)

    def close_memory(self, address: int) -> None:
        """See `Driver`."""
        with self._may_take_long():
            self._call("cuIpcCloseMemHandle", address)

    def pin(self, address: int, size: int) -> None:
        """See `Driver`."""
        with self._may_take_long():
            self._call("cuMemHostRegister_v2", address, size, _HOST_REGISTER_PORTABLE)

    def unpin(self, address: int) -> None:
        """See `Driver`."""
        with self._may_take_long():
            self._call("cuMemHostUnregister", address)

    # --- streams, events, copies

    def make_stream(self) -> int:
        """See `Driver`."""
        return self._address("cuStreamCreate", _STREAM_NON_BLOCKING)

    def drop_stream(self, stream: int) -> None:
        """See `Driver`."""
        self._call("cuStreamDestroy_v2", stream)

    def make_event(self) -> int:
        """See `Driver`."""
        return self._address("cuEventCreate", _EVENT_BLOCKING_SYNC_WITHOUT_TIMING)

    def drop_event(self, event: int) -> None:
        """See `Driver`."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """See `Driver`."""
        self._submit("cuEventRecord", event, stream)

    def reached(self, event: int) -> bool:
        """See `Driver`."""
        code: int = self._library.cuEventQuery(event)
        if code not in (0, _NOT_READY):
            raise self._error("cuEventQuery", code)
        return code == 0

    def wait(self, event: int) -> None:
        """See `Driver`."""
        self._call("cuEventSynchronize", event)

    def copy(
        self,
        destinations: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: int,
        *,
        to_device: bool,
        soon: bool = False,
    ) -> None:
        """See `Driver`."""
        if not self._batch:
            self._copy_each(destinations, sources, sizes, stream, to_device=to_device)
            return
        if soon and len(sizes) > 1:
            self._submit(_copy_name(to_device=to_device), int(destinations[0]), int(sources[0]), int(sizes[0]), stream)
            destinations, sources, sizes = destinations[1:], sources[1:], sizes[1:]
        arguments: list[Any] = [destinations.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes)]
        arguments += [ctypes.byref(self._attributes), ctypes.byref(self._first), 1]
        if self._tells_failed:
            arguments.append(ctypes.byref(self._failed))
        self._submit(self._batch, *arguments, stream)

    def _copy_each(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, to_device: bool
    ) -> None:
        name = _copy_name(to_device=to_device)
        for destination, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._submit(name, destination, source, size, stream)

    def write_word(self, stream: int, address: int, value: int) -> None:
        """See `Driver`."""
        self._submit(_WRITE_WORD, stream, address, value, 0)

    def read(self, destination: int, source: int, size: int) -> None:
        """See `Driver`."""
        with self._may_take_long():
            self._call("cuMemcpyDtoH_v2", destination, source, size)

    def write(self, destination: int, source: int, size: int) -> None:
        """See `Driver`."""
        with self._may_take_long():
            self._call("cuMemcpyHtoD_v2", destination, source, size)


def _copy_name(*, to_device: bool) -> str:
    return "cuMemcpyHtoDAsync_v2" if to_device else "cuMemcpyDtoHAsync_v2"
