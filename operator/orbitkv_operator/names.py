"""Names beyond those of `orbitkv_crds.names` that only the operator writes, and the labels of what it makes."""

from __future__ import annotations

from typing import Final

from orbitkv_crds import names

FIELD_MANAGER: Final = names.OPERATOR
"""The one manager under which the operator owns fields (`metadata.managedFields`)."""

METRICS_READER: Final = "orbitkv-metrics-reader"
"""Secret whose key `token` may read the agents' `/metrics`; the chart makes it."""

ANNOTATION_APPLIED: Final = "orbitkv.io/applied"
"""On a child: digest of what the operator applied. It shows that a field must go that is applied no more."""
ANNOTATION_AGENT_CONFIG: Final = "orbitkv.io/agent-config"
"""On an agent's pod: its configuration file."""

PAYLOAD_CONTAINER: Final = "payload"
"""In an agent's pod: what has the image on its node before an engine's pod needs it."""

CHILD_SELECTOR: Final = f"app.kubernetes.io/managed-by={names.MANAGED_BY}"
ENGINE_SELECTOR: Final = f"{names.LABEL_CACHE}=true"
"""Pods that the webhook has seen."""
ENGINE_FIELDS: Final = "status.phase!=Pending"
"""Those of them whose containers have begun: before that nothing can be said of their use of a cache, and most changes
of a pod come before."""
AGENT_LABELS: Final = {"app.kubernetes.io/name": "orbitkv", "app.kubernetes.io/component": "agent"}
"""Labels of every agent's pod, whatever its pool."""


def pool_labels(pool: str) -> dict[str, str]:
    """Return the labels that all objects and pods of a pool carry."""
    return {
        **AGENT_LABELS,
        "app.kubernetes.io/instance": pool,
        "app.kubernetes.io/part-of": "orbitkv",
        "app.kubernetes.io/managed-by": names.MANAGED_BY,
        names.LABEL_POOL: pool,
    }
