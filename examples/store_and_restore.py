"""Keep numpy arrays in the node agent and get them back: the whole client in one page.

Start an agent first, in another terminal:

    orbitkv-agent serve --pool 256MiB

then run this file. It plays both halves of an engine: the one that asks what is cached (a scheduler) and the one whose
memory is copied (a worker). Run it twice: the second run finds what the first one kept.
"""

from __future__ import annotations

import argparse
import hashlib
import uuid

import numpy as np

from orbitkv import (
    BlockHashes,
    CacheManagerClient,
    GroupGeometry,
    HostAllocation,
    Instance,
    LayerRegion,
    OrbitKVError,
    QueryLoading,
    Ranks,
    RestoreStatus,
    SaveStatus,
)

LAYERS, BLOCKS, BLOCK_BYTES, BLOCK_TOKENS = 4, 64, 64 << 10, 16


def main() -> int:
    """Store eight pages and restore them into other blocks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--socket", default="/tmp/orbitkv-50055.sock", help="the agent's socket (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        with CacheManagerClient(arguments.socket, name="numpy example") as client:
            return store_and_restore(client)
    except OrbitKVError as error:
        print(f"error: {error}")
        return 1


def store_and_restore(client: CacheManagerClient) -> int:
    """Save what is missing, then restore everything; return the exit code."""
    # The "engine": one array a layer, each with 64 blocks of 64 KiB. Eight blocks hold something worth keeping.
    kv = np.zeros((LAYERS, BLOCKS, BLOCK_BYTES), np.uint8)
    numbers = np.random.default_rng(7)
    kv[:, :8] = numbers.integers(0, 256, (LAYERS, 8, BLOCK_BYTES), dtype=np.uint8)
    hashes = BlockHashes([hashlib.sha256(f"page {i}".encode()).digest() for i in range(8)])

    # 1. Tell the agent who we are and where the memory is: base, stride and size of each layer's part of a block.
    instance = Instance(engine_id="numpy-example", nonce=uuid.uuid4().hex)
    client.attach_instance(instance)
    registration = client.register_context_batch(
        instance=instance,
        ranks=Ranks(),
        model_identity="numpy-example-v1",
        model="random numbers",
        allocations=[HostAllocation(kv.ctypes.data, kv.nbytes, owner=kv)],
        groups=[
            GroupGeometry(
                group=0,
                kind="full",
                block_tokens=BLOCK_TOKENS,
                layers=[
                    LayerRegion(f"layer.{i}", 0, i * BLOCKS * BLOCK_BYTES, BLOCKS, BLOCK_BYTES, BLOCK_BYTES, "uint8")
                    for i in range(LAYERS)
                ],
            )
        ],
    )
    # An engine proves its layout before it may hit (it compares copies with its own tensors). Here the arrays are ours.
    client.report_proof(registration, proven=True)

    # 2. Ask which leading pages are there. A real engine asks again every step while the answer is QueryLoading.
    found = client.query_prefetch("request-1", [hashes], instance=instance)
    cached = 0 if isinstance(found, QueryLoading) else found.pages
    print(f"before: {cached} of {len(hashes)} pages are cached")
    client.cancel_query("request-1")

    # 3. Save. Pages that are there already are not copied again.
    save = client.start_save(registration, [hashes], [np.arange(8)])
    if client.wait_save(save, timeout=10) is not SaveStatus.COMMITTED:
        print(f"not saved: {save.error or save.dropped}")
        return 1
    print(f"saved:  {save.positions[0].size} pages copied, {save.present} were there already")

    # 4. Ask again, and restore into other blocks. The lease keeps the pages until the copy is done.
    ready = client.query_prefetch("request-2", [hashes], instance=instance)
    if isinstance(ready, QueryLoading) or not ready.pages:
        print("the pages that were just saved are not there")
        return 1
    restore = client.start_restore(registration, ready.leases[0], [np.arange(40, 48)])
    if client.wait_restore(restore, timeout=10) is not RestoreStatus.DONE:
        print(f"not restored: {restore.error}")
        return 1
    client.query_consumed("request-2")
    same = np.array_equal(kv[:, 40:48], kv[:, :8])
    print(f"after:  {ready.pages} pages restored into blocks 40 to 47, equal to what was saved: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
