"""Pools that want the same nodes: which of them serves, and what each is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orbitkv_operator.cluster.api import Manifest
from orbitkv_operator.placement import matching


@dataclass(frozen=True)
class Candidate:
    """A pool and where its spec wants agents."""

    name: str
    uid: str
    created: str
    placement: dict[str, Any]

    @property
    def age(self) -> tuple[str, str]:
        """Order among pools: the oldest first, and of the same second by uid."""
        return self.created, self.uid


@dataclass(frozen=True)
class Overlap:
    """One pool's share in an overlap."""

    other: str
    """The other pool."""
    other_is_older: bool
    nodes: tuple[str, ...]


def overlaps(mine: Candidate, others: Iterable[Candidate], nodes: Iterable[Manifest]) -> list[Overlap]:
    """Return with which pools `mine` shares nodes, and which; by name."""
    nodes = list(nodes)
    wanted = set(matching(nodes, mine.placement))
    found = []
    for other in sorted(others, key=lambda it: it.name):
        shared = sorted(wanted.intersection(matching(nodes, other.placement))) if other.uid != mine.uid else []
        if shared:
            found.append(Overlap(other.name, other.age < mine.age, tuple(shared)))
    return found
