"""How copies are handed to the driver, with a library that only writes down what it is asked."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from orbitkv.cuda import LibCuda

STREAM = 7


class Library:
    """A driver that takes everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def cuMemcpyHtoDAsync_v2(self, destination: int, source: int, size: int, stream: int) -> int:
        self.calls.append(("to device", destination, source, size))
        assert stream == STREAM
        return 0

    def batch(self, destinations: int, sources: int, sizes: int, count: int, *rest: Any) -> int:
        arrays = [list((ctypes.c_uint64 * count).from_address(each)) for each in (destinations, sources, sizes)]
        self.calls.append(("batch", *arrays))
        assert rest[-1] == STREAM
        return 0


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def driver(library: Library) -> LibCuda:
    driver = object.__new__(LibCuda)
    driver._library = library  # type: ignore[assignment]
    driver._batch = library.batch
    driver._tells_failed = False
    driver._attributes = ctypes.c_int()  # type: ignore[assignment]
    driver._first = ctypes.c_size_t(0)
    return driver


def copy(driver: LibCuda, pieces: int, **more: Any) -> None:
    numbers = np.arange(pieces, dtype=np.uint64)
    driver.copy(numbers + 100, numbers + 200, numbers + 1, STREAM, to_device=True, **more)


def test_copies_are_handed_over_by_one_call(driver: LibCuda, library: Library) -> None:
    copy(driver, 3)
    assert library.calls == [("batch", [100, 101, 102], [200, 201, 202], [1, 2, 3])]


def test_an_idle_gpu_gets_the_first_copy_by_itself(driver: LibCuda, library: Library) -> None:
    copy(driver, 3, soon=True)
    assert library.calls == [("to device", 100, 200, 1), ("batch", [101, 102], [201, 202], [2, 3])]
    library.calls.clear()
    copy(driver, 1, soon=True)
    assert library.calls == [("batch", [100], [200], [1])]


def test_a_driver_without_the_batch_call_gets_them_one_by_one(driver: LibCuda, library: Library) -> None:
    driver._batch = None
    copy(driver, 2, soon=True)
    assert library.calls == [("to device", 100, 200, 1), ("to device", 101, 201, 2)]
