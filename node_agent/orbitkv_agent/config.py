"""The agent's settings: one frozen model. How its values come together is in `config_sources`."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from orbitkv.config import ConfigError as PluginConfigError
from orbitkv.config import check_namespace_options
from orbitkv.protocol.geometry import PAGE_ALIGNMENT
from orbitkv_agent.cluster.settings import ClusterSettings
from orbitkv_agent.host_memory import memory_allowance
from orbitkv_agent.quantity import format_quantity, parse_quantity

SMALLEST_POOL: Final = 1 << 20
_NAMESPACE_NAME: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")


def _at_least(smallest: int) -> BeforeValidator:
    """Check that a value is a size of `smallest` bytes or more; it is kept as it was written."""

    def check(value: Any) -> Any:
        if parse_quantity(value) < smallest:
            raise ValueError(f"must be at least {format_quantity(smallest)}")
        return value

    return BeforeValidator(check)


Quantity = int | str
"""A size as it was written; the property of the same name with `_bytes` has it in bytes."""


def _namespace_name(name: str) -> str:
    if name and (len(name) > 317 or not _NAMESPACE_NAME.fullmatch(name)):
        raise ValueError("a cache namespace is named `name` or `namespace/name`: letters, digits, '.', '_' and '-'")
    return name


def _plugin_options(options: dict[str, Any]) -> dict[str, Any]:
    try:
        return check_namespace_options(options)
    except PluginConfigError as error:
        raise ValueError(str(error)) from None


def _metrics_address(address: str) -> str:
    _split_address(address)
    return address


def _split_address(address: str) -> tuple[str, int] | None:
    if address == "off":
        return None
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be host:port, for example 127.0.0.1:9091, or off")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _split_list(value: Any) -> Any:
    """In flags and variables a list is written with commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _read_yaml_text(value: Any) -> Any:
    """In flags and variables a mapping is written as YAML (JSON is YAML too)."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value) or {}
    except yaml.YAMLError:
        raise ValueError("must be a mapping in YAML or JSON") from None


def _default(text: str) -> dict[str, Any]:
    """State in words a default that is worked out, for the documentation."""
    return {"default_text": text}


class NamespaceSettings(BaseModel):
    """What one cache namespace may use, and what its engines are told."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    quota: Annotated[Quantity, _at_least(0)] | None = Field(
        default=None,
        description="Most memory that its pages may take. Beyond it only its own pages are evicted.",
        json_schema_extra=_default("no limit"),
    )
    guaranteed: Annotated[Quantity, _at_least(0)] = Field(
        default=0, description="Memory within which only the namespace itself evicts its pages."
    )
    insert_class: Literal["probationary", "retained"] = Field(
        default="probationary",
        description="Retention class of new pages: `probationary` ones leave first, until they are used again.",
    )
    reset_generation: int = Field(default=0, ge=0, description="Raising it retires every page that was stored before.")
    options: Annotated[dict[str, Any], AfterValidator(_plugin_options)] = Field(
        default_factory=dict,
        description="Settings of the namespace's engines, by name; they are sent when an engine connects.",
    )

    @property
    def quota_bytes(self) -> int | None:
        """`quota` in bytes; None is no limit."""
        return None if self.quota is None else parse_quantity(self.quota)

    @property
    def guaranteed_bytes(self) -> int:
        """`guaranteed` in bytes."""
        return parse_quantity(self.guaranteed)

    @model_validator(mode="after")
    def _guarantee_fits_quota(self) -> NamespaceSettings:
        if self.quota_bytes is not None and self.guaranteed_bytes > self.quota_bytes:
            raise ValueError(f"guaranteed ({self.guaranteed}) must not be larger than quota ({self.quota})")
        return self


def default_pool() -> int:
    """Half of what this process may use, in bytes."""
    return max(memory_allowance().size // 2, SMALLEST_POOL)


class AgentConfig(BaseModel):
    """Everything that can be set on the agent. Times are milliseconds, sizes quantities."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    socket_path: str = Field(
        default="",
        min_length=1,
        max_length=107,
        description="Unix socket that engines connect to.",
        json_schema_extra=_default("/tmp/orbitkv-<port>.sock"),
    )
    port: int = Field(
        default=50055,
        ge=1,
        le=65535,
        description="Number in the socket's default name, for several agents on one machine.",
    )
    pool: Annotated[Quantity, _at_least(SMALLEST_POOL)] = Field(
        default_factory=default_pool,
        description="Host memory for pages.",
        json_schema_extra=_default("half of what the control group or the machine allows"),
    )
    arena: Annotated[Quantity, _at_least(PAGE_ALIGNMENT)] | None = Field(
        default=None,
        description="Size of the pieces in which the pool is shared with engines.",
        json_schema_extra=_default("chosen from the pool"),
    )
    prefault: bool = Field(
        default=True, description="Touch memory for pages before it is needed, so that no copy waits for it."
    )
    query_budget_percent: int = Field(
        default=75, ge=1, le=100, description="Share of the pool that may be reserved for restores at one time."
    )
    instance_budget: Annotated[Quantity, _at_least(PAGE_ALIGNMENT)] | None = Field(
        default=None,
        description="The same for one engine alone.",
        json_schema_extra=_default("the whole budget"),
    )
    busy_poll_us: int = Field(
        default=100,
        ge=0,
        le=1000,
        description="While requests come one upon the other, look so long for the next one without sleeping: answers "
        "come sooner, for a little processor time. 0 where the agent has less than a processor of its own.",
    )
    reply_ttl_ms: int = Field(
        default=60_000, ge=1, description="Time after which pages promised to an engine return unasked."
    )
    max_session_queries: int = Field(default=128, ge=1, description="Queries that one engine may have open.")
    max_queries: int = Field(
        default=1024,
        ge=1,
        description="Queries that all engines together may have open. Of these, and of the bytes above, none of "
        "several tenants gets more than it leaves to others.",
    )
    max_restores_per_device: int = Field(
        default=128, ge=1, description="Restores that may run at one time on one device."
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        description="Connections to the socket; in a cluster no tenant gets more of them than it leaves to others.",
    )
    max_connections_per_peer: int = Field(
        default=256, ge=1, description="Connections to the socket from one user; in a cluster: from one pod."
    )
    max_strangers: int = Field(
        default=64, ge=2, description="In a cluster: connections whose token has not been accepted yet."
    )
    hello_timeout_ms: int = Field(default=5000, ge=1, description="Time in which a connection must introduce itself.")
    drain_timeout_ms: int = Field(
        default=30_000, ge=0, description="Longest wait for copies in flight when the agent is asked to stop."
    )
    watchdog_warn_ms: int = Field(
        default=30_000, ge=1, description="Age at which a copy in flight is reported as stalled."
    )
    heartbeat_ms: int = Field(
        default=5000, ge=1, description="Rhythm in which a client must report where the kernel cannot tell of its end."
    )
    allowed_uids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_split_list)] = Field(
        default_factory=lambda: tuple(sorted({0, os.getuid()})),
        min_length=1,
        description="Users that may connect (numbers, separated by commas). In a cluster users say nothing: tokens do.",
        json_schema_extra=_default("the agent's own user and root"),
    )
    metrics_address: Annotated[str, AfterValidator(_metrics_address)] = Field(
        default="127.0.0.1:9091",
        description="Where `/metrics`, `/health` and `/ready` are served (`host:port`); `off` for nowhere.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe entries to log."
    )
    log_format: Literal["json", "text"] = Field(
        default="text", description="One line an entry, for programs or for people."
    )
    mode: Literal["auto", "host", "cuda"] = Field(
        default="auto",
        description="Where engines keep their pages: `cuda` on GPUs, which the agent copies to and from; `host` in the "
        "memory of engines on the CPU; `auto` is `cuda` where there is a GPU.",
    )
    cache_namespaces: Annotated[
        dict[Annotated[str, AfterValidator(_namespace_name)], NamespaceSettings], BeforeValidator(_read_yaml_text)
    ] = Field(
        default_factory=dict,
        description='Settings of cache namespaces, by name; "" is the one without a name. Not in a cluster.',
    )
    cluster: Annotated[ClusterSettings | None, BeforeValidator(_read_yaml_text)] = Field(
        default=None,
        description="The agent's place in a Kubernetes cluster; the operator writes it.",
        json_schema_extra=_default("none: alone on this machine"),
    )

    @property
    def pool_bytes(self) -> int:
        """`pool` in bytes."""
        return parse_quantity(self.pool)

    @property
    def arena_bytes(self) -> int | None:
        """`arena` in bytes; None leaves it to the pool."""
        return None if self.arena is None else parse_quantity(self.arena)

    @property
    def query_budget_bytes(self) -> int:
        """Bytes that all queries, leases and restores together may reserve."""
        return self.pool_bytes * self.query_budget_percent // 100

    @property
    def instance_budget_bytes(self) -> int:
        """Bytes that those of one instance may reserve."""
        return self.query_budget_bytes if self.instance_budget is None else parse_quantity(self.instance_budget)

    @property
    def metrics_endpoint(self) -> tuple[str, int] | None:
        """(host, port) to serve metrics on; port 0 is any free one; None is off."""
        return _split_address(self.metrics_address)

    @model_validator(mode="before")
    @classmethod
    def _name_socket_after_port(cls, data: Any) -> Any:
        if isinstance(data, dict) and "socket_path" not in data:
            return data | {"socket_path": f"/tmp/orbitkv-{data.get('port', cls.model_fields['port'].default)}.sock"}
        return data

    @model_validator(mode="after")
    def _sizes_fit(self) -> AgentConfig:
        for name, size in (("arena", self.arena_bytes), ("instance_budget", self.instance_budget_bytes)):
            if size is not None and size > self.pool_bytes:
                raise ValueError(f"{name} ({getattr(self, name)}) must not be larger than pool ({self.pool})")
        if self.cluster is not None and self.cache_namespaces:
            raise ValueError("cache_namespaces must be empty with cluster: there CacheNamespace objects say it")
        guaranteed = sum(namespace.guaranteed_bytes for namespace in self.cache_namespaces.values())
        if guaranteed > self.pool_bytes:
            raise ValueError(
                f"cache_namespaces: guaranteed adds up to {format_quantity(guaranteed)}, more than pool ({self.pool})"
            )
        return self


def describe_default(model: type[BaseModel], name: str) -> str:
    """Return a setting's default as the documentation states it: a value without spaces, or words."""
    field = model.model_fields[name]
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default_text" in extra:
        return str(extra["default_text"])
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default in (None, {}) else str(default)


def choices(model: type[BaseModel], name: str) -> tuple[str, ...]:
    """Return the values that a setting can have, where they are few; else nothing."""
    annotation = model.model_fields[name].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()
