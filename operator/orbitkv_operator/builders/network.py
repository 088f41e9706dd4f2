"""Who reaches the agents, and who scrapes them: NetworkPolicy and PodMonitor."""

from __future__ import annotations

from orbitkv_crds import names
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_operator.builders.agents import Context, child_metadata
from orbitkv_operator.cluster.api import Manifest
from orbitkv_operator.names import AGENT_LABELS, METRICS_READER


def _pods(pool: ManagerPool) -> Manifest:
    return {"matchLabels": {names.LABEL_POOL: pool.metadata.name, **AGENT_LABELS}}


def network_policy(pool: ManagerPool, context: Context) -> Manifest:
    """Return the policy that lets nothing in but requests for metrics (the kubelet's probes pass anyway)."""
    rule: Manifest = {"ports": [{"port": pool.spec.metrics.port, "protocol": "TCP"}]}
    if context.settings.metrics_from:
        rule["from"] = list(context.settings.metrics_from)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(pool, context.namespace),
        "spec": {"podSelector": _pods(pool), "policyTypes": ["Ingress"], "ingress": [rule]},
    }


def pod_monitor(pool: ManagerPool, context: Context) -> Manifest:
    """Return the PodMonitor; the token comes from a Secret that the chart makes."""
    endpoint = {
        "port": "metrics",
        "path": "/metrics",
        "authorization": {"type": "Bearer", "credentials": {"name": METRICS_READER, "key": "token"}},
    }
    metadata = child_metadata(pool, context.namespace)
    metadata["labels"] = {**(pool.spec.metrics.pod_monitor.labels or {}), **metadata["labels"]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": _pods(pool),
            "namespaceSelector": {"matchNames": [context.namespace]},
            "podMetricsEndpoints": [endpoint],
        },
    }
