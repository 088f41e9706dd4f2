"""`orbitkv doctor`: what is wrong with a cluster, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from orbitkv_operator.cli import installation, nodes, objects
from orbitkv_operator.cli.cluster import Cluster
from orbitkv_operator.cli.findings import Finding, info
from orbitkv_operator.cluster.api import ApiError

Check = Callable[[Cluster], Iterator[Finding]]

CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("Kubernetes", installation.kubernetes),
    ("CustomResourceDefinitions", installation.definitions),
    ("Operator", installation.operator),
    ("Release namespace", installation.release_namespace),
    ("Pull secrets", installation.pull_secrets),
    ("Certificates", installation.certificates),
    ("Webhook", installation.webhook),
    ("CSI driver", installation.csi_driver),
    ("ManagerPools", objects.pools),
    ("GPUs", objects.gpus),
    ("Memory of nodes", nodes.memory),
    ("CacheNamespaces", objects.caches),
    ("Pods of tenants", objects.tenants),
)
"""What is looked at, in this order, and what it is called when it cannot be."""


def examine(cluster: Cluster) -> list[Finding]:
    """Look at everything; what the rights of whoever asks do not reach is said and left out.

    Raises:
        ApiError: the API does not answer, or does not know who asks.
    """
    found: list[Finding] = []
    for about, check in CHECKS:
        try:
            found += check(cluster)
        except ApiError as error:
            if error.status in (0, 401):
                raise
            words = "Your rights do not reach to it" if error.status == 403 else "It could not be looked at"
            found.append(info(about, f"{words}: {error}"))
    return found
