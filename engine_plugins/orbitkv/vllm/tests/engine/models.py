"""The models that the engines serve, and the types of what the fixtures hand out."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tools.harness.agent import AgentProcess
from tools.harness.engine import ROOT, EngineProcess, engine_environment, engine_python

EngineMaker = Callable[..., EngineProcess]
AgentMaker = Callable[..., AgentProcess]

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
    """Folders. `other` has the shape of `llama` and other weights; `gemma` has sliding-window layers."""

    llama: Path
    other: Path
    gemma: Path


class Pair(NamedTuple):
    """An engine, and the agent that it is attached to."""

    engine: EngineProcess
    agent: AgentProcess


def make_models(folder: Path) -> Models:
    """Makes all of them in `folder`."""
    models = Models(folder / "llama", folder / "other", folder / "gemma")
    arguments = [models.llama, "llama", 2, 0, models.other, "llama", 2, 1, models.gemma, "gemma3", 4, 0]
    command = [engine_python(), "-c", MAKE, *map(str, arguments)]
    subprocess.run(command, env=engine_environment(), cwd=ROOT, check=True, capture_output=True)
    return models
