"""At which token counts a request can resume, when every KV group must be there."""

from __future__ import annotations

import math
from collections.abc import Sequence


def common_boundary(groups: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return (step, longest) in tokens for groups of full attention.

    A request can resume at every multiple of `step` up to `longest`: there each group has whole pages, and all of them.

    Args:
        groups: (tokens a page, leading pages that are there) of each group.
    """
    step = math.lcm(*(tokens for tokens, _ in groups))
    longest = min(tokens * pages for tokens, pages in groups)
    return step, longest - longest % step
