"""Cache namespaces: which there are, and what they may use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, Literal

from pydantic import ValidationError

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import ConfigureNamespace
from orbitkv_agent.config import AgentConfig, NamespaceSettings
from orbitkv_agent.sessions.errors import Refused, invalid, unsupported
from orbitkv_agent.store.cache import PageCache
from orbitkv_agent.store.namespaces import RetentionClass

_INSERT_CLASSES: Final[dict[str, Literal["probationary", "retained"]]] = {
    "probationary": "probationary",
    "retained": "retained",
}
logger = logging.getLogger(__name__)


class Namespaces:
    """The configured cache namespaces, and the unnamed one. Used by the owner thread only."""

    def __init__(self, cache: PageCache, config: AgentConfig) -> None:
        self._cache = cache
        self._pool_bytes = config.pool_bytes
        self._settings: dict[str, NamespaceSettings] = {"": NamespaceSettings()} | dict(config.cache_namespaces)
        for name, settings in self._settings.items():
            self._apply(name, settings)

    def __iter__(self) -> Iterator[tuple[str, NamespaceSettings]]:
        return iter(self._settings.items())

    def options(self, name: str) -> dict[str, object]:
        """What the engines of a cache namespace are told.

        Raises:
            Refused: DENIED, there is no such namespace.
        """
        settings = self._settings.get(name)
        if settings is None:
            known = ", ".join(repr(each) for each in sorted(self._settings) if each) or "none but the unnamed one"
            raise Refused(
                ErrorKind.DENIED,
                f"cache namespace {name!r} is not configured on this agent (it has {known}); "
                "add it to cache_namespaces, or set it with `orbitkv-agent configure-namespace`",
            )
        return dict(settings.options)

    def configure(self, message: ConfigureNamespace) -> bool:
        """Set what a cache namespace may use; a new name makes a new one. Return whether its pages were dropped.

        Raises:
            Refused: a field and its value.
        """
        for field in ("protected_percent", "ttl_seconds", "uid"):
            if getattr(message, field):
                raise unsupported(f"{field} is {getattr(message, field)!r}: it is not there yet in this release")
        name = message.cache_namespace
        known = self._settings.get(name)
        self._check(message, known.reset_generation if known is not None else 0)
        try:
            settings = NamespaceSettings(
                quota=message.quota_bytes,
                guaranteed=message.guaranteed_bytes,
                insert_class=_INSERT_CLASSES[message.insert_class],
                reset_generation=message.reset_generation,
                options=known.options if known is not None else {},
            )
            AgentConfig.model_validate(
                {"pool": self._pool_bytes, "cache_namespaces": {**self._settings, name: settings}}
            )
        except ValidationError as error:
            words = "; ".join(each["msg"] for each in error.errors(include_url=False, include_input=False))
            raise invalid(f"cache namespace {name!r}: {words}") from None
        self._settings[name] = settings
        self._apply(name, settings)
        reset = settings.reset_generation > (known.reset_generation if known is not None else 0)
        logger.info("cache namespace %r configured%s", name, ", all its pages dropped" if reset else "")
        return reset

    def _check(self, message: ConfigureNamespace, generation: int) -> None:
        for field in ("quota_bytes", "guaranteed_bytes"):
            value = getattr(message, field)
            if value is not None and value < 0:
                raise invalid(f"{field} is {value}; it must not be negative")
        if message.insert_class not in _INSERT_CLASSES:
            raise invalid(f"insert_class is {message.insert_class!r}; it must be one of {list(_INSERT_CLASSES)}")
        if message.reset_generation < generation:
            raise invalid(
                f"reset_generation is {message.reset_generation}; cache namespace {message.cache_namespace!r} is at "
                f"{generation}, and it only rises"
            )

    def _apply(self, name: str, settings: NamespaceSettings) -> None:
        self._cache.configure_namespace(
            name,
            quota_bytes=settings.quota_bytes,
            guaranteed_bytes=settings.guaranteed_bytes,
            insert_class=RetentionClass[settings.insert_class.upper()],
            reset_generation=settings.reset_generation,
        )
