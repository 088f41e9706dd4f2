"""A session: a connection after the handshake, with what came along (records, hint, the agent's pidfd)."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import Goodbye, Hello, JoinSession, Ping, RenewToken, Reply, Welcome
from orbitkv.protocol.permit import Withdrawal
from orbitkv.protocol.records import RecordReader

from .connection import Connection

TOKEN_LOOK_S = 30.0
"""How often a session looks for a newer token. They are replaced minutes before they end."""


@dataclass(frozen=True)
class Endpoint:
    """Where the agent is and how to introduce ourselves. Times in milliseconds.

    The token is `token`, or what the file `token_path` holds whenever a session looks.
    """

    path: str
    cache_namespace: str
    token: bytes
    name: str
    timeout_ms: int
    server_uid: int | None
    token_path: str = ""

    def read_token(self) -> bytes:
        """Return the token that is valid now.

        Raises:
            OrbitKVError: UNAVAILABLE, the file cannot be read.
        """
        if not self.token_path:
            return self.token
        try:
            with open(self.token_path, "rb") as file:
                return file.read().strip()
        except OSError as error:
            raise OrbitKVError(
                ErrorKind.UNAVAILABLE,
                f"the token in {self.token_path} (orbitkv.token_path) cannot be read: {error.strerror}",
            ) from None


class Session:
    """An open session with one boot of the agent.

    Raises:
        OrbitKVError: what `Connection` raises, or the agent's refusal (INCOMPATIBLE, DENIED, BUSY).
    """

    def __init__(self, endpoint: Endpoint, on_late_reply: Callable[[Reply], None]) -> None:
        token = endpoint.read_token()
        self.connection = Connection(
            endpoint.path,
            server_uid=endpoint.server_uid,
            timeout_ms=endpoint.timeout_ms,
            on_late_reply=on_late_reply,
        )
        descriptors: list[int] = []
        try:
            hello = Hello(cache_namespace=endpoint.cache_namespace, token=token, client=endpoint.name)
            reply, descriptors = self.connection.call_for_descriptors(hello, endpoint.timeout_ms)
            if not isinstance(reply, Welcome) or len(descriptors) != (5 if reply.records_version > 1 else 3):
                raise OrbitKVError(
                    ErrorKind.INCOMPATIBLE, f"{endpoint.path} answered the handshake with {type(reply).__name__}"
                )
            self.records = RecordReader(descriptors[0])
            for fd in descriptors[3:4]:
                self.connection.use_shortcut(fd)
                os.close(fd)
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            self.connection.close()
            raise
        os.close(descriptors[0])
        self.welcome: Welcome = reply
        self.hint_fd = descriptors[1]
        self.agent_pidfd = descriptors[2]
        self._permit_fd = descriptors[4] if len(descriptors) > 4 else -1
        self.withdrawal = Withdrawal(self._permit_fd)
        self._liveness = select.poll()
        self._liveness.register(self.agent_pidfd, select.POLLIN)
        self._ending = threading.Event()
        self._upkeep: threading.Thread | None = None
        if self.welcome.heartbeat_ms or endpoint.token_path:
            arguments = (endpoint, token)
            self._upkeep = threading.Thread(target=self._keep_up, args=arguments, name="orbitkv-session", daemon=True)
            self._upkeep.start()

    def join(self, other: Welcome, timeout_ms: float) -> None:
        """Let the agent know that this session belongs with another one of this client, and make sure that it does.

        Raises:
            OrbitKVError: STALE, the other one has ended, or the agent restarted since.
        """
        try:
            self.connection.call(JoinSession(other.boot_id, other.epoch), timeout_ms)
        except OrbitKVError as error:
            if error.kind is not ErrorKind.INVALID:
                raise
            # An agent of an earlier release does not know the message. Which boot it is, it has said.
            if self.welcome.boot_id != other.boot_id:
                raise OrbitKVError(ErrorKind.STALE, "the OrbitKV agent restarted; make a new client") from None

    def agent_alive(self) -> bool:
        """Whether the agent's process exists (a stalled one does)."""
        self.connection.check()
        return not self._liveness.poll(0)

    def close(self) -> None:
        """Say goodbye and release everything. The caller has no copy running."""
        self._ending.set()
        if self._upkeep is not None:
            self._upkeep.join()
        self.connection.send_only(Goodbye())
        self.connection.close()
        self.records.close()
        os.close(self.hint_fd)
        os.close(self.agent_pidfd)
        if self._permit_fd >= 0:
            os.close(self._permit_fd)

    def _keep_up(self, endpoint: Endpoint, token: bytes) -> None:
        """Send heartbeats where the agent needs them, and each newer token: a session does not outlive its token."""
        beat_s = self.welcome.heartbeat_ms / 3000 or TOKEN_LOOK_S
        looked = time.monotonic()
        while not self._ending.wait(min(beat_s, TOKEN_LOOK_S)):
            if self.welcome.heartbeat_ms:
                self.connection.send_only(Ping())
            if endpoint.token_path and time.monotonic() - looked >= TOKEN_LOOK_S:
                looked = time.monotonic()
                token = self._renew(endpoint, token)

    def _renew(self, endpoint: Endpoint, token: bytes) -> bytes:
        """Send the token if there is a newer one; return the one that is in use."""
        try:
            newer = endpoint.read_token()
        except OrbitKVError:
            return token  # it is being replaced, or gone with the pod: the agent will judge
        if newer and newer != token:
            self.connection.send_only(RenewToken(newer))
            return newer
        return token
