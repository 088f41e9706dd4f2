"""Entry point `vllm.general_plugins`: makes the connector known in every process of the engine, and sets it where an
operator asks for that."""

from __future__ import annotations

import logging

from orbitkv.injection import StayOff, in_child, is_injected, stay_off
from orbitkv.protocol.reasons import OffReason

CONNECTOR = "OrbitKVConnector"
logger = logging.getLogger("vllm.orbitkv")


def register() -> None:
    """Register `OrbitKVConnector` with vLLM, and in an injected pod have it set if the user chose none.

    vLLM calls this in each of its processes, in some of them more than once, and ends if it raises: it never does.
    """
    make_known()
    if not is_injected():
        return
    try:
        from .injected import install

        install()
    except Exception as error:
        if not in_child():
            off = StayOff(
                OffReason.ENGINE_VERSION_UNSUPPORTED, f"this vLLM has not the interface that OrbitKV knows: {error!r}"
            )
            stay_off(logger, "vllm", off)


def make_known() -> None:
    """Register `OrbitKVConnector` by its name, once in a process. Never raises.

    MultiConnector finds the classes of its connectors by name in some places, also where a module path is configured.
    """
    global _registered  # noqa: PLW0603 - one registration a process, as the factory's own table
    if _registered:
        return
    _registered = True
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(CONNECTOR, "orbitkv.vllm.connector", CONNECTOR)
    except (ImportError, ValueError) as error:  # an injected engine may say more precisely what is wrong
        logger.warning("OrbitKV: the connector cannot be named %s here: %s", CONNECTOR, error)


_registered = False
