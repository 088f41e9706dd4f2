import os
import socket

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv.protocol import framing
from orbitkv.protocol.messages import GroupHashes, Hello, Instance, Ping, Pong, Query


def test_a_message_survives_the_wire() -> None:
    query = Query(Instance("engine", "nonce"), 3, 1, [GroupHashes(0, 2, b"aabb")], wait_for_full_prefix=True)
    frame = framing.encode(query, 7)
    [(sequence, body)] = framing.FrameReader(1 << 20).feed(bytes(frame))
    assert (sequence, framing.request_decoder.decode(body)) == (7, query)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_frames_are_found_however_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(framing.HEADER.pack(len(body), i) + body for i, body in enumerate(bodies))
    reader, found, start, turn = framing.FrameReader(1000), [], 0, 0
    while start < len(stream):
        size = cuts[turn % len(cuts)]
        found += [(number, bytes(body)) for number, body in reader.feed(stream[start : start + size])]
        start, turn = start + size, turn + 1
    assert found == list(enumerate(bodies))
    assert reader.pending_bytes == 0


def test_a_frame_over_the_limit_is_refused_before_its_body_comes() -> None:
    with pytest.raises(framing.FrameError, match="1001 bytes; at most 1000"):
        framing.FrameReader(1000).feed(framing.HEADER.pack(1001, 1))


def test_a_whole_frame_over_the_limit_is_refused_too() -> None:
    with pytest.raises(framing.FrameError):
        framing.FrameReader(10).feed(framing.HEADER.pack(11, 1) + bytes(11))


def test_an_unknown_field_is_refused() -> None:
    body = msgspec.msgpack.encode([5, "something new"])  # Ping has no fields
    with pytest.raises(msgspec.ValidationError):
        framing.request_decoder.decode(body)


def test_a_missing_new_field_takes_its_default() -> None:
    assert framing.request_decoder.decode(msgspec.msgpack.encode([1, "team-a"])) == Hello("team-a")


def test_descriptors_arrive_closed_on_exec() -> None:
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    with ours, theirs:
        frame = framing.encode(Pong("boot", True, ""), 1)
        assert framing.send_with_descriptors(ours, frame, [read_end]) == len(frame)
        data, [received] = framing.receive_with_descriptors(theirs, 4096)
        assert data == bytes(frame)
        assert not os.get_inheritable(received)
        os.write(write_end, b"x")
        assert os.read(received, 1) == b"x"
        for fd in (received, read_end, write_end):
            os.close(fd)


def test_a_message_without_fields_is_small() -> None:
    assert len(framing.encode(Ping(), 0)) <= framing.HEADER.size + 3
