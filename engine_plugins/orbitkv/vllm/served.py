"""The table of vLLM features: with which the cache works, and with which it stays off while the engine serves.

The table is data. The connector asks it at start (`off_reasons`) and for each request (`request_off_reason`), the page
`docs/` is generated from it, and the tests go through it row by row: a row that is served names its test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        name: short name, stable.
        title: the feature in the words of vLLM's users.
        scope: "engine": decided once, at start; "request": for each request that uses it.
        reason: why the cache is off with it; "" when it is served.
        test: what shows that it is served ("" when it is not): a test's name.
        used: whether an engine's configuration `(vllm_config, kv_cache_config)`, or a request `(request,)`, uses it;
            None for what is served whether used or not.
    """

    name: str
    title: str
    scope: str
    reason: str = ""
    test: str = ""
    used: Callable[..., bool] | None = None

    @property
    def served(self) -> bool:
        """Whether the cache works with it."""
        return not self.reason


def _parallel(field: str) -> Callable[[Any, Any], bool]:
    return lambda vllm_config, kv_cache_config: getattr(vllm_config.parallel_config, field, 1) > 1


def _speculates(*methods: str) -> Callable[[Any, Any], bool]:
    def used(vllm_config: Any, kv_cache_config: Any) -> bool:
        speculation = vllm_config.speculative_config
        return speculation is not None and speculation.method not in methods

    return used


def layer_specs(group: Any) -> Iterator[Any]:
    """Every layer's KV cache spec of a group, whether the layers share one or not."""
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    yield from per_layer.values() if per_layer else [spec]


def _is_full_attention(spec: Any) -> bool:
    """Attention to all tokens before, exactly: subclasses keep other state in their pages, or replace it as they go."""
    return (
        (type(spec).__name__ == "FullAttentionSpec" or _is_plain_mla(spec))
        and not spec.sliding_window
        and not spec.attention_chunk_size
        and not getattr(spec, "non_causal", False)
    )


def _is_plain_mla(spec: Any) -> bool:
    """One latent vector a token, and nothing beside it: no index of sparse attention, no compressed states."""
    return (
        type(spec).__name__ == "MLAAttentionSpec"
        and spec.model_version is None
        and spec.alignment is None
        and getattr(spec, "tokens_per_state", 1) == 1
        and getattr(spec, "topk_buffer_width", None) is None
        and getattr(spec, "cache_role", "sparse") == "sparse"
    )


def _other_groups(vllm_config: Any, kv_cache_config: Any) -> bool:
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group)]
    sparse = getattr(getattr(vllm_config.model_config, "hf_text_config", None), "index_topk", None) is not None
    return sparse or not all(_is_full_attention(spec) for spec in specs)


def describe_groups(kv_cache_config: Any) -> str:
    """The KV cache groups in words, for the log."""
    names = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        kinds = sorted({_kind(spec) for spec in layer_specs(group)})
        names.append(f"group {index}: {', '.join(kinds)} ({len(group.layer_names)} layers)")
    return "; ".join(names)


def _kind(spec: Any) -> str:
    name = type(spec).__name__.removesuffix("Spec")
    window = getattr(spec, "sliding_window", None)
    return f"{name} with a window of {window} tokens" if window else name


def _on_another_device(vllm_config: Any, kv_cache_config: Any) -> bool:
    kind = str(vllm_config.device_config.device_type)
    if kind != "cuda":
        return kind != "cpu"
    import torch

    return torch.version.hip is not None


def _writes_before_it_tells(vllm_config: Any, kv_cache_config: Any) -> bool:
    return bool(vllm_config.use_v2_model_runner) and bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


FEATURES: tuple[Feature, ...] = (
    # --- served
    Feature("repeat", "Prefix caching, and with it switched off", "engine", test="test_a_repeated_prompt_is_restored"),
    Feature("chunked_prefill", "Chunked prefill", "engine", test="test_a_chunk_saves_only_what_is_computed"),
    Feature("async_scheduling", "Asynchronous scheduling", "engine", test="test_async_scheduling"),
    Feature("tensor_parallel", "Tensor parallelism on one host", "engine", test="test_each_rank_gets_its_own_lease"),
    Feature("ngram", "N-gram speculation", "engine", test="test_draft_tokens_are_never_saved"),
    Feature("preemption", "Preemption", "engine", test="test_a_preempted_request_looks_up_again"),
    Feature("priority", "Priority scheduling", "engine", test="test_priority_scheduling"),
    Feature("cache_salt", "Cache salts", "request", test="test_salted_prompts_have_other_hashes"),
    Feature(
        "prompt_logprobs",
        "Prompt log probabilities (such a request computes its whole prompt, and is saved)",
        "request",
        test="test_prompt_logprobs_skip_the_load",
    ),
    Feature("mla", "MLA", "engine", test="test_a_model_with_mla_is_restored"),
    Feature("multi_connector", "MultiConnector", "engine", test="test_under_multi_connector"),
    Feature("gpu", "NVIDIA GPUs", "engine", test="test_memory_of_a_gpu_is_registered_by_handle"),
    # --- off for the engine
    Feature(
        "other_device",
        "Accelerators other than NVIDIA GPUs",
        "engine",
        "their memory cannot be shared with the agent yet",
        used=_on_another_device,
    ),
    Feature(
        "pipeline_parallel",
        "Pipeline parallelism",
        "engine",
        "pages of different pipeline stages are not joined to one hit yet",
        used=_parallel("pipeline_parallel_size"),
    ),
    Feature(
        "data_parallel",
        "Data parallelism inside one engine",
        "engine",
        "several engine cores would share one identity",
        used=_parallel("data_parallel_size"),
    ),
    Feature(
        "expert_parallel",
        "Expert parallelism",
        "engine",
        "not tested yet",
        used=lambda vllm_config, kv_cache_config: bool(vllm_config.parallel_config.enable_expert_parallel),
    ),
    Feature(
        "decode_context_parallel",
        "Decode context parallelism",
        "engine",
        "a block's tokens are spread over ranks",
        used=_parallel("decode_context_parallel_size"),
    ),
    Feature(
        "prefill_context_parallel",
        "Prefill context parallelism",
        "engine",
        "a block's tokens are spread over ranks",
        used=_parallel("prefill_context_parallel_size"),
    ),
    Feature(
        "several_hosts",
        "Tensor parallelism over several hosts",
        "engine",
        "one agent serves one host",
        used=_parallel("nnodes"),
    ),
    Feature(
        "draft_models",
        "EAGLE, MTP, Medusa, draft models and other speculation than n-gram",
        "engine",
        "the draft's own state is not restored with the model's",
        used=_speculates("ngram"),
    ),
    Feature(
        "sleep_mode",
        "Sleep mode",
        "engine",
        "the KV memory moves while the engine sleeps",
        used=lambda vllm_config, kv_cache_config: bool(vllm_config.model_config.enable_sleep_mode),
    ),
    Feature(
        "other_state",
        "Sliding windows, chunked local attention, sparse attention, recurrent state (Mamba, gated delta nets), "
        "cross attention",
        "engine",
        "only full attention can be restored yet; a hit on a part of a model's state would give wrong answers",
        used=_other_groups,
    ),
    Feature(
        "several_groups",
        "Models with several KV cache groups",
        "engine",
        "a boundary at which every group can be restored is not worked out yet",
        used=lambda vllm_config, kv_cache_config: len(kv_cache_config.kv_cache_groups) > 1,
    ),
    Feature(
        "no_cache",
        "Models without a KV cache",
        "engine",
        "there is nothing to keep",
        used=lambda vllm_config, kv_cache_config: not kv_cache_config.kv_cache_groups,
    ),
    Feature(
        "pooling",
        "Pooling models (embeddings, classification)",
        "engine",
        "not tested yet",
        used=lambda vllm_config, kv_cache_config: vllm_config.model_config.runner_type != "generate",
    ),
    Feature(
        "diffusion",
        "Diffusion language models",
        "engine",
        "tokens of a block change after it was computed",
        used=lambda vllm_config, kv_cache_config: bool(getattr(vllm_config.model_config, "is_diffusion", False)),
    ),
    Feature(
        "zeroed_blocks",
        "Model Runner V2 with a KV cache of several precisions",
        "engine",
        "it overwrites preempted blocks before it tells the connector",
        used=_writes_before_it_tells,
    ),
    # --- off for such a request
    Feature(
        "lora",
        "LoRA requests",
        "request",
        "an adapter's name does not say which weights it has",
        used=lambda request: request.lora_request is not None,
    ),
    Feature(
        "prompt_embeds",
        "Prompt embeddings",
        "request",
        "not tested yet",
        used=lambda request: request.prompt_embeds is not None,
    ),
    Feature(
        "multimodal",
        "Images, audio and video in the prompt",
        "request",
        "an input can be named by the user, and the name does not say what it holds",
        used=lambda request: bool(request.mm_features),
    ),
    Feature(
        "streaming_input",
        "Input that streams in (resumable requests)",
        "request",
        "tokens are taken back between its turns",
        used=lambda request: bool(request.resumable),
    ),
)

_ENGINE_OFF = tuple(feature for feature in FEATURES if feature.scope == "engine" and feature.used is not None)
_REQUEST_OFF = tuple(feature for feature in FEATURES if feature.scope == "request" and feature.used is not None)


def off_reasons(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Return why the cache is off for this engine, one sentence a feature; empty when it works."""
    reasons = []
    for feature in _ENGINE_OFF:
        assert feature.used is not None
        if feature.used(vllm_config, kv_cache_config):
            groups = f" ({describe_groups(kv_cache_config)})" if feature.name == "other_state" else ""
            reasons.append(f"{feature.title}{groups}: {feature.reason}")
    return reasons


def request_off_reason(request: Any) -> str:
    """Return the name of the feature that keeps this request from the cache, or ""."""
    for feature in _REQUEST_OFF:
        assert feature.used is not None
        if feature.used(request):
            return feature.name
    return ""
