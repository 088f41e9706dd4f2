"""Errors that a caller of the client can see, and that the agent sends as `messages.Refusal`."""

from __future__ import annotations

from enum import StrEnum


class ErrorKind(StrEnum):
    """What went wrong, as far as it changes what the caller does next."""

    UNAVAILABLE = "unavailable"
    """No agent answers on the socket, or the connection ended. Attach again later."""
    TIMEOUT = "timeout"
    """The agent is there and did not answer in time. What was asked may still happen."""
    INCOMPATIBLE = "incompatible"
    """The two sides speak no common version."""
    DENIED = "denied"
    """The token or the peer's user does not allow this."""
    INVALID = "invalid"
    """A field of the request is wrong; the message names it."""
    UNSUPPORTED = "unsupported"
    """A field asks for something that this agent does not have yet; the message names it."""
    STALE = "stale"
    """A lease, registration, revision or session that is no longer alive. Ask again from the start."""
    BUSY = "busy"
    """A limit on concurrent work is reached. Try again."""
    CLOSED = "closed"
    """The client was closed, or is used in a forked child. Make a new one."""
    INTERNAL = "internal"
    """A defect on the other side; its log has the details."""


class OrbitKVError(Exception):
    """Every error of the client.

    Args:
        kind: what the caller can branch on.
        message: what happened, to what, and what the reader can do.
    """

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[OrbitKVError], tuple[ErrorKind, str]]:
        return type(self), (self.kind, str(self))


class SaveNotSubmittedError(OrbitKVError):
    """Proof that the save it is about was not started: its pages may be used again.

    Any other error of a save leaves its outcome unknown and its pages held.
    """
