"""When a status is written: conditions soon, figures seldom, and never many at one time.

What matters (conditions, counts of nodes) is written at once, but an object at most every 10 s. Figures that only drift
(bytes, sessions, tokens) are written along with it, or every 5 minutes when one moved by a tenth.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from orbitkv_crds import names
from orbitkv_crds.quantity import parse_quantity
from orbitkv_operator.cluster.api import Api, ApiError, Manifest, Resource

FACTS_SECONDS: Final = 10.0
FIGURES_SECONDS: Final = 300.0
WRITES_A_SECOND: Final = 3.0
GONE: Final = 404
FIGURES: Final = ("tiers", "attached", "lastHour")
"""Fields of a status that drift."""


@dataclass(frozen=True)
class LastWrites:
    """When an object's status was written last (monotonic seconds); None: not by this process."""

    any: float | None = None
    figures: float | None = None


def wait_for(before: dict[str, Any], after: dict[str, Any], last: LastWrites, now: float) -> float | None:
    """Return in how many seconds a status is to be written (0: now), or None if there is nothing to write."""
    facts_differ = _facts(before) != _facts(after)
    if facts_differ and _freed(before, after):
        return 0.0
    soonest = 0.0 if last.any is None else max(0.0, last.any + FACTS_SECONDS - now)
    if facts_differ:
        return soonest
    if not _moved(_figures(before), _figures(after)):
        return None
    return 0.0 if last.figures is None else max(soonest, last.figures + FIGURES_SECONDS - now)


def _facts(status: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in status.items() if name not in FIGURES}


def _figures(status: dict[str, Any]) -> dict[str, Any]:
    return {name: status.get(name) for name in FIGURES}


def _freed(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether nothing refers to a pool any more: then it may be deleted, and somebody may be waiting for it."""
    return bool(before.get("cacheNamespaces")) and after.get("cacheNamespaces") == 0


def _moved(before: Any, after: Any) -> bool:
    """Return whether a figure moved by a tenth or more, or one came or went."""
    if isinstance(before, dict) and isinstance(after, dict):
        return any(_moved(before.get(name), after.get(name)) for name in before.keys() | after.keys())
    if before == after:
        return False
    one, other = _number(before), _number(after)
    if one is None or other is None:
        return True
    return abs(one - other) >= 0.1 * max(abs(one), abs(other))


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(parse_quantity(value.removesuffix("%")))
        except ValueError:
            return None
    return None


@dataclass
class StatusWriter:
    """Writes statuses by server-side apply. The lock guards `_last`, `_turns` and `_next`; nothing waits under it.

    Whoever has to wait is given a time of its own, so that a thousand that wait do not ask again all the time.
    """

    api: Api
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last: dict[str, LastWrites] = field(default_factory=dict)
    _turns: dict[str, float] = field(default_factory=dict)
    """When an object that waits may be written."""
    _next: float = 0.0
    """The first time that nobody has been given."""

    def write(self, resource: Resource, live: Manifest, status: dict[str, Any]) -> float | None:
        """Write a status if it is time; else return in how many seconds to come again (None: not for this).

        Raises:
            ApiError: it could not be written.
        """
        metadata, before = live["metadata"], live.get("status") or {}
        uid, now = metadata["uid"], self.clock()
        with self._lock:
            last = self._last.get(uid, LastWrites())
            wait = wait_for(before, status, last, now)
            if wait is None:
                self._turns.pop(uid, None)
                return None
            if wait > 0:
                return wait
            if uid not in self._turns:
                turn = max(self._next, now)
                # Pools are few, and their deletion waits for their status: they come before a thousand others.
                self._turns[uid] = turn if metadata.get("namespace") else now
                self._next = turn + 1 / WRITES_A_SECOND
            if self._turns[uid] > now:
                return self._turns[uid] - now
            del self._turns[uid]
            moved = _moved(_figures(before), _figures(status))
            self._last[uid] = LastWrites(now, now if moved else last.figures)
        body: Manifest = {
            "apiVersion": names.API_VERSION,
            "kind": resource.kind,
            "metadata": {"name": metadata["name"], "uid": uid},  # not one that has the same name by now
            "status": status,
        }
        if metadata.get("namespace"):
            body["metadata"]["namespace"] = metadata["namespace"]
        try:
            self.api.apply(resource, body, subresource="status")
        except ApiError as error:
            with self._lock:
                self._last[uid] = last  # it was not written: the next try need not wait for it
            if error.status == GONE:
                return None  # its end was not heard of yet, and says all that there is to say
            raise
        return None

    def forget(self, uid: str) -> None:
        """An object is gone."""
        with self._lock:
            self._last.pop(uid, None)
            self._turns.pop(uid, None)
