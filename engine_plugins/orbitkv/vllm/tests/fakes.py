"""An agent in memory, as the scheduler's half sees it through its client, and the workers of an engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orbitkv.client import (
    BlockHashes,
    ErrorKind,
    Instance,
    InstanceState,
    OrbitKVError,
    QueryLoading,
    QueryReady,
)
from orbitkv.protocol.messages import Events, LeasedPages
from orbitkv.vllm.metadata import Load, Save, StepMetadata, WorkerReport


@dataclass
class FakeAgent:
    """What the agent holds and how it behaves.

    Attributes:
        pages: hashes that can be restored.
        loading: queries stay without an answer.
        silent: no call is answered.
        gone: every call fails.
        serving: instances may hit.
        shards: leases of an answer.
        engines: what engines said of themselves.
        earlier: it is of the release before, which does not know that.
    """

    pages: set[bytes] = field(default_factory=set)
    loading: bool = False
    silent: bool = False
    gone: bool = False
    serving: bool = True
    shards: int = 1
    boots: int = 0
    leases: set[int] = field(default_factory=set)
    leased: dict[int, list[bytes]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    queries: list[tuple[str, int]] = field(default_factory=list)
    generation: int = 0
    busy: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)
    waited_ms: list[float] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    earlier: bool = False


class _Words:
    """Records that say whether the agent is loading."""

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent

    def tobytes(self) -> bytes:
        return int(self.agent.loading).to_bytes(8, "little")


class FakeClient:
    """The client's calls that the scheduler's half makes."""

    _numbers = itertools.count(1)

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        if agent.gone:
            raise OrbitKVError(ErrorKind.UNAVAILABLE, "no OrbitKV agent at /nowhere.sock: there is no such socket")
        self.boot_id = f"boot-{agent.boots}"
        self.lost: OrbitKVError | None = None
        self.options = agent.options
        self.closed = False
        self._ready: dict[str, tuple[list[BlockHashes], QueryReady]] = {}
        self._loading: dict[str, list[BlockHashes]] = {}
        self._changed = False

    def report_engine(self, engine: str) -> None:
        if self.agent.earlier:
            raise OrbitKVError(ErrorKind.INVALID, "the agent cannot read this request")
        self.agent.engines.append(engine)

    def _call(self, timeout_ms: float | None) -> None:
        assert not self.closed, "a closed client was used"
        if self.agent.gone:
            raise OrbitKVError(ErrorKind.UNAVAILABLE, "lost the OrbitKV agent")
        if timeout_ms is not None:
            self.agent.waited_ms.append(timeout_ms)
        if self.agent.silent:
            time.sleep(min(timeout_ms or 0.0, 50.0) / 1000)
            raise OrbitKVError(ErrorKind.TIMEOUT, "the OrbitKV agent did not answer in time")

    def health(self, timeout_ms: float | None = None) -> tuple[bool, str]:
        self._call(timeout_ms)
        return True, ""

    def peer_alive(self) -> bool:
        return not self.agent.gone

    def attach_instance(
        self, instance: Instance, *, key_generation: str = "", events: bool = False, timeout_ms: float | None = None
    ) -> InstanceState:
        self._call(timeout_ms)
        self._changed = False
        return InstanceState(self.agent.serving, "" if self.agent.serving else "no worker has registered", "")

    def instance_changed(self) -> bool:
        return self._changed

    def reset_instance(self, instance: Instance, timeout_ms: float | None = None) -> str:
        self._call(timeout_ms)
        if self.agent.busy:
            raise OrbitKVError(ErrorKind.BUSY, "it still has saves")
        self.agent.generation += 1
        self.agent.pages.clear()
        return f"generation-{self.agent.generation}"

    def take_events(self, instance: Instance, timeout_ms: float | None = None) -> Events | None:
        if not self.agent.removed:
            return None
        gone, self.agent.removed = self.agent.removed, []
        return Events([BlockHashes(gone).wire()], False)

    def query_prefetch(
        self,
        request_id: str,
        hashes: Sequence[BlockHashes],
        *,
        instance: Instance,
        max_wait_ms: int = 2000,
        wait_for_full_prefix: bool = False,
        proof: bool = False,
        timeout_ms: float | None = None,
    ) -> QueryLoading | QueryReady:
        known = self._ready.get(request_id)
        if known is not None and known[0] == list(hashes):
            return known[1]
        self._call(timeout_ms)
        self.cancel_query(request_id, told=False)
        self.agent.queries.append((request_id, len(hashes[0])))
        if self.agent.loading:
            self._loading[request_id] = list(hashes)
            return QueryLoading(True)
        count = 0
        for page_hash in hashes[0]:
            if page_hash not in self.agent.pages:
                break
            count += 1
        if not count:
            return QueryReady(reason="miss")
        leases = tuple(next(self._numbers) for _ in range(self.agent.shards))
        self.agent.leases.update(leases)
        self.agent.leased.update({lease: [hashes[0][i] for i in range(count)] for lease in leases})
        ready = QueryReady(
            leases=leases,
            pages=count,
            boundaries=((1, count, 1),),
            group_pages=(LeasedPages(0, 0, count),),
            bytes=count * 4096,
            tier="dram",
        )
        self._ready[request_id] = (list(hashes), ready)
        return ready

    def query_watch(self, request_id: str) -> Any:
        return _Words(self.agent), 0, 1

    def cancel_query(self, request_id: str, told: bool = True) -> None:
        self._loading.pop(request_id, None)
        known = self._ready.pop(request_id, None)
        if known is not None:
            self.agent.leases.difference_update(known[1].leases)
        if told:
            self.agent.cancelled.append(request_id)

    def close(self) -> None:
        self.closed = True


class FakeWorkers:
    """The workers of an engine: they carry out a step's metadata against the fake agent, when the test lets them.

    Attributes:
        hold_saves: saves do not end.
        hold_commits: they leave their blocks, but do not end.
        hold_loads: loads do not end.
        fail_loads: loads fail.
        instance: of the engine, for a worker that lives in the scheduler's process (see `orbitkv.vllm.together`).
        asked: how its restores were asked for: whether the engine computes, and whether to wait for one.
        by_layer: requests whose restore is copied layer by layer.
        lands: such a restore is still on its way when its request begins.
        lose_landing: it fails then.
        landed: requests whose restore landed.
    """

    def __init__(self, agent: FakeAgent, workers: int = 1) -> None:
        self.agent = agent
        self.workers = workers
        self.instance: Instance | None = None
        self.at_once: set[str] = set()
        self.asked: list[tuple[bool, bool]] = []
        self.hold_saves = self.hold_commits = self.hold_loads = self.fail_loads = False
        self.loads: list[Load] = []
        self.saves: list[Save] = []
        self.started: list[Load] = []
        self.saved: list[Save] = []
        self.by_layer: set[str] = set()
        self.lands = self.lose_landing = False
        self.landing_failed = ""
        self.landing_load: Load | None = None
        self.landed: list[str] = []
        self.preempted: list[frozenset[str]] = []
        self.held: set[str] = set()
        self.void: set[int] = set()

    def restore(self, load: Load) -> None:
        """The bytes of a load arrive; tests that have memory put them there."""

    def keep(self, save: Save) -> None:
        """The bytes of a save are copied."""
        size = len(save.hashes) // len(save.blocks)
        self.agent.pages.update(save.hashes[i : i + size] for i in range(0, len(save.hashes), size))

    def start_at_once(self, load: Load, *, by_layer: bool = False) -> None:
        """As WorkerHalf's."""
        if by_layer:
            self.by_layer.add(load.request_id)
        self.at_once.add(load.request_id)
        self.loads.append(load)
        self.started.append(load)

    def take_landing_failed(self) -> str:
        """As WorkerHalf's."""
        failed, self.landing_failed = self.landing_failed, ""
        return failed

    def take_restored(self, *, computing: bool, wait: bool = True, alone: str = "") -> set[str]:
        """As WorkerHalf's."""
        self.asked.append((computing, wait))
        if self.hold_loads:
            return set()
        if self.lands and alone and len(self.loads) == 1:
            (load,) = self.loads
            if load.request_id == alone and alone in self.by_layer and not self._fails(load):
                self.landing_load = load
                self.loads.remove(load)
                self.at_once.remove(load.request_id)
                return {load.request_id}
        restored = [load for load in self.loads if load.request_id in self.at_once and not self._fails(load)]
        for load in restored:
            self.loads.remove(load)
            self.at_once.remove(load.request_id)
            self.restore(load)
            self.agent.leases.difference_update(load.leases)
        return {load.request_id for load in restored}

    @property
    def landing(self) -> str:
        """As WorkerHalf's."""
        return self.landing_load.request_id if self.landing_load is not None else ""

    def land(self) -> bool:
        """The step that was scheduled reads its pages, layer by layer; return whether all were in place."""
        load, self.landing_load = self.landing_load, None
        if load is None:
            return True
        self.landed.append(load.request_id)
        self.agent.leases.difference_update(load.leases)
        if self.lose_landing:
            self.landing_failed = load.request_id
            return False
        self.restore(load)
        return True

    def _fails(self, load: Load) -> bool:
        return self.fail_loads or not load.leases or not self.agent.leases.issuperset(load.leases)

    def run(self, step: StepMetadata) -> dict[str, Any]:
        """Return the fields of the step's KVConnectorOutput."""
        self.loads += step.loads
        self.started += step.loads
        self.saves += step.saves
        self.saved += step.saves
        if self.landing_failed:
            self.void |= {save.number for save in step.saves}
        self.held |= step.held
        if step.preempted:
            self.preempted.append(step.preempted)
            self.void |= {save.number for save in self.saves if save.request_id in step.preempted}
        report = WorkerReport()
        received: set[str] = set()
        invalid: set[int] = set()
        for load in list(self.loads) if not self.hold_loads else ():
            if self._fails(load):
                report.failed_loads.add(load.request_id)
                invalid.update(block for block in load.blocks if block >= 0)
            elif load.request_id in self.at_once:
                continue
            else:
                self.restore(load)
            self.loads.remove(load)
            self.at_once.discard(load.request_id)
            received.add(load.request_id)
            self.agent.leases.difference_update(load.leases)
        report.loading = bool(self.at_once)
        if not self.hold_saves and not self.hold_commits:
            for save in self.saves:
                report.ended[save.number] = self.workers
                if save.number not in self.void:
                    report.kept[save.number] = self.workers
                    self.keep(save)
            self.saves = []
        sent = self.held - {save.request_id for save in self.saves if not self.hold_commits}
        self.held -= sent
        return {
            "kv_connector_worker_meta": report if report else None,
            "finished_recving": received or None,
            "finished_sending": sent or None,
            "invalid_block_ids": invalid,
        }
