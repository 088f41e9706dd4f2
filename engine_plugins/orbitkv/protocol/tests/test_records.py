import ctypes
import mmap
import os

import pytest

from orbitkv.protocol.messages import RecordRef
from orbitkv.protocol.records import (
    FIRST_SLOT,
    RECORD_BYTES,
    SLOTS,
    WORD_BYTES,
    Header,
    RecordReader,
    RecordState,
    RecordWriter,
)


@pytest.fixture
def writer() -> RecordWriter:
    return RecordWriter()


def test_a_reader_sees_each_state(writer: RecordWriter) -> None:
    reader = RecordReader(writer.fd)
    ref = writer.open()
    assert ref is not None
    assert reader.state(ref) is RecordState.PENDING
    writer.set(ref, RecordState.SETTLED)
    assert reader.state(ref) is RecordState.SETTLED
    writer.close(ref, RecordState.DONE)
    assert reader.state(ref) is RecordState.DONE


def test_a_slot_used_again_is_not_mistaken_for_the_old_operation(writer: RecordWriter) -> None:
    reader = RecordReader(writer.fd)
    first = writer.open()
    assert first is not None
    writer.close(first, RecordState.DONE)
    others = [writer.open() for _ in range(SLOTS - FIRST_SLOT)]
    other = next(ref for ref in others if ref and ref.slot == first.slot)
    assert reader.state(first) is None
    assert reader.state(other) is RecordState.PENDING


def test_slots_run_out_instead_of_being_shared(writer: RecordWriter) -> None:
    taken = [writer.open() for _ in range(SLOTS - FIRST_SLOT)]
    assert all(ref is not None for ref in taken)
    assert len({ref.slot for ref in taken if ref}) == len(taken)
    assert writer.open() is None


def test_a_client_cannot_write(writer: RecordWriter) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(writer.fd, SLOTS * WORD_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(writer.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(writer.fd, 0)


def test_counters_move_apart_from_records(writer: RecordWriter) -> None:
    reader = RecordReader(writer.fd)
    before = reader.counter(Header.EVENTS)
    writer.bump(Header.EVENTS)
    assert reader.counter(Header.EVENTS) == before + 1
    assert reader.counter(Header.ARENAS) == 0
    reader.close()
    writer.destroy()


def test_a_word_written_at_its_place_says_what_the_writer_would_say(writer: RecordWriter) -> None:
    reader = RecordReader(writer.fd)
    ref = writer.open()
    assert ref is not None
    ctypes.c_uint64.from_address(writer.place(ref)).value = writer.word(ref, RecordState.DONE)
    assert reader.state(ref) is RecordState.DONE


def test_what_is_held_stays_writable_after_the_session(writer: RecordWriter) -> None:
    reader = RecordReader(writer.fd)
    ref = writer.open()
    assert ref is not None
    place, word = writer.place(ref), writer.word(ref, RecordState.DONE)
    writer.hold()
    writer.destroy()
    ctypes.c_uint64.from_address(place).value = word
    assert reader.state(ref) is RecordState.DONE
    writer.let_go()


def test_copies_are_drained_when_the_gpu_has_counted_every_chunk_that_was_handed_over(
    writer: RecordWriter,
) -> None:
    reader = RecordReader(writer.fd)
    first, second = writer.open(), writer.open()
    assert first is not None and second is not None and reader.drained(), "nothing was handed over"
    writer.hand_over(first, 2)
    writer.hand_over(second, 1)
    chunks = ctypes.c_uint64.from_address(writer.place_of_chunks(first))
    chunks.value = writer.word_of_chunks(1, layers=2)
    assert not reader.drained() and not reader.handed_over(first)
    writer.hand_over(first, 2, whole=True)
    assert reader.handed_over(first) and not reader.handed_over(second) and not reader.drained()
    chunks.value = writer.word_of_chunks(2, layers=3)
    assert not reader.drained(), "the second is not"
    writer.close(second, RecordState.FAILED)
    assert reader.drained()
    writer.close(first, RecordState.DONE)
    assert not reader.handed_over(first)
    others = [writer.open() for _ in range(SLOTS - FIRST_SLOT)]
    assert all(others) and reader.drained(), "slots that are used again begin anew"


def test_an_agent_of_the_release_before_tells_no_chunks() -> None:
    fd = os.memfd_create("old")
    os.ftruncate(fd, RECORD_BYTES)
    reader = RecordReader(fd)
    assert reader.words[0] == 0 and not reader.drained() and not reader.handed_over(RecordRef(8, 0))
    reader.close()
    os.close(fd)
