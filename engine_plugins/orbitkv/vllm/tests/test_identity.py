"""What makes two engines' pages the same."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orbitkv.vllm.identity import Identity, IdentityRefusedError, model_identity
from orbitkv.vllm.weights import cache_path, weights_hash


def engine(folder: Path | str, **changes: Any) -> SimpleNamespace:
    settings: dict[str, Any] = {
        "rope_theta": 10000.0,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "load_format": "auto",
        "cache_dtype": "auto",
        "block_size": 32,
        "hash": "sha256",
        "tensor_parallel": 1,
        "commit": None,
        "k_scale": 1.0,
        "backend": "CPU_ATTN",
        **changes,
    }
    config = SimpleNamespace(
        to_dict=lambda: {"rope_theta": settings["rope_theta"], "_name_or_path": str(folder)},
        _commit_hash=settings["commit"],
    )
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: settings["backend"]),
        _k_scale_float=settings["k_scale"],
        _v_scale_float=1.0,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder), hf_config=config, dtype=settings["dtype"], quantization=settings["quantization"]
        ),
        load_config=SimpleNamespace(load_format=settings["load_format"]),
        cache_config=SimpleNamespace(
            cache_dtype=settings["cache_dtype"],
            block_size=settings["block_size"],
            prefix_caching_hash_algo=settings["hash"],
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=settings["tensor_parallel"]),
        layers=[layer],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights" * 1000)
    return model


Identify = Callable[..., Identity]


@pytest.fixture
def identify(tmp_path: Path) -> Identify:
    def ask(config: SimpleNamespace, fingerprint: str = "", layout: str = "layout") -> Identity:
        return model_identity(
            config,
            fingerprint=fingerprint,
            layout_digest=layout,
            environ={"XDG_CACHE_HOME": str(tmp_path / "cache")},
            layers=config.layers,
        )

    return ask


def test_the_same_model_has_the_same_identity(folder: Path, identify: Identify) -> None:
    assert identify(engine(folder)).digest == identify(engine(folder)).digest


def test_the_folders_name_does_not_matter(folder: Path, identify: Identify) -> None:
    before = identify(engine(folder)).digest
    moved = folder.rename(folder.with_name("moved"))
    assert identify(engine(moved)).digest == before


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 1e6},
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8"},
        {"block_size": 16},
        {"hash": "sha256_cbor"},
        {"tensor_parallel": 2},
        {"k_scale": 0.5},
        {"backend": "TRITON_ATTN"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_gives_bytes_their_meaning_is_part_of_it(
    folder: Path, identify: Identify, change: dict[str, Any]
) -> None:
    assert identify(engine(folder)).digest != identify(engine(folder, **change)).digest


def test_the_layout_is_part_of_it(folder: Path, identify: Identify) -> None:
    assert identify(engine(folder)).digest != identify(engine(folder), layout="another").digest


def test_other_weights_under_the_same_path_are_another_model(folder: Path, identify: Identify) -> None:
    before = identify(engine(folder)).digest
    file = folder / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(b"WEIGHTS" * 1000)
    assert file.stat().st_size == size
    assert identify(engine(folder)).digest != before


def test_a_fingerprint_stands_for_the_weights(folder: Path, identify: Identify) -> None:
    named = identify(engine(folder), fingerprint="mine").digest
    (folder / "model.safetensors").write_bytes(b"other")
    assert identify(engine(folder), fingerprint="mine").digest == named
    assert identify(engine(folder), fingerprint="yours").digest != named


def test_dummy_weights_are_refused_without_a_fingerprint(folder: Path, identify: Identify) -> None:
    with pytest.raises(IdentityRefusedError, match=r"load_format=dummy.*orbitkv\.model_fingerprint"):
        identify(engine(folder, load_format="dummy"))
    assert identify(engine(folder, load_format="dummy"), fingerprint="mine").digest


def test_a_hub_commit_stands_for_the_weights(identify: Identify) -> None:
    one = identify(engine("org/model", commit="a" * 40)).digest
    assert one == identify(engine("org/model", commit="a" * 40)).digest
    assert one != identify(engine("org/model", commit="b" * 40)).digest


def test_weights_that_cannot_be_found_are_refused(tmp_path: Path, identify: Identify) -> None:
    with pytest.raises(IdentityRefusedError, match="neither in a folder nor at a known commit"):
        identify(engine("org/model"))
    with pytest.raises(IdentityRefusedError, match="has no weight files"):
        identify(engine(tmp_path))


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_scales_computed_at_run_time_are_refused(folder: Path, identify: Identify, dtype: str) -> None:
    with pytest.raises(IdentityRefusedError, match=f"kv_cache_dtype={dtype}"):
        identify(engine(folder, cache_dtype=dtype))


# --- weights


def age(path: Path) -> None:
    then = time.time() - 60
    os.utime(path, (then, then))


def test_a_file_is_hashed_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = folder / "model.safetensors", tmp_path / "cache" / "weights.json"
    age(file)
    first = weights_hash(folder, cache)

    def not_again(*_: Any) -> None:
        raise AssertionError("it was hashed again")

    monkeypatch.setattr(hashlib, "file_digest", not_again)
    assert weights_hash(folder, cache) == first


def test_a_file_that_was_just_changed_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "weights.json"
    soon = time.time() + 3600
    os.utime(folder / "model.safetensors", (soon, soon))
    weights_hash(folder, cache)
    assert not cache.exists()


def test_a_replaced_file_is_hashed_again(folder: Path, tmp_path: Path) -> None:
    file, cache = folder / "model.safetensors", tmp_path / "weights.json"
    age(file)
    before = weights_hash(folder, cache)
    status = file.stat()
    replacement = folder / "new"
    replacement.write_bytes(b"WEIGHTS" * 1000)
    replacement.replace(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    assert weights_hash(folder, cache) != before


def test_a_broken_or_forbidden_cache_is_done_without(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    cache.write_text("{ not json")
    age(folder / "model.safetensors")
    one = weights_hash(folder, cache)
    assert weights_hash(folder, Path("/proc/nowhere/weights.json")) == one
    cache.write_text("[1, 2]")
    assert weights_hash(folder, cache) == one


def test_where_hashes_are_remembered() -> None:
    assert cache_path({"XDG_CACHE_HOME": "/x"}) == Path("/x/orbitkv/weights.json")
    assert cache_path({}) == Path.home() / ".cache/orbitkv/weights.json"
