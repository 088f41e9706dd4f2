from __future__ import annotations

import os

import pytest

from orbitkv.client import RestoreStatus
from orbitkv.client.allocations import HostAllocation
from orbitkv.client.handles import RestoreHandle
from orbitkv.client.registration import GpuRegistration
from orbitkv.protocol.messages import GroupGeometry, LayerRegion
from orbitkv.protocol.records import RecordReader, RecordState, RecordWriter


def registration_of_two_layers() -> GpuRegistration:
    regions = [LayerRegion(f"layer{i}", 0, i * 64, 4, 16, 16, "uint8") for i in range(2)]
    return GpuRegistration(
        1, None, [GroupGeometry(0, "full", 16, regions)], [HostAllocation(0, 4096, None)], proof_required=False
    )


@pytest.fixture
def records() -> RecordWriter:
    return RecordWriter()


def test_a_restore_that_its_record_calls_done_has_all_layers_in_place(records: RecordWriter) -> None:
    """The transfer thread has not looked yet: status and layers must not contradict each other until it has."""
    handle = RestoreHandle(registration_of_two_layers(), 1, [], layer_order=False)
    ref = records.open()
    assert ref is not None
    handle.follow(RecordReader(os.dup(records.fd)), ref)
    assert (handle.status, handle.layers_ready) == (RestoreStatus.ENQUEUED, 0)
    records.close(ref, RecordState.DONE)
    assert (handle.status, handle.layers_ready) == (RestoreStatus.DONE, 2)


def test_a_restore_that_failed_half_way_keeps_the_layers_that_came() -> None:
    handle = RestoreHandle(registration_of_two_layers(), 1, [], layer_order=True)
    handle.layers_in_place(1)
    handle.advance(RestoreStatus.FAILED)
    assert handle.layers_ready == 1
