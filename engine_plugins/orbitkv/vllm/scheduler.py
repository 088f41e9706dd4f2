"""The connector's half in the engine's scheduler: what to ask, what to restore, what to keep.

It runs in the engine's loop. It never waits for the agent beyond a step's allowance, and whatever goes wrong with the
cache ends in the same answer: not cached, so the engine computes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orbitkv.client import (
    BlockHashes,
    CacheManagerClient,
    ErrorKind,
    Instance,
    OrbitKVError,
    QueryLoading,
    QueryReady,
)
from orbitkv.config import PluginConfig
from orbitkv.guards import guard

from . import together
from .link import SchedulerLink
from .loading import Loading
from .metadata import Load, Save, StepMetadata, WorkerReport
from .requests import UNLIMITED, Phase, Tracked, Wishes
from .served import request_off_reason
from .stats import OrbitKVStats

if TYPE_CHECKING:
    from .events import CacheEvents
    from .worker import WorkerHalf

logger = logging.getLogger("vllm.orbitkv")

MISS_IS_OLD_S = 0.05
"""A request that waits for its turn is asked for again after this long."""

LEAST_PATIENCE_S = 0.1
"""A restore is given this long to begin, even if the lookup took all of `max_wait_ms`."""
SAVE_BLOCKS = 128
"""Most blocks in one save, so that the agent is not held up for others."""
MOST_REST_TOKENS = 512
"""A request that has more than this to compute itself begins after its restore: the step is so long that others would
wait for it in vain, and the restore is little of it."""
NOT_CACHED: tuple[int, bool] = (0, False)
ASK_AGAIN: tuple[None, bool] = (None, False)


@dataclass
class SentSave:
    """A save on its way: handed to the workers and not ended on each of them."""

    tracked: Tracked
    pages: int
    remaining: int
    kept: int
    planned: list[tuple[bytes, Any]]


class SchedulerHalf:
    """Lookups, loads and saves of one engine.

    Args:
        config: the plugin's settings.
        instance: this engine incarnation.
        block_tokens: tokens of a block.
        workers: workers that report about each save.
        may_load: the engine's role lets it take from the cache.
        may_save: the engine's role lets it give to the cache.
        gate: the engine does not schedule restored requests first, so that other lookups have to wait for them.
        events: collects KV events, None when the engine publishes none.

    Attributes:
        instance: this engine incarnation.
        hears_early: `EarlyScheduler`, if that is the engine's, is to ask for restores that ended.
        lands: requests may begin while their restores land: it is wanted, and `EarlyScheduler` can take back a step
            that read what was not there.
    """

    def __init__(
        self,
        config: PluginConfig,
        instance: Instance,
        *,
        block_tokens: int,
        workers: int,
        may_load: bool = True,
        may_save: bool = True,
        gate: bool = False,
        events: CacheEvents | None = None,
    ) -> None:
        self.instance = instance
        self.hears_early = True
        self.lands = False
        self._block_tokens = block_tokens
        self._workers = workers
        self._role_loads = may_load
        self._role_saves = may_save
        self._gate = gate
        self._events = events
        self.link = SchedulerLink(config, instance, events, self._forget_lookups)
        self.stats = OrbitKVStats()
        self._allowance = self.link.allowance
        self._cache_manager: Any = None
        self._tracked: dict[str, Tracked] = {}
        self._loading = Loading()
        self._restoring: dict[str, Tracked] = {}
        self._awaiting_compute: set[str] = set()
        self._saves: dict[int, SentSave] = {}
        self._save_number = 0
        self._held: set[str] = set()
        self._loads: list[Load] = []
        self._newly_held: set[str] = set()
        self._computing = False
        self._asked_early = False  # by `EarlyScheduler`, for restores that ended
        self._alone = ""  # the only request that it had then
        self._saves_until = 0.0
        self._told_late: set[str] = set()
        self._levels: dict[str, int] = {}
        self._trips = 0

    def start(self) -> None:
        """Attach; see `SchedulerLink.start`."""
        self.link.start()

    def shutdown(self) -> None:
        """Leave the agent."""
        self.link.shutdown()

    # --- requests

    def bind_cache_manager(self, cache_manager: Any) -> None:
        """Take the engine's KV cache manager: it knows which blocks a request has."""
        self._cache_manager = cache_manager

    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        served = not request_off_reason(request)
        wishes = Wishes.of(request.kv_transfer_params)
        save_tokens = wishes.max_save_tokens if served and wishes.save and self._role_saves else 0
        if not self.link.config.save_decode:
            save_tokens = min(save_tokens, request.num_prompt_tokens)
        self._tracked[request.request_id] = Tracked(
            request,
            may_load=served and wishes.load and self._role_loads and not request.skip_reading_prefix_cache,
            save_blocks=min(save_tokens, UNLIMITED) // self._block_tokens,
            preemptions=request.num_preemptions,
        )

    def forget(self, request_id: str) -> None:
        """The cache is off for this request from now on: something went wrong with it."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.may_load = False
            tracked.save_blocks = 0
            self._withdraw(tracked)

    # --- lookups

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own can be restored; see the connector's interface.

        Asking again changes nothing. While a query is loading the answer costs no system call.
        """
        request_id = request.request_id
        if self._loading.still.get(request_id) == num_computed_tokens:
            return ASK_AGAIN
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return NOT_CACHED
        if not self._allowance.now:
            self._begin_step()
            if self._loading.still.get(request_id) == num_computed_tokens:
                return ASK_AGAIN
        return self._look_up(tracked, num_computed_tokens)

    def _look_up(self, tracked: Tracked, computed: int) -> tuple[int | None, bool]:
        request = tracked.request
        if request.num_preemptions != tracked.preemptions:
            self._restart(tracked)
        if not tracked.may_load or tracked.phase in (Phase.SETTLED, Phase.RESTORING):
            return NOT_CACHED
        if (
            self._gate
            and self._awaiting_compute
            and tracked.id not in self._awaiting_compute
            and guard("vllm-admission")
        ):
            return ASK_AGAIN
        link = self.link
        if link.client is None or not link.serving or link.allowance.open or link.config.mode == "save_only":
            return self._not_cached(tracked)
        size = self._block_tokens
        first = computed // size
        # The engine needs the logits of the last token. It computes that token's whole block, as after a hit in its own
        # cache: alone the token would go through other kernels, and log probabilities would change by some hundredths.
        last = min((request.num_tokens - 1) // size, len(request.block_hashes))
        if last <= first or (last - first) * size < self.link.config.min_load_tokens:
            return self._not_cached(tracked)
        now = self._allowance.now
        if not tracked.held_until:
            tracked.held_until = now + self.link.config.max_wait_ms / 1000
        elif now >= tracked.held_until and guard("vllm-max-wait"):
            self.stats.add("query_waits_exceeded")
            self._withdraw(tracked)
            tracked.to(Phase.SETTLED)
            return NOT_CACHED
        if (tracked.first, tracked.last) != (first, last) or tracked.hashes is None:
            tracked.first, tracked.last, tracked.first_token = first, last, computed
            tracked.hashes = BlockHashes(request.block_hashes[first:last])
        elif tracked.phase is Phase.IDLE and now < tracked.ask_after:
            return self._not_cached(tracked)
        if not self._allowance.left_s:
            return ASK_AGAIN
        return self._ask(tracked, link.client, tracked.hashes)

    def _not_cached(self, tracked: Tracked) -> tuple[int, bool]:
        self._withdraw(tracked)
        tracked.held_until = 0.0
        return NOT_CACHED

    def _ask(self, tracked: Tracked, client: CacheManagerClient, hashes: BlockHashes) -> tuple[int | None, bool]:
        self._loading.discard(tracked.id)
        left_s = tracked.held_until - self._allowance.now
        if tracked.phase is Phase.IDLE:
            self.stats.add("queries")
        try:
            answer = self._allowance.call(
                lambda timeout_ms: client.query_prefetch(
                    tracked.id,
                    [hashes],
                    instance=self.instance,
                    max_wait_ms=int(max(0.0, left_s) * 1000),
                    wait_for_full_prefix=self.link.config.wait_for_full_prefix,
                    timeout_ms=timeout_ms,
                )
            )
        except OrbitKVError as error:
            self.link.failed(error)
            if error.kind is ErrorKind.TIMEOUT and tracked.phase is Phase.IDLE:
                tracked.to(Phase.LOADING)  # it may be: who knows what the agent holds
            if self._allowance.open:
                self._loading.end_step()
            if error.kind is ErrorKind.TIMEOUT and not self._allowance.open:
                return ASK_AGAIN  # perhaps it was only late
            return self._not_cached(tracked)
        if isinstance(answer, QueryLoading):
            tracked.to(Phase.LOADING)
            watch = client.query_watch(tracked.id)
            if watch is not None:
                self._loading.add(tracked.id, tracked.first_token, watch, tracked.held_until)
            return ASK_AGAIN
        pages = self._restorable_pages(answer, len(hashes))
        if pages == 0 or pages * self._block_tokens < self.link.config.min_load_tokens:
            tracked.ask_after = self._allowance.now + MISS_IS_OLD_S
            if answer.leases:
                tracked.to(Phase.READY)  # and back at once, which returns the leases
            return self._not_cached(tracked)
        tracked.to(Phase.READY)
        tracked.patience_s = max(LEAST_PATIENCE_S, tracked.held_until - self._allowance.now)
        tracked.held_until = 0.0  # from here on it waits for the engine's blocks, not for us
        tracked.ready = answer
        return pages * self._block_tokens, True

    def _restorable_pages(self, ready: QueryReady, asked: int) -> int:
        """The largest legal boundary that every shard has leased and every group covers, in pages; 0 for none."""
        if not guard("vllm-legal-boundary"):
            return asked
        if len(ready.leases) != self._workers or not ready.group_pages:
            return 0
        covered = min(part.count if part.first == 0 else 0 for part in ready.group_pages)
        best = 0
        for first, last, step in ready.boundaries:
            top = min(last, covered, asked)
            if top >= first:
                best = max(best, top - (top - first) % step)
        return best

    def update_state_after_alloc(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """The engine allocated blocks, to be filled with `num_external_tokens` of ours (0: with none)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if num_external_tokens == 0:
            if tracked.phase in (Phase.LOADING, Phase.READY):
                self._withdraw(tracked)
            return
        load = self._load(tracked, block_ids, num_external_tokens)
        if load.leases:
            self._start(tracked, load)
        else:
            self.fail_load(tracked.id, block_ids, num_external_tokens)

    def fail_load(self, request_id: str, block_ids: list[int], num_external_tokens: int) -> None:
        """The engine waits for a load that cannot be: the workers report it as failed, and the engine computes."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.phase is Phase.RESTORING:
            return
        self._withdraw(tracked)
        if tracked.phase is Phase.SETTLED:
            tracked.to(Phase.IDLE)
        end = tracked.first + num_external_tokens // self._block_tokens
        self._start(tracked, Load(request_id, "", (), tuple(block_ids[tracked.first : end])))

    def _start(self, tracked: Tracked, load: Load) -> None:
        tracked.to(Phase.RESTORING)
        self._restoring[tracked.id] = tracked
        self._awaiting_compute.add(tracked.id)
        self.stats.add("restores")
        # Beside computing the workers start it behind the launch of the step: that time is no loss for others then.
        worker = self._worker_here() if not self._computing else None
        if worker is not None:
            worker.start_at_once(load, by_layer=self._may_land(tracked))
        else:
            self._loads.append(load)

    def _may_land(self, tracked: Tracked) -> bool:
        """Whether the request may begin while its restore lands: nothing else is scheduled until its step is over."""
        rest = tracked.request.num_tokens - tracked.restored[1] * self._block_tokens
        return self.lands and self.hears_early and self._alone == tracked.id and rest <= MOST_REST_TOKENS

    def _worker_here(self) -> WorkerHalf | None:
        """The engine's only worker, if it lives in this process."""
        return together.worker_of(self.instance) if self._workers == 1 else None

    def _load(self, tracked: Tracked, block_ids: list[int], num_external_tokens: int) -> Load:
        """Bind the lease to the blocks. What does not fit together any more becomes a load that fails at once."""
        size, first = self._block_tokens, tracked.first
        ready, hashes, client = tracked.ready, tracked.hashes, self.link.client
        pages = num_external_tokens // size
        blocks = tuple(block_ids[first : first + pages])
        given_up = Load(tracked.id, "", (), blocks)
        if ready is None or hashes is None or client is None or pages * size != num_external_tokens:
            return given_up
        if guard("vllm-hash-slice") and (
            pages > ready.pages
            or len(blocks) != pages
            or b"".join(tracked.request.block_hashes[first : first + pages]) != hashes[:pages].blob
        ):
            logger.warning(
                "OrbitKV: request %s changed between its lookup and its allocation; it is computed", tracked.id
            )
            return given_up
        tracked.restored = (first, first + pages)
        # A lease is used for all of its pages; those that the engine has no block for are skipped.
        skipped = (-1,) * (ready.pages - pages)
        return Load(tracked.id, client.boot_id, ready.leases, blocks + skipped, tracked.patience_s)

    # --- step

    def build_step_metadata(self, scheduler_output: Any) -> StepMetadata:
        """Return what the workers do in this step."""
        if not self._allowance.now:
            self._begin_step()
        step = StepMetadata(
            loads=self._loads,
            preempted=frozenset(scheduler_output.preempted_req_ids or ()),
            held=frozenset(self._newly_held),
            computing=bool(scheduler_output.num_scheduled_tokens),
        )
        self._loads, self._newly_held = [], set()
        self._computing = step.computing
        self._allowance.end()
        self._loading.end_step()
        if self._awaiting_compute:
            self._awaiting_compute.difference_update(scheduler_output.num_scheduled_tokens)
        try:
            self._plan(step, scheduler_output)
        except Exception:
            # What is in the step already must reach the workers, whatever becomes of this step's saves.
            if not guard("vllm-contained"):
                raise
            logger.exception("OrbitKV: saves of a step are left out")
            self.stats.add("errors")
        return step

    def _begin_step(self) -> None:
        self.link.begin_step()
        if not self._allowance.open:
            self._loading.begin_step(self._allowance.now)

    def _plan(self, step: StepMetadata, scheduler_output: Any) -> None:
        for request_id in step.preempted:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.request.num_preemptions != tracked.preemptions:
                self._restart(tracked)
        keep = self.link.client is not None and not self._allowance.open
        drafts = scheduler_output.scheduled_spec_decode_tokens
        size = self._block_tokens
        computed_only = guard("vllm-computed-only")
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if not tracked.counted:
                self._count_sources(tracked)
            if tracked.saved >= tracked.save_blocks or not keep:
                continue
            request = tracked.request
            # Only accepted tokens have a hash, and of them only what this step and those before it compute.
            full = min(len(request.block_hashes), tracked.save_blocks)
            if computed_only:
                full = min(full, (request.num_computed_tokens + scheduled - len(drafts.get(request_id, ()))) // size)
            if full > tracked.saved:
                self._plan_saves(step, tracked, full)

    def _plan_saves(self, step: StepMetadata, tracked: Tracked, full: int) -> None:
        """Hand over the blocks up to `full`, but not those that came from the cache."""
        self._saves_until = time.monotonic() + self.link.config.max_wait_ms / 1000
        request = tracked.request
        block_ids = self._cache_manager.get_block_ids(tracked.id)[0]
        low, high = tracked.restored
        for first, end in ((tracked.saved, min(full, max(low, tracked.saved))), (max(high, tracked.saved), full)):
            for start in range(first, end, SAVE_BLOCKS):
                stop = min(start + SAVE_BLOCKS, end)
                hashes = request.block_hashes[start:stop]
                self._save_number += 1
                number = self._save_number
                step.saves.append(Save(number, tracked.id, b"".join(hashes), tuple(block_ids[start:stop])))
                planned = self._events.plan(request, start, hashes) if self._events is not None else []
                self._saves[number] = SentSave(tracked, stop - start, self._workers, 0, planned)
                tracked.saves.add(number)
                self.stats.add("saves")
        tracked.saved = full

    def _count_sources(self, tracked: Tracked) -> None:
        """Count a request's prompt by source, as vLLM itself does: once, when it is first computed."""
        tracked.counted = True
        prefill = tracked.request.prefill_stats
        if prefill is not None and prefill.num_prompt_tokens:
            self.stats.add("prompt_tokens_hbm", prefill.num_local_cached_tokens)
            self.stats.add("prompt_tokens_restored", prefill.num_external_cached_tokens)
            self.stats.add("prompt_tokens_computed", prefill.num_computed_tokens)

    def update_connector_output(self, output: Any) -> None:
        """Take the workers' reports of a step.

        vLLM shows us a step's output before it looks itself at the requests that were received. Those whose restore a
        worker in this process started at once are added here: what ended by now, not only by the end of that step.
        """
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._take_report(report)
            worker = self._worker_here() if report.loading and not self._asked_early else None
            restored = worker.take_restored(computing=self._computing) if worker is not None else set()
            self._told_late |= restored
        if self._told_late:
            output.finished_recving = self._told_late | (output.finished_recving or set())
            self._told_late = set()
        for request_id in output.finished_recving or ():
            tracked = self._restoring.pop(request_id, None)
            if tracked is None:
                continue
            tracked.to(Phase.SETTLED)
            if self.link.client is not None:
                # The lease was used; or it was not, and returns by this.
                self.link.client.cancel_query(tracked.id)
        for request_id in output.finished_sending or ():
            self._held.discard(request_id)

    def take_restored(self, *, computing: bool, others_wait: bool, alone: str) -> set[str]:
        """Return the requests whose restore a worker in this process started at once, and which ended or lands.

        What ends in the next two milliseconds is waited for, unless the engine computes or has others to schedule. Only
        the restore of a request that is alone lands.
        """
        self._asked_early, self._alone = True, alone
        worker = self._worker_here() if self._restoring else None
        if worker is None:
            return set()
        restored = worker.take_restored(computing=computing, wait=not others_wait, alone=alone)
        if worker.landing:
            self.stats.add("restores_overlapped")
        return restored

    @property
    def landing(self) -> str:
        """The request for whose restore the step that is scheduled now waits, layer by layer; "" when there is none."""
        worker = self._worker_here() if self.lands else None
        return worker.landing if worker is not None else ""

    def take_landing_failed(self) -> bool:
        """Return whether a step read what was not in place, since the last call."""
        worker = self._worker_here()
        request_id = worker.take_landing_failed() if worker is not None else ""
        if request_id:
            self._not_restored(request_id)
        return bool(request_id)

    def hear_late(self, restored: set[str]) -> None:
        """The engine hears of restores with the steps' outputs from now on, and of these, which were taken."""
        self.hears_early = self._asked_early = False
        self._told_late |= restored

    def _take_report(self, report: WorkerReport) -> None:
        for request_id in report.failed_loads:
            self._not_restored(request_id)
        for number, count in report.ended.items():
            sent = self._saves.get(number)
            if sent is None:
                continue
            sent.remaining -= count
            sent.kept += report.kept.get(number, 0)
            if sent.remaining <= 0:
                del self._saves[number]
                sent.tracked.saves.discard(number)
                if sent.kept < self._workers:
                    self.stats.add("save_failures")
                elif self._events is not None:
                    self._events.stored(sent.planned)

    def _not_restored(self, request_id: str) -> None:
        """The blocks of a request are computed now, and are kept then as any others."""
        self.stats.add("restore_failures")
        tracked = self._restoring.get(request_id) or self._tracked.get(request_id)
        if tracked is not None:
            tracked.saved, tracked.restored = 0, (0, 0)

    def request_finished(self, request: Any) -> bool:
        """A request ended, in whatever way; return whether its blocks are held until `finished_sending` names it."""
        tracked = self._tracked.pop(request.request_id, None)
        self._awaiting_compute.discard(request.request_id)
        if tracked is None:
            return False
        if tracked.id in self._restoring:
            # The engine itself holds the blocks until the load ended, and would not expect a second end.
            return False
        self._withdraw(tracked)
        if not tracked.saves:
            return False
        self._newly_held.add(tracked.id)
        self._held.add(tracked.id)
        return True

    def has_pending_block_frees(self) -> bool:
        """Whether held blocks come back soon: then the engine waits for them instead of preempting a request.

        They do: a save that does not begin in `max_wait_ms` is withdrawn by the workers.
        """
        return bool(self._held)

    def has_pending_saves(self) -> bool:
        """Whether the engine is to go on stepping, until it has seen its saves end: a reset is refused before.

        Not for longer than a save may wait to begin: an agent that stands still does not keep an idle engine at work.
        """
        return bool(self._saves) and time.monotonic() < self._saves_until

    def reset_cache(self) -> bool:
        """Forget what was stored, for this engine; false while anything is tracked."""
        if self._tracked or self._restoring or self._saves or self._held:
            return False
        return self.link.reset()

    # --- events and stats

    def take_events(self) -> list[Any]:
        """Return KV events since the last call."""
        return self._events.take() if self._events is not None else []

    def take_stats(self) -> OrbitKVStats | None:
        """Return what changed since the last call."""
        levels = {
            "attached": int(self.link.client is not None and self.link.serving),
            "admission_gate": int(self._gate),
            "pending_queries": sum(tracked.phase is Phase.LOADING for tracked in self._tracked.values()),
            "pending_restores": len(self._restoring),
            "pending_saves": len(self._saves),
            "held_requests": len(self._held),
            "breaker_open": int(self._allowance.open),
        }
        for name, value in levels.items():
            if self._levels.get(name) != value:
                self._levels[name] = value
                self.stats.level(name, value)
        if self._allowance.trips != self._trips:
            self.stats.add("breaker_trips", self._allowance.trips - self._trips)
            self._trips = self._allowance.trips
        if self.stats.is_empty():
            return None
        taken, self.stats = self.stats, OrbitKVStats()
        return taken

    # --- internals

    def _forget_lookups(self) -> None:
        """The client is gone, and with it every query and lease that was not handed to the workers."""
        self._loading.clear()
        for tracked in self._tracked.values():
            if tracked.phase in (Phase.LOADING, Phase.READY):
                tracked.to(Phase.IDLE)

    def _restart(self, tracked: Tracked) -> None:
        """The request was preempted: its blocks are gone, and it is looked up as if it were new."""
        self._withdraw(tracked)
        if tracked.phase is Phase.SETTLED:
            tracked.to(Phase.IDLE)
        tracked.preemptions = tracked.request.num_preemptions
        tracked.first = tracked.last = tracked.first_token = -1
        tracked.hashes = None
        tracked.held_until = tracked.ask_after = 0.0
        tracked.saved, tracked.restored = 0, (0, 0)

    def _withdraw(self, tracked: Tracked) -> None:
        """Whatever was asked does not matter any more."""
        self._loading.discard(tracked.id)
        if tracked.phase in (Phase.LOADING, Phase.READY):
            tracked.to(Phase.IDLE)
            if self.link.client is not None:
                self.link.client.cancel_query(tracked.id)
