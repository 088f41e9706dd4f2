"""Entry point `sglang.srt.plugins`: says why an SGLang engine that asked for the cache runs without it."""

from __future__ import annotations

import importlib.metadata
import logging

from orbitkv.injection import StayOff, in_child, is_injected, stay_off
from orbitkv.protocol.reasons import OffReason

logger = logging.getLogger("orbitkv.sglang")


def register() -> None:
    """Called by SGLang before it reads its arguments, in each of its processes. Changes nothing and never raises."""
    global _said  # noqa: PLW0603 - one word a process
    if _said or not is_injected() or in_child():
        return
    _said = True
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    off = StayOff(
        OffReason.ENGINE_NOT_SERVED,
        "this release of OrbitKV serves vLLM only; remove the annotation orbitkv.io/cache-namespace from this pod",
    )
    stay_off(logger, f"sglang {version}", off)


_said = False
