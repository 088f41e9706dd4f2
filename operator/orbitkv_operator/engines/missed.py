"""Pods that ask for a cache and that the webhook never saw: found by looking through the metadata of all pods.

The webhook must never keep a pod from starting, so while it is away pods start without it, and nothing else would tell.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from orbitkv_crds.stamps import ANNOTATION_INJECT, asked, read_injected, read_skip
from orbitkv_operator.cluster.api import PODS, Api
from orbitkv_operator.engines.pods import EnginePod, EnginePods, Without
from orbitkv_operator.events import Events
from orbitkv_operator.view import Name, name_of

logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 3300.0
"""After this time it is said again: the cluster forgets events after an hour."""
MOST: Final = 200
"""Pods that one sweep looks at more closely."""
REASON: Final = "webhook-missed"
MESSAGE: Final = (
    "The pod asks for a cache and runs without it, because OrbitKV's webhook did not see it when it was made: it was "
    "made before OrbitKV was installed, or while the webhook did not answer, or the annotation came later. Delete the "
    "pod, so that it is made anew. If that does not help, `orbitkv doctor` says what is wrong with the webhook."
)


def is_missed(metadata: Mapping[str, Any], release_namespace: str) -> bool:
    """Whether a pod should have been seen by the webhook, and was not. The webhook leaves out two namespaces."""
    if metadata["namespace"] in (release_namespace, "kube-system"):
        return False
    annotations = metadata.get("annotations") or {}
    if not asked(annotations) or annotations.get(ANNOTATION_INJECT) == "false":
        return False
    return read_injected(annotations) is None and read_skip(annotations) is None


@dataclass
class Sweep:
    """Looks through all pods whenever it is called."""

    api: Api
    namespace: str
    """The release namespace."""
    pods: EnginePods
    events: Events
    changed: Callable[[str], None]
    """As `PodReconciler.changed`."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: set[str] = field(default_factory=set)
    """Uids of pods that asked and have ended: nothing is to be said of them."""

    def run(self) -> None:
        """Look once. The lock keeps two sweeps apart; it is held while the API is asked, and by nobody else.

        Raises:
            ApiError: the pods could not be listed.
        """
        with self._lock:
            suspects = {
                name_of(it): it["metadata"]["uid"]
                for it in self.api.each_metadata(PODS)
                if is_missed(it["metadata"], self.namespace) and not it["metadata"].get("deletionTimestamp")
            }
            self._over &= set(suspects.values())
            running = {name: uid for name, uid in suspects.items() if uid not in self._over}
            if len(running) > MOST:
                logger.warning("many pods were missed by the webhook", extra={"pods": len(running)})
            named = {name for name in list(running)[:MOST] if self._look(name)}
            for cache in self.pods.still_missed(named):
                self.changed(cache)

    def _look(self, name: Name) -> bool:
        manifest = self.api.get(PODS, *name)
        if manifest is None:
            return False
        pod = EnginePod.of(manifest)
        if pod.over:
            self._over.add(pod.uid)
            return False
        if not is_missed(manifest["metadata"], self.namespace):
            return False
        self.events.post(pod.reference, "Warning", "CacheMissed", f"{REASON}: {MESSAGE}", "UseCache", AGAIN_SECONDS)
        for cache in self.pods.runs_without(name, pod.cache, Without(pod.full_name, REASON, MESSAGE)):
            if cache:
                self.changed(cache)
        return True
