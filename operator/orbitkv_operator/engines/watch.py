"""The watch of engines' pods, without kopf: they may be ten thousand, and kopf takes milliseconds for each change.

What comes is read as far as it is used, in a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

import msgspec

from orbitkv_operator.audit import Watch
from orbitkv_operator.cluster.api import Api, ApiError, Manifest, Stream
from orbitkv_operator.view import Observer, name_of

logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 1.0
"""From the end of a stream to the next one: nothing is lost meanwhile."""
LONGEST_WAIT: Final = 15.0
"""Between attempts that fail."""
_GONE: Final = 410
"""The apiserver has forgotten what happened since a version: all objects are to be listed anew."""


@dataclass
class PodWatch:
    """Runs from `start` to `stop`. The lock guards `_stream`; nothing waits under it."""

    api: Api
    watch: Watch
    """What is watched, and the record of what was shown."""
    router: Observer
    silence_seconds: float
    """A stream on which nothing came for so long is opened again. (The apiserver sends a bookmark each minute in which
    any pod has changed.)"""
    failed: Callable[[str], None]
    """Called with a reason when it has ended by itself."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stream: Stream | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._run, name="engine-pods", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch and wait for it."""
        self._stop.set()
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.end()
        if self._thread is not None:
            self._thread.join(20)

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            logger.exception("the watch of engines' pods has failed")
            self.failed(f"the watch of engines' pods has failed: {error!r}")

    def _follow(self) -> None:
        """List, and then go on from version to version until `stop`."""
        version, wait = "", AGAIN_SECONDS
        while not self._stop.is_set():
            try:
                version = version or self._list()
                stream, wait = self._open(version), AGAIN_SECONDS
                for line in stream:
                    version = self._take(line)
            except ApiError as error:
                logger.debug("the watch of engines' pods is opened again", extra={"error": str(error)})
                version = "" if error.status == _GONE else version
                wait = min(2 * wait, LONGEST_WAIT)
            self._stop.wait(wait)

    def _list(self) -> str:
        """Show all objects, and which are there no more; return the list's version."""
        watch = self.watch
        manifests, version = self.api.list_to_watch(watch.resource, labels=watch.labels, fields=watch.fields)
        there = {name_of(it) for it in manifests}
        for namespace, name in watch.shown().keys() - there:
            self._show({"metadata": {"namespace": namespace, "name": name}}, gone=True)
        for manifest in manifests:
            self._show(manifest, gone=False)
        return version

    def _open(self, version: str) -> Stream:
        watch = self.watch
        stream = self.api.stream(
            watch.resource,
            version,
            labels=watch.labels,
            fields=watch.fields,
            silence_seconds=self.silence_seconds,
        )
        with self._lock:
            self._stream = stream
        if self._stop.is_set():  # it came while nothing was there to end
            stream.end()
        return stream

    def _take(self, line: bytes) -> str:
        """Take an event; return the version that it brings.

        Raises:
            ApiError: the stream cannot go on.
        """
        event = _EVENT.decode(line)
        if event.type == "ERROR":
            raise ApiError(_GONE, f"the watch cannot go on: {bytes(event.object)[:300]!r}")
        pod: Any = _POD.decode(event.object)
        if event.type != "BOOKMARK":
            self._show(pod, gone=event.type == "DELETED")
        return str(pod["metadata"]["resourceVersion"])

    def _show(self, manifest: Manifest, gone: bool) -> None:
        self.watch.show(manifest, gone)
        self.router.changed(self.watch.resource, manifest, gone)


# ----------------------------------------------------------------------------------------------------- what is read


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Metadata(TypedDict, total=False):
    name: str
    namespace: str
    uid: str
    resourceVersion: str
    creationTimestamp: str | None
    deletionTimestamp: str | None
    labels: dict[str, str] | None
    annotations: dict[str, str] | None


class _Spec(TypedDict, total=False):
    nodeName: str | None


class _Condition(TypedDict, total=False):
    type: str
    status: str
    lastTransitionTime: str | None


class _Running(TypedDict, total=False):
    startedAt: str | None


class _State(TypedDict, total=False):
    running: _Running | None


class _Container(TypedDict, total=False):
    state: _State | None


class _Status(TypedDict, total=False):
    phase: str
    conditions: list[_Condition] | None
    containerStatuses: list[_Container] | None


class _Pod(TypedDict, total=False):
    """What `EnginePod` and the record of the watch use; the rest, which is most of a pod, is passed over."""

    metadata: _Metadata
    spec: _Spec | None
    status: _Status | None


_EVENT: Final = msgspec.json.Decoder(_Event)
_POD: Final = msgspec.json.Decoder(_Pod)
