"""How many connections there are, and of whom; and what they make the agent keep beside pages."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from orbitkv.protocol.errors import ErrorKind
from orbitkv_agent.queries.shares import Shares
from orbitkv_agent.sessions.errors import Rejected

if TYPE_CHECKING:
    from orbitkv_agent.config import AgentConfig
    from orbitkv_agent.sessions.peers import Peer
    from orbitkv_agent.sessions.session import Session


class Connections:
    """Counts connections against their limits. Used by the owner thread only.

    Without a cluster a connection counts for its user from the start. In a cluster anybody may connect, and users say
    nothing: a connection is a stranger until its token is accepted, and then counts for its pod. Strangers have a small
    number of places, half of them for one user at most. When these are taken, the stranger that has been silent for
    longest makes room: whoever has a token shows it at once, so a crowd without tokens only pushes out itself. And no
    tenant has so many connections that others get none, however many pods it has.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._in_cluster = config.cluster is not None
        self._owner: dict[Session, tuple[str, str]] = {}
        """Whom an open session counts for, and the tenant."""
        self._by_owner: Counter[str] = Counter()
        self._shares = Shares(lambda: self._in_cluster)
        self._strangers: dict[Session, None] = {}
        self._strangers_of: Counter[int] = Counter()
        self._silent: dict[Session, None] = {}

    def check(self, peer: Peer) -> None:
        """Whether another connection of this peer may come.

        Raises:
            Rejected: BUSY or DENIED.
        """
        if self._in_cluster:
            return
        config = self._config
        self._check_owner(_user(peer), "")
        if peer.uid not in config.allowed_uids:
            raise Rejected(
                "user-denied",
                ErrorKind.DENIED,
                f"user {peer.uid} may not connect; the agent allows users {sorted(config.allowed_uids)} (allowed_uids)",
            )

    def crowded_out(self, peer: Peer) -> Session | None:
        """The stranger that has to go before another one of this peer may stay, if one has to.

        Raises:
            Rejected: BUSY, all of them have shown a token that is being looked at.
        """
        places = self._config.max_strangers
        if not self._in_cluster:
            return None
        if self._strangers_of[peer.uid] >= -(-places // 2):
            candidates = [each for each in self._silent if each.peer.uid == peer.uid]
        elif len(self._strangers) >= places:
            candidates = list(self._silent)
        else:
            return None
        if not candidates:
            raise Rejected(
                "too-many-connections",
                ErrorKind.BUSY,
                f"{len(self._strangers)} connections wait until their tokens are looked at (max_strangers); try again",
            )
        return candidates[0]

    def connected(self, session: Session) -> None:
        """A connection was accepted."""
        if self._in_cluster:
            self._strangers[session] = None
            self._silent[session] = None
            self._strangers_of[session.peer.uid] += 1
        else:
            self._count(session, _user(session.peer), "")

    def spoke(self, session: Session) -> None:
        """A connection has said hello."""
        self._silent.pop(session, None)

    def opened(self, session: Session, owner: str, tenant: str) -> None:
        """A session was granted; `owner` is whom it counts for, and `tenant` whose the cache namespace is.

        Raises:
            Rejected: BUSY, this owner has too many, or its tenant, or all together have.
        """
        if self._in_cluster:
            self._check_owner(owner, tenant)
            self._forget_stranger(session)
            self._count(session, owner, tenant)

    def ended(self, session: Session) -> None:
        """A connection ended."""
        self._forget_stranger(session)
        owner, tenant = self._owner.pop(session, (None, ""))
        if owner is not None:
            self._shares.give_back(tenant, 1)
            self._by_owner[owner] -= 1
            if not self._by_owner[owner]:
                del self._by_owner[owner]

    def _count(self, session: Session, owner: str, tenant: str) -> None:
        self._owner[session] = owner, tenant
        self._by_owner[owner] += 1
        self._shares.take(tenant, 1)

    def _check_owner(self, owner: str, tenant: str) -> None:
        config = self._config
        if len(self._owner) >= config.max_connections:
            raise Rejected(
                "too-many-connections",
                ErrorKind.BUSY,
                f"the agent has {config.max_connections} connections (max_connections)",
            )
        limit = config.max_connections_per_peer
        if self._by_owner[owner] >= limit:
            raise Rejected(
                "too-many-connections",
                ErrorKind.BUSY,
                f"{owner} has {limit} connections to the agent (max_connections_per_peer)",
            )
        if not self._shares.allows(tenant, 1, config.max_connections - len(self._owner)):
            raise Rejected(
                "too-many-connections",
                ErrorKind.BUSY,
                f"the cache namespaces of {tenant} have as many of the agent's {config.max_connections} connections "
                "(max_connections) as are left for all others",
            )

    def _forget_stranger(self, session: Session) -> None:
        self._silent.pop(session, None)
        if session in self._strangers:
            del self._strangers[session]
            self._strangers_of[session.peer.uid] -= 1
            if not self._strangers_of[session.peer.uid]:
                del self._strangers_of[session.peer.uid]


class HeldMemory:
    """Bytes that sessions make the agent keep beside pages: of unfinished frames, of replies that are not read, of
    requests that take several turns, of registrations. Used by the owner thread only.

    One session may have a lot of it for a moment, and has to: but all together only so much that the agent is not
    killed for it. Beyond that whoever has most loses the session that has most.

    Args:
        limit: most bytes of all sessions.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: dict[Session, int] = {}
        self.total = 0

    def note(self, session: Session, size: int) -> None:
        """A session has so many bytes now."""
        self.total += size - self._of.pop(session, 0)
        if size:
            self._of[session] = size

    @property
    def too_much(self) -> bool:
        """Whether a session has to go."""
        return self.total > self._limit

    def hog(self) -> Session:
        """The session that has to go, while there is too much."""
        by_namespace: Counter[str | None] = Counter()
        for each, held in self._of.items():
            by_namespace[each.namespace] += held
        [(most, _)] = by_namespace.most_common(1)
        return max((each for each in self._of if each.namespace == most), key=self._of.__getitem__)


def _user(peer: Peer) -> str:
    return f"user {peer.uid}"
