"""A session: a connection after the handshake, with what came along (records, hint, the agent's pidfd)."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import Goodbye, Hello, Ping, Reply, Welcome
from orbitkv.protocol.records import RecordReader

from .connection import Connection


@dataclass(frozen=True)
class Endpoint:
    """Where the agent is and how to introduce ourselves. Times in milliseconds."""

    path: str
    cache_namespace: str
    token: bytes
    name: str
    timeout_ms: int
    server_uid: int | None


class Session:
    """An open session with one boot of the agent.

    Raises:
        OrbitKVError: what `Connection` raises, or the agent's refusal (INCOMPATIBLE, DENIED, BUSY).
    """

    def __init__(self, endpoint: Endpoint, on_late_reply: Callable[[Reply], None]) -> None:
        self.connection = Connection(
            endpoint.path,
            server_uid=endpoint.server_uid,
            timeout_ms=endpoint.timeout_ms,
            on_late_reply=on_late_reply,
        )
        descriptors: list[int] = []
        try:
            hello = Hello(cache_namespace=endpoint.cache_namespace, token=endpoint.token, client=endpoint.name)
            reply, descriptors = self.connection.call_for_descriptors(hello, endpoint.timeout_ms)
            if not isinstance(reply, Welcome) or len(descriptors) != 3:
                raise OrbitKVError(
                    ErrorKind.INCOMPATIBLE, f"{endpoint.path} answered the handshake with {type(reply).__name__}"
                )
            self.records = RecordReader(descriptors[0])
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            self.connection.close()
            raise
        os.close(descriptors[0])
        self.welcome: Welcome = reply
        self.hint_fd = descriptors[1]
        self.agent_pidfd = descriptors[2]
        self._liveness = select.poll()
        self._liveness.register(self.agent_pidfd, select.POLLIN)
        self._heartbeat_stop = threading.Event()
        self._heartbeat: threading.Thread | None = None
        if self.welcome.heartbeat_ms:
            self._heartbeat = threading.Thread(target=self._beat, name="orbitkv-heartbeat", daemon=True)
            self._heartbeat.start()

    def agent_alive(self) -> bool:
        """Whether the agent's process exists (a stalled one does)."""
        self.connection.check()
        return not self._liveness.poll(0)

    def close(self) -> None:
        """Say goodbye and release everything. The caller has no copy running."""
        self._heartbeat_stop.set()
        if self._heartbeat is not None:
            self._heartbeat.join()
        self.connection.send_only(Goodbye())
        self.connection.close()
        self.records.close()
        os.close(self.hint_fd)
        os.close(self.agent_pidfd)

    def _beat(self) -> None:
        while not self._heartbeat_stop.wait(self.welcome.heartbeat_ms / 3000):
            self.connection.send_only(Ping())
