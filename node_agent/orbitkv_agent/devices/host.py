"""Host mode: engines on the CPU. The arenas themselves are shared with the engines' processes, which copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.framing import MAX_DESCRIPTORS
from orbitkv.protocol.messages import Arenas, MapArenas, Register, RetiredArenas, SyncArenas
from orbitkv.protocol.records import Header
from orbitkv_agent.guards import guard
from orbitkv_agent.sessions.errors import Refused, invalid
from orbitkv_agent.store.cache import PageCache

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orbitkv_agent.sessions.session import Session


class HostDevice:
    """Passes arenas to sessions, and tells them which to give up. Used by the owner thread only.

    A session gets arenas of its own cache namespace only, and an arena never changes its namespace: what was passed
    cannot be taken back. An arena that was dropped gives its memory back at once; that a client still maps it keeps
    nothing but address space.
    """

    name: Final = "host"
    visible: Final[Sequence[str]] = ("host",)
    copier: Final = None
    context_bytes: Final[Mapping[str, int]] = {}
    copy_plans: Final[Mapping[str, str]] = {"host": "client"}

    def __init__(self, cache: PageCache) -> None:
        self._arenas = cache.arenas
        self._retired = cache.arenas.retired_sequence

    @property
    def max_page_bytes(self) -> int:
        """Largest padded page."""
        return self._arenas.arena_bytes

    def open(self, session: Session, message: Register, opened: Callable[[object | Refused], None]) -> None:
        """There is nothing to open: the bytes stay in the engine's process."""
        opened(None)

    def places_to_prove(self, message: Register) -> Sequence[tuple[int, int]]:
        """There are no handles."""
        return ()

    def prove(
        self, memory: object, places: Sequence[tuple[int, int]], values: Sequence[bytes], proven: Callable[[bool], None]
    ) -> None:
        """There is nothing to prove."""
        proven(True)

    def close(self, memory: object) -> None:
        """There is nothing to close."""

    def shut_down(self) -> None:
        """Nothing runs here."""

    def map_arenas(self, session: Session, sequence: int, message: MapArenas) -> None:
        """Send descriptors of arenas.

        Raises:
            Refused: INVALID, more than fit one frame.
        """
        if len(message.arenas) > MAX_DESCRIPTORS:
            raise invalid(f"arenas: {len(message.arenas)} asked for; at most {MAX_DESCRIPTORS} fit one reply")
        arenas = []
        for number in dict.fromkeys(message.arenas):
            arena = self._arenas.get(number)
            if arena is not None and (arena.namespace == session.namespace or not guard("arena-namespace")):
                arenas.append(arena)
        passed = [arena.id for arena in arenas]
        session.arenas.update(passed)
        session.passed_arenas.update(passed)
        session.reply(sequence, Arenas([(arena.id, arena.size) for arena in arenas]), [arena.fd for arena in arenas])

    def sync_arenas(self, session: Session, message: SyncArenas) -> RetiredArenas:
        """Take note of what a client unmapped; say what else it should."""
        session.arenas.difference_update(message.unmapped)
        session.retired_arenas.difference_update(message.unmapped)
        return RetiredArenas(sorted(session.retired_arenas))

    def tell_retired(self, sessions: Iterable[Session]) -> None:
        """Tell sessions about arenas that were dropped since the last call."""
        if self._retired == self._arenas.retired_sequence:
            return
        try:
            dropped = set(self._arenas.retired_since(self._retired))
        except LookupError:
            dropped = {number for session in sessions for number in session.arenas if self._arenas.get(number) is None}
        self._retired = self._arenas.retired_sequence
        for session in sessions:
            found = session.arenas & dropped
            if found:
                session.retired_arenas |= found
                session.notify(Header.ARENAS)
