"""Every byte arrives, and no other byte changes: layouts, types and sizes of pages as engines have them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from orbitkv import Ranks
from orbitkv.vllm import proof
from tools.harness.agent import AgentProcess
from tools.harness.memory_engine import numbered_hashes

torch = pytest.importorskip("torch")

TYPES: dict[str, dict[str, Any]] = {
    "bf16": {"heads": 8, "content": 256, "dtype": "bfloat16"},
    "fp8": {"heads": 8, "content": 256, "dtype": "float8_e4m3fn"},
    "fp32-one-head": {"heads": 1, "content": 256, "dtype": "float32"},
    "mla": {"heads": 1, "content": 576, "dtype": "bfloat16"},
    "flashinfer-kv-apart": {"heads": 8, "content": 128, "dtype": "float16", "layers": 12},
}


def engine(agent: AgentProcess, **shape: Any) -> Any:
    from tools.harness.gpu_engine import GpuEngine, Shape

    shape["dtype"] = getattr(torch, shape.get("dtype", "bfloat16"))
    return GpuEngine(agent.socket_path, Shape(**shape))


def raw(view: Any) -> Any:
    """The bytes of a view."""
    return view.view(torch.uint8)


@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_restored_pages_are_equal_and_nothing_else_changes(
    agent: AgentProcess, layout: str, kind: str, tokens: int
) -> None:
    numbers = np.random.default_rng(tokens)
    shape = {"layers": 6, **TYPES[kind]}
    with engine(agent, layout=layout, blocks=96, tokens=tokens, **shape) as it:
        it.scramble()
        order = numbers.permutation(96)
        sources, targets, hashes = order[:40], order[40:80], numbered_hashes(40, first=tokens)
        it.save(hashes, sources, it.point())
        views = [raw(view) for view in it.views]
        saved = [view[torch.from_numpy(sources).cuda()] for view in views]
        it.scramble()  # the engine uses its blocks for something else
        before = it.memory.clone()
        for view, pages in zip(views, saved, strict=True):
            view[torch.from_numpy(targets).cuda()] = pages
        expected = it.memory.clone()
        it.memory.copy_(before)
        it.restore(hashes, targets, it.point())
        torch.cuda.synchronize()
        assert torch.equal(it.memory, expected), f"{layout} {kind} {tokens}: bytes differ"


def test_pages_of_another_engine_of_the_same_model_are_restored(agent: AgentProcess) -> None:
    from tools.harness.gpu_engine import GpuEngine, Shape

    hashes = numbered_hashes(30)
    shape = Shape(layers=4, blocks=64)
    with GpuEngine(agent.socket_path, shape, identity="one model") as first:
        first.scramble()
        first.save(hashes, np.arange(30), first.point())
        saved = [raw(view)[:30].clone() for view in first.views]
    with GpuEngine(agent.socket_path, shape, identity="one model") as second:
        second.restore(hashes, np.arange(30)[::-1] + 20, second.point())
        torch.cuda.synchronize()
        for view, pages in zip(second.views, saved, strict=True):
            assert torch.equal(raw(view)[20:50].flip(0), pages)


def test_a_large_restore_in_many_chunks_is_exact(agent: AgentProcess) -> None:
    with engine(agent, blocks=300) as it:
        it.scramble()
        hashes = numbered_hashes(140)
        sources = np.random.default_rng(3).permutation(150)[:140]
        it.save(hashes, sources, it.point())
        it.restore(hashes, 299 - np.arange(140), it.point())
        torch.cuda.synchronize()
        for view in it.views:
            assert torch.equal(raw(view)[150:].flip(0)[:140], raw(view)[torch.from_numpy(sources).cuda()])


def test_a_falsified_stride_is_caught_by_the_proof(agent: AgentProcess) -> None:
    from tools.harness.gpu_engine import GpuEngine, Shape

    for layout in ("LBNHC", "BLNHC"):
        it = GpuEngine(agent.socket_path, Shape(layout=layout, layers=4, blocks=64), prove=False)
        try:
            wrong = it.layout.groups[0].layers[2]
            region = msgspec.structs.replace(wrong, offset=wrong.offset + 256)
            layers = [region if each is wrong else each for each in it.layout.groups[0].layers]
            groups = [msgspec.structs.replace(it.layout.groups[0], layers=layers)]
            instance = type(it.instance)("falsified", it.instance.nonce + layout)
            it.client.attach_instance(instance)
            registration = it.client.register_context_batch(
                instance=instance,
                ranks=Ranks(),
                model_identity="falsified",
                model="falsified",
                groups=groups,
                allocations=it.layout.allocations,
                gpu=it.layout.gpu,
            )
            with pytest.raises(proof.LayoutDisprovenError, match=r"layer layer.2"):
                proof.prove_on_empty_cache(it.layout, it.client, registration, instance, 0)
        finally:
            it.close()


def test_memory_that_cannot_be_exported_is_refused_with_the_setting_to_change(tmp_path: Any) -> None:
    code = (
        "import torch\n"
        "from orbitkv.client.gpu import EngineGpu\n"
        "x = torch.empty(64 << 20, device='cuda', dtype=torch.uint8)\n"
        "try:\n    EngineGpu().allocation(x.data_ptr(), x)\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "OrbitKVError" in out.stdout and "expandable_segments" in out.stdout, out.stdout + out.stderr
