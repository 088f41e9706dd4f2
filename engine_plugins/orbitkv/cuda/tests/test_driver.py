"""How copies are handed to the driver, with a library that only writes down what it is asked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from orbitkv.cuda import LibCuda

STREAM = 7


class Library:
    """A driver that takes everything. `during`: called when memory is pinned."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.during: Callable[[], None] = lambda: None

    def cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> int:
        self.during()
        return 0

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
def quick() -> Library:
    """The same, for calls that keep the interpreter."""
    return Library()


@pytest.fixture
def driver(library: Library, quick: Library) -> LibCuda:
    driver = object.__new__(LibCuda)
    driver._library, driver._quick = library, quick  # type: ignore[assignment]
    driver._long = {}
    driver._batch = "batch"
    driver._tells_failed = False
    driver._attributes = ctypes.c_int()  # type: ignore[assignment]
    driver._first = ctypes.c_size_t(0)
    return driver


def copy(driver: LibCuda, pieces: int, **more: Any) -> None:
    numbers = np.arange(pieces, dtype=np.uint64)
    driver.copy(numbers + 100, numbers + 200, numbers + 1, STREAM, to_device=True, **more)


def test_copies_are_handed_over_by_one_call(driver: LibCuda, quick: Library) -> None:
    copy(driver, 3)
    assert quick.calls == [("batch", [100, 101, 102], [200, 201, 202], [1, 2, 3])]


def test_an_idle_gpu_gets_the_first_copy_by_itself(driver: LibCuda, quick: Library) -> None:
    copy(driver, 3, soon=True)
    assert quick.calls == [("to device", 100, 200, 1), ("batch", [101, 102], [201, 202], [2, 3])]
    quick.calls.clear()
    copy(driver, 1, soon=True)
    assert quick.calls == [("batch", [100], [200], [1])]


def test_a_driver_without_the_batch_call_gets_them_one_by_one(driver: LibCuda, quick: Library) -> None:
    driver._batch = ""
    copy(driver, 2, soon=True)
    assert quick.calls == [("to device", 100, 200, 1), ("to device", 101, 201, 2)]


def test_copies_keep_the_interpreter_unless_another_call_might_make_them_wait(
    driver: LibCuda, library: Library, quick: Library
) -> None:
    busy: list[bool] = []

    def meanwhile() -> None:
        busy.append(driver.busy)
        copy(driver, 2)

    library.during = meanwhile
    driver.pin(0, 4096)
    assert busy == [True] and len(library.calls) == 1 and not quick.calls
    copy(driver, 2)
    assert not driver.busy and len(library.calls) == 1 and len(quick.calls) == 1
