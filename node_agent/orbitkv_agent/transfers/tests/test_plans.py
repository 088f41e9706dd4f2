from __future__ import annotations

import numpy as np
import pytest

from orbitkv.protocol.messages import GroupBlocks
from orbitkv_agent.sessions.layout import GroupLayout
from orbitkv_agent.transfers.plans import FEW, PlanRefused, check_blocks

GROUP = GroupLayout(3, "full", 16, 4096, 8192, ())


def checked(ids: list[int]) -> tuple[list[int], int]:
    found = check_blocks(GroupBlocks(3, np.array(ids, "<i4").tobytes()), GROUP, len(ids))
    return found.blocks.tolist(), found.used


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 1000])
def test_block_ids_are_checked_alike_however_many_they_are(count: int) -> None:
    ids = np.random.default_rng(count).permutation(4096)[:count].tolist()
    assert checked(ids) == (ids, count)
    skipping = [-1, *ids, -1]
    assert checked(skipping) == (skipping, count), "a page may be skipped more than once"
    for wrong, reason in (([*ids, ids[0]], "duplicate"), ([*ids, 4096], "bounds"), ([*ids, -2], "bounds")):
        with pytest.raises(PlanRefused) as refused:
            checked(wrong)
        assert refused.value.reason == reason
        with pytest.raises(PlanRefused):
            checked([-1, *wrong])


def test_pages_that_are_all_skipped_use_no_block() -> None:
    assert checked([-1] * 5) == ([-1] * 5, 0)
    assert checked([-1] * (FEW + 1))[1] == 0
    assert checked([]) == ([], 0)
