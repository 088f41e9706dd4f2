"""Saving and restoring large pages in host mode, against a numpy copy of the same bytes in the same run."""

from __future__ import annotations

import mmap
import os
import statistics
import time

import numpy as np

from bench.figures import Figure, say
from orbitkv import QueryReady, RestoreStatus, SaveStatus
from tools.harness.memory_engine import MemoryEngine, numbered_hashes, temporary_agent

PAGES = 512
PAGE_BYTES = 36 * (64 << 10)
"""2.25 MiB: 16 tokens of a model with 36 layers and 8 KV heads of 128."""
ROUNDS = 5


def run() -> list[Figure]:
    """Alternate numpy copies, saves and restores of 512 pages; compare medians."""
    numbers = np.random.default_rng(1)
    copies, saves, restores = [], [], []
    total = PAGES * PAGE_BYTES
    with (
        temporary_agent(pool="4GiB", prefault=True) as agent,
        MemoryEngine(agent.socket_path, blocks=PAGES, block_bytes=PAGE_BYTES) as engine,
    ):
        client = engine.client
        # The baseline copies into memory of the same kind as the agent's: a shared mapping, faulted in.
        fd = os.memfd_create("bench")
        os.ftruncate(fd, total)
        say("  the agent faults its memory in")
        for turn in range(5):  # more than the pool holds
            engine.save(numbered_hashes(PAGES, first=(100 + turn) * PAGES))
        with mmap.mmap(fd, total) as mapping:
            target = np.frombuffer(mapping, np.uint8).reshape(PAGES, PAGE_BYTES)
            target[:] = 1
            for turn in range(ROUNDS + 1):
                say(f"  round {turn} of {ROUNDS}{' (not counted)' if turn == 0 else ''}")
                sources, slots = numbers.permutation(PAGES), numbers.permutation(PAGES)
                start = time.perf_counter()
                for source, slot in zip(sources.tolist(), slots.tolist(), strict=True):
                    target[slot] = engine.kv[0][source]
                copied = time.perf_counter() - start

                hashes = numbered_hashes(PAGES, first=turn * PAGES)
                start = time.perf_counter()
                save = client.start_save(engine.registration, [hashes], [sources])
                client.wait_save(save, timeout=60)
                saved = time.perf_counter() - start
                if save.status is not SaveStatus.COMMITTED or save.dropped:
                    raise RuntimeError(f"a save ended as {save.status.value}: {save.error or save.dropped}")

                answer = client.query_prefetch(f"round-{turn}", [hashes], instance=engine.instance)
                if not isinstance(answer, QueryReady) or answer.pages != PAGES:
                    raise RuntimeError(f"expected {PAGES} pages, the agent answered {answer}")
                start = time.perf_counter()
                restore = client.start_restore(engine.registration, answer.leases[0], [slots])
                client.wait_restore(restore, timeout=60)
                restored = time.perf_counter() - start
                if restore.status is not RestoreStatus.DONE:
                    raise RuntimeError(f"a restore failed: {restore.error}")
                client.query_consumed(f"round-{turn}")
                if turn:
                    copies.append(copied)
                    saves.append(saved)
                    restores.append(restored)
            del target
        os.close(fd)
    gigabytes = total / 1e9
    numpy_speed = gigabytes / statistics.median(copies)
    save_speed, restore_speed = gigabytes / statistics.median(saves), gigabytes / statistics.median(restores)
    return [
        Figure("numpy_copy_gb_s", numpy_speed, "GB/s"),
        Figure("restore_gb_s", restore_speed, "GB/s", baseline=numpy_speed),
        Figure("save_gb_s", save_speed, "GB/s", baseline=numpy_speed),
        Figure("restore_ratio", restore_speed / numpy_speed, "ratio", bound=0.8, at_least=True),
        Figure("save_ratio", save_speed / numpy_speed, "ratio", bound=0.8, at_least=True),
    ]
