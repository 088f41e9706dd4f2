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
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from orbitkv.protocol import framing
from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import Hello, Refusal, Welcome
from orbitkv.protocol.versions import MESSAGES, PAGE_IMAGE, RECORDS, RELEASE, VersionRange, settle
from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Deadlines, Loop
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.sessions.errors import Refused
from orbitkv_agent.sessions.peers import peer_of
from orbitkv_agent.sessions.session import Session, SessionEvents

if TYPE_CHECKING:
    from orbitkv_agent.config import AgentConfig

logger = logging.getLogger(__name__)

_BACKLOG: Final = 512
_ACCEPTS_A_ROUND: Final = 32
_PAUSE_S: Final = 0.5
_MISSED_HEARTBEATS: Final = 3
_CLIENT_NAME_LENGTH: Final = 64


class SocketTakenError(OSError):
    """The socket's path cannot be used; the message says why and what to do."""


class Listener:
    """A listening Unix socket, mode 0600, with a lock file beside it.

    The lock says who owns the path: a socket that was left behind is replaced, and a second agent is refused.

    Raises:
        SocketTakenError: another agent, or something else, is there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = _take_lock(f"{path}.lock", path)
        try:
            _clear(path)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                self.socket.bind(path)
                os.chmod(path, 0o600)  # nobody can connect before listen()
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


class Server(SessionEvents):
    """Accepts connections, opens sessions, hands their requests to `handle`.

    Args:
        handle: called with every frame of an open session.
        ended: called when a session's stream ended.
        left: called when no copy of a session's process runs any more.
        namespace_options: the settings of a cache namespace for its engines; raises Refused for an unknown one.

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
        namespace_options: Callable[[str], dict[str, object]],
    ) -> None:
        self.sessions: dict[Session, None] = {}
        self.draining = False
        self._loop = loop
        self._config = config
        self._counters = counters
        self._boot_id = boot_id
        self._handle = handle
        self._ended = ended
        self._left = left
        self._namespace_options = namespace_options
        self._connected: Counter[int] = Counter()
        self._epoch = 0
        self._pidfd = os.pidfd_open(os.getpid())
        self._hello: Deadlines[Session] = Deadlines(loop, config.hello_timeout_ms / 1000, self._hello_too_late)
        self._silent: Deadlines[Session] = Deadlines(
            loop, _MISSED_HEARTBEATS * config.heartbeat_ms / 1000, self._check_silence
        )
        try:
            self._listener = Listener(config.socket_path)
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
        for _ in range(_ACCEPTS_A_ROUND):
            try:
                connection, _ = self._listener.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                # Out of descriptors: what waits would wake the loop again at once, so look away for a moment.
                logger.error("accepting a connection failed: %s; trying again soon", error.strerror)
                self._counters.session_rejections["limit"] += 1
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
        config = self._config
        refusal: tuple[str, ErrorKind, str] | None = None
        if self._connected.total() >= config.max_connections:
            refusal = ("limit", ErrorKind.BUSY, f"the agent has {config.max_connections} connections (max_connections)")
        elif self._connected[peer.uid] >= config.max_connections_per_peer:
            limit = config.max_connections_per_peer
            refusal = (
                "peer-limit",
                ErrorKind.BUSY,
                f"user {peer.uid} has {limit} connections to the agent (max_connections_per_peer)",
            )
        elif peer.uid not in config.allowed_uids:
            refusal = (
                "user",
                ErrorKind.DENIED,
                f"user {peer.uid} may not connect; the agent allows users {sorted(config.allowed_uids)} (allowed_uids)",
            )
        if refusal is not None:
            reason, kind, message = refusal
            self._counters.session_rejections[reason] += 1
            with contextlib.suppress(OSError):
                connection.send(framing.encode(Refusal(kind, message), 0), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            connection.close()
            peer.close()
            return
        self._epoch += 1
        session = Session(connection, peer, self._epoch, self._loop, self)
        self.sessions[session] = None
        self._connected[peer.uid] += 1
        self._hello.add(session)

    def _hello_too_late(self, session: Session) -> None:
        message = f"no Hello came within {self._config.hello_timeout_ms} ms"
        logger.warning("%s: closed: %s", session, message)
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
        if session.is_open:
            self._handle(session, sequence, body)
            return
        try:
            hello = framing.request_decoder.decode(body)
            if not isinstance(hello, Hello):
                raise Refused(
                    ErrorKind.INVALID, f"{type(hello).__name__} came before Hello; a session starts with Hello"
                )
            self._welcome(session, sequence, hello)
        except (Refused, msgspec.MsgspecError) as error:
            kind = error.kind if isinstance(error, Refused) else ErrorKind.INVALID
            text = str(error) if isinstance(error, Refused) else f"the agent cannot read this as a Hello: {error}"
            logger.warning("%s: refused: %s", session, text)
            session.refuse_stream(kind, text, sequence)
            session.end_stream(error.reason if isinstance(error, _Rejected) else "frame")

    def stream_ended(self, session: Session, reason: str) -> None:
        """Free what a connection takes; queries and registrations end."""
        self._hello.discard(session)
        self._silent.discard(session)
        self._connected[session.peer.uid] -= 1
        if not self._connected[session.peer.uid]:
            del self._connected[session.peer.uid]
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

    def _welcome(self, session: Session, sequence: int, hello: Hello) -> None:
        if self.draining:
            raise _Rejected("draining", ErrorKind.UNAVAILABLE, "the agent is shutting down; attach again later")
        if hello.token:
            raise _Rejected(
                "token",
                ErrorKind.UNSUPPORTED,
                "token: tokens are not there yet; this agent knows its clients by their user",
            )
        ours = (MESSAGES, RECORDS, PAGE_IMAGE)
        theirs = (VersionRange(*hello.messages), VersionRange(*hello.records), VersionRange(*hello.page_image))
        versions = [settle(*pair) for pair in zip(ours, theirs, strict=True)]
        for name, version, our, their in zip(
            ("messages", "records", "page_image"), versions, ours, theirs, strict=True
        ):
            if version is None and guard("versions"):
                raise _Rejected(
                    "version",
                    ErrorKind.INCOMPATIBLE,
                    f"{name}: the client speaks versions {their}, this agent (release {RELEASE}) speaks {our}; "
                    "use releases that are at most one apart",
                )
        try:
            options = self._namespace_options(hello.cache_namespace)
        except Refused as error:
            raise _Rejected("namespace", error.kind, str(error)) from None
        self._hello.discard(session)
        heartbeat = 0
        if session.peer.pidfd is None:
            heartbeat = self._config.heartbeat_ms
            self._silent.add(session)
        records = session.open(hello.cache_namespace, hello.client[:_CLIENT_NAME_LENGTH])
        config = self._config
        session.reply(
            sequence,
            Welcome(
                boot_id=self._boot_id,
                epoch=session.epoch,
                release=RELEASE,
                messages_version=versions[0] or 0,
                records_version=versions[1] or 0,
                page_image_version=versions[2] or 0,
                mode=config.mode,
                cache_namespace=hello.cache_namespace,
                max_session_queries=config.max_session_queries,
                reply_ttl_ms=config.reply_ttl_ms,
                query_budget_bytes=min(config.query_budget_bytes, config.instance_budget_bytes),
                heartbeat_ms=heartbeat,
                namespace_options=json.loads(json.dumps(options)),
            ),
            (records.fd, session.hint_fd, self._pidfd),
        )
        logger.info("%s opened for cache namespace %r", session, hello.cache_namespace)


class _Rejected(Refused):
    """A refusal that the metrics count under `reason`."""

    def __init__(self, reason: str, kind: ErrorKind, message: str) -> None:
        super().__init__(kind, message)
        self.reason = reason
