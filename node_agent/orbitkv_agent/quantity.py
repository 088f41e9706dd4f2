"""Sizes as people write them: `4GiB`, `512MiB`, `1.5Gi`, or a number of bytes."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
_QUANTITY: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,12})?) ?([A-Za-z]*)")
RULE: Final = "a size such as 512MiB, 4GiB or a number of bytes"


def parse_quantity(value: int | str) -> int:
    """Return `value` in bytes, fractions of a byte cut off.

    `KiB`, `Ki` and so on are powers of 1024, `kB`, `k` and so on powers of 1000, as Kubernetes has them.

    Raises:
        ValueError: it is no size, or negative; the message states the rule.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"must be {RULE}")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def format_quantity(size: int) -> str:
    """Return `size` bytes for people, in the largest unit that keeps it at 1 or more: `1.5 GiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scaled = size / _UNITS[unit]
        if scaled >= 1:
            return f"{scaled:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} B"
