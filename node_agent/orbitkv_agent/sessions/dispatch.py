"""From a frame to the handler of its message, and back to a reply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.framing import request_decoder
from orbitkv.protocol.messages import Refusal, Reply
from orbitkv_agent.sessions.errors import Refused, bad_frame
from orbitkv_agent.sessions.session import Session

logger = logging.getLogger(__name__)

Steps = Generator[None, None, Reply | None]
"""A request that is served in several turns: each `yield` lets others be served before it goes on."""

Handler = Callable[[Session, int, Any], Reply | Steps | None]
"""Called with the session, the request's number and the request. None: the reply comes later, or never."""


class Dispatcher:
    """Decodes requests and calls their handlers. Whatever goes wrong becomes a `Refusal`."""

    def __init__(self, handlers: dict[type[Any], Handler]) -> None:
        self._handlers = handlers

    def __call__(self, session: Session, sequence: int, body: bytes | memoryview) -> None:
        """Serve one request."""
        try:
            message = request_decoder.decode(body)
            handler = self._handlers.get(type(message))
            if handler is None:
                raise bad_frame(f"{type(message).__name__} cannot come here: the session is open already")
            reply = handler(session, sequence, message)
        except Exception as error:
            reply = _refusal(session, sequence, error)
        if reply is None:
            return
        if isinstance(reply, Generator):
            session.work_on(_answered(session, sequence, reply))
        else:
            session.reply(sequence, reply)


def _answered(session: Session, sequence: int, steps: Steps) -> Generator[None]:
    """The steps, and then the reply."""
    try:
        reply = yield from steps
    except Exception as error:
        reply = _refusal(session, sequence, error)
    if reply is not None:
        session.reply(sequence, reply)


def _refusal(session: Session, sequence: int, error: Exception) -> Refusal:
    """The reply to a request that was not served. Called where the error is handled."""
    if isinstance(error, Refused):
        if not sequence:
            logger.debug("%s: a request without reply was refused: %s", session, error)
        return Refusal(error.kind, str(error))
    if isinstance(error, msgspec.MsgspecError):
        # Once a session: it is told of each, and a log that it can fill at will helps nobody.
        level = logging.DEBUG if session.complained_of else logging.WARNING
        session.complained_of = True
        logger.log(level, "%s: unreadable request: %s", session, error)
        return Refusal(ErrorKind.INVALID, f"bad-frame: the agent cannot read this request: {error}")
    logger.exception("%s: internal error; please report it", session)
    return Refusal(ErrorKind.INTERNAL, "internal error in the agent; its log has the details")
