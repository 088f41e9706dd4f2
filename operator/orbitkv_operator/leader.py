"""Which replica acts: whoever holds the Lease.

A replica takes the Lease over only after it has seen it unchanged for as long as it lasts, by its own clock. The holder
renews it every few seconds, and stops acting (`lost` is called) when it could not for `renew_seconds`, which is less
than the Lease lasts: two replicas may overlap only when a clock stands still, and every write is safe even then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from orbitkv_crds import names
from orbitkv_operator.cluster.api import LEASES, Api, ApiError, Manifest
from orbitkv_operator.settings import Settings

logger = logging.getLogger(__name__)


@dataclass
class Leader:
    """Runs in one thread of its own, from `run` to `stop`."""

    api: Api
    settings: Settings
    owner: Callable[[], list[Manifest]]
    """Owner references for a new Lease."""
    clock: Callable[[], float] = time.monotonic
    _stop: threading.Event = field(default_factory=threading.Event)
    _seen: tuple[Any, float] = (None, 0.0)
    """What the Lease said, and since when (by our clock)."""
    _held: bool = False
    _written: Manifest | None = None
    """The Lease as this replica wrote it last: while nobody else writes it, it need not be read to be renewed."""

    def run(self, acquired: Callable[[], None], lost: Callable[[], None]) -> None:
        """Wait for the Lease, call `acquired`, keep the Lease; call `lost` when it is lost. Returns after `stop`."""
        logger.info("waiting for the Lease", extra={"replica": self.settings.pod_name})
        while not self._stop.is_set():
            if self._try():
                break
            self._stop.wait(self.settings.retry_seconds)
        else:
            return
        self._held = True
        logger.info("this replica acts", extra={"replica": self.settings.pod_name})
        acquired()
        renewed = self.clock()
        while not self._stop.wait(self.settings.retry_seconds):
            if self._try():
                renewed = self.clock()
            elif self._taken() or self.clock() - renewed > self.settings.renew_seconds:
                self._held = False
                logger.error("the Lease is lost: this replica stops", extra={"replica": self.settings.pod_name})
                lost()
                return

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()

    def release(self) -> None:
        """Let another replica act at once; to be called when nothing is written any more."""
        if not self._held:
            return
        try:
            lease = self.api.get(LEASES, self.settings.namespace, names.OPERATOR)
            if lease is not None and lease["spec"].get("holderIdentity") == self.settings.pod_name:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
                self.api.replace(LEASES, self.settings.namespace, lease)
        except ApiError as error:
            logger.warning("the Lease could not be given back; it runs out", extra={"error": str(error)})

    def _try(self) -> bool:
        """Take or renew the Lease; return whether it is ours now."""
        try:
            if self._renew():
                return True
            lease = self.api.get(LEASES, self.settings.namespace, names.OPERATOR)
            if lease is None:
                self._wrote(self.api.create(LEASES, self.settings.namespace, self._new()))
                return True
            self._see(lease)
            spec = lease["spec"]
            holder = spec.get("holderIdentity")
            if holder and holder != self.settings.pod_name and not self._run_out(spec):
                return False
            if holder != self.settings.pod_name:
                spec |= {"acquireTime": _now(), "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1}
            spec |= {
                "holderIdentity": self.settings.pod_name,
                "leaseDurationSeconds": max(1, round(self.settings.lease_seconds)),
                "renewTime": _now(),
            }
            self._wrote(self.api.replace(LEASES, self.settings.namespace, lease))  # fails if another was quicker
        except ApiError as error:
            level = logging.INFO if error.status == 409 else logging.WARNING
            logger.log(level, "the Lease could not be taken or renewed", extra={"error": str(error)})
            return False
        return True

    def _renew(self) -> bool:
        """Renew the Lease if nobody has written it since this replica did; else it has to be read first."""
        lease, self._written = self._written, None
        if lease is None:
            return False
        lease["spec"]["renewTime"] = _now()
        try:
            self._wrote(self.api.replace(LEASES, self.settings.namespace, lease))
        except ApiError as error:
            if error.status == 409:
                return False
            raise
        return True

    def _wrote(self, lease: Manifest) -> None:
        self._written = lease
        self._see(lease)

    def _see(self, lease: Manifest) -> None:
        spec = lease["spec"]
        said = spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions")
        if said != self._seen[0]:
            self._seen = said, self.clock()

    def _run_out(self, spec: Manifest) -> bool:
        return self.clock() - self._seen[1] > (spec.get("leaseDurationSeconds") or self.settings.lease_seconds)

    def _taken(self) -> bool:
        """Whether somebody else was seen to hold it."""
        said = self._seen[0]
        return bool(said and said[0] and said[0] != self.settings.pod_name)

    def _new(self) -> Manifest:
        spec = {
            "holderIdentity": self.settings.pod_name,
            "leaseDurationSeconds": max(1, round(self.settings.lease_seconds)),
            "acquireTime": _now(),
            "renewTime": _now(),
            "leaseTransitions": 0,
        }
        metadata = {"name": names.OPERATOR, "namespace": self.settings.namespace, "ownerReferences": self.owner()}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
