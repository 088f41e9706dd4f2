"""The agents of a pool: ServiceAccount, ConfigMap and DaemonSet.

A pod's template is split in two. What an agent *is* goes into its hash, and agents are replaced for it, one by one.
Where agents may run (`nodeSelector`, `affinity`, `tolerations`) does not: the DaemonSet is `OnDelete`, so a change of
placement adds and removes pods at its edges and restarts nothing in between.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

import yaml

from orbitkv_crds import names
from orbitkv_crds.agent_memory import agent_memory
from orbitkv_crds.live import LiveSettings
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_crds.quantity import parse_quantity, size_text
from orbitkv_operator import dra
from orbitkv_operator.cluster.api import CLAIM_TEMPLATES, Manifest
from orbitkv_operator.gpu import HOST, Route, keep_off
from orbitkv_operator.names import (
    AGENT_LABELS,
    ANNOTATION_AGENT_CONFIG,
    ANNOTATION_APPLIED,
    PAYLOAD_CONTAINER,
    pool_labels,
)
from orbitkv_operator.settings import Settings

MI: Final = 1 << 20
DRAIN_SECONDS: Final = 30
"""How long an agent that is asked to go finishes what it began; its pod's grace period covers it."""
_CONFINED: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
_ONE_AGENT_A_NODE: Final = {
    "labelSelector": {"matchLabels": AGENT_LABELS},
    "topologyKey": "kubernetes.io/hostname",
}


@dataclass(frozen=True)
class Context:
    """What manifests depend on beside the pool's spec."""

    settings: Settings
    ca_bundle: str
    """Certificates (PEM) that a report server may show; empty while there are none."""
    route: Route = HOST
    """The way to the GPUs."""

    @property
    def namespace(self) -> str:
        """The release namespace."""
        return self.settings.namespace


def digest(value: Any) -> str:
    """Return a short text that differs where `value` (JSON) does."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def service_account(pool: ManagerPool, context: Context) -> Manifest:
    """Return the identity of the pool's agents; what it may do is up to the chart."""
    return _child("v1", "ServiceAccount", pool, context)


def live_settings_text(pool: ManagerPool) -> str:
    """Return the settings that agents apply while they run, as they read them."""
    return LiveSettings.of(pool.spec).write()


def config_map(pool: ManagerPool, context: Context) -> Manifest:
    """Return the files that agents read again when they change."""
    data = {names.LIVE_CONFIG: live_settings_text(pool), names.CA_CERTIFICATE: context.ca_bundle}
    return _child("v1", "ConfigMap", pool, context) | {"data": data}


def claim_template(pool: ManagerPool, context: Context) -> Manifest:
    """Return the template of the claims by which agents are given all GPUs of their nodes."""
    made = _child(CLAIM_TEMPLATES.api_version, CLAIM_TEMPLATES.kind, pool, context)
    return made | {
        "spec": {"metadata": {"labels": pool_labels(pool.metadata.name)}, "spec": dra.claim_spec()},
    }


def daemon_set(pool: ManagerPool, context: Context, placement: dict[str, Any] | None = None) -> Manifest:
    """Return the DaemonSet; `placement` is put in the place of what the spec says on it."""
    template = _template(pool, context)
    template["metadata"]["annotations"][names.ANNOTATION_TEMPLATE_HASH] = template_hash(pool, context)
    template["spec"] |= placement_for(pool) if placement is None else placement
    _pull_ahead(template["spec"], context.settings)
    manifest = _child("apps/v1", "DaemonSet", pool, context)
    manifest["spec"] = {
        "selector": {"matchLabels": {names.LABEL_POOL: pool.metadata.name, **AGENT_LABELS}},
        "updateStrategy": {"type": "OnDelete"},
        "template": template,
    }
    return manifest


def template_hash(pool: ManagerPool, context: Context) -> str:
    """Return the hash of all that an agent is replaced for."""
    return digest(_template(pool, context))


def placement_for(pool: ManagerPool) -> dict[str, Any]:
    """Return where the spec wants agents, with the rule that there is one a node."""
    affinity = pool.spec.affinity.to_body() if pool.spec.affinity else {}
    if not pool.spec.host_mode:
        affinity = keep_off(affinity)
    apart = dict(affinity.get("podAntiAffinity") or {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    apart[required] = [_ONE_AGENT_A_NODE, *apart.get(required, ())]
    wanted = {
        "nodeSelector": pool.spec.node_selector_in_force,
        "affinity": affinity | {"podAntiAffinity": apart},
        "tolerations": [toleration.to_body() for toleration in pool.spec.tolerations_in_force],
    }
    return {field: value for field, value in wanted.items() if value}


def agent_config(pool: ManagerPool) -> str:
    """Return the agent's configuration file: the settings for which it is replaced."""
    return yaml.safe_dump(
        {
            "pool": size_text(pool.spec.memory.pool_bytes),
            "socket_path": names.SOCKET_PATH,
            "metrics_address": f"0.0.0.0:{pool.spec.metrics.port}",
            "log_format": "json",
            # never "auto": an agent must not take a GPU that it happens to see, nor do without one that it should see
            "mode": "host" if pool.spec.host_mode else "cuda",
            "drain_timeout_ms": DRAIN_SECONDS * 1000,
            "cluster": {"pool": pool.metadata.name},
        },
        sort_keys=True,
    )


def resources(pool: ManagerPool) -> dict[str, Any]:
    """Return what an agent asks for: pool and overhead as memory, and what the spec says above that."""
    pool_bytes = pool.spec.memory.pool_bytes
    memory = size_text(-(-agent_memory(pool_bytes) // MI) * MI)
    given = pool.spec.resources.to_body() if pool.spec.resources else {}
    limits = {"memory": memory} | given.get("limits", {})
    requests = {"cpu": "200m", "memory": limits["memory"]} | given.get("requests", {})
    if "cpu" in limits and "cpu" not in given.get("requests", {}):
        requests["cpu"] = min(requests["cpu"], limits["cpu"], key=parse_quantity)
    return {
        "limits": {name: str(amount) for name, amount in limits.items()},
        "requests": {name: str(amount) for name, amount in requests.items()},
    }


def child_metadata(pool: ManagerPool, namespace: str) -> dict[str, Any]:
    """Return the metadata of an object that belongs to a pool and ends with it."""
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": "ManagerPool",
        "name": pool.metadata.name,
        "uid": pool.metadata.uid,
        "controller": True,
    }
    return {
        "name": names.pool_object_name(pool.metadata.name),
        "namespace": namespace,
        "labels": pool_labels(pool.metadata.name),
        "ownerReferences": [owner],
    }


def with_digest(manifest: Manifest) -> Manifest:
    """Return the manifest with an annotation that differs whenever anything in it does."""
    metadata = dict(manifest["metadata"])
    metadata["annotations"] = metadata.get("annotations", {}) | {ANNOTATION_APPLIED: digest(manifest)}
    return manifest | {"metadata": metadata}


def _child(api_version: str, kind: str, pool: ManagerPool, context: Context) -> Manifest:
    return {"apiVersion": api_version, "kind": kind, "metadata": child_metadata(pool, context.namespace)}


def _template(pool: ManagerPool, context: Context) -> Manifest:
    """Return the pod's template without placement and without its own hash."""
    spec = pool.spec
    secrets = [*context.settings.agent_pull_secrets, *(it.name for it in spec.image_pull_secrets or ())]
    annotations = {**(spec.pod_annotations or {}), ANNOTATION_AGENT_CONFIG: agent_config(pool)}
    pod: dict[str, Any] = {
        "serviceAccountName": names.pool_object_name(pool.metadata.name),
        "priorityClassName": spec.priority_class_name or names.AGENT_PRIORITY_CLASS,
        "terminationGracePeriodSeconds": DRAIN_SECONDS + 10,
        "securityContext": {
            "runAsUser": 0,  # folders of the node belong to root, and fsGroup does not reach them
            "seccompProfile": {"type": "RuntimeDefault"},
            "seLinuxOptions": {"type": "spc_t"},  # engines of every label connect to the socket
        },
        "containers": [_container(pool, context)],
        "volumes": _volumes(pool),
    }
    if context.route.runtime_class:
        pod["runtimeClassName"] = context.route.runtime_class
    if context.route.claims:
        template = names.pool_object_name(pool.metadata.name)
        pod["resourceClaims"] = [{"name": dra.CLAIM, "resourceClaimTemplateName": template}]
    if context.route.privileged:
        pod["volumes"].append({"name": "dev", "hostPath": {"path": "/dev", "type": "Directory"}})
    if secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in dict.fromkeys(secrets)]
    labels = {**(spec.pod_labels or {}), **pool_labels(pool.metadata.name)}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod}


def _container(pool: ManagerPool, context: Context) -> Manifest:
    spec = pool.spec
    fields = {
        "NODE_NAME": "spec.nodeName",
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
    }
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    route = context.route
    if route.visible:
        visible = {"NVIDIA_VISIBLE_DEVICES": route.visible, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        own += [{"name": name, "value": value} for name, value in visible.items()]
    taken = {each["name"] for each in own}
    given = [variable.to_body() for variable in spec.env or () if variable.name not in taken]
    prefault = spec.memory.pool_bytes // (256 * MI)  # seconds, if memory comes slowly
    return {
        "name": names.AGENT_CONTAINER,
        "image": spec.image or context.settings.agent_image,
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the pool's status repeats an agent's last words
        "args": ["serve", "--config", f"{names.CONFIG_DIRECTORY}/{names.AGENT_CONFIG}", *(spec.extra_args or ())],
        "env": [*own, *given],
        "resources": resources(pool) | ({"claims": [{"name": dra.CLAIM}]} if route.claims else {}),
        "ports": [{"name": "metrics", "containerPort": spec.metrics.port, "protocol": "TCP"}],
        "startupProbe": _probe("/health", 1, 120 + prefault),
        "livenessProbe": _probe("/health", 10, 6),
        "readinessProbe": _probe("/ready", 5, 2),
        "securityContext": {"privileged": True, "readOnlyRootFilesystem": True}
        if route.privileged
        else dict(_CONFINED),
        "volumeMounts": [
            {"name": "socket", "mountPath": names.SOCKET_DIRECTORY},
            {"name": "state", "mountPath": names.STATE_DIRECTORY},
            {"name": "config", "mountPath": names.CONFIG_DIRECTORY, "readOnly": True},
            {"name": "token", "mountPath": names.REPORTS_TOKEN_PATH.rpartition("/")[0], "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *([{"name": "dev", "mountPath": "/dev"}] if route.privileged else ()),
        ],
    }


def _pull_ahead(pod: Manifest, settings: Settings) -> None:
    """Add what brings the payload's image to the node; no agent is replaced for it, nor waits for it."""
    if not settings.payload_image:
        return
    waiting = {
        "name": PAYLOAD_CONTAINER,
        "image": settings.payload_image,
        "imagePullPolicy": settings.payload_pull_policy,
        "command": [names.PAYLOAD_COPY, "--wait"],
        "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}, "limits": {"memory": "32Mi"}},
        "securityContext": dict(_CONFINED),
    }
    pod["containers"] = [*pod["containers"], waiting]
    listed = [it["name"] for it in pod.get("imagePullSecrets", ())]
    secrets = dict.fromkeys((*listed, *settings.payload_pull_secrets))
    if secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in secrets]


def _probe(path: str, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(pool: ManagerPool) -> list[Manifest]:
    def folder(name: str, path: str) -> Manifest:
        return {"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}

    config = {
        "downwardAPI": {
            "items": [
                {
                    "path": names.AGENT_CONFIG,
                    "fieldRef": {"fieldPath": f"metadata.annotations['{ANNOTATION_AGENT_CONFIG}']"},
                }
            ]
        }
    }
    live = {"configMap": {"name": names.pool_object_name(pool.metadata.name)}}
    token = {
        "serviceAccountToken": {
            "audience": names.REPORTS_AUDIENCE,
            "expirationSeconds": 3600,
            "path": names.REPORTS_TOKEN_PATH.rpartition("/")[2],
        }
    }
    return [
        folder("socket", names.SOCKET_DIRECTORY),
        folder("state", names.STATE_DIRECTORY),
        # One folder from two sources: what belongs to this pod and stays, and what all pods read again.
        {"name": "config", "projected": {"sources": [config, live]}},
        {"name": "token", "projected": {"sources": [token]}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
    ]
