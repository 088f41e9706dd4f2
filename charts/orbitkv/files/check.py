"""What `helm test` runs: waits until an operator acts and every ManagerPool is ready, or says what is missing."""

import os
import sys
import time
from datetime import UTC, datetime
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.config.incluster_config import load_incluster_config

PATIENCE = 120
"""Seconds until what is missing counts as missing."""

Missing = str | None
Pool = dict[str, Any]


def operator_missing(lease: client.V1Lease | None, now: datetime) -> Missing:
    """Return why no operator acts according to the Lease, or None."""
    if lease is None:
        return "no operator has started to act yet: its Lease orbitkv-operator does not exist"
    spec = lease.spec
    if spec is None or not spec.holder_identity or spec.renew_time is None:
        return "no operator holds the Lease orbitkv-operator"
    age = (now - spec.renew_time).total_seconds()
    if age > (spec.lease_duration_seconds or 15):
        return f"the operator {spec.holder_identity} last renewed the Lease orbitkv-operator {age:.0f} seconds ago"
    return None


def pool_missing(pool: Pool) -> Missing:
    """Return why a pool is not ready, or None."""
    name, status = pool["metadata"]["name"], pool.get("status", {})
    ready: Pool = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
    if status.get("observedGeneration", 0) < pool["metadata"]["generation"]:
        return f"ManagerPool {name}: the operator has not seen its newest version yet"
    if ready.get("status") == "True":
        return None
    return f"ManagerPool {name} is not ready: {ready.get('reason', 'no reason yet')}: {ready.get('message', '')}"


def missing(leases: client.CoordinationV1Api, objects: client.CustomObjectsApi) -> list[str]:
    """Return all that is missing now."""
    namespace = os.environ["POD_NAMESPACE"]
    lease = None
    try:
        lease = leases.read_namespaced_lease("orbitkv-operator", namespace)
    except ApiException as error:
        if error.status != 404:
            raise
    pools = objects.list_cluster_custom_object("orbitkv.io", "v1alpha1", "managerpools")["items"]
    if not pools:
        print("there is no ManagerPool yet")
    found = [operator_missing(lease, datetime.now(UTC)), *map(pool_missing, pools)]
    return [text for text in found if text]


def main() -> None:
    """Checks until all is there or patience ends."""
    load_incluster_config()
    leases, objects = client.CoordinationV1Api(), client.CustomObjectsApi()
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            found = missing(leases, objects)
        except ApiException as error:
            found = [f"the API server refused the check: {error.status} {error.reason}"]
        if not found:
            print("an operator acts, and every ManagerPool is ready")
            return
        if time.monotonic() > deadline:
            sys.exit("\n".join(found))
        time.sleep(2)


if __name__ == "__main__":
    main()
