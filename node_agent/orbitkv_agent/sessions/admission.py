"""Who may open a session, and for what: the question that the handshake asks, and its answer without a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import Hello
from orbitkv_agent.sessions.errors import Refused, Rejected

if TYPE_CHECKING:
    from orbitkv_agent.sessions.namespaces import Namespaces
    from orbitkv_agent.sessions.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grant:
    """A session may be opened.

    Attributes:
        namespace: the cache namespace as the store knows it.
        options: settings for its engines.
        owner: whom the session counts for (see `limits.Connections`).
        administrator: the session may ask for the agent's state and change what is not the cluster's.
    """

    namespace: str
    options: dict[str, Any] = field(default_factory=dict)
    owner: str = ""
    administrator: bool = False


Answer = Callable[[Grant | Refused], None]


class Admission(Protocol):
    """Decides about sessions. Used by the owner thread only."""

    def admit(self, session: Session, hello: Hello, answer: Answer) -> None:
        """Call `answer` once, perhaps later. A session that ended meanwhile is told to `ended`, and needs no answer."""

    def renew(self, session: Session, token: bytes) -> None:
        """An open session shows a newer token."""

    def reported(self, session: Session, engine: str, reason: str, message: str) -> None:
        """An open session says what its engine is and, with a reason, that it does without the cache."""

    def ended(self, session: Session) -> None:
        """The session's stream ended, whether or not it was admitted."""


class KnownUsers(Admission):
    """Without a cluster: the socket lets in only users that may connect, and each may use every cache namespace."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces

    def admit(self, session: Session, hello: Hello, answer: Answer) -> None:
        """Answer at once."""
        if hello.token:
            answer(
                Rejected(
                    "token-unexpected",
                    ErrorKind.UNSUPPORTED,
                    "this agent is in no cluster and cannot check tokens; it knows its clients by their user",
                )
            )
            return
        try:
            options = self._namespaces.options(hello.cache_namespace)
        except Refused as error:
            answer(Rejected("cache-namespace-not-found", error.kind, str(error)))
            return
        answer(Grant(hello.cache_namespace, options, administrator=session.peer.uid in (0, os.getuid())))

    def renew(self, session: Session, token: bytes) -> None:
        """Refuse: there are no tokens here."""
        raise Refused(ErrorKind.UNSUPPORTED, "token-unexpected: this agent is in no cluster and cannot check tokens")

    def reported(self, session: Session, engine: str, reason: str, message: str) -> None:
        """Log a reason: whoever runs the engine looks there."""
        if reason:
            logger.warning("%s does without the cache: %s: %s", engine or session, reason, message)

    def ended(self, session: Session) -> None:
        """Nothing is kept about sessions."""
