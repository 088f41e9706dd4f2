"""Small helpers around numpy arrays."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_MAP_NORESERVE = 0x4000  # Linux; not exported by the mmap module


def lazy_zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of zeros of `shape`, sized for the largest pool yet costing only the 4 KiB pages that were touched.

    Columns made this way never grow, so no operation ever pays for moving millions of rows. numpy's own `zeros` asks
    for huge pages, which would round each column of a small cache up to megabytes.
    """
    kind = np.dtype(dtype)
    dimensions = (shape,) if isinstance(shape, int) else shape
    count = 1
    for dimension in dimensions:
        count *= dimension
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(count * kind.itemsize, mmap.PAGESIZE), flags=flags)
    # A kernel built without transparent huge pages refuses the advice, and then needs none.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=kind, count=count).reshape(dimensions)


def some(values: npt.NDArray[Any]) -> bool:
    """Whether any of `values` is not zero. `any()` says the same and takes five times as long for a small array."""
    return bool(np.count_nonzero(values))


def distinct(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each number once, ascending. `numpy.unique` does the same and imports half of numpy at its first call."""
    ordered = np.sort(numbers)
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
