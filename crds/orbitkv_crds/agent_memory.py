"""How much memory an agent needs beside its pool: what its pod asks for, and its limit."""

from __future__ import annotations

from typing import Final

_MIB: Final = 1 << 20
BASE_BYTES: Final = 256 * _MIB
"""Of the process without pages. Measured: 108 MiB at rest in a cluster, of which 73 MiB are its own; the rest is for
sessions (each has records and buffers of up to 8 MiB for a client that does not read) and for lists of the cluster."""
PAGE_BYTES: Final = 144
"""Of one page, in the index and its parts. Measured: 136 bytes a page at 1,000,000 pages, 140 at 500,000."""
SMALLEST_PAGE: Final = 16384
"""Size of pages up to which the pool may be full of them: a page of 16 tokens of a small model on one of eight
GPUs is larger. Smaller ones need a limit of their own (`spec.resources`)."""


def agent_overhead(pool: int) -> int:
    """Return what an agent with a pool of `pool` bytes needs beside it, in bytes; a whole number of MiB."""
    pages = -(-pool // SMALLEST_PAGE)
    return -(-(BASE_BYTES + pages * PAGE_BYTES) // _MIB) * _MIB


def agent_memory(pool: int) -> int:
    """Return what an agent's container asks for, and is limited to, in bytes: the pool is memory of its own."""
    return pool + agent_overhead(pool)
