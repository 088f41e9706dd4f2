import pytest

from orbitkv.client import BlockHashes, OrbitKVError


def test_slices_share_the_bytes_and_compare_by_content() -> None:
    hashes = BlockHashes([bytes([i]) * 4 for i in range(6)])
    part = hashes[2:5]
    assert len(part) == 3
    assert part[0] == bytes([2]) * 4
    assert part[-1] == bytes([4]) * 4
    assert part == BlockHashes([bytes([i]) * 4 for i in (2, 3, 4)])
    assert part != hashes[1:4]
    assert part._view.obj is hashes._view.obj
    assert len(hashes[5:2]) == 0


def test_groups_do_not_compare_equal() -> None:
    assert BlockHashes([b"a"], group=0) != BlockHashes([b"a"], group=1)


def test_hexadecimal_keys() -> None:
    assert BlockHashes.from_hex(["00ff", "abcd"])[1] == b"\xab\xcd"
    with pytest.raises(OrbitKVError, match="not hexadecimal"):
        BlockHashes.from_hex(["xy"])


@pytest.mark.parametrize("bad", [[b"a", b"bc"], [b""], [b"x" * 33]])
def test_hashes_of_other_sizes_are_refused_by_name(bad: list[bytes]) -> None:
    with pytest.raises(OrbitKVError, match="page_hashes"):
        BlockHashes(bad)


def test_an_index_out_of_range() -> None:
    with pytest.raises(IndexError):
        BlockHashes([b"a"])[1]
