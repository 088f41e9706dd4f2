"""Copy plans: whatever the geometry, the plan moves what a copy page by page and layer by layer would move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv.protocol.messages import GroupGeometry, LayerRegion
from orbitkv_agent.devices.cuda import plans
from orbitkv_agent.devices.cuda.geometry import FEW_PAGES, group_places
from orbitkv_agent.devices.cuda.plans import PagesOfGroup, plan_copy, plan_layers

ENGINE, HOST = 1 << 40, 1 << 30
UNIT = 4096


def layout(kind: str, layers: int, blocks: int, size: int) -> GroupGeometry:
    """A group whose layers lie one after another in memory, or interleaved block by block, or each by itself."""
    regions = []
    for i in range(layers):
        allocation, offset, stride = {
            "layer-outermost": (0, i * blocks * size, size),
            "block-outermost": (0, i * size, layers * size),
            "apart": (i, 0, size),
            "padded": (0, i * (size + 64), layers * (size + 64)),
        }[kind]
        regions.append(LayerRegion(f"l{i}", allocation, offset, blocks, size, stride, "uint8"))
    return GroupGeometry(0, "full", 16, regions)


def addresses(geometry: GroupGeometry) -> dict[int, int]:
    """Allocations that follow one another without a gap: the worst case for merging."""
    size = {r.allocation: 0 for r in geometry.layers}
    for r in geometry.layers:
        size[r.allocation] = max(size[r.allocation], r.offset + (r.block_count - 1) * r.block_stride + r.block_bytes)
    at, result = ENGINE, {}
    for allocation in sorted(size):
        result[allocation] = at
        at += size[allocation]
    return result


def bytes_moved(plan: plans.CopyPlan) -> dict[int, int]:
    """Engine address to host address of every 64 bytes."""
    moved: dict[int, int] = {}
    for host, device, size in zip(plan.host.tolist(), plan.device.tolist(), plan.sizes.tolist(), strict=True):
        for i in range(0, size, 64):
            assert device + i not in moved, "a byte is written twice"
            moved[device + i] = host + i
    return moved


KINDS = ["layer-outermost", "block-outermost", "apart", "padded"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 5),
    size=st.sampled_from([64, 192, 4096]),
    order=st.permutations(range(8)),
    slots=st.permutations(range(8)),
    count=st.integers(1, 8),
    few=st.sampled_from([0, 8]),
)
def test_a_plan_moves_every_byte_of_every_page_to_its_place(
    kind: str, layers: int, size: int, order: list[int], slots: list[int], count: int, few: int
) -> None:
    geometry = layout(kind, layers, 8, size)
    at = addresses(geometry)
    padded = -(-layers * size // UNIT) * UNIT
    blocks = np.array(order[:count], np.int64)
    offsets = np.array(slots[:count], np.int64) * padded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "FEW_PAGES", few)
        pages = PagesOfGroup(group_places(geometry, at), blocks, HOST + offsets, offsets == 0)
        plan = plan_copy([pages])
    expected = {}
    for block, offset in zip(blocks.tolist(), offsets.tolist(), strict=True):
        for i, region in enumerate(geometry.layers):
            start = at[region.allocation] + region.offset + block * region.block_stride
            for j in range(0, size, 64):
                expected[start + j] = HOST + offset + i * size + j
    assert bytes_moved(plan) == expected == bytes_moved(plan_layers([pages]))
    assert plan.bytes == count * layers * size
    covered = [piece for first, end, _ in plan.chunks for piece in range(first, end)]
    assert covered == list(range(plan.sizes.size)), "chunks leave out or repeat pieces"


def test_layer_by_layer_small_layers_of_a_page_are_joined() -> None:
    geometry = layout("block-outermost", 10, 64, 65536)
    places = group_places(geometry, addresses(geometry))
    blocks = np.array([9, 2, 30])
    pages = HOST + np.array([0, 3, 5], np.int64) * places.page_bytes
    group = PagesOfGroup(places, blocks, pages, np.zeros(3, np.bool_))
    plan = plan_layers([group, group], 6 * 65536)
    assert plan.sizes.tolist() == [4 * 65536] * 6 + [2 * 65536] * 3 + [4 * 65536] * 6 + [2 * 65536] * 3
    assert plan.host[3:6].tolist() == (pages + 4 * 65536).tolist()
    ends = np.cumsum(plan.sizes).tolist()
    for (_, end, _), in_place in zip(plan.chunks, plan.layers, strict=True):
        done = ends[end - 1]
        layers = [4, 8, 10, 14, 18, 20]
        sizes = [12 * 65536, 24 * 65536, 30 * 65536, 42 * 65536, 54 * 65536, 60 * 65536]
        assert in_place == max([0, *(layer for layer, size in zip(layers, sizes, strict=True) if size <= done)])
    assert plan.layers[-1] == 20


def test_layer_by_layer_large_layers_and_such_that_lie_apart_are_not_joined() -> None:
    for kind, size in (("block-outermost", 300 << 10), ("layer-outermost", 4096), ("padded", 4096)):
        geometry = layout(kind, 3, 64, size)
        places = group_places(geometry, addresses(geometry))
        pages = PagesOfGroup(places, np.array([5]), np.array([HOST]), np.zeros(1, np.bool_))
        plan = plan_layers([pages])
        assert plan.sizes.tolist() == [size] * 3, kind
        assert plan.layers == (3,)


def test_a_page_of_a_block_outermost_layout_is_one_piece() -> None:
    geometry = layout("block-outermost", 36, 64, 65536)
    places = group_places(geometry, addresses(geometry))
    assert places.whole
    pages = HOST + np.array([0, 3, 5], np.int64) * places.page_bytes
    plan = plan_copy([PagesOfGroup(places, np.array([9, 2, 30]), pages, np.zeros(3, np.bool_))])
    assert plan.sizes.tolist() == [places.page_bytes] * 3


def test_neighbours_on_both_sides_are_one_piece() -> None:
    geometry = layout("block-outermost", 2, 64, 2048)
    places = group_places(geometry, addresses(geometry))
    pages = HOST + np.arange(22, dtype=np.int64) * 4096
    blocks = np.array([4, 5, 6, 20, 21, 9, *range(60, 28, -2)])
    plan = plan_copy([PagesOfGroup(places, blocks, pages, np.zeros(22, np.bool_))])
    assert plan.sizes.tolist() == [3 * 4096, 2 * 4096, 4096] + 16 * [4096]


def test_a_few_whole_pages_are_a_piece_each() -> None:
    geometry = layout("block-outermost", 2, 64, 2048)
    places = group_places(geometry, addresses(geometry))
    pages = HOST + np.arange(FEW_PAGES, dtype=np.int64) * 4096
    plan = plan_copy([PagesOfGroup(places, np.arange(FEW_PAGES), pages, np.zeros(FEW_PAGES, np.bool_))])
    assert plan.sizes.tolist() == FEW_PAGES * [4096]
    assert plan.chunks == [(0, FEW_PAGES, FEW_PAGES * 4096)]


def test_pages_of_neighbouring_arenas_are_never_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "FEW_PAGES", 0)
    geometry = layout("block-outermost", 1, 64, 4096)
    places = group_places(geometry, addresses(geometry))
    pages = HOST + np.arange(4, dtype=np.int64) * 4096
    first = np.array([False, False, True, False])
    plan = plan_copy([PagesOfGroup(places, np.arange(4), pages, first)])
    assert plan.sizes.tolist() == [8192, 8192]


def test_blocks_of_neighbouring_allocations_are_never_one_piece() -> None:
    geometry = layout("apart", 2, 1, 4096)
    at = addresses(geometry)
    assert at[1] == at[0] + 4096
    plan = plan_copy([PagesOfGroup(group_places(geometry, at), np.array([0]), np.array([HOST]), np.array([True]))])
    assert plan.sizes.tolist() == [4096, 4096]


@pytest.mark.parametrize(("pages", "size", "most"), [(100, 36 * 65536, 24), (1000, 16384, 256), (60, 1 << 20, 54)])
def test_a_chunk_has_at_most_54_mib_and_256_pieces(pages: int, size: int, most: int) -> None:
    geometry = layout("block-outermost", 1, 2 * pages, size)
    places = group_places(geometry, addresses(geometry))
    blocks = np.arange(pages) * 2  # no neighbours
    plan = plan_copy(
        [PagesOfGroup(places, blocks, HOST + np.arange(pages, dtype=np.int64) * size, np.zeros(pages, np.bool_))]
    )
    assert all(end - first <= most for first, end, _ in plan.chunks)
    assert all(end - first == most for first, end, _ in plan.chunks[:-1])
    assert sum(size for _, _, size in plan.chunks) == plan.bytes


def test_a_piece_larger_than_a_chunk_is_cut() -> None:
    geometry = layout("block-outermost", 1, 64, 4 << 20)
    places = group_places(geometry, addresses(geometry))
    pages = HOST + np.arange(20, dtype=np.int64) * (4 << 20)
    plan = plan_copy([PagesOfGroup(places, np.arange(20), pages, np.zeros(20, np.bool_))])
    assert plan.sizes.tolist() == [54 << 20, 26 << 20]
    assert len(plan.chunks) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_by_layers_says_which_are_in_place_after_each_chunk(kind: str) -> None:
    geometry = layout(kind, 6, 40, 1 << 20)
    blocks = np.arange(10, dtype=np.int64)
    places = group_places(geometry, addresses(geometry))
    pages = PagesOfGroup(places, blocks, HOST + blocks * (6 << 20), blocks == 0)
    second = PagesOfGroup(places, blocks + 20, HOST + (blocks + 20) * (6 << 20), blocks < 0)
    plan = plan_layers([pages, second], 8 << 20)
    assert [size for _, _, size in plan.chunks] == [8 << 20] * 15 and plan.bytes == 120 << 20
    assert plan.layers == tuple(8 * (chunk + 1) // 10 for chunk in range(15)) and plan.layers[-1] == 12
    base, stride, *_ = places.layers
    for (first, end, _), whole in zip(plan.chunks, plan.layers, strict=True):
        layers = [(piece // 10) % 6 for piece in range(first, end)]
        starts = base[layers] + (np.arange(first, end) % 10 + 20 * (np.arange(first, end) >= 60)) * stride[layers]
        assert (plan.device[first:end] == starts.astype(np.uint64)).all()
        assert whole * 10 <= end
    assert not plan_layers([pages._replace(blocks=blocks[:0], pages=blocks[:0])]).chunks
