"""What a query asks for, checked, and how much of it is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.messages import GroupHashes, LeasedPages
from orbitkv_agent.guards import guard
from orbitkv_agent.queries.boundaries import common_boundary
from orbitkv_agent.sessions.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orbitkv_agent.sessions.layout import GroupPages
    from orbitkv_agent.store.index import KeySpace, Run

MAX_HASH_BYTES: Final = 32
"""Longest engine hash."""


class Found:
    """What of the pages asked for is there, as far as all groups reach together.

    Attributes:
        asked: pages asked for.
        pages: by group; empty when there is nothing.
        runs: the store's entries, in the order of `pages`; valid in this turn only.
        shard_bytes: padded, in rank order.
        bytes: their sum.
        boundaries: page counts at which the request may resume, as runs (first, last, step).
    """

    __slots__ = ("asked", "boundaries", "bytes", "pages", "runs", "shard_bytes")

    def __init__(
        self,
        asked: int,
        pages: list[LeasedPages],
        runs: list[Run],
        shard_bytes: list[int],
        boundaries: list[tuple[int, int, int]],
    ) -> None:
        self.asked = asked
        self.pages = pages
        self.runs = runs
        self.shard_bytes = shard_bytes
        self.bytes = sum(shard_bytes)
        self.boundaries = boundaries


def check_hashes(part: GroupHashes) -> int:
    """Return how many hashes a blob holds.

    Raises:
        Refused: INVALID.
    """
    if not 1 <= part.hash_bytes <= MAX_HASH_BYTES:
        raise invalid(f"group {part.group}: hash_bytes is {part.hash_bytes}; 1 to {MAX_HASH_BYTES} are accepted")
    size = len(part.blob)
    if size % part.hash_bytes:
        raise invalid(f"group {part.group}: {size} bytes of hashes are no multiple of {part.hash_bytes}")
    return size // part.hash_bytes


def check_asked(parts: Sequence[GroupHashes], groups: Mapping[int, GroupPages], *, proof: bool) -> int:
    """Return how many bytes of hashes a query holds.

    Args:
        parts: the hashes of the query.
        groups: those that the instance has.
        proof: pages of a proof are asked for, which may be those of some groups.

    Raises:
        Refused: INVALID.
    """
    asked: list[int] = []
    held = 0
    for part in parts:
        check_hashes(part)
        if part.hash_bytes != parts[0].hash_bytes:
            raise invalid("hash_bytes differs between the groups of one query")
        asked.append(part.group)
        held += len(part.blob)
    if asked != list(groups):
        _check_groups(sorted(asked), sorted(groups), whole=not proof)
    return held


def _check_groups(asked: list[int], groups: list[int], *, whole: bool) -> None:
    if len(set(asked)) != len(asked):
        raise invalid(f"hashes name a group twice: {asked}")
    if not asked or not set(asked) <= set(groups):
        raise invalid(f"hashes name groups {asked}; the instance has groups {groups}")
    if asked != groups and whole and guard("all-groups"):
        raise invalid(f"hashes name groups {asked}; a hit needs every group of the instance: {groups}")


def look_up(space: KeySpace, groups: Mapping[int, GroupPages], parts: Sequence[GroupHashes]) -> Found:
    """Look up how far all groups reach together. Holds nothing."""
    if len(parts) == 1:  # the usual model
        [part] = parts
        run = space.lookup_run(part.group, part.blob)
        count, asked = len(run), len(part.blob) // part.hash_bytes
        if not count:
            return Found(asked, [], [], [], [])
        shard_bytes = [count * size for size in groups[part.group].shard_bytes]
        return Found(asked, [LeasedPages(part.group, 0, count)], [run], shard_bytes, [(1, count, 1)])
    return _look_up_groups(space, groups, parts)


def _look_up_groups(space: KeySpace, groups: Mapping[int, GroupPages], parts: Sequence[GroupHashes]) -> Found:
    asked, runs, reach = 0, [], []
    for part in parts:
        run = space.lookup_run(part.group, part.blob)
        asked += len(part.blob) // part.hash_bytes
        runs.append(run)
        reach.append((groups[part.group].block_tokens, len(run)))
    step, longest = common_boundary(reach)
    if not longest:
        return Found(asked, [], [], [], [])
    pages: list[LeasedPages] = []
    shard_bytes: list[int] = []
    for index, part in enumerate(parts):
        group = groups[part.group]
        count = longest // group.block_tokens
        pages.append(LeasedPages(part.group, 0, count))
        if len(runs[index]) > count:
            runs[index] = runs[index][:count]
        sizes = [count * size for size in group.shard_bytes]
        shard_bytes = [a + b for a, b in zip(shard_bytes, sizes, strict=True)] if shard_bytes else sizes
    tokens = reach[0][0]
    return Found(asked, pages, runs, shard_bytes, [(step // tokens, longest // tokens, step // tokens)])
