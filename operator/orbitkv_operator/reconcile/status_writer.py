"""When a status is written: conditions soon, figures seldom, and never many at one time.

What matters (conditions, counts of nodes) is written at once, but an object at most every 10 s; so is a figure that was
nothing until now, as somebody may be waiting for it. Figures that only drift (bytes, sessions, tokens) are written
along with it, or every 5 minutes when one moved by a tenth.
"""

from __future__ import annotations

import heapq
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
FIGURES_AGAIN: Final = 60.0
"""Rhythm in which figures are looked at that may be written and have not moved enough."""
WRITES_A_SECOND: Final = 3.0
GONE: Final = 404
FIGURES: Final = ("tiers", "attached", "lastHour")
"""Fields of a status that drift."""


@dataclass(frozen=True)
class LastWrites:
    """When an object's status was written last (monotonic seconds); None: not by this process."""

    any: float | None = None
    figures: float | None = None


def wait_for(
    before: dict[str, Any], after: dict[str, Any], last: LastWrites, now: float, facts_seconds: float = FACTS_SECONDS
) -> float | None:
    """Return in how many seconds a status is to be written (0: now), or None if there is nothing to write."""
    if _freed(before, after):
        return 0.0
    soonest = 0.0 if last.any is None else max(0.0, last.any + facts_seconds - now)
    if _matters(before, after):
        return soonest
    if not _moved(_figures(before), _figures(after)):
        return None
    return 0.0 if last.figures is None else max(soonest, last.figures + FIGURES_SECONDS - now)


def _matters(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether a status differs in more than figures that drift."""
    return _facts(before) != _facts(after) or _begun(_figures(before), _figures(after))


def _facts(status: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in status.items() if name not in FIGURES}


def _figures(status: dict[str, Any]) -> dict[str, Any]:
    return {name: status.get(name) for name in FIGURES}


def _freed(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether nothing refers to a pool any more: then it may be deleted, and somebody may be waiting for it."""
    return bool(before.get("cacheNamespaces")) and after.get("cacheNamespaces") == 0


def _begun(before: Any, after: Any) -> bool:
    """Return whether a figure was nothing and is something now."""
    if isinstance(after, dict):
        known = before if isinstance(before, dict) else {}
        return any(_begun(known.get(name), value) for name, value in after.items())
    return bool(_number(after)) and not _number(before)


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


_Name = tuple[str, str, str]
"""Kind, namespace (empty: none) and name."""


@dataclass
class _Turns:
    """Times for those who have to wait, so that a thousand that wait do not ask again all the time. The times of those
    that need none any more are given to others. Used under the writer's lock."""

    _given: dict[_Name, float] = field(default_factory=dict)
    _next: float = 0.0
    """The first time that nobody was ever given."""
    _returned: list[float] = field(default_factory=list)
    """Times before that which nobody has any more, as a heap."""

    def turn(self, name: _Name, now: float) -> float:
        """Return when an object may be written: the time that it was given, or an earlier one that has become free."""
        while self._returned and self._returned[0] < now:
            heapq.heappop(self._returned)
        given = self._given.get(name)
        if given is None:
            if self._returned:
                given = heapq.heappop(self._returned)
            else:
                given = max(self._next, now)
                self._next = given + 1 / WRITES_A_SECOND
            # Pools are few, and their deletion waits for their status: they come before a thousand others.
            self._given[name] = given if name[1] else now
        elif self._returned and self._returned[0] < given:
            self._given[name] = heapq.heapreplace(self._returned, given)
        return self._given[name]

    def taken(self, name: _Name) -> None:
        """An object is written: its turn is over."""
        self._given.pop(name, None)

    def give_back(self, name: _Name) -> None:
        """An object needs no turn any more."""
        turn = self._given.pop(name, None)
        if turn is not None:
            heapq.heappush(self._returned, turn)

    def wanted(self) -> bool:
        """Return whether anybody waits."""
        return bool(self._given)

    def yield_one(self, now: float) -> None:
        """Leave one time to somebody else."""
        self._next = max(self._next, now) + 1 / WRITES_A_SECOND


@dataclass
class StatusWriter:
    """Writes statuses by server-side apply. The lock guards all fields with an underscore; nothing waits under it.

    Whoever has to wait is given a turn. What matters never waits behind figures: both have turns of their own, and
    figures have none while what matters waits.
    """

    api: Api
    clock: Callable[[], float] = time.monotonic
    facts_seconds: float = FACTS_SECONDS
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last: dict[_Name, LastWrites] = field(default_factory=dict)
    _facts_turns: _Turns = field(default_factory=_Turns)
    _figures_turns: _Turns = field(default_factory=_Turns)

    def write(self, resource: Resource, live: Manifest, status: dict[str, Any]) -> float | None:
        """Write a status if it is time; else return in how many seconds to come again (None: not for this).

        Raises:
            ApiError: it could not be written.
        """
        metadata, before = live["metadata"], live.get("status") or {}
        name: _Name = resource.kind, metadata.get("namespace") or "", metadata["name"]
        now = self.clock()
        with self._lock:
            last = self._last.get(name, LastWrites())
            wait = wait_for(before, status, last, now, self.facts_seconds)
            if wait is None:
                self._give_back(name)
                return None
            if wait > 0:
                return wait
            turn = self._turn(name, now, _matters(before, status))
            if turn > now:
                return turn - now
            moved = _moved(_figures(before), _figures(status))
            self._last[name] = LastWrites(now, now if moved else last.figures)
        body: Manifest = {
            "apiVersion": names.API_VERSION,
            "kind": resource.kind,
            "metadata": {"name": metadata["name"], "uid": metadata["uid"]},  # not one that has the same name by now
            "status": status,
        }
        if metadata.get("namespace"):
            body["metadata"]["namespace"] = metadata["namespace"]
        try:
            self.api.apply(resource, body, subresource="status")
        except ApiError as error:
            with self._lock:
                self._last[name] = last  # it was not written: the next try need not wait for it
            if error.status == GONE:
                return None  # its end was not heard of yet, and says all that there is to say
            raise
        return None

    def figures_due(self, resource: Resource, namespace: str, name: str) -> float:
        """Return in how many seconds an object's figures may be written again: until then it need not be asked
        whether they moved."""
        with self._lock:
            last = self._last.get((resource.kind, namespace, name), LastWrites()).figures
        return 0.0 if last is None else max(0.0, last + FIGURES_SECONDS - self.clock())

    def has_written_figures(self, resource: Resource, namespace: str, name: str) -> bool:
        """Return whether an object's figures are this process's own, and not those of one that acted before it."""
        with self._lock:
            return self._last.get((resource.kind, namespace, name), LastWrites()).figures is not None

    def forget(self, resource: Resource, namespace: str, name: str) -> None:
        """An object is gone."""
        with self._lock:
            self._last.pop((resource.kind, namespace, name), None)
            self._give_back((resource.kind, namespace, name))

    def _turn(self, name: _Name, now: float, matters: bool) -> float:
        """Return when an object may be written; now: its turn has come, and is taken."""
        if not matters and self._facts_turns.wanted():
            return now + self.facts_seconds
        turns, others = self._facts_turns, self._figures_turns
        if not matters:
            turns, others = others, turns
        others.give_back(name)
        turn = turns.turn(name, now)
        if turn <= now:
            turns.taken(name)
            if matters:
                others.yield_one(now)
        return turn

    def _give_back(self, name: _Name) -> None:
        self._facts_turns.give_back(name)
        self._figures_turns.give_back(name)
