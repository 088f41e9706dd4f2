"""What operator and webhook may do, as data: the chart's roles are generated from it, and tests hold it against what
is asked.

No rule has a wildcard. The operator can neither write workloads nor grant rights: agents get theirs from a role that
the chart binds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from orbitkv_crds.names import CERTIFICATES_SECRET, OPERATOR, REPORTS_SERVICE, WEBHOOK


@dataclass(frozen=True)
class Rule:
    """One rule of a role."""

    api_groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    resource_names: tuple[str, ...] = ()

    def as_policy_rule(self) -> dict[str, Any]:
        """Return it as a PolicyRule of rbac.authorization.k8s.io/v1."""
        rule = {"apiGroups": list(self.api_groups), "resources": list(self.resources), "verbs": list(self.verbs)}
        return rule | ({"resourceNames": list(self.resource_names)} if self.resource_names else {})


CLUSTER_RULES: Final = (
    Rule(("orbitkv.io",), ("managerpools", "cachenamespaces"), ("get", "list", "watch")),
    Rule(("orbitkv.io",), ("managerpools/status", "cachenamespaces/status"), ("patch",)),
    # Nodes: where pools would overlap. Namespaces: their labels, for allowedNamespaces.
    Rule(("",), ("nodes", "namespaces"), ("get", "list", "watch")),
    # Pods that ask for a cache: what became of them, and which of them the webhook missed (of these the metadata only).
    Rule(("",), ("pods",), ("get", "list", "watch")),
    # Whether the RuntimeClass is there by which a pool's agents get at GPUs.
    Rule(("node.k8s.io",), ("runtimeclasses",), ("get", "list", "watch")),
    # What claims for GPUs need (gpu.access: dra).
    Rule(("resource.k8s.io",), ("deviceclasses",), ("get",)),
    Rule(("resource.k8s.io",), ("resourceslices",), ("list",)),
    # Which CA signs the webhook's certificate.
    Rule(("admissionregistration.k8s.io",), ("mutatingwebhookconfigurations",), ("get", "patch"), (WEBHOOK,)),
    Rule(("events.k8s.io",), ("events",), ("create",)),
    # Who pushes a report; who reads /metrics.
    Rule(("authentication.k8s.io",), ("tokenreviews",), ("create",)),
    Rule(("authorization.k8s.io",), ("subjectaccessreviews",), ("create",)),
)
"""In the whole cluster (a ClusterRole)."""

NAMESPACE_RULES: Final = (
    Rule(("apps",), ("daemonsets",), ("get", "list", "watch", "create", "patch")),
    Rule(("",), ("serviceaccounts", "configmaps"), ("get", "list", "watch", "create", "patch")),
    # Agents are replaced by deleting their pods. Pods are made in dry runs only: to see that the webhook answers.
    # Patched is the image of the container that pulls the payload ahead.
    Rule(("",), ("pods",), ("list", "watch", "delete", "create", "patch")),
    Rule(("networking.k8s.io",), ("networkpolicies",), ("get", "list", "watch", "create", "patch", "delete")),
    Rule(("monitoring.coreos.com",), ("podmonitors",), ("get", "list", "watch", "create", "patch", "delete")),
    Rule(("resource.k8s.io",), ("resourceclaimtemplates",), ("get", "create", "patch", "delete")),
    # `create` cannot be limited to a name.
    Rule(("",), ("secrets",), ("create",)),
    Rule(("",), ("secrets",), ("get", "update"), (CERTIFICATES_SECRET, WEBHOOK)),
    Rule(("discovery.k8s.io",), ("endpointslices",), ("create",)),
    Rule(("discovery.k8s.io",), ("endpointslices",), ("get", "patch", "delete"), (REPORTS_SERVICE,)),
    Rule(("coordination.k8s.io",), ("leases",), ("create",)),
    Rule(("coordination.k8s.io",), ("leases",), ("get", "update"), (OPERATOR,)),
    Rule(("apps",), ("deployments",), ("get",), (OPERATOR,)),  # what Secret, EndpointSlice and Lease end with
)
"""In the release namespace (a Role)."""

WEBHOOK_CLUSTER_RULES: Final = (
    Rule(("orbitkv.io",), ("managerpools", "cachenamespaces"), ("get", "list", "watch")),
    # Labels (Pod Security, access, the default of a namespace) and the uid of kube-system.
    Rule(("",), ("namespaces",), ("get", "list", "watch")),
    # Who reads /metrics.
    Rule(("authentication.k8s.io",), ("tokenreviews",), ("create",)),
    Rule(("authorization.k8s.io",), ("subjectaccessreviews",), ("create",)),
)
"""The webhook's in the whole cluster: it reads, and writes nothing."""

WEBHOOK_NAMESPACE_RULES: Final = (
    Rule(
        ("",), ("secrets", "configmaps"), ("get",), (WEBHOOK,)
    ),  # its certificate, and what the operator has found out
)
"""The webhook's in the release namespace."""
