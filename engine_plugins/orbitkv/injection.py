"""What the entry points of all engines share when an operator put the plugin into an engine's pod.

Nothing here raises into the engine, and nothing beyond the standard library is imported before `check_payload` found
that it is there: whatever is wrong, the engine runs as it would without OrbitKV, its log has one line about it, and the
node's agent is told, if one answers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import multiprocessing
import os
from typing import TYPE_CHECKING

from orbitkv.protocol.reasons import OffReason
from orbitkv.protocol.versions import RELEASE

if TYPE_CHECKING:
    from orbitkv.config import PluginConfig

INJECTED_VARIABLE = "ORBITKV_INJECTED"
"""Set where an operator put the plugin into the engine's pod: the release of that operator."""
NEEDED = ("msgspec", "numpy")
"""Packages that the plugin takes from the engine's environment."""
TELL_MS = 5000
"""The engine's start waits for the agent no longer than this, and only when the plugin stays off."""


class StayOff(Exception):
    """This engine runs without the cache.

    Args:
        reason: in one word.
        message: what was found, and what the reader can do.
    """

    def __init__(self, reason: OffReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def is_injected() -> bool:
    """Whether an operator put the plugin into this engine's pod."""
    return INJECTED_VARIABLE in os.environ


def check_payload() -> None:
    """See that the plugin's files are of one release and that it finds what it needs.

    Raises:
        StayOff: they are not, or it does not.
    """
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise StayOff(
                OffReason.PACKAGES_MISSING,
                f"the engine's Python cannot import {name} ({error}); install it in the engine's image",
            ) from None
    try:
        installed = importlib.metadata.version("orbitkv")
    except importlib.metadata.PackageNotFoundError:
        return  # the files alone, without an installation
    if installed != RELEASE:
        folder = os.path.dirname(__file__)
        raise StayOff(
            OffReason.PAYLOAD_MIXED,
            f"{folder} has OrbitKV {RELEASE}, but the entry point that was found is of release {installed}: remove "
            "OrbitKV from the engine's image, or its folder from PYTHONPATH (annotation orbitkv.io/pythonpath)",
        )


def in_child() -> bool:
    """Whether an engine's process started this one: then that one has said all there is to say."""
    return multiprocessing.parent_process() is not None


def stay_off(logger: logging.Logger, engine: str, off: StayOff, config: PluginConfig | None = None) -> None:
    """Say once why the cache is not used: to the agent, if one answers, and in the engine's log.

    Args:
        logger: the engine's.
        engine: its name and version.
        off: the reason.
        config: says where the agent is; by default the environment does.
    """
    untold = tell_agent(engine, off, config)
    logger.warning(
        "OrbitKV stays off, and the engine serves without it: %s: %s (%s)",
        off.reason,
        off,
        untold or "the node's agent was told",
    )


def tell_agent(engine: str, off: StayOff, config: PluginConfig | None = None) -> str:
    """Tell the node's agent why the plugin stays off; return why it could not be told, or "". Never raises."""
    try:
        from orbitkv.client import CacheManagerClient

        config = config or _whereabouts()
        with CacheManagerClient(
            config.socket_path,
            cache_namespace=config.cache_namespace,
            token_path=config.token_path,
            name=f"{engine} (pid {os.getpid()})",
            timeout_ms=TELL_MS,
        ) as client:
            client.report_engine(engine, off.reason, str(off))
    except Exception as error:
        return f"the node's agent could not be told: {error}"
    return ""


def _whereabouts() -> PluginConfig:
    """Where the agent is and who we are, and no more: other settings may be what is wrong."""
    from orbitkv.config import SETTINGS, PluginConfig

    names = ("bootstrap_socket", "port", "cache_namespace", "token_path")
    variables = [SETTINGS[name].variable for name in names]
    return PluginConfig.load({}, {each: os.environ[each] for each in variables if each in os.environ}, injected=True)
