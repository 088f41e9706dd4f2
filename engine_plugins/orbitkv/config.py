"""Settings of the engine plugins: one model for every engine.

A setting `NAME` can be given in three places, the first of which wins:

1. by the cache namespace, sent by the agent when a session opens (only those marked `live` in `SETTINGS`);
2. as `orbitkv.NAME` in the engine's `kv_connector_extra_config`;
3. as the environment variable `ORBITKV_NAME`.

Only msgspec is imported here, so that an engine, the agent and the tools that write the documentation can all use it.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

logger = logging.getLogger(__name__)

KEY_PREFIX: Final = "orbitkv."
VARIABLE_PREFIX: Final = "ORBITKV_"
NOT_THERE_YET: Final = ("query_control", "tp_shard_endpoints", "tp_shard_bootstrap_sockets", "static_lora_adapters")
"""Names that are announced; this release refuses them."""


class ConfigError(ValueError):
    """A setting cannot be used; the message names the key, its value and the rule."""


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return `known` with the names that look most like `name` first."""
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())


def _about(description: str, *, live: bool = False, **bounds: Any) -> msgspec.Meta:
    """Describe a setting; `live`: the cache namespace may set it too; `bounds` as msgspec names them."""
    return msgspec.Meta(description=description, extra={"live": live}, **bounds)


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set on the engine's side."""

    bootstrap_socket: Annotated[str, _about("Path of the agent's socket. Empty: `/tmp/orbitkv-<port>.sock`.")] = ""
    port: Annotated[
        int,
        _about("Number in the name of the agent's socket, for several agents on one machine.", ge=1, le=65535),
    ] = 50055
    mode: Annotated[
        Literal["read_write", "save_only"],
        _about("`save_only` stores pages and never asks for any (for example in a decode engine).", live=True),
    ] = "read_write"
    on_missing: Annotated[
        Literal["fail", "run"],
        _about(
            "No agent when the engine starts: `fail` ends the start with a message; `run` serves without the cache and "
            "attaches when the agent comes."
        ),
    ] = "fail"
    timeout_ms: Annotated[
        int,
        _about("Longest wait for an answer of the agent, outside the scheduler's loop.", ge=1, le=600_000),
    ] = 5000
    max_wait_ms: Annotated[
        int,
        _about(
            "Longest time that a request is held while its pages are looked up; then the engine computes it.",
            live=True,
            ge=0,
            le=600_000,
        ),
    ] = 2000
    kv_layout: Annotated[
        Literal["auto", "engine"],
        _about(
            "`auto` asks the engine for a layout in which a page is one piece of memory; `engine` takes what the engine"
            " chooses by itself."
        ),
    ] = "auto"
    scheduler: Annotated[
        Literal["auto", "engine"],
        _about(
            "Where OrbitKV sets itself as the engine's connector: `auto` also sets a scheduler class, vLLM's own and a "
            "few lines, which saves a millisecond after a restore; `engine` leaves the engine's scheduler alone."
        ),
    ] = "auto"
    overlap: Annotated[
        Literal["on", "off"],
        _about(
            "`on`: a request that is alone begins to compute while its pages still arrive, layer by layer, where the "
            "scheduler class of `scheduler` is in force; tried on CPUs so far, not on GPUs. `off`: all of them arrive "
            "before it begins."
        ),
    ] = "off"
    wait_for_full_prefix: Annotated[
        bool,
        _about("Hold a request until its whole prefix can be fetched, not only the part that is near.", live=True),
    ] = False
    queue_warmup: Annotated[bool, _about("Announced, not there yet: only `false` is accepted.")] = False
    model_fingerprint: Annotated[
        str,
        _about(
            "Name for the model's weights that you vouch for: engines with the same name must have the same weights. "
            "Empty: worked out from the weights.",
            live=True,
            max_length=256,
        ),
    ] = ""
    min_load_tokens: Annotated[
        int,
        _about("When fewer tokens than this could be fetched, they are computed instead.", live=True, ge=0, le=1 << 30),
    ] = 0
    save_decode: Annotated[
        bool,
        _about(
            "Also keep pages that the engine filled with generated tokens, not only those of the prompt.", live=True
        ),
    ] = True
    cache_namespace: Annotated[
        str,
        _about(
            "Cache namespace (tenant) to join. Engines in different namespaces never see each other's pages.",
            max_length=317,
        ),
    ] = ""
    token_path: Annotated[
        str,
        _about(
            "File with the token that lets the engine join the cache namespace. Empty: none, as on a single machine."
        ),
    ] = ""

    @property
    def socket_path(self) -> str:
        """Path of the agent's socket."""
        return self.bootstrap_socket or f"/tmp/orbitkv-{self.port}.sock"

    @classmethod
    def load(
        cls,
        extra: Mapping[str, Any],
        environ: Mapping[str, str],
        *,
        injected: bool = False,
        namespace_options: Mapping[str, Any] | None = None,
    ) -> PluginConfig:
        """Return the settings in force.

        Args:
            extra: the engine's `kv_connector_extra_config`; keys without the prefix `orbitkv.` are not ours.
            environ: the process's environment; variables that name no setting are not ours.
            injected: an operator put the plugin here, perhaps a newer one: what this release does not know becomes a
                warning in the log instead of an error, and a missing agent never ends the engine's start unless
                `on_missing` says so.
            namespace_options: `Welcome.namespace_options` of an open session.

        Raises:
            ConfigError: a key is unknown or announced only, or a value breaks its rule.
        """
        values: dict[str, Any] = {"on_missing": "run"} if injected else {}
        for name in NOT_THERE_YET:
            if _variable(name) not in environ:
                continue
            if not injected:
                raise _announced_only(f"the environment variable {_variable(name)}")
            _warn_unknown(_variable(name))
        for name, setting in SETTINGS.items():
            text = environ.get(setting.variable)
            if text is not None and not _is_service_link(name, text):
                values[name] = setting.check(text, setting.variable)
        for key, value in extra.items():
            if not key.startswith(KEY_PREFIX):
                continue
            name = key.removeprefix(KEY_PREFIX)
            if name in SETTINGS:
                values[name] = SETTINGS[name].check(value, key)
            elif injected:
                _warn_unknown(key)
            elif name in NOT_THERE_YET:
                raise _announced_only(f"the key {key}")
            else:
                known = ", ".join(KEY_PREFIX + other for other in nearest_first(name, SETTINGS))
                raise ConfigError(f"{key}: there is no such setting. The settings are (nearest first): {known}")
        return cls(**values).with_namespace_options(namespace_options or {})

    def with_namespace_options(self, options: Mapping[str, Any]) -> PluginConfig:
        """Return these settings with those that the cache namespace gives.

        Settings that a namespace may not change, or that this release does not know, are left out with a warning.

        Raises:
            ConfigError: a value breaks its rule.
        """
        known = {name: value for name, value in options.items() if name in LIVE_SETTINGS}
        for name in options.keys() - known.keys():
            logger.warning(
                "the cache namespace's setting %s was ignored: this release of OrbitKV does not take it", name
            )
        return msgspec.structs.replace(self, **check_namespace_options(known))


def check_namespace_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a cache namespace as they are sent to engines: names without a prefix, values checked.

    Raises:
        ConfigError: a name is none of `LIVE_SETTINGS`, or a value breaks its rule.
    """
    for name in options:
        if name not in LIVE_SETTINGS:
            why = "is set on the engine's side only" if name in SETTINGS else "is no setting of the engine plugins"
            known = ", ".join(nearest_first(name, LIVE_SETTINGS))
            raise ConfigError(f"{name}: {why}. A cache namespace can set (nearest first): {known}")
    return {name: SETTINGS[name].check(value, name) for name, value in options.items()}


class Setting(NamedTuple):
    """One row of the table of settings."""

    name: str
    type: Any
    default: Any
    description: str
    rule: str
    live: bool
    """The cache namespace may set it."""

    @property
    def key(self) -> str:
        """Key in `kv_connector_extra_config`."""
        return KEY_PREFIX + self.name

    @property
    def variable(self) -> str:
        """Environment variable."""
        return _variable(self.name)

    def check(self, value: Any, given_as: str) -> Any:
        """Return `value` in the setting's type; text is read as what it says (`"5000"`, `"true"`).

        Raises:
            ConfigError: it breaks the rule.
        """
        try:
            checked = msgspec.convert(value, self.type, strict=False)
        except msgspec.ValidationError:
            raise ConfigError(f"{given_as} is {value!r}; it must be {self.rule}") from None
        if self.name == "queue_warmup" and checked:
            raise _announced_only(f"{given_as} = true")
        return checked


def _warn_unknown(given_as: str) -> None:
    logger.warning("%s was ignored: this release of OrbitKV does not know it", given_as)


def _announced_only(what: str) -> ConfigError:
    return ConfigError(f"{what} is announced, but not there yet in this release of OrbitKV: remove it")


def _variable(name: str) -> str:
    return VARIABLE_PREFIX + name.upper()


def _is_service_link(name: str, text: str) -> bool:
    """Kubernetes gives pods beside a Service called `orbitkv` a variable ORBITKV_PORT=tcp://address:port."""
    return name == "port" and re.match(r"(tcp|udp|sctp)://", text) is not None


def _rule(hint: Any, meta: msgspec.Meta) -> str:
    """Return in words what values a setting takes."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if hint is bool:
        return "true or false"
    if hint is int:
        return f"a whole number from {meta.ge} to {meta.le}"
    return f"text of at most {meta.max_length} characters" if meta.max_length else "text"


def _table() -> dict[str, Setting]:
    hints = get_type_hints(PluginConfig, include_extras=True)
    table = {}
    for field in msgspec.structs.fields(PluginConfig):
        annotated = hints[field.name]
        hint, meta = get_args(annotated)
        rule = _rule(hint, meta)
        live = meta.extra["live"]
        table[field.name] = Setting(field.name, annotated, field.default, meta.description, rule, live)
    return table


SETTINGS: Final = _table()
"""All settings by name: what the documentation's table is made from."""
LIVE_SETTINGS: Final = tuple(name for name, setting in SETTINGS.items() if setting.live)
"""Names of the settings that a cache namespace can give."""
