"""What became of the pods that came to this agent: who is attached, who was refused, who runs without it, and why.

Only pods whose token has proved who they are have a place here; there is one record for each, and none for longer than
an hour after it was last heard of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from orbitkv_agent.cluster.apiserver import Pod
from orbitkv_agent.sessions.instances import Instance
from orbitkv_agent.sessions.session import Session

KEPT_S: Final = 3600.0
"""How long a pod without a session is remembered."""
MOST: Final = 512
"""Pods that are remembered: more than run on a node. Beyond it those go that were not heard of for longest."""
_LONGEST: Final = 500
_NOT_REGISTERED: Final = "it is connected, and no engine has registered yet"


class State(Enum):
    """What became of a pod."""

    CONNECTED = "connected"
    ATTACHED = "attached"
    REFUSED = "refused"
    OFF = "off"
    LEFT = "left"


@dataclass(frozen=True)
class Word:
    """A state, with its reason in one word and in words for people."""

    state: State
    reason: str = ""
    message: str = ""


@dataclass
class Visit:
    """One pod.

    Attributes:
        cache_namespace: what it asked for last, `namespace/name`.
        engine: name and version of its engine, as it says itself; "" if it does not.
        said: what was last said to it or by it.
        sessions: its open ones.
        shown, since: what the last report said of it, and since when (seconds of the loop's clock).
        heard: when it was last heard of.
    """

    pod: Pod
    cache_namespace: str
    said: Word
    heard: float
    since: float
    engine: str = ""
    sessions: dict[Session, None] = field(default_factory=dict)
    shown: Word | None = None


@dataclass(frozen=True)
class Seen:
    """A pod as a report has it.

    Attributes:
        engines: registered ones.
        asked, found: tokens that its engines asked for since they attached, and those that were there.
        age: seconds for which `word` has held.
    """

    visit: Visit
    word: Word
    engines: int
    asked: int
    found: int
    age: float


class Visits:
    """Used by the owner thread only; `now` is the loop's time in seconds."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Visit] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def came(self, pod: Pod, cache_namespace: str, session: Session, now: float) -> None:
        """A session of a pod was opened."""
        visit = self._heard(pod, cache_namespace, now)
        if visit.said.state is not State.OFF or not visit.sessions:
            visit.said = Word(State.CONNECTED)
        visit.sessions[session] = None

    def refused(self, pod: Pod, cache_namespace: str, reason: str, message: str, now: float) -> None:
        """A pod was not let in. What its open sessions do says more, while there are any."""
        visit = self._heard(pod, cache_namespace, now)
        if not visit.sessions:
            visit.said = Word(State.REFUSED, reason, message[:_LONGEST])

    def told(self, pod: Pod, engine: str, reason: str, message: str, now: float) -> None:
        """A pod's plugin says what its engine is and, with a reason, that it does without the cache."""
        visit = self._by_uid.get(pod.uid)
        if visit is None:
            return  # it has no session any more
        visit.heard = now
        visit.engine = engine[:64] or visit.engine
        if reason:
            visit.said = Word(State.OFF, reason[:64], message[:_LONGEST])

    def left(self, pod: Pod, session: Session, reason: str, message: str, now: float) -> None:
        """A session of a pod ended."""
        visit = self._by_uid.get(pod.uid)
        if visit is None or visit.sessions.pop(session, session) is session:
            return
        visit.heard = now
        if not visit.sessions and visit.said.state is not State.OFF:
            visit.said = Word(State.LEFT, reason, message[:_LONGEST])

    def words(self) -> dict[str, tuple[State, str, bool]]:
        """What was said of each pod, and whether it has a session; what its engines do beyond that is theirs to say."""
        return {uid: (it.said.state, it.said.reason, bool(it.sessions)) for uid, it in self._by_uid.items()}

    def seen(self, instances: Iterable[Instance], now: float) -> Iterator[Seen]:
        """Say what became of each pod; those that were not heard of for long are forgotten."""
        theirs: dict[Session, list[Instance]] = {}
        for instance in instances:
            for session in instance.sessions():
                theirs.setdefault(session, []).append(instance)
        for uid, visit in list(self._by_uid.items()):
            if not visit.sessions and now - visit.heard > KEPT_S:
                del self._by_uid[uid]
                continue
            own = list(dict.fromkeys(it for session in visit.sessions for it in theirs.get(session, ())))
            word = _word(visit, own)
            if visit.shown is None or (visit.shown.state, visit.shown.reason) != (word.state, word.reason):
                visit.since = visit.heard if visit.shown is None else now
            visit.shown = word
            yield Seen(
                visit,
                word,
                sum(it.sealed for it in own),
                sum(it.demand.asked for it in own),
                sum(it.demand.found for it in own),
                now - visit.since,
            )

    def _heard(self, pod: Pod, cache_namespace: str, now: float) -> Visit:
        visit = self._by_uid.get(pod.uid)
        if visit is None:
            if len(self._by_uid) >= MOST:
                idle = [uid for uid, it in self._by_uid.items() if not it.sessions]
                if idle:
                    del self._by_uid[min(idle, key=lambda uid: self._by_uid[uid].heard)]
            visit = self._by_uid[pod.uid] = Visit(pod, cache_namespace, Word(State.CONNECTED), now, now)
        visit.cache_namespace, visit.heard = cache_namespace, now
        return visit


def _word(visit: Visit, instances: list[Instance]) -> Word:
    """What an open session does counts more than what was said before."""
    if not visit.sessions or visit.said.state is State.OFF:
        return visit.said
    off = next((it.off for it in instances if it.off), "")
    if off:
        return Word(State.OFF, "layout-mismatch", off[:_LONGEST])
    if any(it.sealed for it in instances):
        return Word(State.ATTACHED)
    missing = next((it.missing for it in instances if it.missing), "")
    return Word(State.CONNECTED, "not-registered", (missing or _NOT_REGISTERED)[:_LONGEST])
