from __future__ import annotations

import ctypes
import os

import pytest

from orbitkv.cuda import CudaError
from orbitkv_agent.devices.cuda.pinned import PinnedArenas
from orbitkv_agent.devices.cuda.tests.fake_gpu import FakeGpu
from orbitkv_agent.store.arenas import Arena


def test_memory_that_the_driver_does_not_unpin_stays_mapped_and_takes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.set_current(1)
    pinned, arena = PinnedArenas(gpu, lambda: 1), Arena(3, "default", 1 << 20)
    pinned.attach(arena)
    assert pinned.addresses[3] == arena.address

    def refuse(address: int) -> None:
        raise CudaError("cuMemHostUnregister", 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")

    monkeypatch.setattr(gpu, "unpin", refuse)
    pinned.detach(arena)
    assert not pinned.addresses[3] and not pinned.busy
    assert ctypes.c_uint64.from_address(arena.address).value == 0, "the GPU may still read there"
    os.close(arena.fd)
