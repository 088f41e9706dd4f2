"""Names that more than one program relies on: groups, labels, annotations, objects, audiences, paths, ports."""

from __future__ import annotations

from typing import Final, Literal

GROUP: Final = "orbitkv.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final[Literal["orbitkv.io/v1alpha1"]] = "orbitkv.io/v1alpha1"

# Labels and annotations
LABEL_POOL: Final = f"{GROUP}/pool"
"""On everything that the operator makes for a pool: the pool's name."""
LABEL_CACHE: Final = f"{GROUP}/cache"
"""On pods of engines that use the cache: "true"."""
LABEL_PROBE: Final = f"{GROUP}/probe"
"""On the pod by which the operator finds out whether the webhook answers; it is only ever made in dry runs."""
ANNOTATION_CACHE_NAMESPACE: Final = f"{GROUP}/cache-namespace"
ANNOTATION_CONFIRM_DELETE: Final = f"{GROUP}/confirm-delete"
"""On a pool: "true" lets it be deleted while cache namespaces refer to it."""
ANNOTATION_TEMPLATE_HASH: Final = f"{GROUP}/template-hash"
"""On agents' pods and DaemonSets: hash of what an agent is replaced for."""

# Objects in the release namespace
OPERATOR: Final = "orbitkv-operator"
"""Deployment, ServiceAccount and Lease of the operator."""
WEBHOOK: Final = "orbitkv-webhook"
"""Deployment, Service, ServiceAccount and MutatingWebhookConfiguration of the webhook; and the Secret of its
certificate, and the ConfigMap in which the operator tells it what it has found out."""
CSI: Final = "orbitkv-csi"
"""DaemonSet and ServiceAccount of the CSI driver."""
REPORTS_SERVICE: Final = "orbitkv-reports"
"""Service, and the EndpointSlice that the acting operator writes."""
CERTIFICATES_SECRET: Final = "orbitkv-certificates"
AGENT_PRIORITY_CLASS: Final = "orbitkv-agent"
AGENT_CONTAINER: Final = "agent"
MANAGED_BY: Final = OPERATOR

POOL_NAME_LENGTH: Final = 50
"""Longest name of a pool, in characters: with a prefix it becomes the name of objects, and a label."""

RESERVED_POOL_NAMES: Final = (
    "agent",
    "ca",
    "certificates",
    "csi",
    "dashboard",
    "metrics-reader",
    "operator",
    "reports",
    "test",
    "webhook",
)
"""A pool of such a name would make objects that are called like the chart's own."""


def pool_object_name(pool: str) -> str:
    """Return the name of the DaemonSet, ServiceAccount and ConfigMap of a pool."""
    return f"orbitkv-{pool}"


def reports_server_name(release_namespace: str) -> str:
    """Return the name that the certificate of the report server is made out to."""
    return f"{REPORTS_SERVICE}.{release_namespace}.svc"


# Tokens
REPORTS_AUDIENCE: Final = f"{GROUP}/reports"
"""Audience of the token with which an agent sends its reports."""


def webhook_server_name(release_namespace: str) -> str:
    """Return the name that the certificate of the webhook is made out to."""
    return f"{WEBHOOK}.{release_namespace}.svc"


def engine_audience(cluster_uid: str) -> str:
    """Return the audience of engines' tokens; `cluster_uid` is the uid of the namespace kube-system."""
    return f"{GROUP}/{cluster_uid}"


# On a node
CSI_DRIVER: Final = f"csi.{GROUP}"
"""The CSI driver, which mounts the folder of the agent's socket for pods."""

# Inside the agent's container
SOCKET_DIRECTORY: Final = "/run/orbitkv"
SOCKET_PATH: Final = f"{SOCKET_DIRECTORY}/agent.sock"
STATE_DIRECTORY: Final = "/var/lib/orbitkv"
"""Cache namespaces as last seen, for a start without the Kubernetes API; mode 0700."""
CONFIG_DIRECTORY: Final = "/etc/orbitkv"
AGENT_CONFIG: Final = "agent.yaml"
LIVE_CONFIG: Final = "live.yaml"
CA_CERTIFICATE: Final = "ca.crt"
REPORTS_TOKEN_PATH: Final = "/var/run/secrets/orbitkv/token"
AGENT_METRICS_PORT: Final = 9091
AGENT_SEES_NO_GPU: Final = 4
"""Exit code of an agent that is to serve GPUs and sees none."""

# Ports of the operator
OPERATOR_METRICS_PORT: Final = 9090
OPERATOR_PROBES_PORT: Final = 8081
OPERATOR_REPORTS_PORT: Final = 9443

# Ports of the webhook, beside those for metrics and probes
WEBHOOK_PORT: Final = 10250
"""Open from the control plane to nodes also where firewalls close others."""

# Inside an injected engine's container
ENGINE_TOKEN_PATH: Final = f"/var/run/secrets/{GROUP}/token"
PAYLOAD_PATH: Final = "/opt/orbitkv/payload"
"""Where the payload is mounted."""
PAYLOAD_IMAGE_FOLDER: Final = "payload"
"""Folder of the payload's image that holds the files for PYTHONPATH."""
PAYLOAD_COPY: Final = "/orbitkv-copy"
"""Program of the payload's image: copies that folder to the one that it is given."""
