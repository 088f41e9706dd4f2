"""Telling people what became of a pod that asked for a cache: events on it, and a place in the CacheNamespace's status.

Nothing is ever written on the pod itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from orbitkv_crds.agent_api.reports_pb2 import PodVisit
from orbitkv_operator.engines.pods import EnginePod, EnginePods, Without
from orbitkv_operator.engines.verdict import Verdict, verdict
from orbitkv_operator.events import Events
from orbitkv_operator.reports.store import INTERVAL, ReportStore
from orbitkv_operator.view import Name, View
from orbitkv_operator.work import FORGET

RECENT_SECONDS: Final = 600.0
"""What happened longer ago is not told any more, after another replica has begun to act."""
AGAIN_SECONDS: Final = 3600.0
"""Events are forgotten by the cluster after an hour: what still holds is then said again."""
WARNINGS_A_SECOND: Final = 20.0
NEWS_A_SECOND: Final = 1.0
"""Of pods that got what they asked for: the stamp on them says the same, and an event is one more write to the API."""
NEWS_AT_ONCE: Final = 50
"""As many, after a time without any, come without waiting: what is installed or rolled out in a day's work."""


@dataclass
class _Known:
    """What was said of one pod, by this process. Times are seconds since the epoch; 0: never."""

    uid: str
    stamps: bool = False
    word: str = ""
    """The verdict that was said last: "attached" or its reason."""
    at: float = 0.0
    attached: float = 0.0
    """When it was last seen attached."""


@dataclass
class Turns:
    """Gives turns, so that the start of thousands of pods is no flood of events. The lock guards what is below it.

    Attributes:
        rate: turns a second, in the long run.
        at_once: so many are taken together after a time in which there were none.
    """

    rate: float
    at_once: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turns: dict[str, float] = field(default_factory=dict)
    """Of those that wait, the latest last."""
    _paid: float = 0.0
    """When those that were taken would have ended, one after the other at the rate."""

    def wait(self, who: str, now: float, longest: float = math.inf) -> float | None:
        """Return in how many seconds it is somebody's turn; 0: now, and the turn is taken; None: not within
        `longest` seconds, and no turn is kept."""
        with self._lock:
            turn = self._turns.get(who)
            if turn is None:
                latest = next(reversed(self._turns.values()), None)
                free = self._paid - (self.at_once - 1) / self.rate
                turn = max(now, free, 0.0 if latest is None else latest + 1 / self.rate)
            if turn > now + longest:
                self._turns.pop(who, None)
                return None
            if turn > now:
                self._turns[who] = turn
                return turn - now
            self._turns.pop(who, None)
            self._paid = max(self._paid, turn) + 1 / self.rate
            return 0.0

    def forget(self, who: str) -> None:
        """Somebody is gone."""
        with self._lock:
            self._turns.pop(who, None)


@dataclass
class PodReconciler:
    """What it remembers of pods is used by one thread at a time for each pod: the queue sees to that."""

    view: View
    pods: EnginePods
    reports: ReportStore
    events: Events
    changed: Callable[[str], None]
    """Called with a CacheNamespace (`namespace/name`) when the pods that run without it are others than before."""
    patience: float = 300.0
    """Seconds that a pod may be ready without being attached before it counts as running without the cache."""
    clock: Callable[[], float] = time.time
    _news: Turns = field(default_factory=lambda: Turns(NEWS_A_SECOND, NEWS_AT_ONCE))
    _warnings: Turns = field(default_factory=lambda: Turns(WARNINGS_A_SECOND))
    _known: dict[Name, _Known] = field(default_factory=dict)

    def reconcile(self, namespace: str, name: str) -> float | None:
        """Look at one pod; return in how many seconds to look again, as `work.Handler`."""
        pod = self.pods.get((namespace, name))
        if pod is None or pod.over:
            self._without(namespace, name, "", None)
            self._known.pop((namespace, name), None)
            self._news.forget(f"{namespace}/{name}")
            self._warnings.forget(f"{namespace}/{name}")
            return FORGET
        if pod.injected is None and pod.skipped is None:
            return FORGET  # a label that the webhook did not write: the sweep looks after such pods
        known = self._known.get((namespace, name))
        if known is None or known.uid != pod.uid:
            known = self._known[namespace, name] = _Known(pod.uid)
        now = self.clock()
        turn = 0.0 if known.stamps else self._tell_stamps(pod, now)
        known.stamps = not turn
        if pod.injected is None:
            assert pod.skipped is not None
            self._without(namespace, name, pod.cache, (pod.skipped.reason, pod.skipped.message))
            return turn or FORGET
        again = self._look(pod, known, now)
        return again if not turn else min(turn, turn if again is None else again)

    def _tell_stamps(self, pod: EnginePod, now: float) -> float:
        """Say what the webhook did; return the seconds to wait before it can be said."""
        turns = self._warnings if pod.injected is None else self._news
        wait = turns.wait(pod.full_name, now, pod.began + RECENT_SECONDS - now)
        if wait != 0:
            return wait or 0.0  # the stamp itself tells what is not told here
        if pod.injected is not None:
            it = pod.injected
            engine = f" ({it.engine})" if it.engine else ""
            words = f"Container {it.container}{engine} gets what it needs to use CacheNamespace {it.namespace}."
            self._post(pod, "Normal", "CacheInjected", " ".join([words, *(f"{note}" for note in it.info)]))
        elif pod.skipped is not None:
            self._post(pod, "Warning", "CacheSkipped", f"{pod.skipped} The pod runs without the cache.")
        return 0.0

    def _look(self, pod: EnginePod, known: _Known, now: float) -> float | None:
        visit = self.reports.visit(pod.uid)
        cache = self.view.cache(*_place(pod.cache))
        found = verdict(
            pod,
            visit,
            self.reports.of_node(pod.node),
            cache,
            cache is not None and self.view.pool(cache.pool) is not None,
        )
        if found.attached:
            assert visit is not None
            self._without(pod.namespace, pod.name, "", None)
            self._tell(pod, known, "attached", found, "CacheAttached", now, _age(visit[1]))
            known.attached = now
            return None
        if found.certain:
            assert visit is not None
            self._without(pod.namespace, pod.name, pod.cache, (found.reason, found.message))
            self._tell(pod, known, found.reason, found, "CacheNotAttached", now, _age(visit[1]))
            return None
        if known.word == "attached":
            self._tell(pod, known, found.reason, found, "CacheDetached", now, 0.0)
        if pod.ready_since is None:
            return None  # the engine may still load its model, and attaches when it has
        if not self.reports.settled:
            return INTERVAL  # an agent that has not reported yet may know more
        patience = max(pod.ready_since, known.attached) + self.patience - now
        if patience > 0:
            return patience
        self._without(pod.namespace, pod.name, pod.cache, (found.reason, found.message))
        self._tell(pod, known, f"late {found.reason}", found, "CacheNotAttached", now, 0.0)
        return None

    def _tell(
        self, pod: EnginePod, known: _Known, word: str, found: Verdict, reason: str, now: float, age: float
    ) -> None:
        """Post an event for a verdict that is new, or that was said long ago and is bad."""
        if known.word == word and (found.attached or now - known.at < AGAIN_SECONDS):
            return
        first, known.word, known.at = not known.word, word, now
        if first and age > RECENT_SECONDS:
            return
        message = found.message if found.attached else f"{found.reason}: {found.message}"
        self._post(pod, "Normal" if found.attached else "Warning", reason, message)

    def _post(self, pod: EnginePod, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        self.events.post(pod.reference, kind, reason, message, action="UseCache")

    def _without(self, namespace: str, name: str, cache: str, why: tuple[str, str] | None) -> None:
        found = None if why is None else Without(f"{namespace}/{name}", *why)
        for concerned in self.pods.runs_without((namespace, name), cache, found):
            self.changed(concerned)


def _age(visit: PodVisit) -> float:
    return float(visit.age_seconds)


def _place(full_name: str) -> tuple[str, str]:
    namespace, _, name = full_name.partition("/")
    return namespace, name
