"""All that a pool consists of."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Final

from orbitkv_crds.managerpool import ManagerPool
from orbitkv_operator.builders import agents, network
from orbitkv_operator.builders.agents import Context, with_digest
from orbitkv_operator.cluster.api import (
    CLAIM_TEMPLATES,
    CONFIG_MAPS,
    DAEMON_SETS,
    NETWORK_POLICIES,
    POD_MONITORS,
    SERVICE_ACCOUNTS,
    Manifest,
    Resource,
)

CHILD_KINDS: Final = (SERVICE_ACCOUNTS, CONFIG_MAPS, DAEMON_SETS, NETWORK_POLICIES, POD_MONITORS)
"""What every pool may have. (Claim templates, which only some have, are not watched.)"""
_ORDER: Final = (SERVICE_ACCOUNTS, CONFIG_MAPS, CLAIM_TEMPLATES, DAEMON_SETS, NETWORK_POLICIES, POD_MONITORS)
"""In which they are made."""


@dataclass(frozen=True)
class Child:
    """An object of a pool as it should be; None: it should not be there."""

    resource: Resource
    manifest: Manifest | None


def children(
    pool: ManagerPool, context: Context, served: Set[Resource], placement: dict[str, Any] | None
) -> list[Child]:
    """Return every child of a pool.

    Args:
        served: kinds that the API has; others are left out.
        placement: where agents may run; None: nowhere yet, and there is no DaemonSet to make (one that is there
            stays as it is).
    """
    wanted: dict[Resource, Manifest | None] = {
        SERVICE_ACCOUNTS: agents.service_account(pool, context),
        CONFIG_MAPS: agents.config_map(pool, context),
        CLAIM_TEMPLATES: agents.claim_template(pool, context) if context.route.claims else None,
        NETWORK_POLICIES: network.network_policy(pool, context) if context.settings.network_policy else None,
        POD_MONITORS: network.pod_monitor(pool, context) if pool.spec.metrics.pod_monitor.enabled else None,
    }
    if placement is not None:
        wanted[DAEMON_SETS] = agents.daemon_set(pool, context, placement)
    return [
        Child(resource, None if (manifest := wanted[resource]) is None else with_digest(manifest))
        for resource in _ORDER
        if resource in served and resource in wanted
    ]
