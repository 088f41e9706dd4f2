"""Who may attach in a cluster: the token says which pod it is, the rules say what that pod may use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import Hello
from orbitkv_agent.cluster.apiserver import INVALID, ApiError, Pod, TokenInfo
from orbitkv_agent.cluster.reviews import Answer as Reviewed
from orbitkv_agent.cluster.reviews import Reviews
from orbitkv_agent.cluster.tenants import Tenant, Tenants
from orbitkv_agent.cluster.visits import Visits
from orbitkv_agent.loop import Deadlines, Loop, Timer
from orbitkv_agent.sessions.admission import Admission, Answer, Grant
from orbitkv_agent.sessions.errors import Refused, Rejected
from orbitkv_agent.sessions.peers import Peer

if TYPE_CHECKING:
    from orbitkv_agent.sessions.session import Session

logger = logging.getLogger(__name__)

ANSWER_S: Final = 4.0
"""A hello is answered after this time at the latest: clients wait for five seconds."""
ROUND_S: Final = 5.0
"""How often the tokens of open sessions are looked through."""
AGE_S: Final = 40.0
"""A token of an open session is reviewed again at this age: with the round, the queue and the call within a minute."""


@dataclass
class _Visitor:
    """An open session's pod, and how it was last proved."""

    token: bytes
    pod: Pod
    cache_namespace: str
    key: str
    ended: tuple[str, str] = ("", "")
    """Why the agent ended it: reason and message; empty: it did not."""


class TokenAdmission(Admission):
    """Used by the owner thread only.

    Args:
        reviews: asks the apiserver about tokens.
        tenants: the cache namespaces, and who may use them.
        node: the agent's node; tokens of pods on other nodes are refused.
        expel: ends an open session with a reason.

    Attributes:
        visits: what became of each pod that came.
    """

    def __init__(
        self, loop: Loop, reviews: Reviews, tenants: Tenants, node: str, expel: Callable[[Session, Refused], None]
    ) -> None:
        self._loop = loop
        self._reviews = reviews
        self._tenants = tenants
        self._node = node
        self._expel = expel
        self.visits = Visits()
        self._visitors: dict[Session, _Visitor] = {}
        self._waiting: dict[Session, Callable[[Reviewed], None]] = {}
        self._deadlines: Deadlines[Session] = Deadlines(loop, ANSWER_S, self._too_late)
        self._timer: Timer | None = None

    def start(self) -> None:
        """Look through the tokens of open sessions from now on."""
        self._timer = self._loop.call_later(ROUND_S, self._round)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def pods_of(self, key: str) -> dict[Pod, int]:
        """The pods attached to a cache namespace, and how many sessions each has."""
        found: dict[Pod, int] = {}
        for visitor in self._visitors.values():
            if visitor.key == key:
                found[visitor.pod] = found.get(visitor.pod, 0) + 1
        return found

    # ------------------------------------------------------------------------------------------- admission

    def admit(self, session: Session, hello: Hello, answer: Answer) -> None:
        """Answer at once when the token was reviewed lately, otherwise when the apiserver has answered."""
        if not hello.token:
            answer(_without_token(session.peer))
            return
        audience = self._tenants.audience
        if audience is None or not self._tenants.known:
            answer(_later("the agent has not heard from the apiserver yet"))
            return

        def reviewed(result: Reviewed) -> None:
            answer(self._decide(session, hello, result))

        known = self._reviews.known(hello.token)
        if known is not None:
            reviewed(known)
            return
        peer = (session.peer.uid, session.peer.process)
        if self._reviews.review(hello.token, audience, lambda result: self._answered(session, result), of=peer):
            self._waiting[session] = reviewed
            self._deadlines.add(session)
        else:
            answer(
                Rejected(
                    "too-many-reviews",
                    ErrorKind.UNAVAILABLE,
                    "too many tokens wait to be checked; attach again later",
                )
            )

    def renew(self, session: Session, token: bytes) -> None:
        """Take a newer token; the next round looks at it."""
        visitor = self._visitors.get(session)
        if visitor is not None and token:
            visitor.token = token

    def reported(self, session: Session, engine: str, reason: str, message: str) -> None:
        """Remember it of the session's pod."""
        visitor = self._visitors.get(session)
        if visitor is not None:
            self.visits.told(visitor.pod, engine, reason, message, self._loop.now())

    def ended(self, session: Session) -> None:
        """Forget a session, but not its pod."""
        visitor = self._visitors.pop(session, None)
        if visitor is not None:
            self.visits.left(visitor.pod, session, *visitor.ended, self._loop.now())
        self._waiting.pop(session, None)
        self._deadlines.discard(session)

    def _answered(self, session: Session, result: Reviewed) -> None:
        then = self._waiting.pop(session, None)
        self._deadlines.discard(session)
        if then is not None:
            then(result)

    def _too_late(self, session: Session) -> None:
        self._answered(session, ApiError("the apiserver has not answered yet"))

    def _decide(self, session: Session, hello: Hello, result: Reviewed) -> Grant | Refused:
        if isinstance(result, ApiError):
            logger.warning("a token could not be reviewed: %s", result)
            return _later(str(result))
        try:
            pod = self._pod(result)
        except Refused as error:
            return error
        try:
            tenant = self._tenant(hello.cache_namespace, pod)
        except Refused as error:
            self.visits.refused(pod, hello.cache_namespace, _reason(error), str(error), self._loop.now())
            return error
        self._tenants.use(tenant)
        self.visits.came(pod, hello.cache_namespace, session, self._loop.now())
        self._visitors[session] = _Visitor(hello.token, pod, hello.cache_namespace, tenant.key)
        return Grant(tenant.key, dict(tenant.settings.options), owner=f"pod {pod.namespace}/{pod.name}")

    def _pod(self, info: TokenInfo) -> Pod:
        if info.pod is None:
            raise Rejected(info.reason, ErrorKind.DENIED, info.why)
        if info.pod.node != self._node:
            raise Rejected(
                "token-node",
                ErrorKind.DENIED,
                f"it belongs to a pod on node {info.pod.node}; this agent serves node {self._node}",
            )
        return info.pod

    def _tenant(self, cache_namespace: str, pod: Pod) -> Tenant:
        tenant = self._tenants.find(cache_namespace)
        if tenant is None:
            raise Rejected("cache-namespace-not-found", ErrorKind.DENIED, self._tenants.why_absent(cache_namespace))
        why = self._tenants.refusal(tenant, pod)
        if why is not None:
            raise Rejected("access-denied", ErrorKind.DENIED, why)
        return tenant

    # --------------------------------------------------------------------------------------- open sessions

    def tenants_changed(self) -> None:
        """End the sessions that would not be admitted any more."""
        for session, visitor in list(self._visitors.items()):
            try:
                if self._tenant(visitor.cache_namespace, visitor.pod).key != visitor.key:
                    raise Rejected(
                        "cache-namespace-replaced",
                        ErrorKind.UNAVAILABLE,
                        f"CacheNamespace {visitor.cache_namespace} was deleted and made again; attach again",
                    )
            except Refused as error:
                self._end(session, visitor, error)

    def _round(self) -> None:
        audience = self._tenants.audience
        if audience is not None:
            for token in {visitor.token for visitor in self._visitors.values()}:
                if self._reviews.known(token, AGE_S) is None:
                    self._reviews.review(token, audience, lambda result, token=token: self._looked_at(token, result))  # type: ignore[misc]
        self._timer = self._loop.call_later(ROUND_S, self._round)

    def _looked_at(self, token: bytes, result: Reviewed) -> None:
        if isinstance(result, ApiError):
            return  # whoever is in stays in while the apiserver is away
        for session, visitor in list(self._visitors.items()):
            if visitor.token != token:
                continue
            try:
                if self._pod(result).uid != visitor.pod.uid:
                    raise Rejected(INVALID, ErrorKind.DENIED, "it belongs to another pod than the one before")
            except Refused as error:
                self._end(session, visitor, error)

    def _end(self, session: Session, visitor: _Visitor, error: Refused) -> None:
        logger.warning("%s ends: %s", session, error, extra={"pod": f"{visitor.pod.namespace}/{visitor.pod.name}"})
        visitor.ended = _reason(error), str(error)
        self._expel(session, error)


def _reason(error: Refused) -> str:
    return error.reason if isinstance(error, Rejected) else "refused"


def _later(why: str) -> Rejected:
    return Rejected(
        "apiserver-unavailable", ErrorKind.UNAVAILABLE, f"the token cannot be checked now ({why}); attach again later"
    )


def _without_token(peer: Peer) -> Grant | Refused:
    """Without a token only the agent's own pod comes in (`kubectl exec ... orbitkv-agent status`)."""
    if _is_own_pod(peer):
        return Grant("", owner="the agent's own pod", administrator=True)
    return Rejected(
        "token-missing",
        ErrorKind.DENIED,
        "none was shown; in a cluster a pod shows a projected service account token (orbitkv.token_path)",
    )


def _is_own_pod(peer: Peer) -> bool:
    """Whether a process shares this one's user and its pid and mount namespaces. Users alone say nothing here."""
    if peer.pid <= 0 or peer.uid != os.getuid() or peer.exited():
        return False
    try:
        return all(
            os.stat(f"/proc/{peer.pid}/ns/{kind}").st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino
            for kind in ("pid", "mnt")
        )
    except OSError:
        return False
