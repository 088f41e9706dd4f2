"""The agent's checks against what must never happen, each with a name.

A test that pins one is marked `@pytest.mark.guard("name")`, and must fail when the check is left out (`orbitkv.guards`
says how): so we know that it would notice if the check were lost.
"""

from __future__ import annotations

from typing import Final

from orbitkv.guards import guard

__all__ = ["NAMES", "guard"]

NAMES: Final = frozenset(
    {
        "held-copies",  # memory is reused only after the copies on it are known to have ended
        "taken-back",  # what an engine's process took back is never handed to a GPU
        "mapping-drained",  # an engine's memory is given back only when no copy runs on it
        "copied-commit",  # a page becomes visible only when all of its bytes are in place
        "live-lease",  # an answer is given again only while its leases live
        "revoked-lease",  # a lease that is gone starts no restore
        "stale-revision",  # an older revision never answers for a newer one
        "boot-ids",  # handles of an earlier agent mean nothing here
        "own-session",  # handles mean something only in the session that got them
        "key-space",  # bytes are found only under what gives them their meaning
        "same-hashes",  # one revision is one list of hashes
        "restore-shape",  # a restore takes exactly the pages of its lease
        "budget-limit",  # no charge beyond the budget
        "tenants-turns",  # a tenant's turn does not grow with its sessions
        "tenants-share",  # no tenant takes what would leave others nothing
        "budget-drain",  # bytes come back only when the restore ended
        "own-memory",  # memory is registered by who may write it
        "own-lease",  # only its owner gives a lease back
        "commit-is-dram",  # a committed page that leaves memory is gone, and said to be gone
        "versions",  # no session without a common version
        "duplicate-rank",  # one live registration a rank
        "all-groups",  # a hit covers every group of the model
        "arena-namespace",  # no arena is mapped into another cache namespace
        "pages-in-use",  # a page that a lease or a save holds is not released
        "all-shards",  # an entry is found only when every shard's page is committed
    }
)
"""What each one keeps up."""
