"""An engine's process on a GPU without torch, quick to start: pages whose bytes say which page they are.

    python -m tests.gpu.plain_engine SOCKET work|hold|check [--pages N]

`work` saves and restores pages for ever, and checks what it restores; it prints a line after each round. `hold` does
the same behind half a second of work on its stream each time, so that something nearly always waits for that. `check`
restores every page that the agent still has and checks it. WRONG in a line is a page with other bytes than its own.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
import uuid
from typing import Any

import numpy as np

from orbitkv import (
    BlockHashes,
    CacheManagerClient,
    GroupGeometry,
    Instance,
    LayerRegion,
    QueryReady,
    Ranks,
    RestoreHandle,
    RestoreStatus,
    SaveStatus,
)
from orbitkv.client.gpu import EngineGpu
from orbitkv.cuda import LibCuda
from tools.harness.memory_engine import numbered_hashes

PAGE = 36 * (64 << 10)
BLOCKS = 512
IDENTITY = "pages that say who they are"


class PlainEngine:
    """Scheduler and only worker of one instance; its memory is one plain allocation.

    Attributes:
        client: its client.
        base: address of block 0.
    """

    def __init__(self, socket: str, **client: Any) -> None:
        self._driver = LibCuda()
        self._cuda = self._driver._library
        self._driver.set_current(self._driver.retain_context(0))
        address = ctypes.c_uint64()
        self._check(self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(BLOCKS * PAGE)))
        self.base = address.value
        self._check(self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(BLOCKS * PAGE)))
        self._spare = address.value
        self._stream = self._driver.make_stream()
        self.gpu = EngineGpu(self._driver)
        self.instance = Instance("plain-engine", uuid.uuid4().hex)
        self.connect(socket, **client)

    def connect(self, socket: str, **client: Any) -> None:
        """Attach to an agent, under a new name."""
        self.instance = Instance("plain-engine", uuid.uuid4().hex)
        self.client = CacheManagerClient(socket, **{"timeout_ms": 60_000, **client})
        self.client.attach_instance(self.instance)
        layer = LayerRegion("all", 0, 0, BLOCKS, PAGE, PAGE, "uint8")
        self.registration = self.client.register_context_batch(
            instance=self.instance,
            ranks=Ranks(),
            model_identity=IDENTITY,
            model=IDENTITY,
            groups=[GroupGeometry(0, "full", 16, [layer])],
            allocations=[self.gpu.allocation(self.base, self)],
            gpu=self.gpu,
        )
        self.client.report_proof(self.registration, proven=True)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def fill(self, block: int, number: int) -> None:
        """Make a block the page of that number, in the order of the engine's stream."""
        self._check(
            self._cuda.cuMemsetD32Async(
                ctypes.c_uint64(self.base + block * PAGE),
                ctypes.c_uint(number),
                ctypes.c_size_t(PAGE // 4),
                ctypes.c_void_p(self._stream),
            )
        )

    def holds(self, block: int, number: int) -> bool:
        """Whether a block is the page of that number."""
        return bool((self.words(block) == number).all())

    def words(self, block: int, blocks: int = 1) -> np.ndarray[Any, Any]:
        """The words of blocks."""
        words = np.empty(blocks * PAGE // 4, np.uint32)
        self.gpu.read(words.ctypes.data, self.base + block * PAGE, blocks * PAGE)
        return words

    def occupy(self, copies: int) -> None:
        """Give the stream work: copies of 1 GiB within the GPU, about half a millisecond each."""
        size = ctypes.c_size_t(BLOCKS * PAGE)
        for _ in range(copies):
            self._check(
                self._cuda.cuMemcpyDtoDAsync_v2(
                    ctypes.c_uint64(self._spare), ctypes.c_uint64(self.base), size, ctypes.c_void_p(self._stream)
                )
            )

    def keep(self, numbers: list[int], blocks: list[int], seconds: float = 20.0) -> None:
        """Save pages, again while the agent still prepares memory for them."""
        end = time.monotonic() + seconds
        while not self.save(numbers, blocks):
            if time.monotonic() > end:
                raise RuntimeError("the agent does not keep pages")

    def save(self, numbers: list[int], blocks: list[int]) -> bool:
        """Compute pages and save them; whether all are kept."""
        for number, block in zip(numbers, blocks, strict=True):
            self.fill(block, number)
        handle = self.client.prepare_save(
            self.registration, [names(numbers)], [np.array(blocks)], after=self.gpu.point(self._stream)
        )
        self.client.submit_saves([handle])
        return self.client.wait_save(handle, timeout=60) is SaveStatus.COMMITTED and not handle.dropped

    def lease(self, numbers: list[int]) -> tuple[int, int]:
        """(pages of the leading run that the agent has, lease for them)."""
        request = uuid.uuid4().hex
        answer = self.client.query_prefetch(request, [names(numbers)], instance=self.instance)
        if not isinstance(answer, QueryReady) or not answer.pages:
            return 0, 0
        self.client.query_consumed(request)
        return answer.pages, answer.leases[0]

    def start_restore(self, numbers: list[int], blocks: list[int]) -> tuple[int, RestoreHandle | None]:
        """Start to restore the leading run of pages that is there; (how many pages, handle)."""
        pages, lease = self.lease(numbers)
        if not pages:
            return 0, None
        point = self.gpu.point(self._stream)
        return pages, self.client.start_restore(self.registration, lease, [np.array(blocks[:pages])], after=point)


def names(numbers: list[int]) -> BlockHashes:
    """The hashes of pages by number."""
    blobs = [numbered_hashes(1, first=number)[0:1].blob for number in numbers]
    return BlockHashes(blobs)


def work(engine: PlainEngine, pages: int, occupied: int = 0) -> None:
    """Save and restore until the process is killed, each behind so many copies on its stream."""
    kept: list[int] = []
    while True:
        engine.occupy(occupied)
        numbers = random.sample(range(pages), 48)
        blocks = random.sample(range(BLOCKS), 96)
        if engine.save(numbers, blocks[:48]):
            kept += numbers
        handles = []
        for _ in range(3):
            chosen = random.sample(sorted(set(kept)) or numbers, min(16, len(set(kept)) or 16))
            free = random.sample(blocks[48:], len(chosen))
            engine.occupy(occupied)
            count, handle = engine.start_restore(chosen, free)
            if handle is not None:
                engine.client.wait_restore(handle, timeout=60)
                if handle.status is RestoreStatus.DONE:
                    handles += list(zip(chosen[:count], free[:count], strict=True))
                    wrong = [n for n, b in zip(chosen[:count], free[:count], strict=True) if not engine.holds(b, n)]
                    if wrong:
                        print(f"WRONG {wrong}", flush=True)
        print(f"round: {len(handles)} pages restored", flush=True)


def check(engine: PlainEngine, pages: int) -> None:
    """Restore all pages that are there, one by one, and check them."""
    found = 0
    for number in range(pages):
        count, handle = engine.start_restore([number], [number % BLOCKS])
        if handle is None:
            continue
        found += count
        engine.client.wait_restore(handle, timeout=60)
        if handle.status is not RestoreStatus.DONE or not engine.holds(number % BLOCKS, number):
            print(f"WRONG page {number}: {handle.status}", flush=True)
    print(f"checked {found} pages", flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("what", choices=["work", "hold", "check"])
    parser.add_argument("--pages", type=int, default=400)
    arguments = parser.parse_args()
    engine = PlainEngine(arguments.socket)
    print("go", flush=True)
    if arguments.what == "check":
        check(engine, arguments.pages)
    else:
        work(engine, arguments.pages, 1000 if arguments.what == "hold" else 0)
    engine.client.close()


if __name__ == "__main__":
    main()
