"""What the two halves of the connector tell each other: scheduler to workers once a step, and back with its output."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class Load:
    """Fill a waiting request's blocks from a lease.

    Attributes:
        request_id: the waiting request.
        boot_id: the agent's boot that gave the leases; under another one they mean nothing.
        leases: one a shard, in rank order; empty: the load was given up, report it as failed.
        blocks: destination of each leased page, -1 for none.
        patience_s: how long it may take to begin; then the request is computed.
    """

    request_id: str
    boot_id: str
    leases: tuple[int, ...]
    blocks: tuple[int, ...]
    patience_s: float = 0.0


@dataclass(frozen=True)
class Save:
    """Keep these blocks, which are full, computed (after this step) and accepted.

    Attributes:
        number: the scheduler's number for it, unique in the engine.
        request_id: the request that holds the blocks.
        hashes: engine hashes, one after another; `blocks` says how many.
        blocks: engine block ids, page by page.
    """

    number: int
    request_id: str
    hashes: bytes
    blocks: tuple[int, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work for every worker.

    Attributes:
        loads: restores to start.
        saves: saves to start after this step's compute.
        preempted: requests whose blocks are given to others in this step.
        held: finished requests whose blocks stay until their saves have left them.
        computing: the step computes something.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    computing: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What ended on the workers since their last report.

    Attributes:
        ended: save number -> workers on which it ended, in whatever way.
        kept: save number -> workers on which all of its pages became visible (or were there before).
        failed_loads: requests whose load failed on a worker; their blocks are recomputed.
        loading: the scheduler's half is to ask its worker for restores that ended (see `together`).
    """

    ended: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    failed_loads: set[str] = field(default_factory=set)
    loading: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Add another worker's report of the same step."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            ended=_sum(self.ended, other.ended),
            kept=_sum(self.kept, other.kept),
            failed_loads=self.failed_loads | other.failed_loads,
            loading=self.loading or other.loading,
        )

    def __bool__(self) -> bool:
        return bool(self.ended or self.failed_loads or self.loading)


def _sum(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    total = dict(left)
    for number, count in right.items():
        total[number] = total.get(number, 0) + count
    return total
