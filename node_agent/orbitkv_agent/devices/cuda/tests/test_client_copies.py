"""A real client and an agent in CUDA mode, in one process, with a driver whose copies the test holds and releases."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbitkv import (
    BlockHashes,
    CacheManagerClient,
    ErrorKind,
    GroupGeometry,
    Instance,
    LayerRegion,
    OrbitKVError,
    QueryReady,
    Ranks,
    RestoreHandle,
    RestoreStatus,
    SaveStatus,
)
from orbitkv.client import agent_copies
from orbitkv.client.agent_copies import AgentCopies
from orbitkv.client.gpu import EngineGpu
from orbitkv.client.transfers import Transfers
from orbitkv_agent.agent import Agent
from orbitkv_agent.config import AgentConfig
from orbitkv_agent.devices.cuda.tests.fake_gpu import UUIDS, FakeGpu

PAGE, BLOCKS = 8192, 64


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


class Running:
    """An agent on a thread of its own."""

    def __init__(self, folder: Path, gpu: FakeGpu, **settings: Any) -> None:
        values = {"socket_path": str(folder / "a.sock"), "pool": "8MiB", "arena": "2MiB", "metrics_address": "off"}
        self.agent = Agent(AgentConfig.model_validate({**values, **settings}), driver=gpu)
        self.drained = False
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        self.drained = self.agent.serve()

    def ask(self, question: Callable[[Agent], Any]) -> Any:
        """Ask on the owner thread."""
        answer: list[Any] = []
        done = threading.Event()

        def work() -> None:
            answer.append(question(self.agent))
            done.set()

        self.agent.loop.post(work)
        assert done.wait(10)
        return answer[0]

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Meanwhile the owner thread does nothing, as when the process is stopped."""
        still, go = threading.Event(), threading.Event()

        def stand() -> None:
            still.set()
            go.wait(20)

        self.agent.loop.post(stand)
        assert still.wait(10)
        try:
            yield
        finally:
            go.set()

    def close(self) -> None:
        self.agent.request_stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


class Engine:
    """A serving engine with memory of two layers, one after another."""

    def __init__(self, running: Running, gpu: FakeGpu, **client: Any) -> None:
        gpu.set_current(1000)
        self.device = EngineGpu(gpu)
        self.memory = gpu.allocate(BLOCKS * PAGE)
        self.kv = self.memory.reshape(2, BLOCKS, PAGE // 2)
        self.stream = gpu.make_stream()
        self.client = CacheManagerClient(running.agent.config.socket_path, **client)
        self.instance = Instance("engine", uuid.uuid4().hex)
        self.client.attach_instance(self.instance)
        regions = [
            LayerRegion(f"l{i}", 0, i * BLOCKS * PAGE // 2, BLOCKS, PAGE // 2, PAGE // 2, "uint8") for i in range(2)
        ]
        self.registration = self.client.register_context_batch(
            instance=self.instance,
            ranks=Ranks(),
            model_identity="m",
            model="m",
            groups=[GroupGeometry(0, "full", 16, regions)],
            allocations=[self.device.allocation(self.memory.ctypes.data, self.memory)],
            gpu=self.device,
        )
        self.client.report_proof(self.registration, True)

    @property
    def transfers(self) -> Transfers:
        assert self.client._transfers is not None
        return self.client._transfers

    def point(self) -> Any:
        return self.device.point(self.stream)

    def save(self, hashes: BlockHashes, blocks: list[int], **more: Any) -> Any:
        handle = self.client.prepare_save(self.registration, [hashes], [np.array(blocks)], **more)
        self.client.submit_saves([handle])
        return handle

    def lease(self, hashes: BlockHashes) -> int:
        request = uuid.uuid4().hex
        answer = self.client.query_prefetch(request, [hashes], instance=self.instance)
        assert isinstance(answer, QueryReady) and answer.pages == len(hashes), answer
        self.client.query_consumed(request)
        return answer.leases[0]

    def restore(self, hashes: BlockHashes, blocks: list[int], **more: Any) -> RestoreHandle:
        return self.client.start_restore(self.registration, self.lease(hashes), [np.array(blocks)], **more)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has long to give a sign: here it has to share the interpreter."""
    monkeypatch.setattr(agent_copies, "SIGN_S", 60.0)


@pytest.fixture
def running(tmp_path: Path, gpu: FakeGpu) -> Iterator[Running]:
    running = Running(tmp_path, gpu)
    yield running
    gpu.release()
    running.close()
    assert running.drained
    assert not +gpu.mapped and not gpu.pinned and not gpu.strays


@pytest.fixture
def engine(running: Running, gpu: FakeGpu) -> Iterator[Engine]:
    engine = Engine(running, gpu)
    yield engine
    gpu.release()
    engine.client.close()


def names(*numbers: int) -> BlockHashes:
    return BlockHashes([bytes([number]) * 32 for number in numbers])


def kept(engine: Engine, hashes: BlockHashes, blocks: list[int]) -> None:
    handle = engine.save(hashes, blocks)
    assert engine.client.wait_save(handle, 10) is SaveStatus.COMMITTED and not handle.dropped


@contextlib.contextmanager
def impatient(engine: Engine) -> Iterator[None]:
    """Meanwhile the agent has half a second to give a sign."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(agent_copies, "SIGN_S", 0.5)
        engine.transfers._notify()
        yield


def drains(engine: Engine, restore: RestoreHandle) -> None:
    """Wait until the client of a lost agent has seen more than once that the restore has not ended, or has ended it."""
    until(lambda: engine.client.lost is not None)
    looks, settle = [], AgentCopies.settle

    def counted(copies: AgentCopies) -> None:
        looks.append(copies)
        settle(copies)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AgentCopies, "settle", counted)
        until(lambda: len(looks) > 3 or restore.status.final)


def test_pages_go_there_and_back(engine: Engine) -> None:
    assert engine.client.mode == "cuda" and engine.device.uuid == UUIDS[0]
    kept(engine, names(1, 2, 3), [4, 5, 60])
    before = engine.kv.copy()
    handle = engine.restore(names(1, 2, 3), [10, 30, 11])
    assert engine.client.wait_restore(handle, 10) is RestoreStatus.DONE
    assert engine.client.layers_ready(handle) == 2
    before[:, [10, 30, 11]] = before[:, [4, 5, 60]]
    assert (engine.kv == before).all()


def test_layers_come_one_after_the_other_where_that_is_asked_for(
    running: Running, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.devices.cuda.lanes.CHUNK_BYTES", 5 * PAGE // 2)
    engine = Engine(running, gpu)
    hashes, sources, targets = names(*range(8)), list(range(8)), list(range(20, 36, 2))
    kept(engine, hashes, sources)
    before = engine.kv.copy()
    gpu.hold()
    calls = len(gpu.calls)
    restore = engine.restore(hashes, targets, layer_order=True)
    until(lambda: len(gpu.calls) == calls + 4)  # of 5 pages' halves each, and the last of 16
    assert restore.status is RestoreStatus.ENQUEUED or engine.client.wait_restore_enqueued(restore, 10)
    until(lambda: restore.handed_over)
    assert engine.client.layers_ready(restore) == 0 and not engine.client.wait_layer(restore, 0, 0.01)
    before[0, targets] = before[0, sources]
    with running.standing_still():
        gpu.step(2)
        assert restore.handed_over
        assert engine.client.wait_layer(restore, 0, 10) and engine.client.layers_ready(restore) == 1
        assert not restore.status.final and not engine.client.wait_layer(restore, 1, 0.01)
        assert (engine.kv[0] == before[0]).all(), "the first layer is whole"
    gpu.release()
    assert engine.client.wait_layer(restore, 1, 10)
    before[1, targets] = before[1, sources]
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE and (engine.kv == before).all()
    assert not restore.handed_over
    engine.client.close()


def test_other_restores_are_not_behind_one_that_is_handed_over_whole(
    running: Running, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.devices.cuda.lanes.CHUNK_BYTES", PAGE)
    engine = Engine(running, gpu)
    hashes = names(*range(8))
    kept(engine, hashes, list(range(8)))
    gpu.hold()
    calls = len(gpu.calls)
    layered = engine.restore(hashes, list(range(20, 36, 2)), layer_order=True)
    until(lambda: len(gpu.calls) == calls + 8)
    other = engine.restore(names(3), [50])
    until(lambda: len(gpu.calls) == calls + 9)
    assert len({stream for stream, queue in gpu._streams.items() if queue}) == 2, "each has a stream of its own"
    gpu.release()
    for restore in (layered, other):
        assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE
    assert (engine.kv[:, 50] == engine.kv[:, 3]).all()
    engine.client.close()


def test_an_image_is_gathered_from_the_gpu(engine: Engine) -> None:
    image = engine.registration.image(0, 7)
    assert (image == np.concatenate([engine.kv[0, 7], engine.kv[1, 7]])).all()


def test_a_save_is_copied_before_it_is_visible(engine: Engine, gpu: FakeGpu) -> None:
    gpu.hold()
    handle = engine.save(names(1), [4])
    until(lambda: handle.record is not None)
    assert handle.status is SaveStatus.SUBMITTED and not handle.status.pages_released
    gpu.release()
    assert engine.client.wait_save_copied(handle, 10)
    assert engine.client.wait_save(handle, 10) is SaveStatus.COMMITTED


def test_a_save_voided_while_it_is_copied_is_not_kept(engine: Engine, gpu: FakeGpu) -> None:
    gpu.hold()
    handle = engine.save(names(1), [4])
    until(lambda: handle.record is not None)
    assert engine.client.void_save(handle)
    gpu.release()
    assert engine.client.wait_save(handle, 10) is SaveStatus.FAILED
    answer = engine.client.query_prefetch("q", [names(1)], instance=engine.instance)
    assert isinstance(answer, QueryReady) and not answer.pages


@pytest.mark.guard("stream-points")
def test_a_restore_waits_for_its_point_of_the_stream(engine: Engine, gpu: FakeGpu) -> None:
    kept(engine, names(1), [4])
    gpu.hold()
    gpu.fill(engine.stream, engine.kv[:, 9], 7)  # whoever had the block before still writes to it
    handle = engine.restore(names(1), [9], after=engine.point())
    later = engine.restore(names(1), [10])
    until(lambda: later.status is RestoreStatus.ENQUEUED)
    assert handle.status is RestoreStatus.PENDING, "nothing was asked of the agent yet"
    gpu.release()
    for each in (handle, later):
        assert engine.client.wait_restore(each, 10) is RestoreStatus.DONE
    assert (engine.kv[:, 9] == engine.kv[:, 4]).all()


@pytest.mark.parametrize("fenced", [True, False])
def test_a_save_waits_for_its_point_of_the_stream(engine: Engine, gpu: FakeGpu, fenced: bool) -> None:
    gpu.hold()
    block = engine.kv[:, 4]
    gpu.fill(engine.stream, block, 7)
    point = engine.point()
    handle = engine.save(names(1), [4], **({"after": point} if fenced else {}))
    if fenced:
        time.sleep(0.05)
        assert handle.record is None, "nothing was asked of the agent yet"
    else:
        until(lambda: handle.record is not None)
    # The engine's stream goes on only now. What was not fenced was copied before.
    gpu.release()
    assert engine.client.wait_save(handle, 10) is SaveStatus.COMMITTED
    restore = engine.restore(names(1), [9])
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE
    if fenced:
        assert (engine.kv[:, 9] == 7).all()


def test_what_waits_for_its_point_can_be_withdrawn(engine: Engine, gpu: FakeGpu) -> None:
    kept(engine, names(1), [4])
    gpu.hold()
    calls = len(gpu.calls)
    restore = engine.restore(names(1), [9], after=engine.point())
    both = [
        engine.client.prepare_save(engine.registration, [names(5)], [np.array([5])], after=engine.point()),
        engine.client.prepare_save(engine.registration, [names(6)], [np.array([6])], after=engine.point()),
    ]
    engine.client.submit_saves(both)
    assert engine.client.cancel_restore(restore) and restore.status is RestoreStatus.CANCELLED
    assert engine.client.cancel_save(both[0]) and both[0].status is SaveStatus.CANCELLED
    gpu.release()
    assert engine.client.wait_save(both[1], 10) is SaveStatus.COMMITTED
    assert len(gpu.calls) == calls + 1


def test_a_copy_that_was_submitted_cannot_be_withdrawn(engine: Engine, gpu: FakeGpu) -> None:
    kept(engine, names(1), [4])
    gpu.hold()
    restore = engine.restore(names(1), [9])
    until(lambda: restore.status is RestoreStatus.ENQUEUED)
    assert not engine.client.cancel_restore(restore)
    gpu.release()
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE


def test_a_copy_that_the_driver_refuses_fails_its_handle(engine: Engine, gpu: FakeGpu) -> None:
    kept(engine, names(1), [4])
    gpu.refuse = 1
    restore, save = engine.restore(names(1), [9]), engine.save(names(2), [5])
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.FAILED
    assert engine.client.wait_save(save, 10) is SaveStatus.FAILED
    gpu.refuse = 0
    again = engine.restore(names(1), [9])
    assert engine.client.wait_restore(again, 10) is RestoreStatus.DONE


def test_unregistering_and_closing_wait_for_the_agents_copies(running: Running, gpu: FakeGpu) -> None:
    engine = Engine(running, gpu)
    kept(engine, names(1), [4])
    gpu.hold()
    restore, save = engine.restore(names(1), [9]), engine.save(names(2), [5])
    until(lambda: restore.status is RestoreStatus.ENQUEUED and save.record is not None)
    threading.Timer(0.1, gpu.release).start()
    engine.client.unregister_context(engine.registration)
    assert restore.status is RestoreStatus.DONE and save.status is SaveStatus.COMMITTED
    until(lambda: not +gpu.mapped)
    engine.client.close()


def test_an_answer_that_comes_late_leaves_the_restore_uncertain_until_its_record_tells(
    running: Running, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(running, gpu)
    kept(engine, names(1), [4])
    lease = engine.lease(names(1))
    monkeypatch.setattr(engine.transfers, "_endpoint", dataclasses.replace(engine.client._endpoint, timeout_ms=100))
    with running.standing_still():
        restore = engine.client.start_restore(engine.registration, lease, [np.array([9])])
        save = engine.save(names(2), [5])
        time.sleep(0.4)
        assert not restore.status.final and not save.status.pages_released, "a timeout proves nothing"
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE
    assert engine.client.wait_save(save, 10) is SaveStatus.COMMITTED
    engine.client.close()


@pytest.mark.guard("taken-back")
def test_what_is_asked_of_an_agent_that_stands_still_ends_soon_and_is_never_copied(
    running: Running, gpu: FakeGpu
) -> None:
    engine = Engine(running, gpu)
    kept(engine, names(1), [4])
    lease, before = engine.lease(names(1)), engine.kv.copy()
    with running.standing_still(), impatient(engine):
        restore = engine.client.start_restore(engine.registration, lease, [np.array([9])])
        save = engine.save(names(2), [5])
        assert engine.client.wait_restore(restore, 10) is RestoreStatus.FAILED
        assert engine.client.wait_save(save, 10) is SaveStatus.FAILED
        assert "gives no sign" in str(engine.client.lost), "whoever used it makes another one"
    until(lambda: running.ask(lambda agent: agent.counters.load_failures))
    assert (engine.kv == before).all()
    engine.client.close()
    until(lambda: not +gpu.mapped)
    again = Engine(running, gpu)
    kept(again, names(3), [4])
    again.client.close()


def test_of_a_restore_that_is_taken_back_amid_its_chunks_those_with_the_gpu_end_first(
    running: Running, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.devices.cuda.lanes.CHUNK_BYTES", 3 * PAGE)
    engine = Engine(running, gpu)
    hashes, sources, targets = names(*range(10)), list(range(10)), list(range(20, 40, 2))
    kept(engine, hashes, sources)
    before, calls = engine.kv.copy(), len(gpu.calls)
    gpu.hold()
    restore = engine.restore(hashes, targets)
    until(lambda: len(gpu.calls) == calls + 2)
    with running.standing_still(), impatient(engine):
        drains(engine, restore)
        assert not restore.status.final, "two chunks may run at any time"
        gpu.release()
        assert engine.client.wait_restore(restore, 10) is RestoreStatus.FAILED
        before[:, targets[:6]] = before[:, sources[:6]]
        assert (engine.kv == before).all()
    engine.client.close()
    assert len(gpu.calls) == calls + 2


@pytest.mark.guard("uncertain-copies")
def test_a_copy_that_was_just_being_handed_over_stays_uncertain_until_the_agent_goes_on(
    running: Running, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(running, gpu)
    kept(engine, names(1), [4])
    entered, go, copy = threading.Event(), threading.Event(), gpu.copy

    def stopped(*arguments: Any, **more: Any) -> None:
        entered.set()
        go.wait(20)
        copy(*arguments, **more)

    monkeypatch.setattr(gpu, "copy", stopped)
    restore = engine.restore(names(1), [9])
    assert entered.wait(10)
    with impatient(engine):
        drains(engine, restore)
    assert not restore.status.final
    go.set()
    assert engine.client.wait_restore(restore, 10).final
    assert (engine.kv[:, 9] == engine.kv[:, 4]).all() or restore.status is RestoreStatus.FAILED
    engine.client.close()


@pytest.mark.guard("uncertain-copies")
def test_a_lost_connection_leaves_copies_uncertain_until_their_records_tell(running: Running, gpu: FakeGpu) -> None:
    engine = Engine(running, gpu)
    kept(engine, names(1), [4])
    gpu.hold()
    calls = len(gpu.calls)
    restore, save = engine.restore(names(1), [9]), engine.save(names(2), [5])
    until(lambda: restore.status is RestoreStatus.ENQUEUED and save.record is not None)
    until(lambda: len(gpu.calls) == calls + 2)

    def cut(agent: Agent) -> None:
        for session in list(agent.server.sessions):
            session.end_stream()

    running.ask(cut)
    drains(engine, restore)
    assert not restore.status.final and not save.status.pages_released
    gpu.release()
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE, "all of it had been submitted"
    assert engine.client.wait_save(save, 10) is SaveStatus.FAILED, "nobody could commit it"
    with pytest.raises(OrbitKVError):
        engine.restore(names(1), [9])
    engine.client.close()


def test_memory_of_the_engines_own_process_is_refused_by_an_agent_in_cuda_mode(running: Running) -> None:
    from orbitkv import HostAllocation

    memory = np.zeros(BLOCKS * PAGE, np.uint8)
    with CacheManagerClient(running.agent.config.socket_path) as client:
        instance = Instance("cpu", "1")
        client.attach_instance(instance)
        with pytest.raises(OrbitKVError, match="device 'host' is not visible to this agent, which serves") as caught:
            client.register_context_batch(
                instance=instance,
                ranks=Ranks(),
                model_identity="m",
                model="m",
                groups=[GroupGeometry(0, "full", 16, [LayerRegion("l", 0, 0, BLOCKS, PAGE, PAGE, "uint8")])],
                allocations=[HostAllocation(memory.ctypes.data, memory.nbytes, memory)],
            )
        assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_when_the_agents_process_ends_what_is_not_done_has_failed(tmp_path: Path, gpu: FakeGpu) -> None:
    """The agent runs in a fork of this process, and sees the memory that this one writes."""
    memory = np.frombuffer(mmap.mmap(-1, BLOCKS * PAGE), np.uint8)
    gpu.memory[memory.ctypes.data] = memory
    child = os.fork()
    if child == 0:  # pragma: no cover
        gpu.hold()
        values = {"socket_path": str(tmp_path / "a.sock"), "pool": "8MiB", "arena": "2MiB", "metrics_address": "off"}
        Agent(AgentConfig.model_validate(values), driver=gpu).serve()
        os._exit(0)
    try:
        until(lambda: listens(tmp_path / "a.sock"))
        gpu.set_current(1000)
        device = EngineGpu(gpu)
        client = CacheManagerClient(str(tmp_path / "a.sock"))
        instance = Instance("engine", "1")
        client.attach_instance(instance)
        registration = client.register_context_batch(
            instance=instance,
            ranks=Ranks(),
            model_identity="m",
            model="m",
            groups=[GroupGeometry(0, "full", 16, [LayerRegion("l", 0, 0, BLOCKS, PAGE, PAGE, "uint8")])],
            allocations=[device.allocation(memory.ctypes.data, memory)],
            gpu=device,
        )
        client.report_proof(registration, True)
        save = client.start_save(registration, [names(1)], [np.array([4])])
        until(lambda: save.record is not None)
        time.sleep(0.05)
        assert save.status is SaveStatus.SUBMITTED
        os.kill(child, signal.SIGKILL)
        assert client.wait_save(save, 10) is SaveStatus.FAILED
        assert save.error is not None and "the agent ended before the copy did" in str(save.error)
        client.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_registering_leaves_the_memory_as_it_was(tmp_path: Path, gpu: FakeGpu) -> None:
    """It is written to show whose it is, and put back."""
    running = Running(tmp_path, gpu)
    try:
        allocate = gpu.allocate
        before: list[Any] = []

        def remembered(size: int) -> Any:
            memory = allocate(size)
            before.append(memory.copy())
            return memory

        gpu.allocate = remembered  # type: ignore[method-assign]
        engine = Engine(running, gpu)
        assert (engine.memory == before[-1]).all()
        engine.client.close()
    finally:
        running.close()
