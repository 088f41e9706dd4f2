"""The table of what is served, row by row."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from orbitkv.vllm.connector import OrbitKVConnector
from orbitkv.vllm.served import FEATURES, Feature, off_reasons, request_off_reason
from orbitkv.vllm.tests.kv_memory import full_attention
from orbitkv.vllm.tests.scheduling import Engine, make_config

WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=64)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
COMPRESSED = replace(MLA, model_version="deepseek_v4")
INDEX = replace(MLA, cache_role=SparseCacheRole.INDEXER)


def groups(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec) for spec in specs]
    )


class Without:
    """A configuration with some fields changed, whether its own class allows them or not."""

    def __init__(self, base: Any, **changes: Any) -> None:
        self._base, self._changes = base, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._base, name)


def used_by(config: Any, part: str, **changes: Any) -> Any:
    return Without(config, **{part: Without(getattr(config, part), **changes)})


def parallel(**changes: Any) -> Callable[[Any], tuple[Any, Any]]:
    return lambda config: (used_by(config, "parallel_config", **changes), groups(full_attention()))


def model(**changes: Any) -> Callable[[Any], tuple[Any, Any]]:
    return lambda config: (used_by(config, "model_config", **changes), groups(full_attention()))


USES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "other_device": lambda config: (used_by(config, "device_config", device_type="xpu"), groups(full_attention())),
    "pipeline_parallel": parallel(pipeline_parallel_size=2),
    "data_parallel": parallel(data_parallel_size=2),
    "expert_parallel": parallel(enable_expert_parallel=True),
    "decode_context_parallel": parallel(decode_context_parallel_size=2),
    "prefill_context_parallel": parallel(prefill_context_parallel_size=2),
    "several_hosts": parallel(nnodes=2),
    "draft_models": lambda config: (
        Without(config, speculative_config=SimpleNamespace(method="eagle")),
        groups(full_attention()),
    ),
    "sleep_mode": model(enable_sleep_mode=True),
    "other_state": lambda config: (config, groups(WINDOW)),
    "several_groups": lambda config: (config, groups(full_attention(), full_attention())),
    "no_cache": lambda config: (config, groups()),
    "pooling": model(runner_type="pooling"),
    "diffusion": model(is_diffusion=True),
    "zeroed_blocks": lambda config: (
        Without(config, use_v2_model_runner=True),
        Without(groups(full_attention()), needs_kv_cache_zeroing=True),
    ),
}
REQUESTS: dict[str, dict[str, Any]] = {
    "lora": {"lora_request": object()},
    "prompt_embeds": {"prompt_embeds": object()},
    "multimodal": {"mm_features": [object()]},
    "streaming_input": {"resumable": True},
}


@pytest.fixture(scope="session")
def config(model_folder: Path) -> Any:
    return make_config(model_folder)[0]


def test_a_plain_engine_is_served(config: Any) -> None:
    assert off_reasons(config, groups(full_attention())) == []
    assert off_reasons(config, groups(MLA)) == []


def test_sparse_attention_is_not_served(config: Any) -> None:
    """Which tokens it looks at is told by an index, which may lie elsewhere."""
    sparse = used_by(config, "model_config", hf_text_config=SimpleNamespace(index_topk=2048))
    (reason,) = off_reasons(sparse, groups(MLA))
    assert "sparse attention" in reason


@pytest.mark.parametrize(
    "feature", [each for each in FEATURES if each.scope == "engine" and each.used], ids=lambda f: f.name
)
def test_an_engine_with_the_feature_is_told_why_the_cache_is_off(config: Any, feature: Feature) -> None:
    reasons = off_reasons(*USES[feature.name](config))
    assert any(reason.startswith(feature.title) and feature.reason in reason for reason in reasons)


@pytest.mark.parametrize(
    "feature", [each for each in FEATURES if each.scope == "request" and each.used], ids=lambda f: f.name
)
def test_a_request_with_the_feature_is_left_alone(feature: Feature) -> None:
    plain: dict[str, Any] = {"lora_request": None, "prompt_embeds": None, "mm_features": [], "resumable": False}
    assert request_off_reason(SimpleNamespace(**plain)) == ""
    assert request_off_reason(SimpleNamespace(**{**plain, **REQUESTS[feature.name]})) == feature.name


@pytest.mark.guard("vllm-whole-model")
@pytest.mark.parametrize(
    "specs",
    [(WINDOW,), (full_attention(), WINDOW), (COMPRESSED,), (INDEX,)],
    ids=["window", "hybrid", "compressed", "index"],
)
def test_no_hit_is_promised_for_a_part_of_a_models_state(
    start: Callable[..., Engine], specs: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    connector = OrbitKVConnector(engine.vllm_config, KVConnectorRole.SCHEDULER, groups(*specs))
    assert connector._scheduler is None
    request = engine.request("any", list(range(70)))
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.request_finished_all_groups(request, ([1],)) == (False, None)
    assert connector.reset_cache() is True
    assert type(specs[-1]).__name__.removesuffix("Spec") in caplog.text


def test_every_served_row_names_a_test_that_exists() -> None:
    here = Path(__file__).parent
    tests = {
        node.name
        for file in here.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    for feature in FEATURES:
        if feature.served:
            assert feature.test in tests, f"{feature.name} is served, with {feature.test}"
        else:
            assert feature.used is not None
            assert not feature.test


def test_rows_are_told_apart_by_name() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names)
    assert all(feature.scope in ("engine", "request") for feature in FEATURES)
    assert replace(FEATURES[0], reason="because").served is False
