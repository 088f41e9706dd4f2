"""Entry point `vllm.general_plugins`: makes the connector known by name in every process of the engine."""

from __future__ import annotations

import logging

CONNECTOR = "OrbitKVConnector"
logger = logging.getLogger("vllm.orbitkv")


def register() -> None:
    """Register `OrbitKVConnector` with vLLM.

    vLLM calls this in each of its processes, in some of them more than once. An engine without KV connectors goes on
    without ours.

    Raises:
        ValueError: another package has registered a connector of this name.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        logger.warning("OrbitKV stays off: this vLLM has no KV connector interface that it knows (%s)", error)
        return
    global _registered  # noqa: PLW0603 - one registration a process, as the factory's own table
    if not _registered:
        KVConnectorFactory.register_connector(CONNECTOR, "orbitkv.vllm.connector", CONNECTOR)
        _registered = True


_registered = False
