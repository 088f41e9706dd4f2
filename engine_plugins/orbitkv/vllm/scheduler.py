"""The connector's half in the engine's scheduler: what to ask, what to restore, what to keep.

It runs in the engine's loop. It never waits for the agent beyond a step's allowance, and whatever goes wrong with the
cache ends in the same answer: not cached, so the engine computes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orbitkv.client import (
    BlockHashes,
    CacheManagerClient,
    ErrorKind,
    Instance,
    InstanceState,
    OrbitKVError,
    QueryLoading,
    QueryReady,
)
from orbitkv.config import PluginConfig
from orbitkv.guards import guard

from .allowance import PROBE_S, Allowance
from .attachment import Attachment, connect
from .metadata import Load, Save, StepMetadata, WorkerReport
from .requests import UNLIMITED, Phase, Tracked, Wishes
from .served import request_off_reason
from .stats import OrbitKVStats

if TYPE_CHECKING:
    from .events import CacheEvents

logger = logging.getLogger("vllm.orbitkv")

MISS_IS_OLD_S = 0.05
"""A request that waits for its turn is asked for again after this long."""
RESET_S = 0.005

NOT_CACHED: tuple[int, bool] = (0, False)
ASK_AGAIN: tuple[None, bool] = (None, False)


@dataclass(frozen=True)
class SchedulerAttachment:
    """A client that joined the instance as its scheduler.

    Attributes:
        resets: how many external resets it has carried out.
    """

    client: CacheManagerClient
    config: PluginConfig
    state: InstanceState
    resets: int

    @property
    def boot_id(self) -> str:
        """The agent's boot."""
        return self.client.boot_id

    def alive(self) -> bool:
        """Whether the agent's process exists."""
        return self.client.lost is None and self.client.peer_alive()

    def close(self) -> None:
        """Leave the agent."""
        self.client.close()


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
        self._base_config = config
        self._config = config
        self._instance = instance
        self._block_tokens = block_tokens
        self._workers = workers
        self._role_loads = may_load
        self._role_saves = may_save
        self._gate = gate
        self._events = events
        self._cache_manager: Any = None
        self._allowance = Allowance()
        self._tracked: dict[str, Tracked] = {}
        self._restoring: dict[str, Tracked] = {}
        self._awaiting_compute: set[str] = set()
        self._saves: dict[int, SentSave] = {}
        self._save_number = 0
        self._held: set[str] = set()
        self._loads: list[Load] = []
        self._newly_held: set[str] = set()
        self._resets = 0
        self._key_generation = ""
        self.stats = OrbitKVStats()
        self._levels: dict[str, int] = {}
        self._said: set[str] = set()
        self._serving = False
        self._state_known = False
        self._adopted: SchedulerAttachment | None = None
        self._attachment: Attachment[SchedulerAttachment] = Attachment("scheduler", self._attach)

    # --- attachment

    def start(self) -> None:
        """Attach, in a thread of its own.

        Raises:
            RuntimeError: there is no agent, and `orbitkv.on_missing` is "fail".
        """
        self._attachment.start()
        self._attachment.wait_first(self._base_config.timeout_ms / 1000 + 1)
        error = self._attachment.last_error
        if error is not None and self._base_config.on_missing == "fail":
            self._attachment.stop()
            raise RuntimeError(f"{error}. (orbitkv.on_missing=run lets the engine start without the agent.)")

    def _attach(self) -> SchedulerAttachment:
        """Join the instance (attachment's thread)."""
        client = connect(self._base_config, f"vLLM scheduler {self._instance}", self._base_config.timeout_ms)
        try:
            config = self._base_config.with_namespace_options(client.options)
            state = client.attach_instance(
                self._instance, key_generation=self._key_generation, events=self._events is not None
            )
            resets = self._resets
            if resets:
                self._key_generation = client.reset_instance(self._instance)
            return SchedulerAttachment(client, config, state, resets)
        except BaseException:
            client.close()
            raise

    def shutdown(self) -> None:
        """Leave the agent."""
        if self._adopted is not None:
            self._drop()
        self._attachment.stop()

    # --- requests

    def bind_cache_manager(self, cache_manager: Any) -> None:
        """Take the engine's KV cache manager: it knows which blocks a request has."""
        self._cache_manager = cache_manager

    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        off = request_off_reason(request)
        if off:
            self._say_once(
                f"request-{off}", f"OrbitKV leaves requests with {off} alone, see the table of what is served"
            )
            return
        wishes = Wishes.of(request.kv_transfer_params)
        save_tokens = wishes.max_save_tokens if wishes.save and self._role_saves else 0
        if not self._config.save_decode:
            save_tokens = min(save_tokens, request.num_prompt_tokens)
        self._tracked[request.request_id] = Tracked(
            request,
            may_load=wishes.load and self._role_loads and not request.skip_reading_prefix_cache,
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
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return NOT_CACHED
        allowance = self._allowance
        if not allowance.now:
            self._begin_step()
        adopted = self._adopted
        if (
            tracked.phase is Phase.LOADING
            and adopted is not None
            and tracked.first_token == num_computed_tokens
            and tracked.preemptions == request.num_preemptions
            and allowance.now < tracked.held_until
            and not allowance.open
            and adopted.client.query_loading(request.request_id)
        ):
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
        adopted = self._adopted
        if adopted is None or not self._serving or self._allowance.open or self._config.mode == "save_only":
            return self._not_cached(tracked)
        size = self._block_tokens
        first = computed // size
        # At least one token is left to compute: the engine needs its logits.
        last = min((request.num_tokens - 1) // size, len(request.block_hashes))
        if last <= first or (last - first) * size < self._config.min_load_tokens:
            return self._not_cached(tracked)
        now = self._allowance.now
        if not tracked.held_until:
            tracked.held_until = now + self._config.max_wait_ms / 1000
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
        return self._ask(tracked, adopted, tracked.hashes)

    def _not_cached(self, tracked: Tracked) -> tuple[int, bool]:
        self._withdraw(tracked)
        tracked.held_until = 0.0
        return NOT_CACHED

    def _ask(self, tracked: Tracked, adopted: SchedulerAttachment, hashes: BlockHashes) -> tuple[int | None, bool]:
        left_s = tracked.held_until - self._allowance.now
        if tracked.phase is Phase.IDLE:
            self.stats.add("queries")
        try:
            answer = self._allowance.call(
                lambda timeout_ms: adopted.client.query_prefetch(
                    tracked.id,
                    [hashes],
                    instance=self._instance,
                    max_wait_ms=int(max(0.0, left_s) * 1000),
                    wait_for_full_prefix=self._config.wait_for_full_prefix,
                    timeout_ms=timeout_ms,
                )
            )
        except OrbitKVError as error:
            self._failed_call(error)
            return self._not_cached(tracked)
        if isinstance(answer, QueryLoading):
            tracked.to(Phase.LOADING)
            return ASK_AGAIN
        pages = self._restorable_pages(answer, len(hashes))
        if pages == 0 or pages * self._block_tokens < self._config.min_load_tokens:
            tracked.ask_after = self._allowance.now + MISS_IS_OLD_S
            if answer.leases:
                tracked.to(Phase.READY)  # and back at once, which returns the leases
            return self._not_cached(tracked)
        tracked.to(Phase.READY)
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
        if not load.leases:
            self._withdraw(tracked)
        tracked.to(Phase.RESTORING)
        self._restoring[tracked.id] = tracked
        self._awaiting_compute.add(tracked.id)
        self._loads.append(load)
        self.stats.add("restores")

    def _load(self, tracked: Tracked, block_ids: list[int], num_external_tokens: int) -> Load:
        """Bind the lease to the blocks. What does not fit together any more becomes a load that fails at once."""
        size, first = self._block_tokens, tracked.first
        ready, hashes, adopted = tracked.ready, tracked.hashes, self._adopted
        pages = num_external_tokens // size
        blocks = tuple(block_ids[first : first + pages])
        given_up = Load(tracked.id, "", (), blocks)
        if ready is None or hashes is None or adopted is None or pages * size != num_external_tokens:
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
        return Load(tracked.id, adopted.boot_id, ready.leases, blocks + (-1,) * (ready.pages - pages))

    def tier_of(self, request: Any) -> str:
        """Where the pages of the request's load are: "dram"."""
        return "dram"

    # --- step

    def build_step_metadata(self, scheduler_output: Any) -> StepMetadata:
        """Return what the workers do in this step."""
        if not self._allowance.now:
            self._begin_step()
        step = StepMetadata(loads=self._loads, held=frozenset(self._newly_held))
        self._loads, self._newly_held = [], set()
        preempted = scheduler_output.preempted_req_ids
        if preempted:
            step.preempted = frozenset(preempted)
            for request_id in preempted:
                tracked = self._tracked.get(request_id)
                if tracked is not None and tracked.request.num_preemptions != tracked.preemptions:
                    self._restart(tracked)
        keep = self._adopted is not None and not self._allowance.open
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
        if self._awaiting_compute:
            self._awaiting_compute.difference_update(scheduler_output.num_scheduled_tokens)
        self._allowance.end()
        return step

    def _plan_saves(self, step: StepMetadata, tracked: Tracked, full: int) -> None:
        """Hand over the blocks up to `full`, but not those that came from the cache."""
        request = tracked.request
        block_ids = self._cache_manager.get_block_ids(tracked.id)[0]
        low, high = tracked.restored
        for first, end in ((tracked.saved, min(full, max(low, tracked.saved))), (max(high, tracked.saved), full)):
            if first >= end:
                continue
            hashes = request.block_hashes[first:end]
            self._save_number += 1
            number = self._save_number
            step.saves.append(Save(number, tracked.id, b"".join(hashes), tuple(block_ids[first:end])))
            planned = self._events.plan(request, first, hashes) if self._events is not None else []
            self._saves[number] = SentSave(tracked, end - first, self._workers, 0, planned)
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
        """Take the workers' reports of a step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._take_report(report)
        for request_id in output.finished_recving or ():
            tracked = self._restoring.pop(request_id, None)
            if tracked is None:
                continue
            tracked.to(Phase.SETTLED)
            if self._adopted is not None:
                # The lease was used; or it was not, and returns by this.
                self._adopted.client.cancel_query(tracked.id)
        for request_id in output.finished_sending or ():
            self._held.discard(request_id)

    def _take_report(self, report: WorkerReport) -> None:
        for request_id in report.failed_loads:
            self.stats.add("restore_failures")
            tracked = self._restoring.get(request_id)
            if tracked is not None:
                # The blocks are computed now, and are kept then as any others.
                tracked.saved, tracked.restored = 0, (0, 0)
        for number, count in report.ended.items():
            sent = self._saves[number]
            sent.remaining -= count
            sent.kept += report.kept.get(number, 0)
            if sent.remaining <= 0:
                del self._saves[number]
                sent.tracked.saves.discard(number)
                if sent.kept < self._workers:
                    self.stats.add("save_failures")
                elif self._events is not None:
                    self._events.stored(sent.planned)

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

    def reset_cache(self) -> bool:
        """Forget what was stored, for this engine; false while anything is tracked."""
        if self._tracked or self._restoring or self._saves or self._held:
            return False
        self._begin_step()
        adopted = self._adopted
        try:
            if adopted is not None and not self._allowance.open:
                self._key_generation = self._allowance.call(
                    lambda timeout_ms: adopted.client.reset_instance(self._instance, timeout_ms=timeout_ms), RESET_S
                )
            else:
                self._reset_later()
        except OrbitKVError as error:
            if error.kind is ErrorKind.BUSY:
                return False
            self._reset_later()
        finally:
            self._allowance.end()
        if self._events is not None:
            self._events.cleared()
        return True

    def _reset_later(self) -> None:
        """Nothing is asked before the next attachment, which resets first."""
        self._resets += 1
        if self._adopted is not None:
            self._lose("an external reset could not be carried out at once")

    # --- events and stats

    def take_events(self) -> list[Any]:
        """Return KV events since the last call."""
        return self._events.take() if self._events is not None else []

    def take_stats(self) -> OrbitKVStats | None:
        """Return what changed since the last call."""
        levels = {
            "attached": int(self._adopted is not None and self._serving),
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
        if self.stats.is_empty():
            return None
        taken, self.stats = self.stats, OrbitKVStats()
        return taken

    # --- internals

    def _begin_step(self) -> None:
        allowance = self._allowance
        allowance.begin()
        if self._adopted is not self._attachment.published:
            if self._adopted is not None:
                self._drop()
            published = self._attachment.take()
            if published is not None:
                self._adopt(published)
        adopted = self._adopted
        if adopted is None:
            return
        if adopted.client.lost is not None:
            self._lose(str(adopted.client.lost))
            return
        try:
            if allowance.probe_due():
                allowance.call(lambda timeout_ms: adopted.client.health(timeout_ms=timeout_ms), PROBE_S)
                allowance.close()
                logger.info("OrbitKV: the agent answers again")
            if allowance.open:
                return
            if not self._state_known or adopted.client.instance_changed():
                self._state_known = False
                state = allowance.call(
                    lambda timeout_ms: adopted.client.attach_instance(
                        self._instance, events=self._events is not None, timeout_ms=timeout_ms
                    )
                )
                self._take_state(state)
            if self._events is not None:
                news = allowance.call(lambda timeout_ms: adopted.client.take_events(self._instance, timeout_ms))
                if news is not None:
                    self._take_news(news)
        except OrbitKVError as error:
            self._failed_call(error)

    def _adopt(self, published: SchedulerAttachment) -> None:
        if published.resets < self._resets:
            self._attachment.renew(published, "an external reset has to be carried out first")
            self._attachment.give_back(published)
            return
        self._adopted = published
        self._config = published.config
        self._allowance.close()
        self._take_state(published.state)
        self._state_known = False

    def _take_state(self, state: InstanceState) -> None:
        self._state_known = True
        if self._serving != state.serving:
            logger.info("OrbitKV: %s", "serving" if state.serving else f"not serving: {state.missing or state.off}")
        self._serving = state.serving
        if state.off:
            self._say_once("off", f"OrbitKV is off for this engine, which serves on without it: {state.off}")

    def _take_news(self, news: Any) -> None:
        assert self._events is not None
        if news.lost:
            self._events.cleared()
            return
        for part in news.removed:
            size = part.hash_bytes
            self._events.removed([part.blob[i : i + size] for i in range(0, len(part.blob), size)])

    def _failed_call(self, error: OrbitKVError) -> None:
        if error.kind is ErrorKind.TIMEOUT:
            self.stats.add("breaker_trips")
            self._say_once("slow", "OrbitKV: the agent did not answer within a step; requests compute until it does")
        elif error.kind in (ErrorKind.UNAVAILABLE, ErrorKind.CLOSED):
            self._lose(str(error))
        elif error.kind is not ErrorKind.BUSY:
            self._say_once(f"refused-{error.kind}", f"OrbitKV: the agent refused a call: {error}")

    def _lose(self, why: str) -> None:
        """The agent is gone: let go of the client and have another one made."""
        assert self._adopted is not None
        self._attachment.renew(self._adopted, why)
        self._drop()

    def _drop(self) -> None:
        adopted, self._adopted = self._adopted, None
        assert adopted is not None
        self._serving = False
        for tracked in self._tracked.values():
            if tracked.phase in (Phase.LOADING, Phase.READY):
                tracked.to(Phase.IDLE)  # its query and lease ended with the client
        if self._events is not None:
            self._events.cleared()
        self._attachment.give_back(adopted)

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
        if tracked.phase in (Phase.LOADING, Phase.READY):
            tracked.to(Phase.IDLE)
            if self._adopted is not None:
                self._adopted.client.cancel_query(tracked.id)

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("%s", text)
