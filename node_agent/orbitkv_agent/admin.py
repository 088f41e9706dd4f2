"""The administrator's side of the agent's socket: one session, questions answered one at a time."""

from __future__ import annotations

import os
import socket
import struct
import time
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from orbitkv.protocol import framing
from orbitkv.protocol.messages import (
    ConfigureNamespace,
    Done,
    GetStatus,
    Hello,
    Refusal,
    Reply,
    Request,
    Status,
    Welcome,
)
from orbitkv_agent.observe.snapshot import Snapshot

ANSWER_SECONDS: Final = 5.0
R = TypeVar("R", bound=Reply)


class AdminError(Exception):
    """The agent refused, or could not be asked; the message says what to do."""


class NoAgentError(AdminError):
    """No agent listens on the socket."""


def parse_status(body: bytes) -> Snapshot:
    """Return what `AdminConnection.status` got.

    Raises:
        AdminError: the agent's release tells other things than this one.
    """
    try:
        return msgspec.json.decode(body, type=Snapshot)
    except msgspec.DecodeError as error:
        raise AdminError(
            f"the agent's state cannot be read, probably it is of another release ({error}): ask with --json"
        ) from None


def may_be_trusted(server: int, own: int) -> bool:
    """Return whether user `own` may take what a process of user `server` says for an agent's words."""
    return server in (own, 0) or own == 0


class AdminConnection:
    """An open session with the agent on `socket_path`. Use it in a `with` statement.

    Raises:
        NoAgentError: nothing listens there.
        AdminError: it cannot be opened, belongs to a stranger, or the agent refuses.
    """

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._sequence = 0
        self._reader = framing.FrameReader(framing.MAX_FRAME_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._connect()
            self._check_server()
            self._ask(Hello(client="orbitkv-agent"), Welcome)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def status(self) -> bytes:
        """Return the agent's state: the JSON of a `Snapshot` of the agent's release.

        Raises:
            AdminError: the agent refuses or does not answer.
        """
        return self._ask(GetStatus(), Status).body

    def configure(self, settings: ConfigureNamespace) -> None:
        """Set what a cache namespace may use.

        Raises:
            AdminError: the agent refuses or does not answer.
        """
        self._ask(settings, Done)

    def _connect(self) -> None:
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            self._socket.connect(self._path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise NoAgentError(
                f"no agent listens on {self._path}: start one with `orbitkv-agent serve`, "
                "or name the socket of a running one with --socket"
            ) from None
        except PermissionError:
            raise AdminError(f"{self._path} may not be opened by this user: run this as the agent's user") from None
        except TimeoutError:
            raise AdminError(f"the agent on {self._path} accepts no connection: it hangs or is stopped") from None
        except OSError as error:
            raise AdminError(f"{self._path} cannot be opened: {error.strerror or error}") from None

    def _check_server(self) -> None:
        """Speak only to an agent of this user or of root: any process can put a socket in a shared folder."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        server = struct.unpack("iII", credentials)[1]
        if not may_be_trusted(server, os.getuid()):
            raise AdminError(
                f"the process that listens on {self._path} is user {server}'s: no agent of yours, nothing was sent"
            )

    def _ask(self, request: Request, expected: type[R]) -> R:
        self._sequence += 1
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.sendall(framing.encode(request, self._sequence))
            reply = self._receive(deadline)
        except TimeoutError:
            raise AdminError(
                f"the agent on {self._path} did not answer within {ANSWER_SECONDS:g} s: it hangs or is stopped"
            ) from None
        except (OSError, framing.FrameError) as error:
            raise AdminError(f"the connection to the agent on {self._path} broke: {error}") from None
        if isinstance(reply, Refusal):
            raise AdminError(f"the agent refused: {reply.message}")
        if not isinstance(reply, expected):
            raise AdminError(
                f"the agent on {self._path} answered with {type(reply).__name__}, which is no answer to this"
            )
        return reply

    def _receive(self, deadline: float) -> Reply:
        """Return the reply to the last request; descriptors that come along are closed."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            data, descriptors = framing.receive_with_descriptors(self._socket, 1 << 16)
            for fd in descriptors:
                os.close(fd)
            if not data:
                raise ConnectionError("the agent closed it")
            for sequence, body in self._reader.feed(data):
                if sequence in (self._sequence, 0):  # 0 refuses the connection as such
                    return framing.reply_decoder.decode(body)
