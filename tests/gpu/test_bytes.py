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

LAYOUTS = ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]
"""All that are served: in the other two of vLLM's a layer's part of a block is not one piece."""
TYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8"]
GEOMETRIES: dict[str, dict[str, Any]] = {
    "eight-heads": {"heads": 8, "content": 256},
    "one-head": {"heads": 1, "content": 256},
    "mla": {"heads": 1, "content": 576},
    "flashinfer-kv-apart": {"heads": 8, "content": 128, "layers": 12},
}
"""As vLLM 0.33.0 shows them: K and V of a head are one content, a head of a latent cache has 512 + 64."""
WAYS = [(layout, shape) for layout in LAYOUTS for shape in ({}, {"apart": True}) if layout[0] == "L" or not shape]
CASES = [
    pytest.param(
        {"layout": layout, "dtype": dtype, **where, **shape},
        id=f"{layout}-{'apart' if where else 'one'}-{dtype}-{name}",
    )
    for layout, where in WAYS
    for dtype in TYPES
    for name, shape in GEOMETRIES.items()
]
CASES += [  # 656 bytes a token: 512 of fp8, their scales, and 64 of bf16
    pytest.param({"layout": layout, "dtype": "uint8", "heads": 1, "content": 656, **where}, id=f"{layout}-mla-fp8")
    for layout, where in WAYS
    if not where
]
CASES += [  # a backend whose kernels take blocks of 16 tokens
    pytest.param({"layout": layout, "kernel": 16, "heads": 8, "content": 256}, id=f"{layout}-kernel-blocks")
    for layout in LAYOUTS[:2]
]


def engine(agent: AgentProcess, **shape: Any) -> Any:
    from tools.harness.gpu_engine import GpuEngine, Shape

    shape["dtype"] = getattr(torch, shape.get("dtype", "bfloat16"))
    return GpuEngine(agent.socket_path, Shape(**shape))


def raw(view: Any) -> Any:
    """The bytes of a view."""
    return view.view(torch.uint8)


@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_restored_pages_are_equal_and_nothing_else_changes(
    agent: AgentProcess, case: dict[str, Any], tokens: int
) -> None:
    shape = {"layers": 6, "blocks": 48, "tokens": tokens, **case}
    parts = tokens // shape.pop("kernel", tokens)
    numbers = np.random.default_rng(tokens)
    with engine(agent, kernel_blocks=parts, **shape) as it:
        order = numbers.permutation(48)
        sources, targets, hashes = order[:20], order[20:40], numbered_hashes(20, first=tokens)
        it.scramble()
        it.save(hashes, sources, it.point())
        views = [raw(view).unflatten(0, (48, parts)) for view in it.views]
        saved = [view[torch.from_numpy(sources).cuda()] for view in views]
        it.scramble()  # the engine uses its blocks for something else
        before = [memory.clone() for memory in it.memories]
        for view, pages in zip(views, saved, strict=True):
            view[torch.from_numpy(targets).cuda()] = pages
        expected = [memory.clone() for memory in it.memories]
        for memory, old in zip(it.memories, before, strict=True):
            memory.copy_(old)
        it.restore(hashes, targets, it.point())
        torch.cuda.synchronize()
        for memory, whole in zip(it.memories, expected, strict=True):
            assert torch.equal(memory, whole), f"{case} {tokens}: bytes differ"


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC"])
def test_blocks_that_kernels_cut_across_layers_are_refused(agent: AgentProcess, layout: str) -> None:
    from orbitkv.vllm.layout import LayoutRefusedError

    with pytest.raises(LayoutRefusedError, match="not one piece"):
        engine(agent, layout=layout, tokens=64, layers=4, blocks=8, kernel_blocks=4)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_come_one_after_the_other_where_that_is_asked_for(agent: AgentProcess, layout: str) -> None:
    with engine(agent, layout=layout, blocks=800) as it:
        it.scramble()
        hashes = numbered_hashes(390)
        it.save(hashes, np.arange(390), it.point())
        _, lease = it.lease(hashes)
        restore = it.client.start_restore(it.registration, lease, [np.arange(390) + 400], layer_order=True)
        assert it.client.wait_restore_enqueued(restore, 10)
        seen = [it.client.layers_ready(restore)]
        while not restore.status.final:
            seen.append(it.client.layers_ready(restore))
            os.sched_yield()  # the client's own thread needs the interpreter too
        for layer, view in enumerate(it.views):
            assert it.client.wait_layer(restore, layer, 10)
            assert torch.equal(raw(view)[400:790], raw(view)[:390])
        assert seen == sorted(seen) and len(set(seen)) > 3, f"layers came together: {sorted(set(seen))}"


@pytest.mark.parametrize("field", ["offset", "block_stride"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_falsified_place_is_caught_by_the_proof(agent: AgentProcess, layout: str, field: str) -> None:
    from tools.harness.gpu_engine import GpuEngine, Shape

    it = GpuEngine(agent.socket_path, Shape(layout=layout, layers=4, blocks=64), prove=False)
    try:
        wrong = it.layout.groups[0].layers[2]
        region = msgspec.structs.replace(wrong, **{field: getattr(wrong, field) + 256})
        layers = [region if each is wrong else each for each in it.layout.groups[0].layers]
        groups = [msgspec.structs.replace(it.layout.groups[0], layers=layers)]
        instance = type(it.instance)("falsified", it.instance.nonce)
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
