"""Model identity: a digest of everything that gives the bytes of a page their meaning.

Pages are found again only by an engine with the same identity. What is not known for certain is refused, never assumed:
an engine that restored pages of other weights would answer wrongly, and nobody would notice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .weights import WeightsUnknownError, cache_path, weights_hash

_COMMIT = re.compile(r"[0-9a-f]{40}")
_FINGERPRINT_HINT = (
    "set orbitkv.model_fingerprint to a name that you vouch for: engines with the same name must have the same weights"
)


class IdentityRefusedError(Exception):
    """The model's identity cannot be established; the message says why and what to do."""


@dataclass(frozen=True)
class Identity:
    """Who the model is.

    Attributes:
        digest: of all parts, hexadecimal.
        description: the model in words, for people.
        parts: what the digest is of.
    """

    digest: str
    description: str
    parts: dict[str, Any]


def model_identity(
    vllm_config: Any, *, fingerprint: str, layout_digest: str, environ: Mapping[str, str], layers: Any = ()
) -> Identity:
    """Work out the model's identity. Reads all weight files the first time.

    Args:
        vllm_config: the engine's configuration.
        fingerprint: `orbitkv.model_fingerprint`, "" to work the weights out.
        layout_digest: of how a page's bytes lie (`layout.Layout.digest`).
        environ: the process's environment.
        layers: the model's attention layers: they know their backend and their KV scales.

    Raises:
        IdentityRefusedError: weights without content and no fingerprint, weights that cannot be found, or KV scales
            that are computed while the engine runs.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    _refuse_runtime_scales(cache)
    backends, scales = set(), []
    for layer in layers:
        backends.add(_backend(layer))
        scales.append(_scales(layer))
    parts: dict[str, Any] = {
        "weights": _weights(vllm_config, fingerprint, environ),
        "engine": f"vllm {_engine_version()}",
        "config": _model_settings(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "attention_backend": sorted(backends),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_scales": _digest(scales),
        "block_tokens": cache.block_size,
        "hash": str(cache.prefix_caching_hash_algo),
        "tensor_parallel": parallel.tensor_parallel_size,
        "layout": layout_digest,
    }
    return Identity(_digest(parts), f"{model.model} ({parts['dtype']}, vLLM {_engine_version()})", parts)


def _weights(vllm_config: Any, fingerprint: str, environ: Mapping[str, str]) -> str:
    if fingerprint:
        return f"fingerprint {fingerprint}"
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        raise IdentityRefusedError(f"load_format=dummy: such weights have no content of their own; {_FINGERPRINT_HINT}")
    path = Path(getattr(model, "model_weights", "") or model.model)
    if path.exists():
        try:
            return f"content {weights_hash(path, cache_path(environ))}"
        except WeightsUnknownError as error:
            raise IdentityRefusedError(f"the weights cannot be told apart: {error}; {_FINGERPRINT_HINT}") from error
    commit = getattr(model.hf_config, "_commit_hash", None) or ""
    if _COMMIT.fullmatch(commit):
        return f"commit {model.model}@{commit}"
    raise IdentityRefusedError(
        f"the weights of {model.model} are neither in a folder nor at a known commit of a model hub; "
        f"{_FINGERPRINT_HINT}"
    )


def _refuse_runtime_scales(cache: Any) -> None:
    dtype = str(cache.cache_dtype)
    if getattr(cache, "calculate_kv_scales", False) or dtype.endswith("_per_token_head"):
        raise IdentityRefusedError(
            f"kv_cache_dtype={dtype} with scales that are computed while the engine runs: pages of one run mean "
            "something else in the next; use a KV cache type without scales, or with scales from the checkpoint"
        )


def _model_settings(model: Any) -> str:
    """The architecture's settings with all overrides (positions, ropes and windows are among them)."""
    settings = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "_commit_hash"):
        settings.pop(volatile, None)
    return _digest(settings)


def _backend(layer: Any) -> str:
    get = getattr(layer, "get_attn_backend", None)
    return str(get().get_name()) if get is not None else type(layer).__name__


def _scales(layer: Any) -> list[float]:
    return [float(getattr(layer, name, 1.0)) for name in ("_k_scale_float", "_v_scale_float")]


def _engine_version() -> str:
    import vllm

    return str(vllm.__version__)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
