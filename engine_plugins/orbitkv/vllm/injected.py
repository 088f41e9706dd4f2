"""Sets the connector in an engine that an operator put the plugin into, without a word on its command line.

vLLM builds its configuration in `EngineArgs.create_engine_config`. That method is wrapped: where the user chose no KV
connector ours is set, for this one call. Whatever speaks against it leaves the arguments as they were.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from orbitkv.injection import StayOff, check_payload, stay_off
from orbitkv.protocol.reasons import OffReason

logger = logging.getLogger("vllm.orbitkv")

SUPPORTED = ("0.32", "0.33")
"""Series of vLLM that this release was tried with."""
CONNECTOR = "OrbitKVConnector"
MULTI_CONNECTOR = "MultiConnector"
MULTI_VARIABLE = "ORBITKV_MULTI_CONNECTOR"
OURS: dict[str, Any] = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": "orbitkv.vllm",  # so that it is found whether or not the entry points are loaded there
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
EARLY_SCHEDULER = "orbitkv.vllm.early.EarlyScheduler"
_WRAPPED = "_orbitkv"


def engine_name() -> str:
    """The engine's name and version, such as "vllm 0.32.0"."""
    import vllm

    return f"vllm {vllm.__version__}"


def install() -> None:
    """Wrap `EngineArgs.create_engine_config`, once in a process."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return with_connector(self, lambda: original(self, *args, **kwargs))

    setattr(create_engine_config, _WRAPPED, True)
    EngineArgs.create_engine_config = create_engine_config


def with_connector(engine_args: Any, create: Callable[[], Any]) -> Any:
    """Return what `create` makes of the engine's arguments, with the connector set for it if nothing speaks against it.

    Raises only what `create` raises without the connector.
    """
    given = getattr(engine_args, "kv_transfer_config", None)
    try:
        chosen = choose(engine_args, os.environ)
        if chosen is None:
            return create()
        from vllm.config import KVTransferConfig

        engine_args.kv_transfer_config = KVTransferConfig(**chosen)
    except StayOff as off:
        _say(off)
        return create()
    except Exception as error:
        logger.debug("OrbitKV: choosing the connector failed", exc_info=True)
        _say(StayOff(OffReason.PLUGIN_ERROR, f"choosing the connector failed: {error!r}; please report it"))
        return create()
    refused: Exception | None = None
    try:
        made = create()
    except Exception as error:
        refused = error
    finally:
        engine_args.kv_transfer_config = given
    if refused is not None:
        made = create()  # if it was not about the connector, this says so as it would without us
        _say(StayOff(OffReason.ENGINE_REFUSED, f"vLLM does not start with a KV connector here: {first_line(refused)}"))
    else:
        logger.info("OrbitKV: the connector is set; whether it is attached is said below")
        if chosen["kv_connector"] == CONNECTOR:
            _set_scheduler(made)
    return made


def _set_scheduler(vllm_config: Any) -> None:
    """Have an engine with its only worker in the scheduler's process hear of restores early, if the user chose no
    scheduler class."""
    try:
        from orbitkv.config import PluginConfig

        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        alone = parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"
        chosen = PluginConfig.load({}, os.environ, injected=True).scheduler
        if not alone or scheduler.scheduler_cls is not None or chosen == "engine":
            return
        from . import early  # noqa: F401 - that it can be imported, before the engine has to

        scheduler.scheduler_cls = EARLY_SCHEDULER
        logger.info("OrbitKV: the scheduler class is set, too (orbitkv.scheduler=engine leaves it alone)")
    except Exception as error:
        logger.info("OrbitKV: the scheduler is vLLM's own: %r", error)


def choose(engine_args: Any, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the `KVTransferConfig` to use as its fields; None where the user has set our connector already.

    Raises:
        StayOff: the engine is to run without it.
    """
    check_engine(engine_name())
    check_payload()
    check_settings(environ)
    if getattr(engine_args, "kv_offloading_size", None) is not None:
        raise StayOff(
            OffReason.KV_TRANSFER_CONFIG_PRESENT,
            "the engine was started with --kv-offloading-size, for which vLLM sets a KV connector of its own; "
            "remove it to use OrbitKV instead",
        )
    given = getattr(engine_args, "kv_transfer_config", None)
    if given is None:
        return dict(OURS)
    fields = _fields(given)
    if CONNECTOR in connectors_of(fields):
        return None
    if environ.get(MULTI_VARIABLE, "").lower() != "true":
        raise StayOff(
            OffReason.KV_TRANSFER_CONFIG_PRESENT,
            f"the engine was started with a KV connector ({', '.join(connectors_of(fields))}), which is left as it is; "
            "take --kv-transfer-config away to use OrbitKV instead, or annotate the pod with "
            'orbitkv.io/multi-connector: "true" to use both',
        )
    return joined(fields)


def check_engine(engine: str) -> None:
    """See that this release was tried with the engine.

    Raises:
        StayOff: it was not.
    """
    version = engine.removeprefix("vllm ")
    found = re.match(r"(\d+\.\d+)\.", version)
    if found is None or found[1] not in SUPPORTED:
        raise StayOff(
            OffReason.ENGINE_VERSION_UNSUPPORTED,
            f"this is vLLM {version}, and this release of OrbitKV serves "
            f"{' and '.join(f'{each}.x' for each in SUPPORTED)}: use an image with one of these, or a release of "
            "OrbitKV that serves this one",
        )


def check_settings(environ: Mapping[str, str]) -> None:
    """See that the connector will take its settings.

    Raises:
        StayOff: it will not.
    """
    from orbitkv.config import ConfigError, PluginConfig

    try:
        PluginConfig.load({}, environ, injected=True)
    except ConfigError as error:
        raise StayOff(OffReason.SETTING_INVALID, f"{error}; correct the pod's annotations or variables") from None


def connectors_of(fields: Mapping[str, Any]) -> list[str]:
    """The connectors that a configuration names, those within a MultiConnector too."""
    inner = (fields.get("kv_connector_extra_config") or {}).get("connectors") or []
    return [str(fields.get("kv_connector")), *(name for each in inner for name in connectors_of(each))]


def joined(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of the user's with our connector beside it. Theirs is asked first."""
    # Two connectors that wish for different layouts of memory would stop the engine's start.
    ours = {**OURS, "kv_connector_extra_config": {"orbitkv.kv_layout": "engine"}}
    # What one connector cannot load is computed: with vLLM's default a failed load fails the request.
    common = {"kv_role": given.get("kv_role"), "kv_load_failure_policy": "recompute"}
    if given.get("engine_id"):
        common["engine_id"] = given["engine_id"]
    if given.get("kv_connector") == MULTI_CONNECTOR:
        extra = dict(given.get("kv_connector_extra_config") or {})
        extra["connectors"] = [*(extra.get("connectors") or []), ours]
        return {**given, **common, "kv_connector_extra_config": extra}
    theirs = {name: value for name, value in given.items() if name != "engine_id"}
    return {"kv_connector": MULTI_CONNECTOR, **common, "kv_connector_extra_config": {"connectors": [theirs, ours]}}


def first_line(error: Exception) -> str:
    """What an error says, in one line of at most 500 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (" ".join(lines) or repr(error))[:500]


def _fields(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.init}


def _say(off: StayOff) -> None:
    stay_off(logger, engine_name(), off)
