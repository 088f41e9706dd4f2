from __future__ import annotations

import ctypes
import os

import pytest

from orbitkv.cuda import CudaError
from orbitkv_agent.devices.cuda.pinned import PinnedArenas
from orbitkv_agent.devices.cuda.tests.fake_gpu import FakeGpu
from orbitkv_agent.store.arenas import Arena, ArenaPool


def test_memory_that_the_driver_does_not_unpin_stays_mapped_and_takes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.set_current(1)
    pinned, arena = PinnedArenas(gpu, lambda: 1), Arena(3, "default", 1 << 20)
    pinned.attach(arena)
    assert pinned.addresses[3] == arena.address

    def refuse(address: int) -> None:
        raise CudaError("cuMemHostUnregister", 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")

    monkeypatch.setattr(gpu, "unpin", refuse)
    assert not pinned.detach(arena)
    assert not pinned.addresses[3] and "could not be unpinned" in pinned.problem
    assert ctypes.c_uint64.from_address(arena.address).value == 0, "the GPU may still read there"
    os.close(arena.fd)


def test_memory_that_stays_pinned_is_not_had_again_by_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.set_current(1)
    pool = ArenaPool(2 << 20, 1 << 20, prefault=False, memory=PinnedArenas(gpu, lambda: 1))

    def made() -> Arena:
        arena = pool.request("default")
        assert arena is not None and (arena.ready or pool.wait(10))
        return arena

    first, second = made(), made()

    def refuse(address: int) -> None:
        raise CudaError("cuMemHostUnregister", 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "unpin", refuse)
        pool.drop(first)
        assert not pool.discarding or pool.wait(10)
    assert (pool.committed_bytes, pool.room_bytes) == (2 << 20, 0)
    pool.drop(second)
    assert not pool.discarding or pool.wait(10)
    assert (pool.committed_bytes, pool.room_bytes) == (1 << 20, 1 << 20)
    pool.close()
