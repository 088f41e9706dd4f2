import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv.client import OrbitKVError
from orbitkv.client.copies import CHUNK_BYTES, CopyPlan, plan_pages
from orbitkv.client.layout import GroupLayout
from orbitkv.protocol.messages import GroupGeometry, LayerRegion


def layout_of(memory: np.ndarray, layers: int, blocks: int, size: int, *, block_outermost: bool) -> GroupLayout:
    regions = []
    for i in range(layers):
        offset, stride = (i * size, layers * size) if block_outermost else (i * blocks * size, size)
        regions.append(LayerRegion(f"layer{i}", 0, offset, blocks, size, stride, "uint8"))
    return GroupLayout(GroupGeometry(0, "full", 16, regions), [memory.ctypes.data])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.permutations(range(12)), st.permutations(range(12)), st.just(n))),
    st.booleans(),
)
def test_saved_pages_restored_into_other_blocks_are_equal(
    block_outermost: bool, layers: int, pick: tuple[list[int], list[int], int], layer_order: bool
) -> None:
    sources, targets, count = pick
    size, blocks, page = 24, 12, 128
    rng = np.random.default_rng(count)
    memory = rng.integers(0, 256, layers * blocks * size, dtype=np.uint8)
    arena = np.zeros(blocks * page, np.uint8)
    layout = layout_of(memory, layers, blocks, size, block_outermost=block_outermost)
    pages = arena.ctypes.data + np.array(targets[:count], np.int64) * page
    before = memory.copy()
    plan_pages(layout, np.array(sources[:count]), pages, to_engine=False).run()
    assert np.array_equal(memory, before), "a save changes nothing in the engine"
    shape = (blocks, layers, size) if block_outermost else (layers, blocks, size)

    def block(data: np.ndarray, number: int) -> np.ndarray:
        cube = data.reshape(shape)
        return cube[number] if block_outermost else cube[:, number]

    memory[:] = 0
    plan_pages(layout, np.array(targets[:count]), pages, to_engine=True, layer_order=layer_order).run()
    for source, target in zip(sources[:count], targets[:count], strict=True):
        assert np.array_equal(block(memory, target), block(before, source))
    for untouched in targets[count:]:
        assert not block(memory, untouched).any()


def test_neighbours_on_both_sides_become_one_piece() -> None:
    memory, arena = np.zeros(4 * 64, np.uint8), np.zeros(4 * 64, np.uint8)
    layout = layout_of(memory, 2, 4, 32, block_outermost=True)
    pages = arena.ctypes.data + np.arange(3) * 64
    assert len(plan_pages(layout, np.arange(3), pages, to_engine=True)) == 1
    assert len(plan_pages(layout, np.array([2, 0, 1]), pages, to_engine=True)) == 2
    layer_outermost = layout_of(memory, 2, 4, 32, block_outermost=False)
    assert len(plan_pages(layer_outermost, np.arange(3), pages, to_engine=True)) == 6


def test_a_large_piece_is_copied_in_chunks() -> None:
    size = 2 * CHUNK_BYTES + 5
    source, target = np.arange(size, dtype=np.uint32).view(np.uint8)[:size].copy(), np.zeros(size, np.uint8)
    plan = CopyPlan(np.array([source.ctypes.data]), np.array([target.ctypes.data]), np.array([size]))
    assert list(plan.chunks()) == [CHUNK_BYTES, 2 * CHUNK_BYTES, size]
    assert np.array_equal(source, target)


def test_blocks_out_of_range_or_named_twice_are_refused() -> None:
    layout = layout_of(np.zeros(64, np.uint8), 1, 4, 16, block_outermost=True)
    with pytest.raises(OrbitKVError, match="blocks 0 to 3, asked for 4"):
        layout.check_blocks(np.array([1, 4]), destination=False)
    with pytest.raises(OrbitKVError, match="asked for -1"):
        layout.check_blocks(np.array([-1]), destination=False)
    with pytest.raises(OrbitKVError, match="named twice"):
        layout.check_blocks(np.array([1, 1]), destination=True)
    layout.check_blocks(np.array([1, 1]), destination=False)


@pytest.mark.parametrize("count", [8, 99])
def test_many_blocks_are_checked_like_few(count: int) -> None:
    layout = layout_of(np.zeros(64 * 100, np.uint8), 1, 100, 16, block_outermost=True)
    blocks = np.arange(count)[::-1]
    layout.check_blocks(blocks, destination=True)
    with pytest.raises(OrbitKVError, match="named twice"):
        layout.check_blocks(np.append(blocks, 3), destination=True)
    with pytest.raises(OrbitKVError, match="asked for 100"):
        layout.check_blocks(np.append(blocks, 100), destination=True)
