"""The agent in CUDA mode, by its protocol: it copies, its records tell the end, and what is lost drains first."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbitkv.cuda import CudaError
from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    Allocation,
    Challenge,
    ChallengeMet,
    CommitSave,
    GroupGeometry,
    Hello,
    Instance,
    MapArenas,
    RecordRef,
    Refusal,
    Register,
    Registered,
    RestorePlan,
    SavePlan,
    Unregister,
)
from orbitkv.protocol.records import REGION_BYTES, RecordState
from orbitkv.protocol.versions import VersionRange
from orbitkv_agent.devices.cuda.device import CudaDevice
from orbitkv_agent.devices.cuda.gpu import own_bytes
from orbitkv_agent.devices.cuda.tests.fake_gpu import UUIDS, FakeGpu
from orbitkv_agent.tests.harness import (
    INSTANCE,
    Client,
    World,
    group_geometry,
    hashes,
    register_message,
    start_message,
)

PAGE = 4096
BLOCKS = 64


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(2)


@pytest.fixture
def world(tmp_path: Path, gpu: FakeGpu) -> Iterator[World]:
    with World(tmp_path, driver=gpu) as world:
        yield world
        gpu.release()
    assert not +gpu.mapped, "engine memory stayed mapped"
    assert not gpu.pinned, "host memory stayed pinned"
    assert not gpu.strays, "the GPU was told to use host memory that is not pinned"


def pinned_for_pages(gpu: FakeGpu) -> int:
    """Bytes that are pinned, without sessions' records."""
    return sum(size for size in gpu.pinned.values() if size != REGION_BYTES)


def all_is_pinned(world: World, gpu: FakeGpu) -> None:
    """Wait until no memory is being pinned any more."""
    world.until(lambda: pinned_for_pages(gpu) == world.config.pool_bytes)


def lanes_wait(world: World) -> None:
    """Wait until no lane's thread looks for copies any more."""
    (gpu,) = world.agent.device._gpus.values()  # type: ignore[attr-defined]
    world.until(lambda: all(lane._changed._waiters for lane in gpu.lanes))


def message(gpu: FakeGpu, kv: np.ndarray[Any, Any], **changes: Any) -> Register:
    allocation = Allocation(kv.nbytes, gpu.export_memory(kv.ctypes.data))
    return register_message(**{"device": UUIDS[0], "allocations": [allocation], **changes})


def answer(client: Client, request: Any) -> Any:
    """What comes back once the GPU's thread has done its part."""
    number = client.post(request)
    replies: list[Any] = []

    def take() -> bool:
        reply = client.reply(number)
        replies.extend([reply] if reply is not None else [])
        return bool(replies)

    client.world.until(take)
    return replies[0]


def meet(memory: np.ndarray[Any, Any], challenge: Challenge) -> None:
    """Write what the agent asks for, as the process that owns the memory can."""
    for (_, offset), value in zip(challenge.places, challenge.values, strict=True):
        memory[offset : offset + len(value)] = np.frombuffer(value, np.uint8)


class CudaEngine:
    """A serving engine whose blocks are in `kv`, (blocks, bytes)."""

    def __init__(self, world: World, gpu: FakeGpu, namespace: str = "", instance: Instance = INSTANCE) -> None:
        self.world, self.gpu, self.instance = world, gpu, instance
        self.memory = gpu.allocate(BLOCKS * PAGE)
        self.kv = self.memory.reshape(BLOCKS, PAGE)
        self.control, self.worker = world.client(namespace), world.client(namespace)
        self.control.attach(instance)
        self.registration = self.register(message(gpu, self.memory, instance=instance)).registration
        self.worker.prove(self.registration)
        self.operation = 0

    def register(self, request: Register) -> Registered:
        challenge = answer(self.worker, request)
        assert isinstance(challenge, Challenge), challenge
        meet(self.memory, challenge)
        registered = answer(self.worker, ChallengeMet(challenge.challenge))
        assert isinstance(registered, Registered), registered
        return registered

    def state(self, ref: RecordRef) -> RecordState | None:
        assert self.worker.records is not None
        return self.worker.records.state(ref)

    def save(self, names: bytes, blocks: list[int]) -> SavePlan:
        plan = self.submit(names, blocks)
        self.world.until(lambda: self.state(plan.record) is RecordState.SETTLED)
        self.worker.commit(plan)
        self.world.until(lambda: self.state(plan.record) is RecordState.DONE)
        return plan

    def submit(self, names: bytes, blocks: list[int]) -> SavePlan:
        return self.worker.submit(self.registration, names, blocks)

    def start(self, names: bytes, blocks: list[int]) -> RestorePlan:
        self.operation += 1
        ready = self.control.ready(names, operation=self.operation, instance=self.instance)
        return self.worker.start(self.registration, ready.leases[0], blocks)


@pytest.fixture
def engine(world: World, gpu: FakeGpu) -> CudaEngine:
    engine = CudaEngine(world, gpu)
    lanes_wait(world)
    return engine


def test_saved_pages_are_restored_into_other_blocks(engine: CudaEngine, world: World) -> None:
    assert world.agent.device.name == "cuda"
    engine.save(hashes(1, 2, 3), [5, 9, 7])
    before = engine.kv.copy()
    plan = engine.start(hashes(1, 2, 3), [20, 21, 40])
    assert not plan.pages, "nobody but the agent needs to know the places"
    world.until(lambda: engine.state(plan.record) is RecordState.DONE)
    before[[20, 21, 40]] = before[[5, 9, 7]]
    assert (engine.kv == before).all(), "the pages arrived, and nothing else changed"


def test_a_page_is_visible_only_after_the_commit(engine: CudaEngine, world: World) -> None:
    plan = engine.submit(hashes(1), [5])
    world.until(lambda: engine.state(plan.record) is RecordState.SETTLED)
    assert type(engine.control.query(hashes(1), operation=50)).__name__ == "Nothing"
    engine.worker.commit(plan)
    world.until(lambda: engine.state(plan.record) is RecordState.DONE)
    assert engine.control.ready(hashes(1), operation=51).leases


@pytest.mark.guard("copied-commit")
def test_a_commit_before_the_copy_ended_is_refused(engine: CudaEngine, gpu: FakeGpu, world: World) -> None:
    gpu.hold()
    plan = engine.submit(hashes(1), [5])
    refusal = engine.worker.refused(CommitSave(plan.save, True))
    assert refusal.kind == ErrorKind.INVALID and "not ended" in refusal.message
    assert engine.state(plan.record) is RecordState.PENDING
    gpu.release()
    world.until(lambda: engine.state(plan.record) is RecordState.SETTLED)
    engine.worker.commit(plan)


def test_a_save_that_is_voided_while_it_is_copied_never_becomes_visible(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    gpu.hold()
    plan = engine.submit(hashes(1), [5])
    world.until(lambda: gpu.calls)
    engine.worker.commit(plan, copied=False)
    assert engine.state(plan.record) is RecordState.PENDING, "its copy still runs"
    assert world.agent.saves.inflight_bytes, "its pages stay held"
    gpu.release()
    world.until(lambda: engine.state(plan.record) is RecordState.FAILED)
    assert not world.agent.saves.inflight_bytes
    assert type(engine.control.query(hashes(1), operation=50)).__name__ == "Nothing"


def test_pages_that_are_kept_already_are_not_copied_again(engine: CudaEngine, gpu: FakeGpu, world: World) -> None:
    engine.save(hashes(1, 2), [5, 6])
    calls = len(gpu.calls)
    plan = engine.save(hashes(1, 2), [7, 8])
    assert plan.present == 2 and len(gpu.calls) == calls


def test_a_skipped_block_is_not_touched(engine: CudaEngine, world: World) -> None:
    engine.save(hashes(1, 2), [5, 6])
    before = engine.kv.copy()
    plan = engine.start(hashes(1, 2), [30, -1])
    world.until(lambda: engine.state(plan.record) is RecordState.DONE)
    before[30] = before[5]
    assert (engine.kv == before).all()


@pytest.mark.guard("mapping-drained")
def test_when_the_engine_dies_its_copies_drain_and_then_its_memory_is_given_back(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    engine.save(hashes(1), [5])
    gpu.hold()
    engine.start(hashes(1), [20])
    engine.submit(hashes(2), [6])
    world.until(lambda: len(gpu.calls) == 3)
    for client in (engine.worker, engine.control):
        session = client.session
        client.drop()
        session.close()  # as when its process has exited
    world.pump()
    mapper = next(iter(world.agent.device._gpus.values()))._work  # type: ignore[attr-defined]
    looked = threading.Event()
    mapper.put(looked.set)  # behind all that the GPU's thread has to unmap
    assert looked.wait(10)
    assert gpu.mapped[engine.memory.ctypes.data] == 1, "copies still run on it"
    assert len(world.agent.restores) == 1 and len(world.agent.saves) == 1
    gpu.release()
    world.until(lambda: not gpu.mapped[engine.memory.ctypes.data])
    assert not any(world.agent.oracle().values())


def test_a_stream_that_ends_before_its_process_closes_when_its_copies_have_ended(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    engine.save(hashes(1), [5])
    gpu.hold()
    plan = engine.start(hashes(1), [20])
    records, session = engine.worker.records, engine.worker.session
    engine.worker.records = None  # the client's own mapping outlives its connection
    world.until(lambda: len(gpu.calls) == 2)
    engine.worker.drop()
    assert session in world.agent.server.sessions, "its copy runs"
    assert records is not None and records.state(plan.record) is RecordState.PENDING
    gpu.release()
    world.until(lambda: session not in world.agent.server.sessions)
    assert records.state(plan.record) is RecordState.DONE, "all of it had been submitted"
    records.close()


def test_unregistering_answers_when_the_copies_have_ended(engine: CudaEngine, gpu: FakeGpu, world: World) -> None:
    engine.save(hashes(1), [5])
    gpu.hold()
    engine.start(hashes(1), [20])
    number = engine.worker.post(Unregister(engine.registration))
    world.pump()
    assert engine.worker.reply(number) is None
    gpu.release()
    world.until(lambda: engine.worker.reply(number) is not None)


@pytest.mark.parametrize("limit", [1, 2])
def test_restores_beyond_the_limit_of_a_gpu_are_accepted_and_wait(tmp_path: Path, gpu: FakeGpu, limit: int) -> None:
    with World(tmp_path, driver=gpu, max_restores_per_device=limit) as world:
        engine = CudaEngine(world, gpu)
        engine.save(hashes(1), [5])
        calls = len(gpu.calls)
        gpu.hold()
        plans = [engine.start(hashes(1), [20 + i]) for i in range(4)]
        world.until(lambda: len(gpu.calls) == calls + limit)
        assert len(world.agent.restores) == 4
        assert all(engine.state(plan.record) is RecordState.PENDING for plan in plans)
        gpu.release()
        world.until(lambda: all(engine.state(plan.record) is RecordState.DONE for plan in plans))
        assert (engine.kv[20:24] == engine.kv[5]).all()
        world.until(lambda: not len(world.agent.restores))


@pytest.mark.parametrize("limit", [1, 2])
def test_a_restore_that_finds_no_record_free_leaves_its_lease_as_it_was(
    tmp_path: Path, gpu: FakeGpu, limit: int
) -> None:
    with World(tmp_path, driver=gpu, max_restores_per_device=limit) as world:
        engine = CudaEngine(world, gpu)
        engine.save(hashes(1), [5])
        gpu.hold()
        first = engine.start(hashes(1), [20])
        ready = engine.control.ready(hashes(1), operation=90, instance=engine.instance)
        request = start_message(engine.registration, ready.leases[0], [21])
        (restore,) = world.agent.restores
        records = restore.session.records
        assert records is not None
        taken = []
        while (record := records.open()) is not None:
            taken.append(record)
        assert engine.worker.refused(request).kind == ErrorKind.BUSY
        assert len(world.agent.restores) == 1 and world.agent.queries.leases.live == 1
        records.close(taken[0], RecordState.FAILED)
        second = engine.worker.start(engine.registration, ready.leases[0], [21])
        gpu.release()
        world.until(lambda: all(engine.state(plan.record) is RecordState.DONE for plan in (first, second)))
        assert (engine.kv[20:22] == engine.kv[5]).all()
        world.until(lambda: not len(world.agent.restores))


def test_the_gpu_tells_the_end_of_a_restore_before_any_thread_of_the_agent_does(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    engine.save(hashes(1), [5])
    gpu.hold()
    plan = engine.start(hashes(1), [20])
    assert engine.state(plan.record) is RecordState.PENDING
    with gpu.unobserved():
        gpu.release()
        assert engine.state(plan.record) is RecordState.DONE
        assert (engine.kv[20] == engine.kv[5]).all()
        assert len(world.agent.restores) == 1, "the agent has not noticed yet"
    world.until(lambda: not len(world.agent.restores))


def test_a_copy_that_can_begin_is_handed_over_by_the_owner_thread(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    names = hashes(*range(1, 5))
    before = len(gpu.calls)
    engine.save(names, [1, 2, 3, 4])
    plan = engine.start(names, [20, 23, 26, 29])
    world.until(lambda: engine.state(plan.record) is RecordState.DONE)
    assert gpu.threads[before:] == [threading.current_thread().name] * 2
    world.until(lambda: not len(world.agent.restores))
    assert (engine.kv[[20, 23, 26, 29]] == engine.kv[[1, 2, 3, 4]]).all()


def test_nothing_is_handed_over_by_the_owner_thread_while_the_driver_may_make_it_wait(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    engine.save(hashes(1), [5])
    gpu.busy = True
    engine.start(hashes(1), [21])
    world.until(lambda: not len(world.agent.restores))
    assert gpu.threads[-1] == "orbitkv-gpu0-restores"
    gpu.busy = False
    lanes_wait(world)
    engine.start(hashes(1), [22])
    assert gpu.threads[-1] == threading.current_thread().name
    world.until(lambda: not len(world.agent.restores))


def test_while_more_is_to_be_handed_over_the_loop_leaves_lanes_the_interpreter(
    engine: CudaEngine, gpu: FakeGpu, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = hashes(*range(10))
    engine.save(names, list(range(10)))
    lane = next(iter(world.agent.device._gpus.values())).restores  # type: ignore[attr-defined]
    monkeypatch.setattr(lane, "_chunk_bytes", 2 * PAGE)
    gpu.hold()
    engine.start(names[:32], [20])
    assert not world.agent.loop.crowded(), "all of it is with the GPU"
    engine.start(names, list(range(30, 50, 2)))
    assert world.agent.loop.crowded()
    gpu.release()
    world.until(lambda: not len(world.agent.restores))
    assert not world.agent.loop.crowded()


def test_a_commit_of_what_the_gpu_says_is_copied_waits_for_the_agent_to_know(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    gpu.hold()
    plan = engine.submit(hashes(1), [5])
    with gpu.unobserved():
        gpu.release()
        assert engine.state(plan.record) is RecordState.SETTLED
        engine.worker.commit(plan)
        assert engine.state(plan.record) is RecordState.SETTLED, "its slot is not free before the copy is over for all"
        assert len(world.agent.saves) == 1
        assert engine.worker.refused(CommitSave(plan.save, False)).kind == ErrorKind.STALE, "it was said already"
    world.until(lambda: engine.state(plan.record) is RecordState.DONE)
    assert engine.control.ready(hashes(1), operation=51).leases


def test_a_committed_save_becomes_visible_though_its_engine_leaves(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    gpu.hold()
    plan = engine.submit(hashes(1), [5])
    with gpu.unobserved():
        gpu.release()
        engine.worker.commit(plan)
        session = engine.worker.session
        engine.worker.drop()
        assert session in world.agent.server.sessions
    world.until(lambda: session not in world.agent.server.sessions)
    assert world.agent.counters.save_bytes == PAGE


def test_where_gpus_write_no_words_the_agent_tells_the_end(tmp_path: Path, gpu: FakeGpu) -> None:
    gpu.words = False
    with World(tmp_path, driver=gpu) as world:
        engine = CudaEngine(world, gpu)
        engine.save(hashes(1), [5])
        gpu.hold()
        plan = engine.start(hashes(1), [20])
        with gpu.unobserved():
            gpu.release()
            assert engine.state(plan.record) is RecordState.PENDING
        world.until(lambda: engine.state(plan.record) is RecordState.DONE)
        world.until(lambda: not len(world.agent.restores))
        assert REGION_BYTES not in gpu.pinned.values(), "no records are pinned for nothing"


def test_records_that_cannot_be_pinned_are_written_by_the_agent(
    engine: CudaEngine, gpu: FakeGpu, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.until(lambda: pinned_for_pages(gpu) == world.config.pool_bytes)
    gpu.pins = False
    other = CudaEngine(world, gpu, instance=Instance("other", "1"))
    assert "ends of copies are told a little later" in caplog.text
    other.save(hashes(1), [5])
    plan = other.start(hashes(1), [20])
    world.until(lambda: other.state(plan.record) is RecordState.DONE)
    assert (other.kv[20] == other.kv[5]).all()
    world.until(lambda: not len(world.agent.restores))


def test_records_stay_pinned_while_one_registration_of_the_session_is_left(
    engine: CudaEngine, gpu: FakeGpu, world: World
) -> None:
    records = engine.worker.session.records
    assert records is not None and gpu.pinned[records.address] == REGION_BYTES
    second = gpu.allocate(BLOCKS * PAGE)
    challenge = answer(engine.worker, message(gpu, second, instance=Instance("second", "1")))
    meet(second, challenge)
    registered = answer(engine.worker, ChallengeMet(challenge.challenge))
    answer(engine.worker, Unregister(engine.registration))
    world.until(lambda: not gpu.mapped[engine.memory.ctypes.data])
    assert records.address in gpu.pinned
    answer(engine.worker, Unregister(registered.registration))
    world.until(lambda: records.address not in gpu.pinned)


def test_waiting_restores_of_an_engine_that_dies_are_never_begun(tmp_path: Path, gpu: FakeGpu) -> None:
    with World(tmp_path, driver=gpu, max_restores_per_device=1) as world:
        engine = CudaEngine(world, gpu)
        engine.save(hashes(1), [5])
        calls = len(gpu.calls)
        gpu.hold()
        for i in range(4):
            engine.start(hashes(1), [20 + i])
        world.until(lambda: len(gpu.calls) == calls + 1)
        engine.worker.drop()
        assert len(world.agent.restores) == 1
        gpu.release()
        world.until(lambda: not len(world.agent.restores))
        assert len(gpu.calls) == calls + 1


def test_a_copy_that_the_driver_refuses_fails_the_restore_only(engine: CudaEngine, gpu: FakeGpu, world: World) -> None:
    engine.save(hashes(1), [5])
    gpu.refuse = 1
    plan = engine.start(hashes(1), [20])
    world.until(lambda: engine.state(plan.record) is RecordState.FAILED)
    gpu.refuse = 0
    again = engine.start(hashes(1), [21])
    world.until(lambda: engine.state(again.record) is RecordState.DONE)


def test_a_defect_after_a_copy_was_handed_over_lets_nothing_go_before_the_copy_ended(
    engine: CudaEngine, gpu: FakeGpu, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save(hashes(1), [5])
    device = world.agent.device
    assert isinstance(device, CudaDevice)
    start = device.start

    def defect(*arguments: Any, **more: Any) -> Any:
        start(*arguments, **more)
        raise RuntimeError("after the copy was handed over")

    monkeypatch.setattr(device, "start", defect)
    gpu.hold()
    ready = engine.control.ready(hashes(1), operation=99, instance=engine.instance)
    refusal = engine.worker.ask(start_message(engine.registration, ready.leases[0], [20]))
    assert isinstance(refusal, Refusal) and refusal.kind == ErrorKind.INTERNAL
    registration, leases = engine.worker.session.registrations[engine.registration], world.agent.queries.leases
    engine.control.session.end_stream("gone")  # with all that was promised to it
    world.pump()
    assert (registration.copies, leases.pinned_pages) == (1, 1)
    gpu.release()
    world.until(lambda: (registration.copies, leases.pinned_pages) == (0, 0))


def test_a_gpu_is_used_only_from_its_first_registration(world: World, gpu: FakeGpu) -> None:
    world.client()
    assert not gpu.contexts and world.agent.device.context_bytes == {}
    CudaEngine(world, gpu)
    assert gpu.contexts == {0: 1}
    assert list(world.agent.device.context_bytes) == [UUIDS[0]]


def test_an_allocation_is_mapped_once_for_all_registrations_of_a_process(world: World, gpu: FakeGpu) -> None:
    engine = CudaEngine(world, gpu)
    address = engine.memory.ctypes.data
    engine.register(message(gpu, engine.memory, instance=type(INSTANCE)("other", "1")))
    assert gpu.mapped[address] == 1
    engine.worker.call(Unregister(engine.registration), object)
    world.pump()
    assert gpu.mapped[address] == 1, "the other registration uses it"


def refused(world: World, client: Client, request: Register) -> Refusal:
    number = client.post(request)
    replies: list[Any] = []

    def take() -> bool:
        reply = client.reply(number)
        replies.extend([reply] if reply is not None else [])
        return bool(replies)

    world.until(take)
    assert isinstance(replies[0], Refusal), replies[0]
    return replies[0]


def test_registrations_that_cannot_be_served_are_refused_by_name(world: World, gpu: FakeGpu) -> None:
    kv = gpu.allocate(BLOCKS * PAGE)
    client = world.client()
    cases = {
        "not visible to this agent": message(gpu, kv, device="GPU-other"),
        "has 0 bytes; memory of a GPU is registered with a handle of 64": message(
            gpu, kv, allocations=[Allocation(kv.nbytes)]
        ),
        "could not be opened": message(gpu, kv, allocations=[Allocation(kv.nbytes, bytes(64))]),
        f"but the allocation has {kv.nbytes} bytes": message(
            gpu, kv, allocations=[Allocation(2 * kv.nbytes, gpu.export_memory(kv.ctypes.data))]
        ),
        "outside its allocation": message(gpu, kv, groups=[group_geometry(blocks=BLOCKS + 1)]),
    }
    for words, request in cases.items():
        assert words in refused(world, client, request).message
    assert UUIDS[1] in refused(world, client, cases["not visible to this agent"]).message, "both lists are named"
    assert not +gpu.mapped and not list(world.agent.instances)


def test_memory_that_cuda_takes_for_the_agents_own_is_refused_by_name(world: World, gpu: FakeGpu) -> None:
    kv = gpu.allocate(BLOCKS * PAGE)
    gpu.of_namesakes.add(kv.ctypes.data)
    refusal = refused(world, world.client(), message(gpu, kv))
    assert f"the same process number {os.getpid()}" in refusal.message and "init process" in refusal.message
    assert not +gpu.mapped


def test_a_gpu_in_exclusive_process_mode_is_refused_by_name(tmp_path: Path, gpu: FakeGpu) -> None:
    gpu.compute_mode = "exclusive-process"
    with World(tmp_path, driver=gpu) as world:
        refusal = refused(world, world.client(), message(gpu, gpu.allocate(BLOCKS * PAGE)))
        assert "exclusive-process" in refusal.message and "nvidia-smi -c DEFAULT" in refusal.message
        assert "one MPS server" in refusal.message
        gpu.compute_mode = "default"  # nothing of the failure stays
        assert CudaEngine(world, gpu).registration


@pytest.mark.parametrize("streams", range(3))
def test_a_gpu_that_has_no_room_for_a_stream_is_tried_again_by_the_next_registration(
    tmp_path: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    room, make = [streams], gpu.make_stream

    def make_while_there_is_room() -> int:
        if not room[0]:
            raise CudaError("cuStreamCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        room[0] -= 1
        return make()

    with World(tmp_path, driver=gpu) as world:
        threads = threading.active_count()
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "make_stream", make_while_there_is_room)
            refusal = refused(world, world.client(), message(gpu, gpu.allocate(BLOCKS * PAGE)))
        assert "CUDA_ERROR_OUT_OF_MEMORY" in refusal.message
        assert not +gpu.contexts and not gpu._streams
        assert threading.active_count() <= threads + 1, "only the GPU's own thread is left"
        assert CudaEngine(world, gpu).registration


def test_memory_of_another_part_of_a_gpu_is_refused_by_name(tmp_path: Path, gpu: FakeGpu) -> None:
    gpu.name = "NVIDIA H200 MIG 1g.18gb"
    with World(tmp_path, driver=gpu) as world:
        kv = gpu.allocate(BLOCKS * PAGE)
        refusal = refused(world, world.client(), message(gpu, kv, allocations=[Allocation(kv.nbytes, bytes(64))]))
        assert "NVIDIA H200 MIG 1g.18gb is a part of a GPU" in refusal.message
        assert CudaEngine(world, gpu).registration, "memory of the same part is served"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("pid", "others", "processes", "bytes_"),
    [
        (7, {5: 3 * GIB}, {5: 9 * GIB, 7: 500}, 500),
        (1, {5: 3 * GIB}, {5: 9 * GIB, 4711: 500}, 500),
        (5, {5: 3 * GIB}, {5: 9 * GIB, 4711: 500}, 500),
        (1, {5: 3 * GIB}, {5: 9 * GIB, 4711: 500, 4712: 900}, 6 * GIB),
        (1, {}, {}, 6 * GIB),
    ],
    ids=["by its number", "the only new one", "another's number in a container", "two are new", "nothing is told"],
)
def test_what_the_agent_takes_of_a_gpu_is_told_by_process_where_it_can_be(
    pid: int, others: dict[int, int], processes: dict[int, int], bytes_: int
) -> None:
    assert own_bytes(pid, 4 * GIB, others, 10 * GIB, processes) == bytes_
    assert own_bytes(pid, None, {}, None, {}) == 0


def test_memory_that_cannot_be_pinned_keeps_nothing_and_is_tried_again(
    tmp_path: Path, gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.pins = False
    with World(tmp_path, driver=gpu) as world:
        worker, memory = world.client(), gpu.allocate(BLOCKS * PAGE)
        challenge = answer(worker, message(gpu, memory))
        meet(memory, challenge)
        worker.post(ChallengeMet(challenge.challenge))
        world.until(lambda: world.agent.cache.arenas.failures)
        assert "could not be pinned" in caplog.text
        assert "memlock" in world.agent.memory_problem
        assert not gpu.pinned and not any(arena.ready for arena in world.agent.cache.arenas)


def test_all_of_the_pool_is_pinned_before_it_is_needed(world: World, gpu: FakeGpu) -> None:
    assert not gpu.pinned, "nothing without an engine"
    CudaEngine(world, gpu)
    world.until(lambda: pinned_for_pages(gpu) == world.config.pool_bytes)


def test_a_namespace_that_comes_later_gets_what_was_made_ahead_for_the_first(tmp_path: Path, gpu: FakeGpu) -> None:
    with World(tmp_path, driver=gpu, cache_namespaces={"other": {}}) as world:
        CudaEngine(world, gpu)
        world.until(lambda: pinned_for_pages(gpu) == world.config.pool_bytes)
        second = CudaEngine(world, gpu, "other")

        def kept() -> bool:
            plan = second.submit(hashes(1), [5])
            world.until(lambda: second.state(plan.record) is RecordState.SETTLED)
            second.worker.commit(plan)
            return not plan.dropped

        world.until(kept)


def test_a_session_that_ends_while_its_memory_is_opened_leaves_nothing_behind(world: World, gpu: FakeGpu) -> None:
    kv = gpu.allocate(BLOCKS * PAGE)
    client = world.client()
    client.post(message(gpu, kv))
    world.agent.loop.run_once(0.1)
    client.drop()
    world.until(lambda: gpu.contexts and not +gpu.mapped)
    assert not list(world.agent.instances)


def test_no_arena_leaves_the_agent(engine: CudaEngine) -> None:
    came = list(engine.worker.descriptors)
    refusal = engine.worker.refused(MapArenas([1]))
    assert refusal.kind == ErrorKind.UNSUPPORTED and engine.worker.descriptors == came


def test_status_says_how_a_gpu_copies(engine: CudaEngine, world: World) -> None:
    snapshot = world.agent.snapshot()
    assert snapshot["agent"]["mode"] == "cuda"
    assert snapshot["transfer"]["copy_plans"] == {UUIDS[0]: "batch-pages"}
    assert snapshot["sessions"]["registered_bytes"] == {UUIDS[0]: BLOCKS * PAGE}


def test_restoring_with_words_in_device_memory_is_refused_by_name(engine: CudaEngine) -> None:
    from orbitkv.protocol.messages import TimelineWord

    engine.save(hashes(1), [5])
    ready = engine.control.ready(hashes(1), operation=9)
    request = start_message(engine.registration, ready.leases[0], [6])
    request.ready = TimelineWord(0, 0, 1)
    assert "ready: words in device memory are not there yet" in engine.worker.refused(request).message


# --------------------------------------------------------------------------------------------- whose memory it is


@pytest.mark.guard("own-memory")
def test_memory_of_another_process_is_refused_before_anything_is_written_there(world: World, gpu: FakeGpu) -> None:
    """The handle is a right one: a handle says nothing about who shows it."""
    victim = gpu.allocate(BLOCKS * PAGE)
    before = victim.copy()
    thief = world.client()
    challenge = answer(thief, message(gpu, victim))
    assert isinstance(challenge, Challenge), challenge
    refusal = answer(thief, ChallengeMet(challenge.challenge))
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, refusal.message.split(":")[0]) == (ErrorKind.DENIED, "not-owner")
    assert (victim == before).all()
    world.until(lambda: not +gpu.mapped)


def test_each_allocation_is_proven(world: World, gpu: FakeGpu) -> None:
    own, victim = gpu.allocate(BLOCKS * PAGE), gpu.allocate(BLOCKS * PAGE)
    allocations = [Allocation(each.nbytes, gpu.export_memory(each.ctypes.data)) for each in (own, victim)]
    layers = [
        *group_geometry(page=PAGE, blocks=BLOCKS, name="a").layers,
        *group_geometry(page=PAGE, blocks=BLOCKS, name="b", allocation=1).layers,
    ]
    request = message(gpu, own, allocations=allocations, groups=[GroupGeometry(0, "full", 16, layers)])
    thief = world.client()
    challenge = answer(thief, request)
    assert [place for place, _ in challenge.places] == [0, 1]
    value = np.frombuffer(challenge.values[0], np.uint8)
    own[: len(value)] = value
    assert answer(thief, ChallengeMet(challenge.challenge)).message.startswith("not-owner: ")


def test_a_challenge_is_met_once_and_by_whom_it_was_put_to(world: World, gpu: FakeGpu) -> None:
    memory, worker, other = gpu.allocate(BLOCKS * PAGE), world.client(), world.client()
    challenge = answer(worker, message(gpu, memory))
    meet(memory, challenge)
    met = ChallengeMet(challenge.challenge)
    assert answer(other, met).message.startswith("unknown-challenge: ")
    assert isinstance(answer(worker, met), Registered)
    assert answer(worker, met).message.startswith("unknown-challenge: ")


def test_a_session_that_ends_amid_a_challenge_keeps_nothing_mapped(world: World, gpu: FakeGpu) -> None:
    worker = world.client()
    answer(worker, message(gpu, gpu.allocate(BLOCKS * PAGE)))
    assert +gpu.mapped
    worker.drop()
    world.until(lambda: not +gpu.mapped)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_plugin_of_the_release_before_is_served_only_where_nobody_needs_to_show_anything(
    world: World, gpu: FakeGpu, trusted: bool
) -> None:
    """Outside of a cluster all who may connect are one user."""
    worker = world.client(hello=False)
    worker.hello(Hello(messages=VersionRange(1, 1)))
    worker.session.trusted = trusted
    reply = answer(worker, message(gpu, gpu.allocate(BLOCKS * PAGE)))
    if trusted:
        assert isinstance(reply, Registered)
    else:
        assert (reply.kind, reply.message.split(":")[0]) == (ErrorKind.INCOMPATIBLE, "version-mismatch")
