"""Events on our objects, for `kubectl describe`: one for each thing that happened, however often it is seen."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal

from orbitkv_operator.cluster.api import EVENTS, Api, ApiError, Manifest

logger = logging.getLogger(__name__)

QUIET_SECONDS: Final = 600.0
"""Time in which the same words about the same object are not said again."""
LONGEST_NOTE: Final = 1024
"""Bytes: with more the apiserver takes none of it."""
_MOST: Final = 5000


@dataclass
class Events:
    """Posts events. The lock guards `_said`; nothing waits under it. An event that cannot be posted is only logged:
    it tells nothing that the conditions do not."""

    api: Api
    reporter: str
    """Name of the pod that posts."""
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _said: dict[str, float] = field(default_factory=dict)

    def post(
        self,
        about: Manifest,
        kind: Literal["Normal", "Warning"],
        reason: str,
        message: str,
        action: str = "Reconcile",
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """Post an event on `about` (an object with apiVersion and kind), unless said in the last `quiet` seconds."""
        metadata, now = about["metadata"], self.clock()
        said = hashlib.sha256(f"{metadata['uid']} {reason} {message}".encode()).hexdigest()[:16]
        with self._lock:
            if now - self._said.get(said, -quiet) < quiet:
                return
            if len(self._said) > _MOST:
                self._said.clear()
            self._said[said] = now
        moment = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        namespace = metadata.get("namespace") or "default"  # where events on cluster-wide objects go
        regarding = {key: about[key] for key in ("apiVersion", "kind")} | {
            key: metadata[key] for key in ("name", "namespace", "uid") if key in metadata
        }
        try:
            self.api.create(
                EVENTS,
                namespace,
                {
                    "apiVersion": "events.k8s.io/v1",
                    "kind": "Event",
                    "metadata": {"name": f"{metadata['name'][:200]}.{said}{time.time_ns():x}", "namespace": namespace},
                    "eventTime": moment,
                    "type": kind,
                    "reason": reason[:128],
                    "note": message.encode()[:LONGEST_NOTE].decode(errors="ignore"),
                    "action": action,
                    "regarding": regarding,
                    "reportingController": "orbitkv.io/operator",
                    "reportingInstance": self.reporter[:128],
                },
            )
        except ApiError as error:
            logger.warning("an event could not be posted", extra={"reason": reason, "error": str(error)})
