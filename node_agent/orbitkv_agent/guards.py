"""Checks that keep what must never happen from happening, each with a name.

A test that pins such a check is marked `@pytest.mark.guard("name")` and must fail when the environment variable
`ORBITKV_TEST_GUARD_OFF` names it: so we know that the test would notice if the check were lost. The variable is read
once, at import, and is meant for tests only.
"""

from __future__ import annotations

import os
from typing import Final

NAMES: Final = frozenset(
    {
        "held-copies",  # memory is reused only after the copies on it are known to have ended
        "live-lease",  # an answer is given again only while its leases live
        "revoked-lease",  # a lease that is gone starts no restore
        "stale-revision",  # an older revision never answers for a newer one
        "boot-ids",  # handles of an earlier agent mean nothing here
        "own-session",  # handles mean something only in the session that got them
        "key-space",  # bytes are found only under what gives them their meaning
        "same-hashes",  # one revision is one list of hashes
        "restore-shape",  # a restore takes exactly the pages of its lease
        "budget-limit",  # no charge beyond the budget
        "budget-drain",  # bytes come back only when the restore ended
        "own-lease",  # only its owner gives a lease back
        "commit-is-dram",  # a committed page that leaves memory is gone, and said to be gone
        "versions",  # no session without a common version
        "duplicate-rank",  # one live registration a rank
        "all-groups",  # a hit covers every group of the model
        "arena-namespace",  # no arena is mapped into another cache namespace
    }
)
"""Guards of this package outside the store."""

_off: Final = frozenset(filter(None, os.environ.get("ORBITKV_TEST_GUARD_OFF", "").split(",")))


def guard(name: str) -> bool:
    """Whether the check `name` is in force: always, unless a test has switched it off."""
    return name not in _off
