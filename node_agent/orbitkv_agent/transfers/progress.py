"""How far a copy of the agent is, where the client's process can read it without asking."""

from __future__ import annotations

import contextlib

from orbitkv.protocol.messages import RecordRef
from orbitkv.protocol.records import RecordState, RecordWriter
from orbitkv_agent.devices.base import Word
from orbitkv_agent.guards import guard


class CopyProgress:
    """The words of one copy (`Progress`). Used by one thread at a time: the one that hands its chunks over.

    Args:
        records: of the session that asked for it.
        record: the copy's own.
        whole: what its record says when all of it is in place.
    """

    __slots__ = ("_chunks", "_record", "_records", "_whole")

    def __init__(self, records: RecordWriter, record: RecordRef, whole: RecordState) -> None:
        self._records = records
        self._record = record
        self._whole = whole
        self._chunks = 0

    @classmethod
    def of(cls, records: RecordWriter | None, record: RecordRef, whole: RecordState) -> CopyProgress | None:
        """The words of a copy, None when nobody is left to read them."""
        return None if records is None else cls(records, record, whole)

    def begin(self) -> bool:
        """See `Progress`."""
        taken = self._records.permit.take()
        if not taken and guard("taken-back"):
            return False
        self._chunks += 1
        try:
            self._records.hand_over(self._record, self._chunks)
        except ValueError:  # the session is over, and its records with it
            self._records.permit.give_back()
            return False
        return True

    def end(self, *, whole: bool) -> None:
        """See `Progress`."""
        if whole:
            with contextlib.suppress(ValueError):  # the session is over, and its records with it
                self._records.hand_over(self._record, self._chunks, whole=True)
        self._records.permit.give_back()

    def word(self, *, last: bool, layers: int) -> Word:
        """See `Progress`."""
        if last:
            return Word(self._records.place(self._record), self._records.word(self._record, self._whole))
        word = self._records.word_of_chunks(self._chunks, layers)
        return Word(self._records.place_of_chunks(self._record), word)
