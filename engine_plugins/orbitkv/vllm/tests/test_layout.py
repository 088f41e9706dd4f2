"""Reading how KV memory lies, and proving it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from orbitkv.client import QueryReady, SaveStatus
from orbitkv.client.allocations import DeviceAllocation
from orbitkv.client.gpu import EngineGpu
from orbitkv.client.handles import RestoreStatus
from orbitkv.client.registration import GpuRegistration
from orbitkv.protocol.messages import Instance
from orbitkv.vllm import layout as layout_module
from orbitkv.vllm import proof
from orbitkv.vllm.layout import Layout, LayoutRefusedError, read_layout
from orbitkv.vllm.tests.kv_memory import CONTENT, HEADS, TOKENS, FakeGroup, full_attention, kv_memory

PART = HEADS * TOKENS * CONTENT * 2


def read(memory: dict[str, torch.Tensor], blocks: int = 8, names: list[str] | None = None) -> Layout:
    return read_layout(memory, [FakeGroup(names or list(memory))], blocks)


def registered(layout: Layout) -> GpuRegistration:
    return GpuRegistration(1, None, layout.groups, layout.allocations, proof_required=True)


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_are_read_by_address_as_the_engine_sees_them(name: str) -> None:
    memory = kv_memory(layout=name)
    layout = read(memory)
    registration = registered(layout)
    assert registration.page_bytes == [2 * PART]
    for block in range(8):
        proof.compare_block(layout, registration, 0, block)
    first = layout.groups[0].layers[0]
    assert first.block_count == 8
    assert first.block_bytes == PART
    assert first.block_stride == (PART if name.startswith("L") else 2 * PART)
    assert len(layout.allocations) == 1


@pytest.mark.parametrize("name", ["LHBNC", "BHLNC"])
def test_a_layout_in_which_a_part_is_not_one_piece_is_refused(name: str) -> None:
    with pytest.raises(LayoutRefusedError, match=r"layer a: its part of a block is not one piece .* strides .*LHBNC"):
        read(kv_memory(layout=name))


class Device:
    """What is used of a GPU's driver, for memory of this process: one allocation around all of it."""

    def __init__(self, exportable: bool = True) -> None:
        self.exportable = exportable
        self.storage: Any = None

    def current_context(self) -> int:
        return 1

    def current_uuid(self) -> str:
        return "GPU-1"

    def allocation_of(self, address: int) -> tuple[int, int]:
        return self.storage.data_ptr() - 4096, self.storage.nbytes() + 8192

    def is_exportable(self, address: int) -> bool:
        return self.exportable

    def export_memory(self, address: int) -> bytes:
        return b"handle of " + str(address).encode()


@pytest.mark.parametrize("name", ["LBNHC", "BLNHC"])
def test_memory_of_a_gpu_is_registered_by_handle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, device = kv_memory(layout=name), Device()
    device.storage = memory["a"].untyped_storage()
    monkeypatch.setattr(layout_module, "_gpu_of", lambda kv_caches: EngineGpu(device))  # type: ignore[arg-type]
    layout = read(memory)
    base = device.storage.data_ptr() - 4096
    assert layout.gpu is not None and layout.gpu.uuid == "GPU-1"
    (allocation,) = layout.allocations
    assert isinstance(allocation, DeviceAllocation)
    assert (allocation.address, allocation.size) == (base, device.storage.nbytes() + 8192)
    assert allocation.exported == b"handle of " + str(base).encode()
    for region, view in zip(layout.groups[0].layers, memory.values(), strict=True):
        assert base + region.offset == view.data_ptr(), "offsets count from the start of the allocation"


def test_memory_of_a_gpu_that_cannot_be_exported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, device = kv_memory(), Device(exportable=False)
    device.storage = memory["a"].untyped_storage()
    monkeypatch.setattr(layout_module, "_gpu_of", lambda kv_caches: EngineGpu(device))  # type: ignore[arg-type]
    with pytest.raises(LayoutRefusedError, match=r"layer a: .*expandable_segments"):
        read(memory)


def test_kernel_blocks_are_joined_to_the_blocks_that_the_engine_counts() -> None:
    memory = kv_memory(kernel_blocks=4)
    assert memory["a"].shape[0] == 32
    layout = read(memory)
    assert layout.groups[0].layers[0].block_count == 8
    for block in range(8):
        proof.compare_block(layout, registered(layout), 0, block)
    with pytest.raises(LayoutRefusedError, match="do not divide"):
        read(kv_memory(blocks=9), blocks=8)


def test_a_layer_that_shares_another_ones_memory_is_kept_once() -> None:
    memory = kv_memory(("a",))
    memory["reader"] = memory["a"]
    assert [layer.name for layer in read(memory).groups[0].layers] == ["a"]


def test_a_missing_layer_is_named() -> None:
    with pytest.raises(LayoutRefusedError, match="layer lost of KV cache group 0"):
        read(kv_memory(), names=["a", "lost"])


def test_layers_of_different_sizes_can_be_in_one_group() -> None:
    memory = {"a": torch.rand(8, 2, 16, 64), "b": torch.rand(8, 1, 16, 32)}
    spec = UniformTypeKVCacheSpecs(
        block_size=TOKENS, kv_cache_specs={"a": full_attention(), "b": full_attention(num_kv_heads=1, head_size=16)}
    )
    layout = read_layout(memory, [FakeGroup(["a", "b"], spec)], 8)
    assert [layer.block_bytes for layer in layout.groups[0].layers] == [2 * 16 * 64 * 4, 16 * 32 * 4]
    proof.compare_block(layout, registered(layout), 0, 5)


def test_another_order_of_heads_and_tokens_is_another_layout() -> None:
    digests = {read(kv_memory(layout=name)).digest for name in ("LBHNC", "LBNHC")}
    assert len(digests) == 2
    assert read(kv_memory(layout="LBHNC")).digest == read(kv_memory(layout="BLHNC")).digest


@pytest.mark.parametrize("change", ["offset", "block_stride"])
def test_wrong_strides_are_caught(change: str) -> None:
    layout = read(kv_memory())
    layer = layout.groups[0].layers[1]
    setattr(layer, change, getattr(layer, change) - PART // 2)
    with pytest.raises(proof.LayoutDisprovenError, match=r"layer b: .*strides"):
        proof.compare_block(layout, registered(layout), 0, 3)


class Agent:
    """Keeps one page, through the copies that the client would make."""

    def __init__(self, spoil: bool = False) -> None:
        self.page: Any = None
        self.spoil = spoil

    def carry(
        self, layout: Layout, client: Any, registration: Any, instance: Any, rank: int, source: int, target: int
    ) -> None:
        image = registration.image(0, source)
        if self.spoil:
            image[-1] ^= 1
        start = 0
        for layer in layout.groups[0].layers:
            address = layout.allocations[layer.allocation].address + layer.offset + target * layer.block_stride
            import ctypes

            ctypes.memmove(address, image[start:].ctypes.data, layer.block_bytes)
            start += layer.block_bytes


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_proof_on_an_empty_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = read(kv_memory(layout=name))
    kept = proof.block_bytes(layout.views[0][0], 3).copy()
    monkeypatch.setattr(proof, "_there_and_back", Agent().carry)
    proof.prove_on_empty_cache(layout, None, registered(layout), None, 0)  # type: ignore[arg-type]
    for view in layout.views[0]:
        assert not proof.block_bytes(view, 7).any(), "the blocks of the proof are left as zeros"
        assert not proof.block_bytes(view, 6).any()
    assert np.array_equal(proof.block_bytes(layout.views[0][0], 3), kept)


def test_proof_on_an_empty_cache_sees_a_single_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = read(kv_memory())
    monkeypatch.setattr(proof, "_there_and_back", Agent(spoil=True).carry)
    with pytest.raises(proof.LayoutDisprovenError, match="layer b: random bytes came back different"):
        proof.prove_on_empty_cache(layout, None, registered(layout), None, 0)  # type: ignore[arg-type]


@dataclass
class Save:
    """A save that was committed."""

    dropped: dict[str, int]
    error: None = None


class FullAgent:
    """A client of an agent that has room for a page at its third save, or never."""

    def __init__(self, room: bool = True) -> None:
        self.room = room
        self.saves = 0
        self.asked_after: list[int] = []

    def prepare_save(self, registration: Any, hashes: Any, blocks: Any, *, proof: bool) -> Save:
        assert proof
        self.saves += 1
        return Save({} if self.room and self.saves > 2 else {"pool_full": 1})

    def submit_saves(self, saves: list[Save]) -> None:
        pass

    def wait_save(self, save: Save, timeout: float) -> SaveStatus:
        return SaveStatus.COMMITTED

    def query_prefetch(self, request_id: str, hashes: Any, *, instance: Any, proof: bool) -> QueryReady:
        self.asked_after.append(self.saves)
        return QueryReady(leases=(1,), pages=1)

    def start_restore(self, registration: Any, lease: int, blocks: Any) -> None:
        assert lease == 1

    def query_consumed(self, request_id: str) -> None:
        pass

    def wait_restore(self, restore: None, timeout: float) -> RestoreStatus:
        return RestoreStatus.DONE


def carry(layout: Layout, agent: Any) -> None:
    proof._there_and_back(layout, agent, registered(layout), Instance("engine", "1"), 0, 7, 6)


def test_a_page_of_the_proof_that_found_no_room_is_saved_again() -> None:
    agent = FullAgent()
    carry(read(kv_memory()), agent)
    assert agent.saves == 3
    assert agent.asked_after == [3], "what was not kept is not waited for"


def test_proof_gives_up_soon_where_there_is_never_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "ROOM_S", 0.05)
    agent = FullAgent(room=False)
    with pytest.raises(proof.ProofUnfinishedError, match=r"no room for its page \(pool_full\)"):
        carry(read(kv_memory()), agent)
    assert not agent.asked_after


def test_proof_needs_three_blocks() -> None:
    layout = read(kv_memory(blocks=2), blocks=2)
    with pytest.raises(proof.ProofUnfinishedError, match="needs 3"):
        proof.prove_on_empty_cache(layout, None, registered(layout), None, 0)  # type: ignore[arg-type]
