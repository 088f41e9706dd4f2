"""Whether the watches still tell the truth.

A watch can fall silent without an error: a proxy keeps the connection, a task has died. So each minute a list of
metadata is held against what the watch has shown. What differs is looked at again; what still differs a minute later
proves that the watch is dead, and this replica is restarted (its liveness probe fails). A kind to which nothing happens
differs in nothing, so silence alone never restarts anybody.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from orbitkv_operator.cluster.api import ENGINE_PODS, Api, ApiError, Manifest, Resource
from orbitkv_operator.view import KINDS, Name, Observer, View, name_of

logger = logging.getLogger(__name__)

Version = tuple[str, str]
"""(uid, resourceVersion)."""


def version_of(manifest: Manifest) -> Version:
    """Return what distinguishes two states of an object."""
    metadata = manifest["metadata"]
    return metadata["uid"], metadata["resourceVersion"]


@dataclass(frozen=True)
class Suspect:
    """An object of which the watch had not shown what a list had."""

    since: float
    shown: Version | None
    """What the watch had shown then; None: nothing, or that it is gone."""


@dataclass
class Watch:
    """What one watch has shown, and where a list said otherwise.

    The lock guards everything; nothing waits under it.
    """

    resource: Resource
    namespace: str | None = None
    labels: str = ""
    fields: str = ""
    clock: Callable[[], float] = time.monotonic
    last_event: float | None = None
    """When the last event came (seconds since the epoch)."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _shown: dict[Name, Version] = field(default_factory=dict)
    _suspects: dict[Name, Suspect] = field(default_factory=dict)
    _compared: float = 0.0

    def show(self, manifest: Manifest, gone: bool) -> None:
        """The watch has shown an object, or that it is gone."""
        name = name_of(manifest)
        with self._lock:
            self.last_event = time.time()
            if gone:
                self._shown.pop(name, None)
            else:
                self._shown[name] = version_of(manifest)
            self._suspects.pop(name, None)

    def has_shown(self, name: Name) -> Version | None:
        """Return what the watch has shown of an object last."""
        with self._lock:
            return self._shown.get(name)

    def shown(self) -> dict[Name, Version]:
        """Return what the watch has shown so far."""
        with self._lock:
            return dict(self._shown)

    def compare(self, listed: Iterable[Manifest], before: Mapping[Name, Version]) -> set[Name]:
        """Hold a list against what the watch has shown; return the names of objects that differ.

        Args:
            before: what it had shown when the list was asked for: where it has shown more since, the list is behind.
        """
        versions = {name_of(it): version_of(it) for it in listed}
        now = self.clock()
        with self._lock:
            kept = {}
            for name in versions.keys() | self._shown.keys():
                shown = self._shown.get(name)
                if shown == versions.get(name) or shown != before.get(name):
                    continue
                known = self._suspects.get(name)
                kept[name] = known if known is not None and known.shown == shown else Suspect(now, shown)
            self._suspects, self._compared = kept, now
            return set(kept)

    def behind(self) -> float:
        """Return for how many seconds the watch had owed something when it was last compared.

        Time in which no list was to be had does not count: then the apiserver is away, not the watch.
        """
        with self._lock:
            return max((self._compared - suspect.since for suspect in self._suspects.values()), default=0.0)


MANY: Final = 50
"""Differences beyond which a kind is listed as a whole. Of engines' pods, which may be many, no more are fetched."""
ENGINE_PODS_EVERY: Final = 5
"""Rounds after which engines' pods are listed: they are many, and what depends on them can wait."""


@dataclass
class Auditor:
    """Runs in a thread of its own, from `run` to `stop`."""

    api: Api
    view: View
    watches: Sequence[Watch]
    router: Observer
    seconds: float
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Hold lists against the watches until `stop`."""
        for number in itertools.count():
            if self._stop.wait(self.seconds):
                return
            for watch in self.watches:
                if watch.resource is ENGINE_PODS and number % ENGINE_PODS_EVERY:
                    continue
                try:
                    self.audit(watch)
                except ApiError as error:
                    logger.debug(
                        "a watch could not be checked", extra={"watch": watch.resource.label, "error": str(error)}
                    )
                except Exception:
                    logger.exception("a watch could not be checked", extra={"watch": watch.resource.label})

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()

    def audit(self, watch: Watch) -> None:
        """Hold one list against one watch, and have what differs looked at.

        Raises:
            ApiError: a list could not be had.
        """
        # what is known is read before the list: what comes meanwhile is not in it, and is not gone
        resource, before, known = watch.resource, watch.shown(), self.view.names(watch.resource)
        there = self.api.list_metadata(resource, watch.namespace, labels=watch.labels, fields=watch.fields)
        listed = {name_of(it): it for it in there}
        differing = watch.compare(listed.values(), before)
        for name in (differing | known) - listed.keys():
            # a stub will do: of what is gone nothing is asked but its name
            self.router.gone(resource, name)
        changed = [name for name in differing if name in listed]
        if changed:
            logger.info("a watch is behind a list", extra={"watch": resource.label, "objects": len(changed)})
        if resource not in KINDS and resource is not ENGINE_PODS:
            for name in changed:
                self.router.changed(resource, listed[name], False)
        elif len(changed) > MANY and resource is not ENGINE_PODS:
            for manifest in self.api.list_all(resource, watch.namespace, labels=watch.labels):
                self.router.changed(resource, manifest, False)
        else:
            for namespace, plain in changed[:MANY]:
                found = self.api.get(resource, namespace or None, plain)
                if found is not None and watch.has_shown((namespace, plain)) == before.get((namespace, plain)):
                    self.router.changed(resource, found, False)

    def problem(self) -> str:
        """Return which watch is dead, in words, or nothing."""
        for watch in self.watches:
            if watch.behind() >= 0.9 * self.seconds:
                return f"the watch of {watch.resource.label} does not show what is there"
        return ""
