"""The listening socket: who may connect, how many, and the handshake."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import select
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import msgspec

from orbitkv.protocol import framing
from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import Done, Hello, JoinSession, Refusal, Reply, Welcome
from orbitkv.protocol.versions import MESSAGES, PAGE_IMAGE, RECORDS, RELEASE, VersionRange, settle
from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Deadlines, Loop
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.sessions.admission import Admission, Grant
from orbitkv_agent.sessions.errors import Refused, Rejected, bad_frame, stale
from orbitkv_agent.sessions.limits import Connections, HeldMemory
from orbitkv_agent.sessions.namespaces import tenant_of
from orbitkv_agent.sessions.peers import peer_of
from orbitkv_agent.sessions.session import Session, SessionEvents
from orbitkv_agent.sessions.turns import TenantTurns

if TYPE_CHECKING:
    from orbitkv_agent.config import AgentConfig

logger = logging.getLogger(__name__)

_BACKLOG: Final = 512
_ACCEPTS_A_ROUND: Final = 32
_STRANGERS_A_ROUND: Final = 1
"""In a cluster anybody may connect, and nobody shall be kept waiting by a crowd."""
_OWN_SOCKET: Final = 0o600
_SHARED_SOCKET: Final = 0o666
_PAUSE_S: Final = 0.5
_MISSED_HEARTBEATS: Final = 3
_CLIENT_NAME_LENGTH: Final = 64
_SHORTCUT_SINCE: Final = 2
"""Version of the records."""
_PERMIT: Final = 4
"""Place of the permit among the descriptors that a client gets."""
_HELD_BYTES: Final = 64 << 20
_HELD_SHARE: Final = 512
"""What sessions may make the agent keep: so many bytes and one part in so many of the pool."""
_COMPLAINTS: Final = 30
"""Refused connections that are logged,"""
_COMPLAINTS_S: Final = 60.0
"""in so many seconds."""


class SocketTakenError(OSError):
    """The socket's path cannot be used; the message says why and what to do."""


class Listener:
    """A listening Unix socket, and a lock file: beside it, or at `lock_path`.

    The lock says who owns the path: a socket that was left behind is replaced, and a second agent is refused. The
    folder is made by others and never made anew: engines in containers hold on to it.

    Raises:
        SocketTakenError: another agent, or something else, is there.
    """

    def __init__(self, path: str, mode: int = _OWN_SOCKET, lock_path: str = "") -> None:
        self.path = path
        self._lock = _take_lock(lock_path or f"{path}.lock", path)
        try:
            _clear(path)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                self.socket.bind(path)
                os.chmod(path, mode)  # nobody can connect before listen()
                self.socket.listen(_BACKLOG)
                self._inode = os.lstat(path).st_ino
            except OSError as error:
                self.socket.close()
                raise SocketTakenError(f"{path}: cannot listen there: {error.strerror}") from None
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Stop listening and remove the socket, if the path still leads to it."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        # The lock file stays: removing it would let two agents lock two files of one name.
        os.close(self._lock)


def _take_lock(path: str, socket_path: str) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SocketTakenError(
            f"{path}: cannot open the lock file: {error.strerror}; choose another socket_path or remove what is there"
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise SocketTakenError(f"{path} is not a file; choose another socket_path or remove what is there")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise SocketTakenError(
                f"another agent (pid {owner}) serves {socket_path}; stop it, or choose another socket_path"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _clear(path: str) -> None:
    """Remove a socket that nobody listens on. Called with the lock held."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketTakenError(f"{path} exists and is not a socket; remove it, or choose another socket_path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        result = probe.connect_ex(path)
    if result in (0, errno.EAGAIN):
        raise SocketTakenError(
            f"a process that is no OrbitKV agent listens on {path}; stop it, or choose another socket_path"
        )
    try:
        os.unlink(path)
    except OSError as error:
        raise SocketTakenError(
            f"{path}: cannot remove the socket that was left there: {error.strerror}; "
            "remove it, or choose another socket_path"
        ) from None


def _listener(config: AgentConfig) -> Listener:
    """In a cluster the socket is everybody's, and alone in its folder: that is left empty when agents are removed."""
    if config.cluster is None:
        return Listener(config.socket_path)
    folder = Path(config.cluster.state_path)
    with contextlib.suppress(OSError):  # then the lock file cannot be opened either, and that says why
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Listener(config.socket_path, _SHARED_SOCKET, str(folder / "agent.lock"))


class Server(SessionEvents):
    """Accepts connections, opens sessions, hands their requests to `handle`.

    Args:
        handle: called with every frame of an open session.
        ended: called when a session's stream ended.
        left: called when no copy of a session's process runs any more.
        admission: decides who may open a session.

    Attributes:
        sessions: all that are not closed.
        draining: refuse new sessions.
    """

    def __init__(
        self,
        loop: Loop,
        config: AgentConfig,
        counters: Counters,
        boot_id: str,
        *,
        handle: Callable[[Session, int, bytes | memoryview], None],
        ended: Callable[[Session], None],
        left: Callable[[Session], None],
        admission: Admission,
        mode: str = "host",
    ) -> None:
        self._mode = mode
        self.sessions: dict[Session, None] = {}
        self.draining = False
        self._loop = loop
        self._config = config
        self._counters = counters
        self._boot_id = boot_id
        self._handle = handle
        self._ended = ended
        self._left = left
        self._admission = admission
        self._connections = Connections(config)
        self._held = HeldMemory(_HELD_BYTES + config.pool_bytes // _HELD_SHARE)
        self._strangers = TenantTurns(loop)
        self._turns: WeakValueDictionary[str, TenantTurns] = WeakValueDictionary()
        """By tenant; sessions keep theirs."""
        self._asked: dict[Session, None] = {}
        """Sessions whose hello waits for the admission's answer."""
        self._complaints = 0
        self._complaints_since = loop.now()
        self._epoch = 0
        self._pidfd = os.pidfd_open(os.getpid())
        self._hello: Deadlines[Session] = Deadlines(loop, config.hello_timeout_ms / 1000, self._hello_too_late)
        self._silent: Deadlines[Session] = Deadlines(
            loop, _MISSED_HEARTBEATS * config.heartbeat_ms / 1000, self._check_silence
        )
        try:
            self._listener = _listener(config)
        except BaseException:
            os.close(self._pidfd)
            raise
        loop.watch(self._listener.socket.fileno(), select.EPOLLIN, self._accept)

    def close(self) -> None:
        """Close all sessions and stop listening."""
        for session in list(self.sessions):
            session.close()
        self._loop.forget(self._listener.socket.fileno())
        self._listener.close()
        os.close(self._pidfd)

    # ---------------------------------------------------------------------------------------------- accept

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTS_A_ROUND if self._config.cluster is None else _STRANGERS_A_ROUND):
            try:
                connection, _ = self._listener.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                # Out of descriptors: what waits would wake the loop again at once, so look away for a moment.
                logger.error("accepting a connection failed: %s; trying again soon", error.strerror)
                self._counters.session_rejections["too-many-connections"] += 1
                self._loop.forget(self._listener.socket.fileno())
                self._loop.call_later(_PAUSE_S, self._resume)
                return
            self._admit(connection)

    def _resume(self) -> None:
        if self._listener.socket.fileno() >= 0:
            self._loop.watch(self._listener.socket.fileno(), select.EPOLLIN, self._accept)

    def _admit(self, connection: socket.socket) -> None:
        try:
            peer = peer_of(connection)
        except OSError:
            connection.close()
            return
        try:
            self._connections.check(peer)
            crowded_out = self._connections.crowded_out(peer)
        except Rejected as error:
            self._counters.session_rejections[error.reason] += 1
            with contextlib.suppress(OSError):
                refusal = framing.encode(Refusal(error.kind, str(error)), 0)
                connection.send(refusal, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            connection.close()
            peer.close()
            return
        if crowded_out is not None:
            why = "others came, and nothing was said here; try again"
            self.expel(crowded_out, Rejected("too-many-connections", ErrorKind.BUSY, why))
        self._epoch += 1
        session = Session(connection, peer, self._epoch, self._loop, self, self._strangers)
        self.sessions[session] = None
        self._connections.connected(session)
        self._hello.add(session)

    def expel(self, session: Session, error: Refused, sequence: int = 0) -> None:
        """End a session from this side, and say why. Copies of its process drain as always."""
        session.refuse_stream(error.kind, str(error), sequence)
        session.end_stream(error.reason if isinstance(error, Rejected) else "refused")

    def _hello_too_late(self, session: Session) -> None:
        message = f"hello-timeout: no Hello came within {self._config.hello_timeout_ms} ms"
        self._complain("%s: closed: %s", session, message)
        session.refuse_stream(ErrorKind.TIMEOUT, message)
        session.end_stream("hello-timeout")

    def _check_silence(self, session: Session) -> None:
        """A client whose exit nobody reports must be heard."""
        silence = self._loop.now() - session.last_heard
        if silence < _MISSED_HEARTBEATS * self._config.heartbeat_ms / 1000:
            self._silent.add(session)
        else:
            logger.warning("%s: closed, because nothing was heard for %.1f s", session, silence)
            session.end_stream()

    # -------------------------------------------------------------------------------------- session events

    def frame(self, session: Session, sequence: int, body: bytes | memoryview) -> None:
        """Pass a request on, or take the handshake."""
        if session.namespace is not None:
            self._handle(session, sequence, body)
            return
        try:
            if session in self._asked:
                raise bad_frame("a request came before the answer to Hello; wait for it")
            hello = framing.request_decoder.decode(body)
            if not isinstance(hello, Hello):
                raise bad_frame(f"{type(hello).__name__} came before Hello; a session starts with Hello")
            self._greet(session, sequence, hello)
        except Refused as error:
            self._refuse(session, sequence, error)
        except msgspec.MsgspecError as error:
            self._refuse(session, sequence, bad_frame(f"the agent cannot read this as a Hello: {error}"))

    def _refuse(self, session: Session, sequence: int, error: Refused) -> None:
        self._complain("%s: refused: %s", session, error)
        self.expel(session, error, sequence)

    def _complain(self, text: str, session: Session, why: object) -> None:
        """Log what became of a stranger; a crowd of them must not fill the log."""
        now = self._loop.now()
        if now - self._complaints_since >= _COMPLAINTS_S:
            self._complaints_since, self._complaints = now, 0
        self._complaints += 1
        if self._complaints <= _COMPLAINTS:
            logger.warning(text, session, why)
        elif self._complaints == _COMPLAINTS + 1:
            logger.warning("more connections that are refused within this minute are counted and not logged")

    def holds(self, session: Session, size: int) -> None:
        """Take note of it; where all sessions together hold too much, one has to go, as soon as nobody has a turn."""
        self._held.note(session, size)
        if self._held.too_much:
            self._loop.soon(self._relieve)

    def _relieve(self) -> None:
        while self._held.too_much:
            hog = self._held.hog()
            logger.warning("%s: closed, because clients make the agent keep %d bytes", hog, self._held.total)
            text = "clients made the agent keep more than it may, and this session the most; attach again"
            self.expel(hog, Rejected("too-much-held", ErrorKind.BUSY, text))

    def stream_ended(self, session: Session, reason: str) -> None:
        """Free what a connection takes; queries and registrations end."""
        self._held.note(session, 0)
        self._hello.discard(session)
        self._silent.discard(session)
        self._asked.pop(session, None)
        self._connections.ended(session)
        self._admission.ended(session)
        if reason:
            self._counters.session_rejections[reason] += 1
        if session.namespace is not None:
            self._ended(session)

    def closed(self, session: Session) -> None:
        """Free what its copies held."""
        del self.sessions[session]
        if session.namespace is not None:
            self._left(session)

    # ------------------------------------------------------------------------------------------- handshake

    def _greet(self, session: Session, sequence: int, hello: Hello) -> None:
        if self.draining:
            raise Rejected("draining", ErrorKind.UNAVAILABLE, "the agent is shutting down; attach again later")
        ours = (MESSAGES, RECORDS, PAGE_IMAGE)
        theirs = (VersionRange(*hello.messages), VersionRange(*hello.records), VersionRange(*hello.page_image))
        versions = [settle(*pair) for pair in zip(ours, theirs, strict=True)]
        for name, version, our, their in zip(
            ("messages", "records", "page_image"), versions, ours, theirs, strict=True
        ):
            if version is None and guard("versions"):
                raise Rejected(
                    "version-mismatch",
                    ErrorKind.INCOMPATIBLE,
                    f"{name}: the client speaks versions {their}, this agent (release {RELEASE}) speaks {our}; "
                    "use releases that are at most one apart",
                )
        self._hello.discard(session)
        self._connections.spoke(session)
        self._asked[session] = None
        settled = tuple(version or 0 for version in versions)

        def decided(answer: Grant | Refused) -> None:
            if self._asked.pop(session, session) is session:  # it ended, or was answered already
                return
            try:
                if isinstance(answer, Refused):
                    raise answer
                self._welcome(session, sequence, hello, settled, answer)
            except Refused as error:
                self._refuse(session, sequence, error)

        self._admission.admit(session, hello, decided)

    def _welcome(self, session: Session, sequence: int, hello: Hello, versions: tuple[int, ...], grant: Grant) -> None:
        if self.draining:
            raise Rejected("draining", ErrorKind.UNAVAILABLE, "the agent is shutting down; attach again later")
        self._connections.opened(session, grant.owner, tenant_of(grant.namespace))
        heartbeat = 0
        if session.peer.pidfd is None:
            heartbeat = self._config.heartbeat_ms
            self._silent.add(session)
        records = session.open(grant.namespace, hello.client[:_CLIENT_NAME_LENGTH])
        session.turns = self._turns.setdefault(session.tenant, TenantTurns(self._loop))
        shared = [records.fd, session.hint_fd, self._pidfd]
        if versions[1] >= _SHORTCUT_SINCE:
            shared += [session.open_shortcut(), records.permit.share()]
        session.administrator = grant.administrator
        session.messages_version = versions[0]
        session.trusted = self._config.cluster is None
        config = self._config
        session.reply(
            sequence,
            Welcome(
                boot_id=self._boot_id,
                epoch=session.epoch,
                release=RELEASE,
                messages_version=versions[0],
                records_version=versions[1],
                page_image_version=versions[2],
                mode=self._mode,
                cache_namespace=hello.cache_namespace,
                max_session_queries=config.max_session_queries,
                reply_ttl_ms=config.reply_ttl_ms,
                query_budget_bytes=min(config.query_budget_bytes, config.instance_budget_bytes),
                heartbeat_ms=heartbeat,
                namespace_options=json.loads(json.dumps(grant.options)),
            ),
            shared,
        )
        for fd in shared[_PERMIT:]:  # a description of the client's own
            os.close(fd)
        logger.info("%s opened for cache namespace %r", session, hello.cache_namespace)

    def join(self, session: Session, message: JoinSession) -> Reply:
        """Say whether the session that this one is to belong with is one of the same client, and open.

        The answer is the same for another client's session and for one that there never was.
        """
        if message.boot_id != self._boot_id and guard("boot-ids"):
            raise stale("agent-changed: the agent restarted since, and all that it had given out is gone: attach anew")
        for other in self.sessions:
            if other.epoch == message.epoch and other.is_open and other.same_client(session):
                return Done()
        raise stale(f"stale-session: this client has no open session {message.epoch}: attach anew")
