"""The way to the GPUs by Dynamic Resource Allocation: what it needs of a cluster, and what agents claim.

A claim with admin access is given devices that others hold, so that an agent sees every GPU of its node and takes none
from an engine. Where the cluster drops the word `adminAccess`, the same claim would take them all: so nothing is made
before the API was seen to keep it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from orbitkv_operator.cluster.api import CLAIM_TEMPLATES, DEVICE_CLASSES, RESOURCE_SLICES, Api, ApiError, Manifest

DRIVER: Final = "gpu.nvidia.com"
"""NVIDIA's driver, and the DeviceClass that it brings."""
CLAIM: Final = "gpus"
ADMIN_LABEL: Final = "resource.kubernetes.io/admin-access"
FIRST: Final = 10


@dataclass(frozen=True)
class Obstacle:
    """Why there is no way to the GPUs: one word, and a message that says what to do."""

    reason: str
    message: str


@dataclass(frozen=True)
class Dra:
    """What was found of all that is needed.

    Attributes:
        served: whether the API has the kinds (Kubernetes 1.34).
        device_class: whether NVIDIA's DeviceClass is there.
        labelled: whether the release namespace allows admin access.
        nodes: those whose GPUs NVIDIA's driver has published.
        keeps_admin: whether the API keeps `adminAccess`; None: it was not tried, as something else is missing.
        refused: why the API does not take such a claim; "" if it does.
    """

    served: bool
    device_class: bool = False
    labelled: bool = False
    nodes: frozenset[str] = frozenset()
    keeps_admin: bool | None = None
    refused: str = ""

    def missing(self, nodes: Iterable[str], namespace: str) -> list[Obstacle]:
        """Return all that is missing.

        Args:
            nodes: those that are to have an agent.
            namespace: the release namespace.
        """
        if not self.served:
            return [
                Obstacle(
                    "DRANotServed",
                    "This cluster does not serve resource.k8s.io/v1, which Kubernetes has from 1.34 on: upgrade it, or "
                    "use another way.",
                )
            ]
        found = []
        if not self.device_class:
            found.append(
                Obstacle(
                    "DeviceClassNotFound", f"There is no DeviceClass {DRIVER}: NVIDIA's DRA driver for GPUs brings it."
                )
            )
        if not self.labelled:
            found.append(
                Obstacle(
                    "AdminAccessNotAllowed",
                    f"Namespace {namespace} does not allow admin access to devices: `kubectl label namespace "
                    f"{namespace} {ADMIN_LABEL}=true`.",
                )
            )
        without = sorted(set(nodes) - self.nodes)
        if without:
            more = f" (and {len(without) - FIRST} more)" if len(without) > FIRST else ""
            found.append(
                Obstacle(
                    "NoDevicesPublished",
                    f"Driver {DRIVER} has no ResourceSlice of {', '.join(without[:FIRST])}{more}: see its pods there, "
                    "or leave these nodes out by nodeSelector.",
                )
            )
        if self.refused:
            found.append(
                Obstacle("ClaimRefused", f"The cluster does not take a claim with admin access: {self.refused}")
            )
        elif self.keeps_admin is False:
            found.append(
                Obstacle(
                    "AdminAccessDropped",
                    "The cluster drops adminAccess from claims, so that agents would take every GPU from the engines: "
                    "switch the feature gate DRAAdminAccess on.",
                )
            )
        return found


def claim_spec() -> Manifest:
    """Return what agents claim: all GPUs of their node, whoever else holds them."""
    exactly = {"deviceClassName": DRIVER, "allocationMode": "All", "adminAccess": True}
    return {"devices": {"requests": [{"name": CLAIM, "exactly": exactly}]}}


def look(api: Api, namespace: str, labels: dict[str, str], live: Manifest | None) -> Dra:
    """Look up what is needed.

    Args:
        namespace: the release namespace, with its labels.
        live: the pool's claim template, if it is there.

    Raises:
        ApiError: a request failed, or a right is missing.
    """
    if not api.serves(CLAIM_TEMPLATES):
        return Dra(served=False)
    device_class = api.get(DEVICE_CLASSES, None, DRIVER) is not None
    labelled = labels.get(ADMIN_LABEL) == "true"
    slices = [it["spec"] for it in api.list_all(RESOURCE_SLICES) if it["spec"].get("driver") == DRIVER]
    nodes = frozenset(str(it["nodeName"]) for it in slices if it.get("nodeName") and it.get("devices"))
    keeps, refused = None, ""
    if labelled:
        try:
            keeps = keeps_admin(live or api.create(CLAIM_TEMPLATES, namespace, _trial(namespace), dry_run=True))
        except ApiError as error:
            if error.status not in (400, 403, 422) or error.lacks_a_right:
                raise
            refused = str(error)
    return Dra(True, device_class, labelled, nodes, keeps, refused)


def keeps_admin(template: Manifest) -> bool:
    """Return whether a claim template asks for admin access, as the API has it."""
    requests: list[dict[str, Any]] = template["spec"]["spec"]["devices"].get("requests") or []
    return bool(requests) and all((it.get("exactly") or {}).get("adminAccess") is True for it in requests)


def _trial(namespace: str) -> Manifest:
    return {
        "apiVersion": CLAIM_TEMPLATES.api_version,
        "kind": CLAIM_TEMPLATES.kind,
        "metadata": {"generateName": "orbitkv-trial-", "namespace": namespace},
        "spec": {"spec": claim_spec()},
    }
