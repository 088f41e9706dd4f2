"""Arithmetic on page sizes that plugin and agent must do alike."""

from __future__ import annotations

PAGE_ALIGNMENT = 4096
"""Bytes to which every page is padded in host memory (so that it can be read from and written to disks directly)."""


def padded(size: int) -> int:
    """Return `size` in bytes rounded up to `PAGE_ALIGNMENT`."""
    return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
