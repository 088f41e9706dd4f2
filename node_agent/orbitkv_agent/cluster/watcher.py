"""A thread that keeps a complete list of one kind of object: from disk at first, then by list and watch."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from orbitkv_agent.cluster.apiserver import ApiError, Change, Gone
from orbitkv_agent.cluster.state_file import StateFile

logger = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 30.0
_SHORT_S: Final = 5.0
_MANY: Final = 100_000
"""Objects that are kept at most: more than a cluster has."""


T = TypeVar("T")


class Source(Protocol):
    """Lists and watches (`apiserver.Listing`)."""

    what: str

    def all(self) -> tuple[list[dict[str, Any]], str]:
        """Return all objects and the version to watch from."""

    def changes(self, version: str) -> Iterator[Change]:
        """Return what happens after a version."""

    def stop(self) -> None:
        """End what another thread waits in."""


@dataclass(frozen=True)
class Known(Generic[T]):
    """All objects of one kind, as they were at one moment.

    Attributes:
        objects: by uid; to be read only. What did not change is the same object as before.
        source: where they come from: a "list", "disk", or "" while nothing is known at all.
        problem: why they may be old, for people; "" when the watch runs.
        unsaved: why they are not on disk as they are, for people; "" when they are.
    """

    objects: dict[str, T]
    source: Literal["list", "disk", ""]
    problem: str = ""
    unsaved: str = ""


class Watcher(Generic[T]):
    """Runs a `Source` until it is stopped.

    Args:
        source: where objects come from.
        file: where they are kept.
        keep: returns what matters of an object; changes of the rest are no changes.
        parse: returns what is delivered of what was kept.
        post: hands a callable to the owner thread.
        deliver: called on the owner thread with what is known, after each change; only the newest is delivered.
    """

    def __init__(
        self,
        source: Source,
        file: StateFile,
        keep: Callable[[dict[str, Any]], dict[str, Any]],
        parse: Callable[[dict[str, Any]], T],
        *,
        post: Callable[[Callable[[], None]], None],
        deliver: Callable[[Known[T]], None],
    ) -> None:
        self._source = source
        self._file = file
        self._keep = keep
        self._parse = parse
        self._post = post
        self._deliver = deliver
        self._stopping = threading.Event()
        self._retry_s = _FIRST_RETRY_S
        # Used by the thread only.
        self._objects: dict[str, dict[str, Any]] = {}
        self._parsed: dict[str, tuple[dict[str, Any], T]] = {}
        self._known_from: Literal["list", "disk", ""] = ""
        # Written by the thread, read by the owner; replacing a reference needs no lock.
        self._newest: Known[T] | None = None
        self._delivered: Known[T] | None = None
        self._thread = threading.Thread(target=self._run, name=f"orbitkv-watch-{source.what}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end."""
        self._stopping.set()
        self._source.stop()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._source.stop()  # again: the first time may have come just before the thread began to wait
            self._thread.join(0.1)

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        saved = self._file.load()
        if saved is not None:
            self._objects = {each["metadata"]["uid"]: each for each in saved}
            self._known_from = "disk"
            self._tell(f"{self._source.what} are known from disk only: the apiserver has not answered yet")
        while not self._stopping.is_set():
            try:
                self._follow()
            except Gone as error:
                logger.info("%s: listing again", error)
                self._pause()
            except ApiError as error:
                if self._stopping.is_set():
                    return
                logger.warning("%s; going on with what is known, and trying again", error)
                self._tell(str(error))
                self._pause()
            except Exception:
                logger.exception("internal error in the watch of %s; please report it", self._source.what)
                self._pause()

    def _follow(self) -> None:
        """List, then watch for as long as it works."""
        items, version = self._source.all()
        objects = {each["metadata"]["uid"]: self._keep(each) for each in items[:_MANY]}
        changed = objects != self._objects or not self._known_from
        self._objects, self._known_from = objects, "list"
        if changed:
            self._file.save(list(objects.values()))
        self._tell("")
        while not self._stopping.is_set():
            began = time.monotonic()
            for change in self._source.changes(version):
                version = change.version
                if self._apply(change):
                    self._file.save(list(self._objects.values()))
                    self._tell("")
                if self._stopping.is_set():
                    return
            if time.monotonic() - began < _SHORT_S:
                self._pause()  # a server that ends every stream at once is not to be asked without end
            else:
                self._retry_s = _FIRST_RETRY_S

    def _apply(self, change: Change) -> bool:
        """Take a change over; return whether it was one."""
        if change.kind == "bookmark":
            return False
        uid = change.object["metadata"]["uid"]
        objects = dict(self._objects)  # what was delivered stays as it is
        if change.kind == "gone":
            changed = objects.pop(uid, None) is not None
        else:
            kept = self._keep(change.object)
            changed = objects.get(uid) != kept
            objects[uid] = kept
        self._objects = objects
        return changed

    def _tell(self, problem: str) -> None:
        parsed: dict[str, tuple[dict[str, Any], T]] = {}
        for uid, kept in self._objects.items():
            known = self._parsed.get(uid)
            parsed[uid] = known if known is not None and known[0] == kept else (kept, self._parse(kept))
        self._parsed = parsed
        objects = {uid: each for uid, (_, each) in parsed.items()}
        self._newest = Known(objects, self._known_from, problem, self._file.problem)
        self._post(self._take)

    def _take(self) -> None:
        newest = self._newest
        if newest is not None and newest is not self._delivered:
            self._delivered = newest
            self._deliver(newest)

    def _pause(self) -> None:
        self._stopping.wait(self._retry_s * random.uniform(0.7, 1.3))
        self._retry_s = min(self._retry_s * 2, _LAST_RETRY_S)
