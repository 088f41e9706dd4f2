"""What engines are started with, and the types of what the fixtures hand out."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tools.harness.agent import AgentProcess
from tools.harness.engine import ROOT, EngineProcess, engine_environment, engine_python
from tools.harness.serve import ServeProcess

EngineMaker = Callable[..., EngineProcess]
AgentMaker = Callable[..., AgentProcess]

PATIENT = {"ORBITKV_TEST_GUARD_OFF": os.environ.get("ORBITKV_TEST_GUARD_OFF", "vllm-step-allowance")}
PATIENT_SETTINGS = {"timeout_ms": 60_000, "max_wait_ms": 60_000}
"""On a busy machine the agent, or the thread that copies, can take longer than the 5 ms that a step waits for an
answer or the 2 s that a request waits for its pages, and then the engine rightly computes. Tests of what is restored
need an engine that waits; the tests of faults and those over HTTP leave these bounds as they are."""

MAKE = """
import sys
from pathlib import Path
import torch
from tools.tiny_model import byte_tokenizer, model_config, random_model

for folder, arch, layers, seed in zip(*[iter(sys.argv[1:])] * 4):
    tokenizer = byte_tokenizer()
    random_model(model_config(arch, int(layers), tokenizer), torch.bfloat16, int(seed)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
"""
"""All models in one process, as importing torch and transformers takes longer than making them."""


class Models(NamedTuple):
    """Folders. `other` has the shape of `llama` and other weights; `gemma` has sliding windows, `deepseek` MLA."""

    llama: Path
    other: Path
    gemma: Path
    deepseek: Path


class Pair(NamedTuple):
    """An engine, and the agent that it is attached to."""

    engine: EngineProcess
    agent: AgentProcess


class Service(NamedTuple):
    """A server and the agent that it is attached to."""

    server: ServeProcess
    agent: AgentProcess


MODELS = "ORBITKV_TEST_MODELS"


def make_models(folder: Path) -> Models:
    """Makes all of them in `folder`, or takes those that another test session made: ORBITKV_TEST_MODELS names its
    folder."""
    shared = os.environ.get(MODELS)
    folder = Path(shared) if shared else folder
    models = Models(folder / "llama", folder / "other", folder / "gemma", folder / "deepseek")
    if shared:
        return models
    arguments = [models.llama, "llama", 2, 0, models.other, "llama", 2, 1]
    arguments += [models.gemma, "gemma3", 4, 0, models.deepseek, "deepseek", 2, 0]
    command = [engine_python(), "-c", MAKE, *map(str, arguments)]
    subprocess.run(command, env=engine_environment(), cwd=ROOT, check=True, capture_output=True)
    return models
