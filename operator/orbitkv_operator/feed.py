"""The watches: kopf shows what happens in the cluster.

kopf keeps nothing in the objects: there are only handlers of plain events, so it writes no annotation and no finalizer,
and `kubectl delete` works while the operator is down. Two of its operators share a thread: one for the release
namespace and cluster-wide kinds, one for CacheNamespaces everywhere, because one operator is either or. Engines' pods,
which are many, have a watch of their own (`engines.watch`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

import kopf

from orbitkv_operator.audit import Watch
from orbitkv_operator.builders.children import CHILD_KINDS
from orbitkv_operator.cluster.api import (
    CACHES,
    NAMESPACES,
    NODES,
    POD_MONITORS,
    PODS,
    POOLS,
    RUNTIME_CLASSES,
    Api,
)
from orbitkv_operator.names import CHILD_SELECTOR
from orbitkv_operator.view import Observer

logger = logging.getLogger(__name__)

SERVER_SECONDS: Final = 1800
CLIENT_SECONDS: Final = 1830.0
"""How long a watch lasts: at its end kopf lists all objects anew."""


class Nothing(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """Keeps nothing of an object and compares nothing, as handlers of plain events need neither.

    What kopf has by default copies each object several times at each event, which is most of what an event costs.
    """

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        """Return the part of an object whose changes count: none."""
        return {}

    def fetch(self, *, body: Any, key: Any = None) -> None:
        """Return what was kept: nothing."""

    def clear(self, *, essence: Any) -> Any:
        """Return an object's part without what is kept in it: as it is."""
        return essence

    def store(self, **_: Any) -> None:
        """Keep something."""

    def purge(self, **_: Any) -> None:
        """Keep something no longer."""

    def touch(self, **_: Any) -> None:
        """Change an object for the sake of a change."""


class Patiently:
    """Waits between requests that fail: 1 s, then longer up to 15 s, for ever. A watch never gives up, and a kind that
    is forbidden is asked for at most once a second."""

    def __iter__(self) -> Iterator[float]:
        for seconds in (1, 1, 2, 3, 5, 8):
            yield float(seconds)
        while True:
            yield 15.0


def make_watches(api: Api, namespace: str) -> list[Watch]:
    """Return kopf's watches that there are to be; of children in the release namespace only ours."""
    children = [Watch(kind, namespace, CHILD_SELECTOR) for kind in (*CHILD_KINDS, PODS)]
    return [
        *(Watch(kind) for kind in (POOLS, CACHES, NODES, NAMESPACES, RUNTIME_CLASSES)),
        *(watch for watch in children if watch.resource is not POD_MONITORS or api.serves(POD_MONITORS)),
    ]


@dataclass
class Feed:
    """Runs kopf in a thread of its own, from `start` to `stop`."""

    watches: list[Watch]
    namespace: str
    router: Observer
    silence_seconds: float
    """A watch on which nothing came for so long is opened again (the apiserver sends a bookmark each minute)."""
    failed: Callable[[str], None]
    """Called with a reason when the watches have ended by themselves."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _beat: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all watches and wait for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(20)

    def _run(self) -> None:
        try:
            asyncio.run(self._operators())
        except Exception as error:
            logger.exception("the watches have failed")
            self.failed(f"the watches have failed: {error!r}")
        else:
            if not self._stop.is_set():
                self.failed("the watches have ended")

    def stalled(self) -> float:
        """Return for how many seconds the watches' thread has not done what it does each second."""
        return time.monotonic() - self._beat

    async def _operators(self) -> None:
        beat = asyncio.create_task(self._beats(), name="beat")
        everywhere = [watch for watch in self.watches if watch.resource is CACHES]
        here = [watch for watch in self.watches if watch.resource is not CACHES]
        try:
            await asyncio.gather(
                self._operator(here, namespaces=[self.namespace]), self._operator(everywhere, clusterwide=True)
            )
        finally:
            beat.cancel()

    async def _beats(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(1)

    async def _operator(self, watches: list[Watch], **scope: Any) -> None:
        await kopf.operator(
            registry=self._registry(watches),
            settings=_settings(watches, self.silence_seconds),
            standalone=True,
            # only peers are told it, and there are none; kopf would look up a name for the user, who may have none
            identity=cast(Any, "orbitkv-operator"),
            stop_flag=self._stop,
            **scope,
        )

    def _registry(self, watches: list[Watch]) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(_log_in)
        for watch in watches:
            resource = watch.resource
            kopf.on.event(resource.group, resource.version, resource.plural, id=resource.plural, registry=registry)(
                self._handler(watch)
            )
        return registry

    def _handler(self, watch: Watch) -> Callable[..., Any]:
        async def handle(event: Any, **_: Any) -> None:
            manifest, gone = dict(event["object"]), event["type"] == "DELETED"
            watch.show(manifest, gone)
            self.router.changed(watch.resource, manifest, gone)

        return handle


def _log_in(**arguments: Any) -> Any:
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


def _settings(watches: list[Watch], silence_seconds: float) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = settings.persistence.progress_storage = Nothing()
    settings.scanning.disabled = True  # kinds that come later are noticed by the audit
    settings.watching.inactivity_timeout = silence_seconds
    settings.watching.server_timeout = SERVER_SECONDS
    settings.watching.client_timeout = CLIENT_SECONDS
    settings.watching.chunk_size = 500
    settings.watching.reconnect_backoff = 1.0
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Patiently()
    settings.queueing.idle_timeout = 1.0
    settings.process.ultimate_exiting_timeout = None
    for watch in watches:
        resource = watch.resource
        selector = resource.group or "", resource.version, resource.plural
        if watch.labels:
            settings.watching.label_selectors[selector] = watch.labels
        if watch.fields:
            settings.watching.field_selectors[selector] = watch.fields
    return settings
