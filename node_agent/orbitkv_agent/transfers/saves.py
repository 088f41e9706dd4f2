"""Saves: places are granted, the bytes are copied, the client's commit makes the pages visible.

In host mode the client copies before it commits. In CUDA mode the agent copies, and the record says when the engine's
pages are free (SETTLED); the client then commits, or voids the save.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    CommitSave,
    PagePlaces,
    RecordRef,
    SavePlan,
    SaveRequest,
    SavesAccepted,
    SubmitSaves,
)
from orbitkv.protocol.records import RecordState
from orbitkv_agent import faults
from orbitkv_agent.devices.base import Copier, Copy, CopyPart
from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Loop
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.queries.leases import handle_numbers
from orbitkv_agent.queries.lookup import check_hashes
from orbitkv_agent.sessions.errors import Refused, invalid, stale
from orbitkv_agent.sessions.instances import Instance, Registration
from orbitkv_agent.sessions.layout import GroupLayout
from orbitkv_agent.sessions.session import Session, SessionState, is_own
from orbitkv_agent.sessions.spaces import KeySpaces
from orbitkv_agent.store.cache import PageCache, Reservation
from orbitkv_agent.store.index import KeySpace
from orbitkv_agent.transfers.plans import Blocks, PlanRefused, check_blocks, group_of, same_groups
from orbitkv_agent.transfers.progress import CopyProgress

if TYPE_CHECKING:
    from orbitkv_agent.sessions.membership import Membership

logger = logging.getLogger(__name__)

MAX_SAVES: Final = 1024
"""Saves of one session that may be in flight, and in one batch."""
SAVE_BYTES: Final = 2 << 10
"""About what one takes in the agent, beside its pages."""
N = TypeVar("N", bound=np.unsignedinteger[Any])
_TURN_PAGES: Final = 128
"""Pages that are granted in one turn. Half as many take almost as long: it is the number of calls that costs."""
_LONG_TURN_S: Final = 0.0007
"""Where a turn took so long already, what is left of a save is done in the next one."""
_DROPPED: Final = {"pool_full": "pool-full"}


@dataclass(eq=False, slots=True)
class Save:
    """An accepted save. `bytes` is what it copies, without padding; `held_bytes` with it.

    Where the agent copies: `copy` until it ended; meanwhile `void` when its pages are not to become visible, or
    `committed` when they are, by a client whom the record told of the end before this process knew.
    """

    number: int
    session: Session
    registration: Registration
    instance: Instance
    reservations: list[Reservation]
    record: RecordRef
    bytes: int
    held_bytes: int
    started: float
    proof: bool
    parts: list[CopyPart] = field(default_factory=list)
    copy: Copy | None = None
    void: bool = False
    committed: bool = False
    warned: float | None = None

    def __str__(self) -> str:
        return f"save {self.number} of {self.session}, instance {self.instance}, {self.bytes} bytes"

    @property
    def pages(self) -> int:
        """How many pages it writes."""
        return sum(map(len, self.reservations))


@dataclass(frozen=True, slots=True)
class _Part:
    """One group of a checked request: `wanted` are the indices of the hashes to keep, None for all of them."""

    group: GroupLayout
    blob: bytes
    hash_bytes: int
    wanted: Blocks | None
    blocks: Blocks

    @property
    def count(self) -> int:
        return len(self.blob) // self.hash_bytes

    def pieces(self) -> Iterator[bytes]:
        """The wanted ones of the hashes, _TURN_PAGES at a time; at least one piece."""
        blob = self.blob
        if self.wanted is not None:
            blob = np.frombuffer(blob, np.uint8).reshape(-1, self.hash_bytes)[self.wanted].tobytes()
        size = _TURN_PAGES * self.hash_bytes
        for start in range(0, max(1, len(blob)), size):
            yield blob[start : start + size]


@dataclass(slots=True)
class _Reserved:
    """What a part of a request got so far: `positions` are those of the places among the hashes to keep, of which
    `count` had their turn; the others were `dropped`, by reason."""

    part: _Part
    reservations: list[Reservation] = field(default_factory=list)
    positions: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    count: int = 0


class Saves:
    """All saves. Used by the owner thread only.

    Args:
        copier: copies for the engines; None where they do so themselves.

    Attributes:
        inflight_bytes: padded bytes that are granted and not committed.
        draining: accept no more.
    """

    def __init__(
        self,
        loop: Loop,
        cache: PageCache,
        spaces: KeySpaces,
        membership: Membership,
        counters: Counters,
        copier: Copier | None = None,
    ) -> None:
        self._loop = loop
        self._cache = cache
        self._spaces = spaces
        self._membership = membership
        self._counters = counters
        self._copier = copier
        self._numbers = handle_numbers()
        self._saves: dict[int, Save] = {}
        self.inflight_bytes = 0
        self.draining = False

    def __len__(self) -> int:
        return len(self._saves)

    def __iter__(self) -> Iterator[Save]:
        """Those in flight, oldest first."""
        return iter(list(self._saves.values()))

    def submit(self, session: Session, message: SubmitSaves) -> Generator[None, None, SavesAccepted]:
        """Grant places to a batch: to all of it, or nothing. Each save is checked in a turn of its own, and granted in
        as many as it needs; what has to make room for it goes in others.

        Raises:
            Refused: a field of one of the saves, too many of them, or the agent drains.
        """
        try:
            self._refuse_when_draining(message)
            if len(session.saves) + len(message.saves) > MAX_SAVES:
                raise PlanRefused("busy", f"this session has {len(session.saves)} saves in flight", ErrorKind.BUSY)
            checked: list[tuple[Registration, list[_Part]]] = []
            for request in message.saves:
                checked.append(self._check(session, request))
                yield
        except PlanRefused as refusal:
            raise refusal.count(self._counters.plans_refused) from None
        saves: list[Save] = []
        plans: list[SavePlan] = []
        try:
            for request, (registration, parts) in zip(message.saves, checked, strict=True):
                if saves:
                    yield
                reserved = yield from self._reserve_all(message, request, registration, parts)
                save, plan = self._grant(session, request, registration, reserved)
                saves.append(save)
                plans.append(plan)
                faults.hit("save-granted")
        except BaseException:  # also when the session ends before all are granted
            for save in saves:
                self._end(save, copied=False)
            raise
        if self._copier is not None:
            for save in saves:
                self._begin(save, self._copier)
        return SavesAccepted(plans)

    def commit(self, session: Session, message: CommitSave) -> None:
        """The client saw the copy done and wants it visible, or dropped.

        Raises:
            Refused: STALE, no such save of this session is in flight; INVALID, the agent still copies.
        """
        save = self._saves.get(message.save)
        if save is None or save.committed or not is_own(save.session, session):
            raise stale(f"unknown-save: {message.save} is not in flight in this session")
        faults.hit("save-commit")
        if save.copy is not None:
            if not message.copied:
                self._void(save)
                return
            records = save.session.records
            if records is not None and records.says(save.record, RecordState.SETTLED):
                save.committed = True  # the GPU said that it is through, before its thread here has come to it
                return
            if guard("copied-commit"):
                raise invalid(f"save {message.save}: its copy has not ended, so it cannot become visible")
        if not message.copied:
            self._counters.save_dropped["failed"] += save.pages
        self._end(save, copied=message.copied)

    def end_copies(self, session: Session) -> None:
        """The session's process copies nothing any more: what it did not commit is dropped.

        What the agent copies itself drains first.
        """
        for save in [each for each in session.saves.values() if not each.void and not each.committed]:
            self._counters.save_dropped["aborted"] += save.pages
            if save.copy is None:
                self._end(save, copied=False)
            else:
                self._void(save)

    def end_stream(self, session: Session) -> None:
        """Nobody will commit what the agent copies for this session."""
        if self._copier is not None:
            self.end_copies(session)

    # ------------------------------------------------------------------------------------------- internals

    def _check(self, session: Session, request: SaveRequest) -> tuple[Registration, list[_Part]]:
        try:
            registration = self._membership.registration(session, request.registration)
        except Refused as error:
            raise PlanRefused("stale", str(error), error.kind) from None
        if request.producer is not None:
            raise PlanRefused(
                "unsupported",
                "producer: words in device memory are not there yet; a client waits for its own streams",
                ErrorKind.UNSUPPORTED,
            )
        same_groups([part.group for part in request.blocks], [part.group for part in request.hashes])
        if len({part.group for part in request.hashes}) != len(request.hashes):
            raise PlanRefused("group", "hashes name a group twice")
        parts = []
        for hashes, ids in zip(request.hashes, request.blocks, strict=True):
            group = group_of(registration, hashes.group)
            try:
                count = check_hashes(hashes)
            except Refused as error:
                raise PlanRefused("count", str(error)) from None
            blocks, used = check_blocks(ids, group, count)
            wanted = None if used == count else np.flatnonzero(blocks >= 0).astype(np.int32)
            parts.append(_Part(group, hashes.blob, hashes.hash_bytes, wanted, blocks))
        return registration, parts

    def _refuse_when_draining(self, message: SubmitSaves) -> None:
        if self.draining:
            self._counters.save_dropped["draining"] += sum(_pages(request) for request in message.saves)
            raise Refused(ErrorKind.UNAVAILABLE, "the agent is shutting down and keeps nothing more")

    def _make_room(self, request: SaveRequest, registration: Registration, part: _Part, piece: bytes) -> bool:
        space, _ = self._space(registration, part, request.proof)
        shard = 0 if request.proof else registration.shard
        return space is not None and self._cache.make_room(space, part.group.group, piece, shard, part.group.page_bytes)

    def _reserve_all(
        self, message: SubmitSaves, request: SaveRequest, registration: Registration, parts: list[_Part]
    ) -> Generator[None, None, list[_Reserved]]:
        """Get places for one save of a batch, a piece of it in each turn."""
        reserved: list[_Reserved] = []
        try:
            for part in parts:
                for number, piece in enumerate(part.pieces()):
                    if reserved:
                        yield
                    if not number:
                        reserved.append(_Reserved(part))
                    if self._make_room(request, registration, part, piece):
                        yield
                    self._refuse_what_ended(message, registration)
                    self._reserve(request, registration, reserved[-1], piece)
            if self._loop.turn_s > _LONG_TURN_S:
                yield
                self._refuse_what_ended(message, registration)
        except BaseException:
            self._abort(reserved)
            raise
        return reserved

    def _refuse_what_ended(self, message: SubmitSaves, registration: Registration) -> None:
        """Look again after others had a turn."""
        self._refuse_when_draining(message)
        if registration.retired:
            raise PlanRefused(
                "stale",
                f"unknown-registration: {registration.number} was retired meanwhile; register again",
                ErrorKind.STALE,
            ).count(self._counters.plans_refused)

    def _abort(self, parts: list[_Reserved]) -> None:
        for part in parts:
            for reservation in part.reservations:
                self._cache.abort(reservation)

    def _reserve(self, request: SaveRequest, registration: Registration, reserved: _Reserved, piece: bytes) -> None:
        """Get places for a piece of a part."""
        part, count = reserved.part, len(piece) // reserved.part.hash_bytes
        space, reason = self._space(registration, part, request.proof)
        if space is None:
            reserved.dropped[reason] += count
        else:
            shard = 0 if request.proof else registration.shard
            places = self._cache.reserve(space, part.group.group, piece, shard, part.group.page_bytes)
            reserved.reservations.append(places)
            reserved.positions.append(places.positions + np.uint32(reserved.count))
        reserved.count += count

    def _grant(
        self, session: Session, request: SaveRequest, registration: Registration, parts: list[_Reserved]
    ) -> tuple[Save, SavePlan]:
        record = session.records.open() if session.records is not None else None
        if record is None:
            self._abort(parts)
            raise PlanRefused(
                "busy", "this session has no completion record left; let others end", ErrorKind.BUSY
            ).count(self._counters.plans_refused)
        instance = registration.instance
        save = Save(
            next(self._numbers), session, registration, instance, [], record, 0, 0, self._loop.now(), request.proof
        )
        self._saves[save.number] = save
        session.saves[save.number] = save
        session.keeps(SAVE_BYTES)
        instance.saves += 1
        registration.copy_started()
        plan = SavePlan(save.number, record, [], [], 0, {})
        for each in parts:
            self._add(save, plan, each)
        self._counters.save_dropped.update(plan.dropped)
        return save, plan

    def _add(self, save: Save, plan: SavePlan, reserved: _Reserved) -> None:
        """Add a part with its places to a save and its plan."""
        part, kept = reserved.part, reserved.reservations
        save.reservations += kept
        size = sum(each.padded_bytes for each in kept)
        save.bytes += sum(map(len, kept)) * part.group.page_bytes
        save.held_bytes += size
        self.inflight_bytes += size
        positions = _joined(reserved.positions, np.uint32)
        if part.wanted is not None:
            positions = part.wanted[positions].astype(np.uint32)
        plan.positions.append(positions.astype("<u4", copy=False).tobytes())
        arenas = _joined([each.arena_ids for each in kept], np.uint32)
        offsets = _joined([each.offsets for each in kept], np.uint64)
        places = b"", b""
        if self._copier is None:
            places = arenas.astype("<u4", copy=False).tobytes(), offsets.astype("<u8", copy=False).tobytes()
        elif kept:  # nobody else needs to know the places
            save.parts.append(CopyPart(part.group.group, part.blocks[positions], arenas, offsets))
        plan.pages.append(PagePlaces(part.group.group, *places))
        for each in kept:
            plan.present += each.present + each.in_flight
            reserved.dropped.update({_DROPPED.get(name, name): count for name, count in each.dropped.items()})
        for word, count in reserved.dropped.items():
            plan.dropped[word] = plan.dropped.get(word, 0) + count

    def _space(self, registration: Registration, part: _Part, proof: bool) -> tuple[KeySpace | None, str]:
        """Where the pages of a part belong; else why nowhere."""
        if proof:
            space = self._spaces.of_proof(registration, part.hash_bytes)
        elif not registration.proven or registration.instance.off:
            return None, "unproven"
        elif not registration.instance.sealed:
            return None, "not-serving"
        else:
            space = self._spaces.of(registration.instance, part.hash_bytes)
        return (space, "") if self._cache.takes(space, part.group.group) else (None, "too-many-models")

    def _begin(self, save: Save, copier: Copier) -> None:
        save.copy = copier.start(
            save.registration,
            save.parts,
            lambda error: self._copied(save, error),
            to_engine=False,
            progress=CopyProgress.of(save.session.records, save.record, RecordState.SETTLED),
        )
        save.parts = []

    def _void(self, save: Save) -> None:
        """What is being copied is not to become visible."""
        assert save.copy is not None
        save.void = True
        save.copy.abandon()

    def _copied(self, save: Save, error: str) -> None:
        """No byte of the save moves any more: the engine's pages are free."""
        save.copy = None
        if error or save.void:
            if error and not save.void:
                logger.warning("%s ended without all of its bytes: %s", save, error)
                self._counters.save_dropped["failed"] += save.pages
            self._end(save, copied=False)
            save.session.close_if_drained()
            return
        if save.committed:
            self._end(save, copied=True)
            save.session.close_if_drained()
            return
        records = save.session.records
        if records is not None and save.session.state is not SessionState.CLOSED:
            records.set(save.record, RecordState.SETTLED)
            save.session.notify()

    def _end(self, save: Save, *, copied: bool) -> None:
        del self._saves[save.number]
        del save.session.saves[save.number]
        save.session.keeps(-SAVE_BYTES)
        for reservation in save.reservations:
            if copied:
                self._cache.commit(reservation)
            else:
                self._cache.abort(reservation)
        self.inflight_bytes -= save.held_bytes
        save.instance.saves -= 1
        records = save.session.records
        if records is not None and save.session.state is not SessionState.CLOSED:
            records.close(save.record, RecordState.DONE if copied else RecordState.FAILED)
            save.session.notify()
        if copied:
            self._counters.save_bytes += save.bytes
            self._counters.save_duration.observe(self._loop.now() - save.started)
        save.registration.copy_ended()


def _joined(pieces: list[npt.NDArray[N]], kind: type[N]) -> npt.NDArray[N]:
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, kind), *pieces])


def _pages(request: SaveRequest) -> int:
    return sum(len(part.blob) // max(1, part.hash_bytes) for part in request.hashes)
