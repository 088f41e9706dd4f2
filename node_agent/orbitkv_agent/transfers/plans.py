"""Plans: which blocks a copy touches. Checked whole before anything is granted."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import GroupBlocks
from orbitkv_agent.sessions.errors import Refused
from orbitkv_agent.sessions.instances import Registration
from orbitkv_agent.sessions.layout import GroupLayout

Blocks = npt.NDArray[np.int32]

FEW: Final = 32
"""Up to so many ids are looked at one by one: a call of numpy costs as much as a dozen of them."""


class Checked(NamedTuple):
    """Block ids of one group, int32 of shape (pages,); -1 stands for a page that is skipped. `used` are not skipped."""

    blocks: Blocks
    used: int


class PlanRefused(Refused):
    """A plan is refused, and with it the request.

    Args:
        reason: one word for the metrics.
    """

    def __init__(self, reason: str, message: str, kind: ErrorKind = ErrorKind.INVALID) -> None:
        super().__init__(kind, message)
        self.reason = reason

    def count(self, counters: Counter[str]) -> PlanRefused:
        """Count this refusal; return itself."""
        counters[self.reason] += 1
        return self


def group_of(registration: Registration, number: int) -> GroupLayout:
    """The group of that number.

    Raises:
        PlanRefused: the registration has none.
    """
    group = registration.groups.get(number)
    if group is None:
        raise PlanRefused("group", f"group {number}: the registration has groups {sorted(registration.groups)}")
    return group


def check_blocks(part: GroupBlocks, group: GroupLayout, count: int) -> Checked:
    """Return the block ids of so many pages.

    Raises:
        PlanRefused: a wrong number of ids, one out of range, or one named twice.
    """
    if len(part.blob) != 4 * count:
        raise PlanRefused(
            "count", f"group {part.group}: {len(part.blob)} bytes of block ids for {count} pages; 4 a page"
        )
    blocks = np.frombuffer(part.blob, "<i4")
    if not count:
        return Checked(blocks, 0)
    few = count <= FEW
    ordered: Any = sorted(blocks.tolist()) if few else np.sort(blocks)
    low, high = int(ordered[0]), int(ordered[-1])
    if low < -1 or high >= group.block_count:
        raise PlanRefused(
            "bounds",
            f"out-of-range: group {part.group}: block {low if low < -1 else high} is not one of "
            f"0 to {group.block_count - 1}",
        )
    used = ordered if low >= 0 else ordered[bisect_left(ordered, 0) :]
    if len(set(used)) != len(used) if few else (used[1:] == used[:-1]).any():
        raise PlanRefused("duplicate", f"group {part.group}: a block is named twice")
    return Checked(blocks, len(used))


def same_groups(asked: Sequence[int], expected: Sequence[int]) -> None:
    """Check that two lists name the same groups, each once, in the same order.

    Raises:
        PlanRefused: they do not.
    """
    if list(asked) != list(expected):
        raise PlanRefused("group", f"blocks name groups {list(asked)}; expected {list(expected)}, in this order")
