from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from orbitkv.protocol import framing
from orbitkv.protocol.messages import Ping
from orbitkv.protocol.shortcut import MOST_BYTES, REGION_BYTES, REPLY, REQUEST, Shortcut, shortcut_memory


@pytest.fixture
def memory() -> Iterator[int]:
    fd = shortcut_memory()
    yield fd
    os.close(fd)


@pytest.fixture
def sides(memory: int) -> Iterator[tuple[Shortcut, Shortcut]]:
    both = Shortcut(memory), Shortcut(memory)
    yield both
    for side in both:
        side.close()


def test_what_one_side_puts_the_other_one_finds(sides: tuple[Shortcut, Shortcut]) -> None:
    one, other = sides
    largest = framing.HEADER.pack(MOST_BYTES - framing.HEADER.size, 8) + b"x" * (MOST_BYTES - framing.HEADER.size)
    one.put(REQUEST, 7, framing.encode(Ping(), 7))
    other.put(REPLY, 8, largest)
    assert other.words[REQUEST] == 7 and one.words[REPLY] == 8
    assert framing.request_decoder.decode(other.body(REQUEST)) == Ping()
    assert one.body(REPLY) == largest[framing.HEADER.size :]


@pytest.mark.parametrize("length", [MOST_BYTES - framing.HEADER.size + 1, (1 << 32) - 1])
def test_a_length_that_cannot_be_is_nothing(sides: tuple[Shortcut, Shortcut], length: int) -> None:
    one, other = sides
    one.put(REQUEST, 7, framing.HEADER.pack(length, 7))
    assert other.body(REQUEST) == b""


@pytest.mark.parametrize("size", [0, REGION_BYTES - 4096, REGION_BYTES + 4096])
def test_nobody_can_change_its_size(memory: int, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory, size)
