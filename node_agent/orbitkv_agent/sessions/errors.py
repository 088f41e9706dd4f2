"""How a handler says no."""

from __future__ import annotations

from orbitkv.protocol.errors import ErrorKind


class Refused(Exception):
    """The request is refused with this kind and message, and nothing of it happened.

    Args:
        kind: what the client can branch on.
        message: what is wrong (field and value), and what the reader can do.
    """

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def invalid(message: str) -> Refused:
    """A field is wrong."""
    return Refused(ErrorKind.INVALID, message)


def unsupported(message: str) -> Refused:
    """A field asks for something that this agent does not have."""
    return Refused(ErrorKind.UNSUPPORTED, message)


def stale(message: str) -> Refused:
    """A handle that is no longer alive."""
    return Refused(ErrorKind.STALE, message)


class Rejected(Refused):
    """A connection or session is refused; the metrics count it under `reason`, and the message begins with it."""

    def __init__(self, reason: str, kind: ErrorKind, message: str) -> None:
        super().__init__(kind, f"{reason}: {message}")
        self.reason = reason


def bad_frame(message: str) -> Rejected:
    """What came is not what the protocol has here."""
    return Rejected("bad-frame", ErrorKind.INVALID, message)
