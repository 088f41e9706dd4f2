"""vLLM's real scheduler with the connector in it, without a model: the test samples the tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from orbitkv.vllm import together
from orbitkv.vllm.connector import OrbitKVConnector
from orbitkv.vllm.early import EarlyScheduler
from orbitkv.vllm.metadata import Load, Save
from orbitkv.vllm.scheduler import SchedulerHalf
from orbitkv.vllm.tests.fakes import FakeAgent, FakeWorkers

BLOCK = 16


def write_model_config(folder: Path) -> Path:
    """Write what a scheduler needs of a model: its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 259,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "bos_token_id": 0,
                "eos_token_id": 1,
                "torch_dtype": "float32",
            }
        )
    )
    return folder


def make_config(
    model: Path,
    *,
    blocks: int = 64,
    batched_tokens: int = 512,
    max_seqs: int = 8,
    extra: dict[str, Any] | None = None,
    policy: str = "fcfs",
    asynchronous: bool = False,
    events: bool = False,
    ngram: bool = False,
    transfer: dict[str, Any] | None = None,
    mla: bool = False,
) -> tuple[VllmConfig, KVCacheConfig]:
    """Return vLLM's configuration of an engine with OrbitKV."""
    model_config = ModelConfig(model=str(model), dtype="float32", seed=0, max_model_len=8192, skip_tokenizer_init=True)
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    settings = {"orbitkv.bootstrap_socket": "/nowhere.sock", **(extra or {})}
    connector = transfer or {
        "kv_connector": "OrbitKVConnector",
        "kv_connector_module_path": "orbitkv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    speculation = None
    if ngram:
        speculation = SpeculativeConfig(
            method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1,
            target_model_config=model_config, target_parallel_config=ParallelConfig(),
        )  # fmt: skip
    vllm_config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=batched_tokens,
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            disable_hybrid_kv_cache_manager=False,
            policy=policy,
        ),
        model_config=model_config,
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(**connector),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        speculative_config=speculation,
        device_config=DeviceConfig("cpu"),
    )
    spec: FullAttentionSpec
    if mla:
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)
    else:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)]
    )
    return vllm_config, kv_cache


class Memory:
    """KV memory in which every slot says what it holds: the digest of all tokens up to its own.

    It checks what nobody else sees: that a request computes on nothing but its own prefix, and that a page is kept
    under its own hash only.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots: dict[int, list[int]] = {}
        self._kept: dict[bytes, list[int]] = {}
        self._steps: dict[int, list[tuple[Request, list[int], int, int]]] = {}
        engine.memory = self
        engine.workers.restore = self._restore  # type: ignore[method-assign]
        engine.workers.keep = self._keep  # type: ignore[method-assign]
        self.restored_tokens = 0
        self.lost = 0
        """Steps whose pages did not come."""

    @staticmethod
    def _digests(request: Request, end: int) -> list[int]:
        """What the slots of the first `end` tokens hold; the model here always answers 42."""
        tokens = [*request.all_token_ids, *[42] * end][:end]
        digests, last = [], hash(request.cache_salt)
        for token in tokens:
            last = hash((last, token))
            digests.append(last)
        return digests

    def scheduled(self, output: Any, *, in_place: bool = True) -> None:
        """Note what a step computes, and in which blocks: with a restore that was not in place, nothing of worth."""
        manager = self._engine.scheduler.kv_cache_manager
        work = []
        self.lost += not in_place
        for name, count in output.num_scheduled_tokens.items() if in_place else ():
            request = self._engine.scheduler.requests[name]
            end = request.num_computed_tokens
            work.append((request, list(manager.get_block_ids(name)[0]), end - count, end))
        self._steps[id(output)] = work

    def compute(self, output: Any) -> None:
        """The forward pass of a step."""
        for request, blocks, start, end in self._steps.pop(id(output)):
            digests = self._digests(request, end)
            for position in range(start):
                block = self._slots.get(blocks[position // BLOCK], [])
                assert block[position % BLOCK : position % BLOCK + 1] == digests[position : position + 1], (
                    f"request {request.request_id} computes token {start} on wrong KV at token {position}"
                )
            for position in range(start, end):
                block = self._slots.setdefault(blocks[position // BLOCK], [])
                del block[position % BLOCK :]
                block.extend([0] * (position % BLOCK - len(block)))
                block.append(digests[position])

    def _restore(self, load: Load) -> None:
        for block, page_hash in zip(load.blocks, self._engine.agent.leased[load.leases[0]], strict=True):
            if block >= 0:
                self._slots[block] = list(self._kept[page_hash])
                self.restored_tokens += BLOCK

    def _keep(self, save: Save) -> None:
        size = len(save.hashes) // len(save.blocks)
        for index, block in enumerate(save.blocks):
            page_hash = save.hashes[index * size : (index + 1) * size]
            page = list(self._slots[block])
            assert len(page) == BLOCK, f"a page is kept with {len(page)} of {BLOCK} tokens computed"
            assert self._kept.setdefault(page_hash, page) == page, "a page is kept under the hash of another one"
            self._engine.agent.pages.add(page_hash)


class Engine:
    """A scheduler, its connector, the fake agent and workers, and a model that answers 42."""

    def __init__(self, model: Path, agent: FakeAgent, **options: Any) -> None:
        self.agent = agent
        self.workers = FakeWorkers(agent)
        one_process, early = options.pop("one_process", False), options.pop("early", False)
        asynchronous = options.get("asynchronous", False)
        self.vllm_config, self.kv_cache_config = make_config(model, **options)
        make: Callable[..., Scheduler] = AsyncScheduler if asynchronous else Scheduler
        if early:  # vLLM itself never schedules asynchronously on CPUs
            self.vllm_config.scheduler_config.async_scheduling = asynchronous
            make, self.vllm_config.scheduler_config.scheduler_cls = EarlyScheduler, EarlyScheduler
        self.scheduler = make(
            vllm_config=self.vllm_config,
            kv_cache_config=self.kv_cache_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK,
        )
        if one_process:
            self.workers.instance = self.half.instance
            together.enter(self.workers)  # type: ignore[arg-type]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.outputs: list[Any] = []
        self.memory: Memory | None = None

    @property
    def connector(self) -> OrbitKVConnector:
        """The connector in the scheduler."""
        connector = self.scheduler.connector
        assert isinstance(connector, OrbitKVConnector)
        return connector

    @property
    def half(self) -> SchedulerHalf:
        """The connector's half."""
        assert self.connector._scheduler is not None
        return self.connector._scheduler

    def request(self, name: str, tokens: list[int], answer: int = 3, **options: Any) -> Request:
        """Make a request without adding it."""
        params = SamplingParams(
            max_tokens=answer,
            temperature=0,
            ignore_eos=True,
            prompt_logprobs=options.pop("prompt_logprobs", None),
            extra_args={"kv_transfer_params": options.pop("params")} if "params" in options else None,
        )
        params.update_from_generation_config({}, 1)
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
            **options,
        )

    def add(self, name: str, tokens: list[int], answer: int = 3, **options: Any) -> Request:
        """Make a request and add it."""
        request = self.request(name, tokens, answer, **options)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Any:
        """Schedule a step."""
        output = self.scheduler.schedule()
        in_place = self.workers.land()
        if self.memory is not None:
            self.memory.scheduled(output, in_place=in_place)
        return output

    def finish_step(self, output: Any, accept: int = 0) -> None:
        """Run the workers and the model on a scheduled step; of draft tokens, `accept` are right."""
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for name in ids:
            request = self.scheduler.requests.get(name)
            done = request is not None and request.num_computed_tokens >= request.num_tokens
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            sampled.append([*drafts[:accept], 42] if done else [])
        if self.memory is not None:
            self.memory.compute(output)
        fields = self.workers.run(output.kv_connector_metadata)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(**fields),
        )
        self.outputs.append(self.scheduler.update_from_output(output, result))

    def step(self) -> Any:
        """One step, start to end; returns the scheduler's output."""
        output = self.schedule()
        self.finish_step(output)
        return output

    def step_beside(self, flying: list[Any]) -> None:
        """Go on as vLLM's loop does, which schedules a step before the one in flight is over, where it is asynchronous.

        Args:
            flying: the steps in flight, which the caller keeps.
        """
        most = 2 if isinstance(self.scheduler, AsyncScheduler) else 1
        more = not flying or self.scheduler.has_requests()
        if more:
            flying.append(self.schedule())
        if not more or len(flying) == most or not flying[-1].num_scheduled_tokens:
            self.finish_step(flying.pop(0))

    def run(self, most: int = 500) -> None:
        """Step until nothing is left."""
        for _ in range(most):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"the engine does not come to an end: {self.scheduler.requests}")

    def serve(self, name: str, tokens: list[int], answer: int = 3, **options: Any) -> Request:
        """Serve one request to its end."""
        request = self.add(name, tokens, answer, **options)
        self.run()
        return request

    def abort(self, name: str) -> None:
        """The client disconnected."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset_hbm(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def assert_at_rest(self) -> None:
        """Nothing is tracked, no lease lives, all blocks are free."""
        half = self.half
        assert not half._tracked
        assert not half._restoring
        assert not half._saves
        assert not half._held
        assert not self.agent.leases
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
