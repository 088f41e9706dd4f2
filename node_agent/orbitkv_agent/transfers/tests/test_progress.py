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
