"""What the scheduler's half knows of each request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orbitkv.client import BlockHashes, QueryReady

logger = logging.getLogger("vllm.orbitkv")

UNLIMITED = 1 << 60


class Phase(Enum):
    """Where a request's lookup stands."""

    IDLE = "idle"
    """Not asked, or what was asked does not matter any more."""
    LOADING = "loading"
    """Asked; nothing is promised."""
    READY = "ready"
    """Pages are leased."""
    RESTORING = "restoring"
    """Blocks are allocated and the lease is on its way to the workers."""
    SETTLED = "settled"
    """Decided; not asked again until the request is preempted."""


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.IDLE, Phase.LOADING, Phase.READY, Phase.RESTORING, Phase.SETTLED}),
    Phase.LOADING: frozenset({Phase.LOADING, Phase.READY, Phase.IDLE, Phase.RESTORING, Phase.SETTLED}),
    Phase.READY: frozenset({Phase.READY, Phase.LOADING, Phase.IDLE, Phase.RESTORING, Phase.SETTLED}),
    Phase.RESTORING: frozenset({Phase.SETTLED}),
    Phase.SETTLED: frozenset({Phase.SETTLED, Phase.IDLE}),
}


class IllegalTransitionError(Exception):
    """A defect here: a lookup was to go where it cannot."""


@dataclass(slots=True)
class Wishes:
    """What a request asks for itself in its `kv_transfer_params`."""

    load: bool = True
    save: bool = True
    max_save_tokens: int = UNLIMITED

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> Wishes:
        """Read `orbitkv.load`, `orbitkv.save` and `orbitkv.max_save_tokens`; what cannot be read is left out."""
        wishes = cls()
        if not params:
            return wishes
        for name, kind in (("load", bool), ("save", bool), ("max_save_tokens", int)):
            value = params.get(f"orbitkv.{name}")
            if value is None:
                continue
            if type(value) is kind and (kind is bool or value >= 0):
                setattr(wishes, name, value)
            else:
                logger.warning("OrbitKV: kv_transfer_params: orbitkv.%s = %r is ignored", name, value)
        return wishes


@dataclass(slots=True, eq=False)
class Tracked:
    """One request of the engine, from its arrival to its end.

    Attributes:
        request: vLLM's own object.
        may_load: it may be asked for.
        save_blocks: at most so many leading blocks are kept.
        phase: of its lookup.
        preemptions: the engine's count when the lookup began: another count is another lookup.
        first: block from which on pages were asked for.
        last: block before which they end.
        first_token: the token of `first`.
        hashes: the hashes asked for.
        ready: the answer while READY.
        held_until: how long the engine may be made to wait for an answer of ours, 0.0 while it does not wait.
        patience_s: what is left of that for the restore to begin.
        ask_after: not again before.
        saved: blocks below this were handed over to be kept, or were restored.
        restored: [first, end) of the blocks that were restored, not saved again.
        saves: saves that have not ended.
        counted: its tokens were counted by source.
    """

    request: Any
    may_load: bool
    save_blocks: int
    phase: Phase = Phase.IDLE
    preemptions: int = 0
    first: int = -1
    last: int = -1
    first_token: int = -1
    hashes: BlockHashes | None = None
    ready: QueryReady | None = None
    held_until: float = 0.0
    patience_s: float = 0.0
    ask_after: float = 0.0
    saved: int = 0
    restored: tuple[int, int] = (0, 0)
    saves: set[int] = field(default_factory=set)
    counted: bool = False

    @property
    def id(self) -> str:
        """The request's id."""
        return str(self.request.request_id)

    def to(self, phase: Phase) -> None:
        """Move the lookup on.

        Raises:
            IllegalTransitionError: it cannot go there.
        """
        if phase not in _NEXT[self.phase]:
            raise IllegalTransitionError(f"request {self.id}: no lookup goes from {self.phase.value} to {phase.value}")
        self.phase = phase
        if phase is not Phase.READY:
            self.ready = None
