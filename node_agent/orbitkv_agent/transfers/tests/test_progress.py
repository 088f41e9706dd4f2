import os

from orbitkv.protocol.permit import Withdrawal
from orbitkv.protocol.records import RecordState, RecordWriter
from orbitkv_agent.transfers.progress import CopyProgress


def test_no_chunk_is_handed_over_for_a_session_that_is_over_and_its_permit_can_be_taken_away() -> None:
    records = RecordWriter()
    ref = records.open()
    assert ref is not None
    progress = CopyProgress(records, ref, RecordState.DONE)
    shared = records.permit.share()
    records.hold()
    records.destroy()
    assert not progress.begin()
    assert Withdrawal(shared).complete(), "no part of it is lost"
    records.let_go()
    os.close(shared)


def test_a_session_that_ends_while_the_last_chunk_is_handed_over_gets_its_part_of_the_permit_back() -> None:
    records = RecordWriter()
    ref = records.open()
    assert ref is not None
    progress = CopyProgress(records, ref, RecordState.DONE)
    shared = records.permit.share()
    records.hold()
    withdrawal = Withdrawal(shared)
    assert progress.begin() and not withdrawal.complete()
    records.destroy()
    progress.end(whole=True)
    assert withdrawal.complete(), "no part of it is lost"
    records.let_go()
    os.close(shared)
