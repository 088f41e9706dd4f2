"""Pods that are to have a cache and that the webhook never saw: found by looking through the metadata of all pods.

The webhook must never keep a pod from starting, so while it is away pods start without it, and nothing else would tell.
A pod asks for a cache itself, or its namespace has one for all engines: whether a pod has an engine is seen in its
spec, which is looked at once in its life.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from orbitkv_crds.stamps import ANNOTATION_INJECT, asked, read_injected, read_skip
from orbitkv_operator.admission import asks
from orbitkv_operator.admission.asks import Ask
from orbitkv_operator.admission.detect import detect
from orbitkv_operator.cluster.api import PODS, Api, Manifest
from orbitkv_operator.engines.pods import EnginePod, EnginePods, Without
from orbitkv_operator.events import Events
from orbitkv_operator.view import Name, View

logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 3300.0
"""After this time it is said again: the cluster forgets events after an hour."""
MOST: Final = 200
"""Pods that asked, and as many others, that one sweep looks at more closely."""
REASON: Final = "webhook-missed"
_MESSAGE: Final = (
    "{who} and it runs without it, because OrbitKV's webhook did not see it when it was made: it was made before "
    "OrbitKV was installed, or while the webhook did not answer, or the annotation came later. Delete the pod, so that "
    "it is made anew. If that does not help, `orbitkv doctor` says what is wrong with the webhook."
)


def wishes(metadata: Mapping[str, Any], lmcache: bool) -> Mapping[str, str]:
    """Return a pod's annotations, as the webhook would read them.

    Args:
        lmcache: whether pods that are labelled for LMCache's operator are served.
    """
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    return asks.from_lmcache(metadata.get("labels") or {}, annotations)[0] if lmcache else annotations


def is_missed(
    metadata: Mapping[str, Any], release_namespace: str, by_default: bool = False, lmcache: bool = False
) -> bool:
    """Whether a pod should have been seen by the webhook, and was not. The webhook leaves out two namespaces.

    Args:
        by_default: the pod's namespace has a cache for its engines; whether the pod is one does not show here.
        lmcache: as for `wishes`.
    """
    if metadata["namespace"] in (release_namespace, "kube-system"):
        return False
    annotations = wishes(metadata, lmcache)
    if not (by_default or asked(annotations)) or annotations.get(ANNOTATION_INJECT) == "false":
        return False
    return read_injected(annotations) is None and read_skip(annotations) is None


@dataclass
class Sweep:
    """Looks through all pods whenever it is called."""

    api: Api
    namespace: str
    """The release namespace."""
    view: View
    pods: EnginePods
    events: Events
    changed: Callable[[str], None]
    """As `PodReconciler.changed`."""
    lmcache: bool = False
    """As for `wishes`."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _nothing: set[str] = field(default_factory=set)
    """Uids of pods of which nothing is to be said: they have ended, or have no engine and never asked."""

    def run(self) -> None:
        """Look once. The lock keeps two sweeps apart; it is held while the API is asked, and by nobody else.

        Raises:
            ApiError: the pods could not be listed.
        """
        with self._lock:
            suspects = [self._suspect(it["metadata"]) for it in self.api.each_metadata(PODS) if self._suspected(it)]
            self._nothing &= {each.uid for each in suspects}
            running = [each for each in suspects if each.uid not in self._nothing]
            askers = [each for each in running if each.asks]
            if len(askers) > MOST:
                logger.warning("many pods were missed by the webhook", extra={"pods": len(askers)})
            # the newest first: what was made since the last sweep is named soon, however many pods there are
            others = sorted((each for each in running if not each.asks), key=lambda each: each.created, reverse=True)
            named = {each.name for each in (*askers[:MOST], *others[:MOST]) if self._look(each.name)}
            for cache in self.pods.still_missed(named):
                self.changed(cache)

    def _suspected(self, manifest: Manifest) -> bool:
        metadata = manifest["metadata"]
        if metadata.get("deletionTimestamp"):
            return False
        return is_missed(metadata, self.namespace, self._default(metadata["namespace"]) is not None, self.lmcache)

    def _suspect(self, metadata: Mapping[str, Any]) -> _Suspect:
        return _Suspect(
            (metadata["namespace"], metadata["name"]),
            metadata["uid"],
            metadata.get("creationTimestamp") or "",
            bool(asked(wishes(metadata, self.lmcache))),
        )

    def _default(self, namespace: str) -> Mapping[str, str] | None:
        """Return the annotations of a Namespace that are a default for its pods; None: it is not labelled for that."""
        found = self.view.namespace(namespace)
        return None if found is None or found.labels.get(ANNOTATION_INJECT) != "true" else found.annotations

    def _look(self, name: Name) -> bool:
        manifest = self.api.get(PODS, *name)
        if manifest is None:
            return False
        pod, default = EnginePod.of(manifest), self._default(name[0])
        if pod.over:
            self._nothing.add(pod.uid)
            return False
        if not is_missed(manifest["metadata"], self.namespace, default is not None, self.lmcache):
            return False
        annotations = wishes(manifest["metadata"], self.lmcache)
        ask = asks.read(annotations, pod.namespace, default)
        by_default = not asked(annotations)
        if by_default and detect(manifest["spec"], ask if isinstance(ask, Ask) else Ask("", by_default=True)) is None:
            self._nothing.add(pod.uid)
            return False
        cache = ask.cache if isinstance(ask, Ask) else pod.cache
        who = (
            f"Namespace {pod.namespace} has a cache for the pod's engine,"
            if by_default
            else "The pod asks for a cache,"
        )
        message = _MESSAGE.format(who=who)
        self.events.post(pod.reference, "Warning", "CacheMissed", f"{REASON}: {message}", "UseCache", AGAIN_SECONDS)
        for each in self.pods.runs_without(name, cache, Without(pod.full_name, REASON, message)):
            if each:
                self.changed(each)
        return True


@dataclass(frozen=True)
class _Suspect:
    name: Name
    uid: str
    created: str
    """As Kubernetes writes it: it sorts by time."""
    asks: bool
    """Whether the pod itself asks for a cache."""
