import os
from collections.abc import Iterator

import pytest

from orbitkv.protocol.permit import Withdrawal
from orbitkv.protocol.records import RecordState, RecordWriter
from orbitkv_agent.transfers.progress import CopyProgress


@pytest.fixture
def records() -> Iterator[RecordWriter]:
    """The records of a session that a copy holds on to."""
    records = RecordWriter()
    records.hold()
    yield records
    records.let_go()


@pytest.fixture
def progress(records: RecordWriter) -> CopyProgress:
    ref = records.open()
    assert ref is not None
    return CopyProgress(records, ref, RecordState.DONE)


@pytest.fixture
def withdrawal(records: RecordWriter) -> Iterator[Withdrawal]:
    """The engine's side of their permit."""
    shared = records.permit.share()
    yield Withdrawal(shared)
    os.close(shared)


def test_no_chunk_is_handed_over_for_a_session_that_is_over_and_its_permit_can_be_taken_away(
    records: RecordWriter, progress: CopyProgress, withdrawal: Withdrawal
) -> None:
    records.destroy()
    assert not progress.begin()
    assert withdrawal.complete(), "no part of it is lost"


def test_a_session_that_ends_while_the_last_chunk_is_handed_over_gets_its_part_of_the_permit_back(
    records: RecordWriter, progress: CopyProgress, withdrawal: Withdrawal
) -> None:
    assert progress.begin() and not withdrawal.complete()
    records.destroy()
    progress.end(whole=True)
    assert withdrawal.complete(), "no part of it is lost"
