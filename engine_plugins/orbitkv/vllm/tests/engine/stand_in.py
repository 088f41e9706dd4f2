"""A stand-in for an engine, without a model: both halves of one against the agent, by the client alone.

    python -m orbitkv.vllm.tests.engine.stand_in SOCKET SEED

Saves and restores pages at random until it is killed. What a page must hold follows from its hash, so it knows a
stale or wrong page when it gets one: then it says so and exits with WRONG. It needs no vLLM and starts in a fraction
of a second.
"""

import hashlib
import os
import random
import sys
from collections.abc import Sequence

import numpy as np

from orbitkv.client import (
    BlockHashes,
    CacheManagerClient,
    GroupGeometry,
    HostAllocation,
    LayerRegion,
    QueryLoading,
    QueryReady,
    Ranks,
    RestoreHandle,
    RestoreStatus,
    SaveHandle,
)
from orbitkv.protocol.messages import Instance

LAYERS = 2
LAYER_BYTES = 8192
PAGE_BYTES = LAYERS * LAYER_BYTES
BLOCKS = 64
CHAINS = 40
CHAIN_PAGES = 12
WRONG = 3


def chain(name: str, pages: int) -> list[bytes]:
    """The hashes of a prompt's pages."""
    return [hashlib.sha256(f"{name} {page}".encode()).digest() for page in range(pages)]


def content(page_hash: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What the page of this hash holds: (PAGE_BYTES,) uint8."""
    return np.frombuffer(hashlib.shake_128(page_hash).digest(PAGE_BYTES), np.uint8)


class StandIn:
    """An engine of BLOCKS blocks in LAYERS layers, attached and registered."""

    def __init__(self, socket_path: str, name: str, model: str = "stand-in", timeout_ms: int = 5000) -> None:
        self.memory = np.zeros((LAYERS, BLOCKS, LAYER_BYTES), np.uint8)
        self.instance = Instance(name, os.urandom(8).hex())
        self.client = CacheManagerClient(socket_path, name=name, timeout_ms=timeout_ms)
        self.worker = CacheManagerClient(socket_path, name=f"{name} worker", timeout_ms=timeout_ms)
        regions = [
            LayerRegion(f"layer {layer}", 0, layer * BLOCKS * LAYER_BYTES, BLOCKS, LAYER_BYTES, LAYER_BYTES, "uint8")
            for layer in range(LAYERS)
        ]
        self.client.attach_instance(self.instance)
        self.registration = self.worker.register_context_batch(
            instance=self.instance,
            ranks=Ranks(),
            model_identity=model,
            model=model,
            groups=[GroupGeometry(0, "full", 32, regions)],
            allocations=[HostAllocation(self.memory.ctypes.data, self.memory.nbytes, self.memory)],
        )
        self.worker.report_proof(self.registration, True)

    def fill(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Computes pages: puts what their hashes say into blocks."""
        for page_hash, block in zip(hashes, blocks, strict=True):
            self.memory[:, block] = content(page_hash).reshape(LAYERS, LAYER_BYTES)

    def wrong(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """The blocks that do not hold what their hashes say."""
        pairs = zip(hashes, blocks, strict=True)
        return [block for page_hash, block in pairs if (self.memory[:, block].reshape(-1) != content(page_hash)).any()]

    def start_save(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> SaveHandle:
        """Computes and saves pages."""
        self.fill(hashes, blocks)
        return self.worker.start_save(self.registration, [BlockHashes(hashes)], [np.array(blocks)])

    def query(self, request: str, hashes: Sequence[bytes]) -> QueryReady | QueryLoading:
        """Asks for a prompt's pages."""
        return self.client.query_prefetch(request, [BlockHashes(hashes)], instance=self.instance)

    def start_restore(self, request: str, ready: QueryReady, blocks: Sequence[int]) -> RestoreHandle:
        """Restores what a query promised into blocks, one a leased page."""
        handle = self.worker.start_restore(self.registration, ready.leases[0], [np.array(blocks)])
        self.client.query_consumed(request)
        return handle

    def close(self) -> None:
        """Leaves the agent."""
        self.worker.close()
        self.client.close()


def work(engine: StandIn, chance: random.Random) -> None:
    """Saves and restores until it is killed, and says "working" once it has done either."""
    for number in range(1 << 30):
        hashes = chain(f"prompt {chance.randrange(CHAINS)}", chance.randint(1, CHAIN_PAGES))
        blocks = chance.sample(range(BLOCKS), len(hashes))
        request = f"request {number}"
        answer = engine.query(request, hashes)
        if isinstance(answer, QueryReady) and answer.pages:
            blocks = blocks[: answer.pages]
            engine.memory[:, blocks] = 255
            handle = engine.start_restore(request, answer, blocks)
            status = engine.worker.wait_restore(handle, 20)
            wrong = engine.wrong(hashes[: answer.pages], blocks)
            if status is not RestoreStatus.DONE or wrong:
                print(f"restore of {answer.pages} pages: {status}, wrong blocks {wrong}", flush=True)
                sys.exit(WRONG)
            hashes, blocks = hashes[answer.pages :], []
        else:
            engine.client.cancel_query(request)
            save = engine.start_save(hashes, blocks)
            if chance.random() < 0.7:
                engine.worker.wait_save(save, 20)
            else:
                engine.worker.wait_save_copied(save, 20)
        if number == 0:
            print("working", flush=True)


if __name__ == "__main__":
    work(StandIn(sys.argv[1], f"stand-in {sys.argv[2]}"), random.Random(int(sys.argv[2])))
