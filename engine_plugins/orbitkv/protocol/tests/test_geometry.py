import pytest

from orbitkv.protocol.geometry import padded


@pytest.mark.parametrize(("size", "result"), [(1, 4096), (4096, 4096), (4097, 8192), (2359296, 2359296)])
def test_pages_are_padded_to_whole_disk_blocks(size: int, result: int) -> None:
    assert padded(size) == result
