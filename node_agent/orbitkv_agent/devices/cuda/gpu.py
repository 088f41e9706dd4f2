"""One GPU in use: its context, the engine memory that is mapped, and its two lanes."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from orbitkv.cuda import CudaError, Driver, GpuInfo
from orbitkv.protocol.records import REGION_BYTES, RecordWriter
from orbitkv_agent.devices.cuda.lanes import Lane
from orbitkv_agent.devices.cuda.nvml import used_by_process, used_bytes

logger = logging.getLogger(__name__)

CONTEXT_BYTES: Final = 600 << 20
"""What the agent's context may take of a GPU; more is reported."""

MIG: Final = " MIG "
"""In the name of a part of a GPU, as the driver shows it."""

Key = tuple[Hashable, bytes]
"""An allocation: the process that exported it, and its handle."""


@dataclass(frozen=True)
class Imported:
    """Allocations that are mapped for one registration, in its order.

    `records` are those of its session; `pinned`: the GPU writes to them itself.
    """

    keys: tuple[Key, ...]
    addresses: tuple[int, ...]
    records: RecordWriter | None = None
    pinned: bool = False


def own_bytes(
    pid: int, before: int | None, others: Mapping[int, int], after: int | None, processes: Mapping[int, int]
) -> int:
    """How much of a GPU a context of this process takes, in bytes; 0 where nothing is known.

    What the driver says of this process, or of the only one that is new there; otherwise, by how much more of the whole
    GPU is taken, which is wrong if others allocated or freed meanwhile.

    Args:
        pid: this process, as it is called here; in a container the driver calls it otherwise.
        before, after: what of the GPU was taken by all before the context was made, and is now.
        others, processes: the same by process.
    """
    if pid in processes and pid not in others:
        return processes[pid]
    new = [used for process, used in processes.items() if process not in others]
    if len(new) == 1:
        return new[0]
    return max(0, after - before) if before is not None and after is not None else 0


class Gpu:
    """A GPU that has, or had, a registration. Its context is made by the first one and lives as long as the agent.

    What takes the driver long, mapping and unmapping, happens on a thread of its own; so copies go on meanwhile.

    Restores that are copied layer by layer have a lane of their own: all of one is handed over at once, so that it ends
    whatever becomes of this process, and those in the other lane do not wait behind it.

    Args:
        post: has a callback called on the owner thread.
        lost: called on the owner thread when the GPU fails.
    """

    def __init__(
        self, driver: Driver, info: GpuInfo, post: Callable[[Callable[[], None]], None], lost: Callable[[str], None]
    ) -> None:
        self.info = info
        self.context = 0
        self.context_bytes = 0
        self.restores: Lane | None = None
        self.saves: Lane | None = None
        self.layered: Lane | None = None
        self._driver = driver
        self._post = post
        self._lost = lost
        self._mapped: dict[Key, tuple[int, int]] = {}
        self._pinned: dict[int, int] = {}  # how often a region of records, by its address
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"orbitkv-gpu{info.ordinal}", daemon=True)
        self._thread.start()

    @property
    def lanes(self) -> list[Lane]:
        """Those that it has: none before its first registration."""
        return [lane for lane in (self.restores, self.saves, self.layered) if lane is not None]

    # ---------------------------------------------------------------------------------------- the owner thread

    def open(
        self,
        process: Hashable,
        handles: Sequence[bytes],
        sizes: Sequence[int],
        records: RecordWriter | None,
        opened: Callable[..., None],
    ) -> None:
        """Map allocations, and let the GPU write to `records` if it can. `opened(Imported | str)` is called on the
        owner thread, with the reason if it failed. The records are held until `close`."""
        if records is not None:
            records.hold()

        def work() -> None:
            try:
                self._use_context()
                result: Imported | str = self._import(process, handles, sizes)
            except CudaError as error:
                result = self._explain(error)
            except Exception as error:  # a thread that could not be made, or a defect
                logger.exception("%s: internal error; please report it", self.info.uuid)
                result = f"{self.info.uuid} could not be used: {error!r}"
            if isinstance(result, Imported) and records is not None:
                result = replace(result, records=records, pinned=self._pin(records))
            elif records is not None:
                self._post(records.let_go)
            self._post(lambda: opened(result))

        self._work.put(work)

    def compare(self, addresses: Sequence[int], values: Sequence[bytes], compared: Callable[[bool], None]) -> None:
        """Read memory that is mapped; `compared` is called on the owner thread, with whether it holds these values."""

        def work() -> None:
            try:
                self._use_context()
                equal = [self._read(*each) for each in zip(addresses, map(len, values), strict=True)] == list(values)
            except CudaError as error:
                logger.error("%s: engine memory could not be read: %s", self.info.uuid, error)
                equal = False
            self._post(lambda: compared(equal))

        self._work.put(work)

    def close(self, imported: Imported) -> None:
        """Unmap what no other registration uses. No copy runs on it."""

        def work() -> None:
            self._release(imported.keys)
            if imported.pinned and imported.records is not None:
                self._unpin(imported.records)
            if imported.records is not None:
                self._post(imported.records.let_go)

        self._work.put(work)

    def shut_down(self) -> None:
        """Finish all copies, unmap everything, end the threads."""
        self._work.put(None)
        self._thread.join()
        if self.context:
            self._driver.set_current(self.context)
        for lane in self.lanes:
            lane.close()
        if self.context:
            for address, _ in self._mapped.values():
                self._driver.close_memory(address)
            self._mapped.clear()
            for address in self._pinned:
                self._driver.unpin(address)
            self._pinned.clear()

    # ---------------------------------------------------------------------------------------- the GPU's thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("%s: internal error; please report it", self.info.uuid)

    def _use_context(self) -> None:
        if self.context:
            return
        before, others = used_bytes(self.info.uuid), used_by_process(self.info.uuid)
        context = self._driver.retain_context(self.info.ordinal)
        made: list[Lane] = []
        try:
            self._driver.set_current(context)
            name = f"orbitkv-gpu{self.info.ordinal}"
            post, lost = self._post, self._lost
            self.restores = Lane(self._driver, context, f"{name}-restores", to_device=True, post=post, lost=lost)
            made.append(self.restores)
            self.saves = Lane(self._driver, context, f"{name}-saves", to_device=False, post=post, lost=lost)
            made.append(self.saves)
            self.layered = Lane(
                self._driver, context, f"{name}-layered", to_device=True, whole=True, post=post, lost=lost
            )
        except Exception:  # no memory for a stream, or no thread: the next registration tries again
            for each in made:
                each.close()
            self.restores = self.saves = self.layered = None
            self._driver.release_context(self.info.ordinal)
            raise
        self.context_bytes = own_bytes(
            os.getpid(), before, others, used_bytes(self.info.uuid), used_by_process(self.info.uuid)
        )
        self.context = context
        logger.info(
            "%s (%s) is in use; the agent takes %d bytes of it", self.info.uuid, self.info.name, self.context_bytes
        )
        if self.context_bytes > CONTEXT_BYTES:
            logger.warning(
                "the agent takes %d MiB of %s for itself, more than the %d MiB that it is meant to",
                self.context_bytes >> 20,
                self.info.uuid,
                CONTEXT_BYTES >> 20,
            )

    def _read(self, address: int, size: int) -> bytes:
        found = np.empty(size, np.uint8)
        self._driver.read(found.ctypes.data, address, size)
        return found.tobytes()

    def _import(self, process: Hashable, handles: Sequence[bytes], sizes: Sequence[int]) -> Imported | str:
        keys: list[Key] = []
        addresses: list[int] = []
        why = ""
        try:
            for index, (handle, size) in enumerate(zip(handles, sizes, strict=True)):
                address = self._map((process, handle))
                keys.append((process, handle))
                addresses.append(address)
                real = self._driver.allocation_of(address)[1]
                if real < size:
                    why = f"allocations[{index}].size is {size}, but the allocation has {real} bytes"
                    break
            else:
                return Imported(tuple(keys), tuple(addresses))
        except CudaError:
            self._release(keys)
            raise
        self._release(keys)
        return why

    def _map(self, key: Key) -> int:
        address, count = self._mapped.get(key, (0, 0))
        if not count:
            address = self._driver.import_memory(key[1])
        self._mapped[key] = address, count + 1
        return address

    def _release(self, keys: Sequence[Key]) -> None:
        for key in keys:
            address, count = self._mapped[key]
            if count > 1:
                self._mapped[key] = address, count - 1
                continue
            del self._mapped[key]
            try:
                self._driver.close_memory(address)
            except CudaError as error:
                logger.error("%s: engine memory could not be given back: %s", self.info.uuid, error)

    def _pin(self, records: RecordWriter) -> bool:
        """Let the GPU write to a session's records; false when it does not."""
        if not self._driver.words:
            return False
        count = self._pinned.get(records.address, 0)
        try:
            if not count:
                self._driver.pin(records.address, REGION_BYTES)
        except CudaError as error:
            logger.warning("%s: ends of copies are told a little later: %s", self.info.uuid, error)
            return False
        self._pinned[records.address] = count + 1
        return True

    def _unpin(self, records: RecordWriter) -> None:
        count = self._pinned.pop(records.address)
        if count > 1:
            self._pinned[records.address] = count - 1
        else:
            try:
                self._driver.unpin(records.address)
            except CudaError as error:
                logger.error("%s: memory of records could not be unpinned: %s", self.info.uuid, error)

    def _explain(self, error: CudaError) -> str:
        why = f"{self.info.uuid}: {error}"
        if not self.context and self.info.compute_mode != "default":
            why += (
                f"; the GPU is in compute mode {self.info.compute_mode}, in which agent and engine cannot both use it: "
                "set it to default (nvidia-smi -c DEFAULT), or run both under one MPS server"
            )
        elif not self.context:
            why += "; the agent could not start to use this GPU (a context takes about 600 MiB of its memory)"
        elif (error.call, error.name) == ("cuIpcOpenMemHandle_v2", "CUDA_ERROR_INVALID_CONTEXT"):
            why += (
                f"; agent and engine seem to have the same process number {os.getpid()}, each in its own container, "
                "and CUDA takes the engine's memory for the agent's then: start the engine under another number, for "
                "example by a shell or an init process"
            )
        else:
            why += "; the engine's memory could not be opened (agent and engine must run on the same machine)"
            if MIG in self.info.name:
                why += f"; {self.info.name} is a part of a GPU, and its memory can be shared within the part only"
        return why
