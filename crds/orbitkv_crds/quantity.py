"""Kubernetes quantities: `8Gi`, `500m`, `1.5G`, `12e6`, or a whole number."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Final

LARGEST: Final = 2**63 - 1
MAX_LENGTH: Final = 32
"""Characters of a quantity in our objects; those in others may be longer."""

_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_NUMBER: Final = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_PARTS: Final = re.compile(rf"([+-]?)({_NUMBER})(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?", re.ASCII)
_FURTHEST_EXPONENT: Final = 1000  # what is beyond it need not be told apart

PATTERN: Final = rf"^[+]?{_NUMBER.replace('?:', '')}(([numkMGTPE]|[KMGTPE]i)|[eE][+-]?[0-9]{{1,3}})?$"
"""What a quantity in our objects looks like: not negative. A regular expression for pydantic and OpenAPI alike."""


@lru_cache(maxsize=4096, typed=True)  # the same few are read again with every decision on a pool's cache namespaces
def parse_quantity(value: str | int) -> Fraction:
    """Return a quantity's exact value.

    As in Kubernetes, what is finer than a billionth is rounded away from zero, and with a binary suffix a value is at
    most 2^63 - 1. One difference: a sign or a suffix without any digit, which Kubernetes reads as zero, is refused.

    Raises:
        ValueError: it is no quantity; the message says what one looks like.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    match = _PARTS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no quantity: write a number with or without a suffix, such as 8Gi, 500M or 0.5")
    sign, number, suffix, exponent = match.groups()
    whole, _, digits = number.partition(".")
    mantissa = int(whole + digits or "0")
    power = int(exponent) if exponent else _DECIMAL.get(suffix or "", 0)
    power = max(-_FURTHEST_EXPONENT, min(_FURTHEST_EXPONENT, power)) - len(digits)
    nano = Fraction(mantissa << _BINARY.get(suffix, 0)) * Fraction(10) ** (power + 9)
    size = Fraction(-(-nano.numerator // nano.denominator), 10**9)
    if suffix in _BINARY:
        size = min(size, Fraction(LARGEST))
    return -size if sign == "-" else size


def whole_quantity(value: str | int) -> int:
    """Return a quantity as a whole number, rounded up and at most 2^63 - 1: bytes, for a size.

    Raises:
        ValueError: as `parse_quantity`.
    """
    exact = parse_quantity(value)
    return min(LARGEST, -(-exact.numerator // exact.denominator))


@lru_cache(maxsize=4096)
def size_text(size: int) -> str:
    """Return `size` bytes as a quantity without loss: in the largest unit that divides it, `1536Mi`."""
    for suffix, bits in reversed(_BINARY.items()):
        if size and size % (1 << bits) == 0:
            return f"{size >> bits}{suffix}"
    return str(size)


def rounded_size_text(size: int) -> str:
    """Return `size` bytes as a short quantity for people, with at most two decimals: `1.46Gi`."""
    for suffix, bits in reversed(_BINARY.items()):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.2f}".rstrip("0").rstrip(".") + suffix
    return str(size)
