"""The worker's half against a client whose copies the test moves on by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from orbitkv.client import (
    BlockHashes,
    ErrorKind,
    HostAllocation,
    Instance,
    OrbitKVError,
    Ranks,
    RestoreStatus,
    SaveNotSubmittedError,
    SaveStatus,
)
from orbitkv.client.registration import GpuRegistration
from orbitkv.config import PluginConfig
from orbitkv.protocol.messages import GroupGeometry
from orbitkv.vllm import connector as connector_module
from orbitkv.vllm import proof, restores, together, worker
from orbitkv.vllm.connector import OrbitKVConnector
from orbitkv.vllm.identity import Identity, IdentityRefusedError
from orbitkv.vllm.layout import read_layout
from orbitkv.vllm.metadata import Load, Save, StepMetadata
from orbitkv.vllm.tests.kv_memory import FakeGroup, kv_memory

HASH = bytes(32)


class Handle:
    def __init__(self, status: Any) -> None:
        self.status = status
        self.error: OrbitKVError | None = None
        self.dropped: dict[str, int] = {}
        self.void = self.by_layer = self.handed_over = False
        self.layers = 0


class CopyingClient:
    """As the real client, but what was handed over moves on only when the test says so."""

    def __init__(self) -> None:
        self.boot_id = "boot-0"
        self.lost: OrbitKVError | None = None
        self.options: dict[str, Any] = {}
        self.saves: list[Handle] = []
        self.restores: list[tuple[int, np.ndarray[Any, Any], Handle]] = []
        self.proofs: list[tuple[bool, str]] = []
        self.refuse_saves = self.queued = False
        self.proof_required = False
        self.used: list[bool] = []
        self.waited: list[int] = []
        self.closed = False

    def register_context_batch(
        self, *, groups: Sequence[GroupGeometry], allocations: Sequence[HostAllocation], used: bool, **_: Any
    ) -> GpuRegistration:
        self.used.append(used)
        return GpuRegistration(1, self, groups, allocations, proof_required=self.proof_required)

    def report_proof(self, registration: GpuRegistration, proven: bool, detail: str = "") -> None:
        self.proofs.append((proven, detail))

    def peer_alive(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    def start_restore(
        self,
        registration: GpuRegistration,
        lease: int,
        blocks: Sequence[Any],
        *,
        layer_order: bool = False,
        after: object = None,
    ) -> Handle:
        handle = Handle(RestoreStatus.PENDING)
        handle.by_layer = layer_order
        self.restores.append((lease, blocks[0], handle))
        return handle

    def wait_layer(self, handle: Handle, layer: int) -> bool:
        self.waited.append(layer)
        return handle.layers > layer

    def wait_restore(self, handle: Handle) -> RestoreStatus:
        self.waited.append(-1)
        return handle.status

    def cancel_restore(self, handle: Handle) -> bool:
        if self.queued:
            handle.status = RestoreStatus.CANCELLED
        return self.queued

    def prepare_save(
        self,
        registration: GpuRegistration,
        hashes: Sequence[BlockHashes],
        blocks: Sequence[Any],
        *,
        after: object = None,
    ) -> Handle:
        if self.refuse_saves:
            raise SaveNotSubmittedError(ErrorKind.UNAVAILABLE, "lost the agent")
        return Handle(SaveStatus.PREPARED)

    def submit_saves(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            handle.status = SaveStatus.SUBMITTED
        self.saves += handles

    def cancel_save(self, handle: Handle) -> bool:
        if self.queued:
            handle.status = SaveStatus.CANCELLED
        return self.queued

    def wait_save_copied(self, handle: Handle, timeout: float) -> bool:
        assert timeout <= worker.DRAIN_S
        return bool(handle.status.pages_released)

    def void_save(self, handle: Handle) -> bool:
        handle.void = True
        return True


@pytest.fixture
def client() -> CopyingClient:
    return CopyingClient()


Make = Callable[..., worker.WorkerHalf]


@pytest.fixture
def make(client: CopyingClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(worker, "connect", lambda config, name, timeout_ms: client)
    made: list[worker.WorkerHalf] = []

    def build(*, rank: int = 0, ranks: int = 1, on_missing: str = "fail", **settings: Any) -> worker.WorkerHalf:
        config = PluginConfig.load(
            {"orbitkv.on_missing": on_missing, **{f"orbitkv.{name}": value for name, value in settings.items()}}, {}
        )
        half = worker.WorkerHalf(
            config,
            Instance("engine", "nonce"),
            Ranks(tensor=rank, tensor_size=ranks),
            lambda layout: Identity("digest", "a model", {}),
        )
        made.append(half)
        half.register(read_layout(kv_memory(), [FakeGroup(["a", "b"])], 8))
        return half

    yield build
    for half in made:
        half.shutdown()


def save_step(*requests: str, first: int = 1) -> StepMetadata:
    numbers = itertools.count(first)
    return StepMetadata(saves=[Save(next(numbers), name, HASH * 2, (1, 2)) for name in requests])


def run(half: worker.WorkerHalf, step: StepMetadata) -> worker.Results:
    half.handle_preemptions(step)
    half.start_loads(step)
    half.start_saves(step)
    return half.take_results(step)


def test_saves_are_handed_over_and_reported_once_they_are_visible(make: Make, client: CopyingClient) -> None:
    half = make()
    run(half, save_step("a"))
    assert half.take_report() is None
    client.saves[0].status = SaveStatus.COPIED
    run(half, StepMetadata())
    assert half.take_report() is None
    client.saves[0].status = SaveStatus.COMMITTED
    run(half, StepMetadata())
    report = half.take_report()
    assert report is not None
    assert report.ended == report.kept == {1: 1}


@pytest.mark.guard("vllm-released-only")
@pytest.mark.parametrize("status", [SaveStatus.SUBMITTED])
def test_held_blocks_are_let_go_only_when_their_save_left_them(
    make: Make, client: CopyingClient, status: SaveStatus
) -> None:
    half = make()
    run(half, save_step("a", "b"))
    client.saves[0].error = OrbitKVError(ErrorKind.TIMEOUT, "no answer")
    client.saves[0].status = status
    client.saves[1].status = SaveStatus.COPIED
    assert run(half, StepMetadata(held=frozenset({"a", "b"}))).sent == {"b"}
    assert run(half, StepMetadata()).sent == set()
    client.saves[0].status = SaveStatus.NOT_SUBMITTED
    assert run(half, StepMetadata()).sent == {"a"}
    assert run(half, StepMetadata()).sent == set()


def test_a_request_without_a_running_save_is_let_go_at_once(make: Make) -> None:
    assert run(make(), StepMetadata(held=frozenset({"a"}))).sent == {"a"}


@pytest.mark.guard("vllm-preempted-saves")
def test_preempted_blocks_are_left_or_their_save_is_void(make: Make, client: CopyingClient) -> None:
    half = make()
    run(half, save_step("a", "b", "c"))
    client.saves[1].status = SaveStatus.COPIED
    half.handle_preemptions(StepMetadata(preempted=frozenset({"a", "b"})))
    assert client.saves[0].void, "what is copied of overwritten blocks must never be visible"
    assert not client.saves[1].void, "it left its blocks before"
    assert not client.saves[2].void, "another request's"


def test_a_queued_save_of_preempted_blocks_is_withdrawn(make: Make, client: CopyingClient) -> None:
    half = make()
    run(half, save_step("a"))
    client.queued = True
    half.handle_preemptions(StepMetadata(preempted=frozenset({"a"})))
    run(half, StepMetadata())
    report = half.take_report()
    assert report is not None
    assert report.ended == {1: 1}
    assert not report.kept


def test_a_save_that_does_not_begin_is_withdrawn_after_max_wait(make: Make, client: CopyingClient) -> None:
    half = make(max_wait_ms=0)
    client.queued = True
    run(half, save_step("a"))
    assert run(half, StepMetadata(held=frozenset({"a"}))).sent == {"a"}


def test_saves_that_cannot_be_submitted_end_at_once(make: Make, client: CopyingClient) -> None:
    half = make()
    client.refuse_saves = True
    run(half, save_step("a", "b"))
    report = half.take_report()
    assert report is not None
    assert set(report.ended) == {1, 2}
    assert not report.kept


def test_a_partly_dropped_save_is_not_reported_as_kept(make: Make, client: CopyingClient) -> None:
    half = make()
    run(half, save_step("a"))
    client.saves[0].status, client.saves[0].dropped = SaveStatus.COMMITTED, {"pool": 1}
    run(half, StepMetadata())
    report = half.take_report()
    assert report is not None
    assert report.ended
    assert not report.kept


def load_step(
    name: str = "a", boot: str = "boot-0", leases: tuple[int, ...] = (7,), patience_s: float = 60.0
) -> StepMetadata:
    return StepMetadata(loads=[Load(name, boot, leases, (3, 4, -1), patience_s)])


def test_a_load_is_reported_when_it_is_done(make: Make, client: CopyingClient) -> None:
    half = make()
    assert run(half, load_step()).received == set()
    lease, blocks, handle = client.restores[0]
    assert lease == 7
    assert blocks.tolist() == [3, 4, -1]
    handle.status = RestoreStatus.ENQUEUED
    assert run(half, StepMetadata()).received == set()
    handle.status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == {"a"}
    assert half.take_invalid_blocks() == set()


class Clock:
    """The worker's time, moved on by the test and by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept = 0.0
        self.asleep: Callable[[], None] = lambda: None
        for module in (worker, restores):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        self.asleep()


def start_loads(half: worker.WorkerHalf, client: CopyingClient, *names: str) -> dict[str, Handle]:
    """Restores of these requests, all running."""
    run(half, StepMetadata(loads=[load_step(name).loads[0] for name in names], computing=True))
    return {name: handle for name, (_, _, handle) in zip(names, client.restores, strict=True)}


def test_restores_beside_running_requests_are_reported_together(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock, busy = make(), Clock(monkeypatch), StepMetadata(computing=True)
    handles = start_loads(half, client, "a", "b", "c")
    clock.now += 0.020
    handles["a"].status = RestoreStatus.DONE
    assert run(half, busy).received == set()
    clock.now += 0.015
    handles["b"].status = RestoreStatus.DONE
    assert run(half, busy).received == set()
    clock.now += 0.006
    assert run(half, busy).received == {"a", "b"}, "a took 20 ms and waited as long; b goes with it"
    handles["c"].status = RestoreStatus.DONE
    assert run(half, busy).received == {"c"}, "there is nothing left to wait for"


def test_a_restore_waits_for_others_no_longer_than_a_tenth_of_a_second(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock, busy = make(), Clock(monkeypatch), StepMetadata(computing=True)
    handles = start_loads(half, client, "a", "never")
    clock.now += 5
    handles["a"].status = RestoreStatus.DONE
    assert run(half, busy).received == set()
    clock.now += 0.101
    assert run(half, busy).received == {"a"}


def test_an_engine_with_nothing_to_compute_gets_each_restore_at_once(make: Make, client: CopyingClient) -> None:
    half = make()
    handles = start_loads(half, client, "a", "b")
    handles["a"].status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == {"a"}


def test_a_step_without_work_waits_for_a_restore_that_is_about_to_end(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock = make(), Clock(monkeypatch)
    monkeypatch.setattr(half, "_gpu_bytes", lambda load: 0.010 * restores.GPU_BYTES_S)
    handle = start_loads(half, client, "a")["a"]
    run(half, StepMetadata())
    assert not clock.slept, "it takes longer"
    clock.now += 0.009
    run(half, StepMetadata(computing=True))
    assert not clock.slept, "the engine has other work"

    def end() -> None:
        if clock.slept > 0.001:
            handle.status = RestoreStatus.DONE

    clock.asleep = end
    assert run(half, StepMetadata()).received == {"a"}
    assert clock.slept < 0.0011


def test_a_step_without_work_waits_two_milliseconds_at_most(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock = make(), Clock(monkeypatch)
    monkeypatch.setattr(half, "_gpu_bytes", lambda load: 0.001 * restores.GPU_BYTES_S)
    start_loads(half, client, "late")
    run(half, StepMetadata())
    assert 0.002 <= clock.slept < 0.0021
    clock.now += 0.001
    run(half, StepMetadata())
    assert clock.slept < 0.0021, "nobody knows when it ends"


def test_restores_side_by_side_are_due_one_after_another(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock = make(), Clock(monkeypatch)
    monkeypatch.setattr(half, "_gpu_bytes", lambda load: 0.020 * restores.GPU_BYTES_S)
    handles = start_loads(half, client, "a", "b")
    clock.now += 0.022
    handles["a"].status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == {"a"}
    assert not clock.slept, "b has just begun"
    clock.now += 0.019
    clock.asleep = lambda: setattr(handles["b"], "status", RestoreStatus.DONE)
    assert run(half, StepMetadata()).received == {"b"}
    assert clock.slept


def test_an_engine_with_nothing_to_compute_gets_the_last_two_together_if_the_last_is_due_soon(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock = make(), Clock(monkeypatch)
    monkeypatch.setattr(half, "_gpu_bytes", lambda load: 0.020 * restores.GPU_BYTES_S)
    handles = start_loads(half, client, "a", "b", "c")
    clock.now += 0.020
    handles["a"].status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == {"a"}, "two others run"
    clock.now += 0.020
    handles["b"].status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == {"b"}, "c takes longer than a step"
    half.start_at_once(load_step("d").loads[0])
    clock.now += 0.015
    handles["c"].status = RestoreStatus.DONE
    run(half, StepMetadata(computing=True))
    assert run(half, StepMetadata(computing=True)).received == set()
    clock.now += 0.012
    assert run(half, StepMetadata()).received == set(), "d is due in 8 ms"
    clock.now += 0.009
    assert run(half, StepMetadata()).received == set(), "d is late by a millisecond"
    clock.now += 0.002
    assert run(half, StepMetadata()).received == {"c"}, "d is late, nobody knows how long"


def test_an_end_that_was_seen_late_does_not_put_off_when_the_next_is_due(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock = make(), Clock(monkeypatch)
    monkeypatch.setattr(half, "_gpu_bytes", lambda load: 0.020 * restores.GPU_BYTES_S)
    handles = start_loads(half, client, "a", "b")
    clock.now += 0.035
    handles["a"].status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == set(), "a ended after 20 ms, so b is due in 5 ms"
    clock.now += 0.007
    handles["b"].status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == {"a", "b"}


def test_what_was_still_running_when_it_was_looked_at_ended_after_that(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slower link than is thought: what is due next is due after that end, not after the expected one."""
    half, clock = make(), Clock(monkeypatch)
    monkeypatch.setattr(half, "_gpu_bytes", lambda load: 0.010 * restores.GPU_BYTES_S)
    handles = start_loads(half, client, "a", "b")
    clock.now += 0.030
    assert run(half, StepMetadata()).received == set()
    clock.now += 0.001
    handles["a"].status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == set(), "b is due in 9 ms"
    clock.now += 0.010
    assert run(half, StepMetadata()).received == set(), "b is late by a millisecond"
    clock.now += 0.002
    assert run(half, StepMetadata()).received == {"a"}


def test_nothing_is_waited_for_if_the_engine_has_others_to_schedule(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock = make(), Clock(monkeypatch)
    monkeypatch.setattr(half, "_gpu_bytes", lambda load: 0.001 * restores.GPU_BYTES_S)
    half.start_at_once(load_step("a").loads[0])
    assert half.take_restored(computing=False, wait=False) == set()
    assert not clock.slept
    half.take_restored(computing=False)
    assert clock.slept


def test_what_the_scheduler_started_at_once_it_is_told_when_it_asks(make: Make, client: CopyingClient) -> None:
    half = make()
    half.start_at_once(load_step("a").loads[0])
    run(half, load_step("b"))
    report = half.take_report()
    assert report is not None
    assert report.loading
    for _, _, handle in client.restores:
        handle.status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == {"b"}
    assert half.take_restored(computing=False) == {"a"}
    assert half.take_restored(computing=False) == set()
    assert half.take_report() is None, "nothing is left to ask for"


def test_what_the_scheduler_started_at_once_and_fails_is_reported_with_a_step(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = make()
    half.start_at_once(load_step("a").loads[0])
    client.restores[0][2].status = RestoreStatus.FAILED
    assert half.take_restored(computing=False) == set()
    assert run(half, StepMetadata()).received == {"a"}
    assert half.take_invalid_blocks() == {3, 4}

    def broken() -> None:
        raise RuntimeError("no event")

    monkeypatch.setattr(half, "_point", broken)
    half.start_at_once(load_step("b").loads[0])
    assert run(half, StepMetadata()).received == {"b"}, "a load that could not be started is computed too"


def test_a_restore_at_once_is_the_first_thing_that_an_engine_does(make: Make, client: CopyingClient) -> None:
    half = make()
    assert half._adopted is None, "no step has run yet"
    half.start_at_once(load_step("a").loads[0])
    assert len(client.restores) == 1


@pytest.fixture
def landing(make: Make, client: CopyingClient) -> worker.WorkerHalf:
    """A worker whose next step begins before its restore is over."""
    half = make()
    half.start_at_once(load_step("a").loads[0], by_layer=True)
    handle = client.restores[0][2]
    assert handle.by_layer
    handle.handed_over = True
    assert half.take_restored(computing=False, alone="a") == {"a"}
    assert half.landing == "a"
    handle.status, handle.layers = RestoreStatus.DONE, 2
    return half


def test_a_step_waits_for_each_layer_of_a_restore_that_lands(landing: worker.WorkerHalf, client: CopyingClient) -> None:
    landing.begin_landing(lambda: True, computing=True)
    assert client.waited == []
    for layer in ("a", "b"):
        landing.wait_layer(layer)
    assert client.waited == [0, 1]
    landing.start_saves(StepMetadata())
    assert client.waited == [0, 1, -1] and not landing.landing and not landing.take_landing_failed()
    landing.wait_layer("a")
    assert len(client.waited) == 3, "of steps that follow none waits"


@pytest.mark.parametrize("computing", [False, True])
def test_a_step_that_names_no_layer_waits_for_all_before(
    landing: worker.WorkerHalf, client: CopyingClient, caplog: pytest.LogCaptureFixture, computing: bool
) -> None:
    landing.begin_landing(lambda: not computing, computing=computing)
    assert client.waited == [-1]
    run(landing, StepMetadata())
    assert not landing.take_landing_failed() and not caplog.records


def test_a_step_that_computes_nothing_waits_for_all_before(
    landing: worker.WorkerHalf, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "names_layers", lambda: True)
    connector = OrbitKVConnector.__new__(OrbitKVConnector)
    connector._worker = landing
    connector.bind_connector_metadata(StepMetadata(computing=False))
    assert client.waited == [-1]


def test_a_layer_that_reads_anothers_pages_waits_for_all(landing: worker.WorkerHalf, client: CopyingClient) -> None:
    landing.begin_landing(lambda: True, computing=True)
    landing.wait_layer("a")
    landing.wait_layer("reader")
    landing.wait_layer("b")
    assert client.waited == [0, -1, 1]
    run(landing, StepMetadata())
    assert not landing.take_landing_failed()


@pytest.mark.guard("vllm-landed-only")
@pytest.mark.parametrize("how", ["a layer is missing", "it fails", "a defect", "another vllm"])
def test_what_a_landing_that_fails_had_computed_is_not_kept(
    landing: worker.WorkerHalf, client: CopyingClient, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = client.restores[0][2]
    if how == "a layer is missing":
        handle.layers = 1
    elif how == "it fails":
        handle.status = RestoreStatus.FAILED
    elif how == "a defect":
        monkeypatch.setattr(client, "wait_layer", lambda *_: 1 / 0)
    landing.begin_landing(lambda: bool(1 / (how != "another vllm")), computing=True)
    for layer in ("a", "b"):
        landing.wait_layer(layer)
    landing.start_saves(StepMetadata(saves=[Save(5, "a", HASH, (3,))]))
    report = landing.take_report()
    assert report is not None and report.ended == {5: 1} and not report.kept and not client.saves
    assert landing.take_landing_failed() == "a" and not landing.take_landing_failed()
    landing.start_saves(StepMetadata(saves=[Save(6, "a", HASH, (3,))]))
    assert client.saves, "those of later steps are"


def test_an_engine_that_does_not_say_what_it_reads_lands_none_any_more(
    landing: worker.WorkerHalf, client: CopyingClient, caplog: pytest.LogCaptureFixture
) -> None:
    landing.begin_landing(lambda: True, computing=True)
    landing.wait_layer("a")
    landing.wait_layer("reader")
    run(landing, StepMetadata())
    assert landing.take_landing_failed() and "does not say which layer it reads" in caplog.text
    landing.start_at_once(load_step("b").loads[0], by_layer=True)
    assert not client.restores[1][2].by_layer


def test_a_restore_lands_only_alone_and_when_all_of_it_is_with_the_gpu(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, clock = make(), Clock(monkeypatch)
    half.start_at_once(load_step("a").loads[0], by_layer=True)
    handle = client.restores[0][2]
    assert half.take_restored(computing=False, alone="a") == set() and clock.slept
    clock.now += restores.HAND_OVER_S
    slept = clock.slept
    assert half.take_restored(computing=False, alone="a") == set() and clock.slept == slept, "it waits no longer"
    handle.handed_over = True
    assert half.take_restored(computing=False) == set(), "its request is not alone, or is not there any more"
    assert half.take_restored(computing=False, alone="other") == set()
    run(half, load_step("b"))
    assert half.take_restored(computing=False, alone="a") == set(), "another one runs"
    client.restores[1][2].status = RestoreStatus.DONE
    assert run(half, StepMetadata()).received == {"b"}
    assert half.take_restored(computing=False, alone="a") == {"a"} and half.landing


def test_where_nobody_says_that_all_of_a_restore_is_with_the_gpu_none_is_copied_layer_by_layer(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, _ = make(), Clock(monkeypatch)

    def by_layer(name: str, *, told: bool) -> bool:
        half.start_at_once(load_step(name).loads[0], by_layer=True)
        handle = client.restores[-1][2]
        handle.status, handle.handed_over = RestoreStatus.DONE, told
        assert half.take_restored(computing=False) == {name}
        return handle.by_layer

    for told in (False, False, True, False, False, False):
        assert by_layer("a", told=told)
    assert not by_layer("a", told=False)


def test_small_restores_on_a_gpu_are_not_copied_layer_by_layer(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = make()
    for size, by_layer in ((worker.BY_LAYER_BYTES - 1, False), (worker.BY_LAYER_BYTES, True)):
        monkeypatch.setattr(half, "_gpu_bytes", lambda load, size=size: size)
        half.start_at_once(load_step(f"of {size}").loads[0], by_layer=True)
        assert client.restores[-1][2].by_layer is by_layer


def test_a_worker_is_found_by_its_engine_where_it_is_the_only_one(make: Make) -> None:
    half = make()
    assert together.worker_of(half.instance) is half
    assert together.worker_of(Instance("engine", "another")) is None
    other = make()
    assert together.worker_of(half.instance) is None, "two of ours under MultiConnector: which is meant?"
    other.shutdown()
    assert together.worker_of(half.instance) is half


def test_a_failed_load_is_reported_at_once_beside_running_requests(make: Make, client: CopyingClient) -> None:
    half = make()
    handles = start_loads(half, client, "a", "b")
    handles["a"].status = RestoreStatus.FAILED
    assert run(half, StepMetadata(computing=True)).received == {"a"}
    assert half.take_invalid_blocks() == {3, 4}


@pytest.mark.parametrize("status", [RestoreStatus.FAILED, RestoreStatus.CANCELLED])
def test_a_failed_load_names_its_blocks(make: Make, client: CopyingClient, status: RestoreStatus) -> None:
    half = make()
    run(half, load_step())
    client.restores[0][2].status = status
    assert run(half, StepMetadata()).received == {"a"}
    assert half.take_invalid_blocks() == {3, 4}
    report = half.take_report()
    assert report is not None
    assert report.failed_loads == {"a"}


@pytest.mark.guard("vllm-boot")
def test_a_lease_of_an_earlier_agent_starts_no_restore(make: Make, client: CopyingClient) -> None:
    half = make()
    assert run(half, load_step(boot="boot-before")).received == {"a"}
    assert not client.restores
    assert half.take_invalid_blocks() == {3, 4}


def test_a_load_without_leases_fails_at_once(make: Make, client: CopyingClient) -> None:
    half = make()
    assert run(half, load_step(leases=())).received == {"a"}
    assert half.take_invalid_blocks() == {3, 4}


def test_a_load_that_does_not_begin_is_given_up_when_patience_ends(make: Make, client: CopyingClient) -> None:
    half = make()
    assert run(half, load_step(patience_s=0.0)).received == set(), "it is being copied: it drains"
    client.queued = True
    assert run(half, StepMetadata()).received == {"a"}


def test_each_rank_gets_its_own_lease(make: Make, client: CopyingClient) -> None:
    half = make(rank=1, ranks=2)
    run(half, load_step(leases=(7, 8)))
    assert client.restores[0][0] == 8


def test_a_worker_without_an_agent_still_answers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_agent(*_: Any) -> CopyingClient:
        raise OrbitKVError(ErrorKind.UNAVAILABLE, "no OrbitKV agent at /nowhere.sock")

    monkeypatch.setattr(worker, "connect", no_agent)
    with pytest.raises(RuntimeError, match=r"no OrbitKV agent at /nowhere\.sock"):
        make()
    half = make(on_missing="run")
    step = StepMetadata(loads=load_step().loads, saves=save_step("b").saves, held=frozenset({"b"}))
    results = run(half, step)
    assert results.received == {"a"}
    assert results.sent == {"b"}
    report = half.take_report()
    assert report is not None
    assert report.ended == {1: 1}
    assert report.failed_loads == {"a"}


def test_a_refused_identity_turns_the_cache_off_and_the_engine_starts(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(layout: Any) -> Identity:
        raise IdentityRefusedError("dummy weights")

    real = worker.WorkerHalf.__init__

    def build(self: worker.WorkerHalf, *args: Any, **options: Any) -> None:
        config, instance, ranks, _ = args
        real(self, config, instance, ranks, refused, **options)

    monkeypatch.setattr(worker.WorkerHalf, "__init__", build)
    half = make()
    assert half._attachment.off == "dummy weights"
    run(half, save_step("a"))
    assert not client.saves
    assert half.take_report() is not None


def test_late_attachment_proves_the_layout_by_the_first_computed_block(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_proven", set())
    half = make()
    client.proof_required = True
    half._attachment.renew(half._attachment.published, "test")  # type: ignore[arg-type]
    _until(lambda: half._attachment.published is not None)
    assert client.used == [False, True]
    run(half, save_step("a"))
    _until(lambda: bool(client.proofs))
    assert client.proofs == [(True, "by a computed block")]
    assert len(client.saves) == 1


def test_wrong_strides_are_caught_by_the_first_computed_block(
    make: Make, client: CopyingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_proven", set())
    half = make()
    client.proof_required = True
    layout = half._layout
    assert layout is not None
    for group in layout.groups:
        group.layers[0].block_stride //= 2
    for views in layout.views:
        for view in views:
            view.copy_(torch.rand(view.shape).to(view.dtype))
    half._attachment.renew(half._attachment.published, "test")  # type: ignore[arg-type]
    _until(lambda: half._attachment.published is not None)
    run(half, save_step("a"))
    assert not client.saves, "nothing of an unproven layout is kept"
    report = half.take_report()
    assert report is not None
    assert report.ended
    _until(lambda: bool(client.proofs))
    proven, detail = client.proofs[0]
    assert not proven
    assert "layer a" in detail
    assert "strides" in detail
    _until(lambda: bool(half._attachment.off))
    run(half, save_step("b", first=5))
    assert not client.saves


def test_turned_off_workers_still_answer(client: CopyingClient) -> None:
    half = worker.WorkerHalf(
        PluginConfig(), Instance("engine", "nonce"), Ranks(), lambda layout: Identity("digest", "a model", {})
    )
    half.turn_off("layer a is not one piece")
    assert run(half, load_step()).received == {"a"}
    run(half, save_step("b"))
    assert half.take_report() is not None


def _until(condition: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
