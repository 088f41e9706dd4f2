"""Where the scheduler and the only worker of an engine live in one process, as on one GPU, its two halves meet here.

Then a restore starts as soon as its blocks are allocated, and its end reaches the scheduler in the round in which it is
seen. By each step's metadata and output both come a round of the engine's loop later, with a sleep of a millisecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from orbitkv.protocol.messages import Instance

if TYPE_CHECKING:
    from .worker import WorkerHalf

_workers: WeakSet[WorkerHalf] = WeakSet()
"""The workers of this process. Made, and asked for, in the thread that also schedules."""


def enter(worker: WorkerHalf) -> None:
    """This worker is in this process."""
    _workers.add(worker)


def leave(worker: WorkerHalf) -> None:
    """This worker is over."""
    _workers.discard(worker)


def worker_of(instance: Instance) -> WorkerHalf | None:
    """An engine's worker, if it is in this process; None too if its MultiConnector has several of ours."""
    found = [worker for worker in _workers if worker.instance == instance]
    return found[0] if len(found) == 1 else None
