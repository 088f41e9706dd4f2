import pytest

from orbitkv.protocol.versions import VersionRange, settle


@pytest.mark.parametrize(
    ("ours", "theirs", "settled"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 2), 2),
        ((1, 3), (2, 2), 2),
        ((2, 3), (1, 1), None),
        ((1, 1), (2, 3), None),
    ],
)
def test_two_sides_use_the_highest_version_that_both_speak(
    ours: tuple[int, int], theirs: tuple[int, int], settled: int | None
) -> None:
    assert settle(VersionRange(*ours), VersionRange(*theirs)) == settled


def test_a_range_reads_as_a_range() -> None:
    assert str(VersionRange(1, 2)) == "[1, 2]"
