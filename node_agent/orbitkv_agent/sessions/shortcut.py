"""The agent's end of a session's shortcut: see `orbitkv.protocol.shortcut`."""

from __future__ import annotations

import os
from typing import Final

from orbitkv.protocol.framing import HEADER
from orbitkv.protocol.shortcut import BEFORE, MOST_BYTES, REPLY, REQUEST, WATCHED, Shortcut, shortcut_memory

_LARGEST_NUMBER: Final = (1 << 32) - 1
_EMPTY_FRAME: Final = bytes(HEADER.size)


class ShortcutEnd:
    """Takes requests, and brings their replies to where the client waits for them.

    Attributes:
        fd: the memory's descriptor, for the client.
    """

    def __init__(self) -> None:
        self.fd = shortcut_memory()
        self._memory = Shortcut(self.fd)
        self._words = self._memory.words
        self._seen = 0
        """The number that was there last and is not served again."""
        self._open = 0
        """The number that was taken here and is still waited for here; 0 when there is none."""
        self._answered = 0
        """The last number that was answered here."""
        self._reply = b""
        """That answer, for a client that stopped looking just before; empty once it went by the socket."""

    def watch(self, *, watched: bool) -> None:
        """Say whether anybody looks for requests."""
        self._words[WATCHED] = watched

    def rings(self) -> bool:
        """Whether another number is there than the last one."""
        return self._words[REQUEST] != self._seen

    def take(self, received: int) -> tuple[int, bytes] | None:
        """A new request as (number, body), if there is one and all that came before it is among what was `received`.

        Args:
            received: bytes that came by the socket and are served.
        """
        sequence = self._words[REQUEST]
        if sequence == self._seen or self._words[BEFORE] > received:
            return None
        self._seen = sequence
        if sequence > _LARGEST_NUMBER:
            return None
        self._open = sequence
        return sequence, self._memory.body(REQUEST)

    def answer(self, sequence: int, frame: bytes, *, descriptors: bool) -> bool:
        """Answer a request that is waited for here; return whether the frame goes this way.

        It does not if the client waits at the socket already, or is sent there: what is too large, or comes with
        `descriptors`, has to go by the socket.
        """
        if sequence != self._open:
            return False
        fits = len(frame) <= MOST_BYTES and not descriptors
        self._open, self._answered, self._reply = 0, sequence, frame if fits else b""
        self._memory.put(REPLY, sequence, frame if fits else _EMPTY_FRAME)
        return fits

    def sent_again(self, sequence: int) -> bytes | None:
        """Whether a request that came by the socket was taken here before: None if it was not, and is to be served.

        Otherwise what is to be sent for it now: the answer that its client did not wait for, or nothing.
        """
        if sequence == self._open:
            self._open = 0
            return b""
        if sequence == self._answered:
            reply, self._reply = self._reply, b""
            return reply
        if sequence == self._words[REQUEST]:
            self._seen = sequence
        return None

    def close(self) -> None:
        """Unmap; the client keeps its own mapping."""
        self._memory.close()
        os.close(self.fd)
