"""What the agent asks of the place where engines keep their pages: host memory, or GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.messages import MapArenas, Register, RetiredArenas, SyncArenas
from orbitkv_agent.sessions.errors import Refused

if TYPE_CHECKING:
    from orbitkv_agent.sessions.instances import Registration
    from orbitkv_agent.sessions.session import Session


PROOF_BYTES: Final = 16
"""What a process writes to show that it may: enough that nobody guesses it."""


class CopyPart(NamedTuple):
    """Pages of one group to copy: (n,) block ids, and (n,) arena ids and offsets in bytes of their places."""

    group: int
    blocks: npt.NDArray[np.integer[Any]]
    arenas: npt.NDArray[np.integer[Any]]
    offsets: npt.NDArray[np.integer[Any]]


class Word(NamedTuple):
    """A 64-bit word in the completion records of the session that registered: its address, and what to write there."""

    address: int
    value: int


class Progress(Protocol):
    """What an engine's process sees of a copy by itself, even while this process does not run. For any thread."""

    def begin(self) -> bool:
        """Say that a chunk is handed over from now on; false when the engine's process does not want it any more."""

    def end(self, *, whole: bool) -> None:
        """Undo a `begin` that was true: the chunk is with the device, or was refused. With a copy that is made layer by
        layer, `whole` says that all of it is with the device: it ends even while this process does not run."""

    def word(self, *, last: bool, layers: int) -> Word:
        """What the device writes when the chunk that was begun last, and all before it, are through: `last` of all, and
        with it so many `layers` in place (0 when the copy is not made layer by layer)."""


class Copy(Protocol):
    """A copy that the agent makes itself."""

    def abandon(self) -> None:
        """Leave out what has not been submitted. The copy still ends, when what was submitted has drained."""


class Copier(Protocol):
    """Copies between engine memory and pages, beside the owner thread."""

    def start(
        self,
        registration: Registration,
        parts: Sequence[CopyPart],
        ended: Callable[[str], None],
        *,
        to_engine: bool,
        landed: Callable[[], None] | None = None,
        progress: Progress | None = None,
        layered: bool = False,
    ) -> Copy:
        """Start a copy, `layered` one layer after the other.

        `ended` is called once on the owner thread, when no byte of it moves any more: with "" when all of it is in
        place, otherwise with the reason. `landed` is called before that, on another thread, as soon as all of it is in
        place; before even that, a device that can writes the words of `progress` itself."""

    def lane(self, registration: Registration) -> object:
        """What the number of restores in flight is limited for."""


class Device(Protocol):
    """Where engines keep their pages. Used by the owner thread only.

    Attributes:
        name: the agent's mode, as clients see it.
        copier: makes the copies; None where engines copy themselves.
    """

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def copier(self) -> Copier | None:
        """See the class."""

    @property
    def visible(self) -> Sequence[str]:
        """Names of the devices that engines may register memory of."""

    @property
    def max_page_bytes(self) -> int:
        """Largest padded page."""

    @property
    def context_bytes(self) -> Mapping[str, int]:
        """Device memory that the agent itself takes, by device."""

    @property
    def copy_plans(self) -> Mapping[str, str]:
        """How bytes are copied, by device."""

    def open(self, session: Session, message: Register, opened: Callable[[object | Refused], None]) -> None:
        """Get access to the memory of a checked registration; `opened` is called once, perhaps at once, with what
        becomes `Registration.memory` or with the refusal."""

    def places_to_prove(self, message: Register) -> Sequence[tuple[int, int]]:
        """Where a process shows that it may write what it registers: (allocation, byte in it), `PROOF_BYTES` at each.
        None where nothing is opened by a handle.

        Raises:
            Refused: UNSUPPORTED, some of it cannot be shown.
        """

    def prove(
        self, memory: object, places: Sequence[tuple[int, int]], values: Sequence[bytes], proven: Callable[[bool], None]
    ) -> None:
        """Read what is at these places, and say whether it is these values. `proven` is called once, perhaps later."""

    def close(self, memory: object) -> None:
        """Give access up. No copy runs on it."""

    def map_arenas(self, session: Session, sequence: int, message: MapArenas) -> None:
        """Send descriptors of arenas.

        Raises:
            Refused: the device does not share them, or more are asked for than fit.
        """

    def sync_arenas(self, session: Session, message: SyncArenas) -> RetiredArenas:
        """Take note of what a client unmapped; say what else it should."""

    def tell_retired(self, sessions: Iterable[Session]) -> None:
        """Tell sessions about arenas that were dropped since the last call."""

    def shut_down(self) -> None:
        """Finish all copies, end all threads, give all memory back."""
