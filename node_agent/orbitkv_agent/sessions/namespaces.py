"""Cache namespaces: which there are, and what they may use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
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


def key_of(namespace: str, name: str, uid: str) -> str:
    """Return the name under which the store keeps a CacheNamespace: made again it has another uid, and starts empty."""
    return f"{namespace}/{name}@{uid}"


def display_name(key: str) -> str:
    """Return a cache namespace's name for people; without a cluster it is the key itself."""
    return key.partition("@")[0]


def tenant_of(key: str) -> str:
    """Return whose a cache namespace is: in a cluster all that are of one Kubernetes namespace are one tenant's."""
    return key.partition("/")[0]


class Namespaces:
    """The cache namespaces that the store knows. Used by the owner thread only.

    Without a cluster: those that are configured, and the unnamed one. In a cluster: those that an engine attached to.

    Args:
        changed: called after each change: there may be pages to evict.
        reset: called with the name of a namespace whose pages were dropped.
    """

    def __init__(
        self, cache: PageCache, config: AgentConfig, changed: Callable[[], None], reset: Callable[[str], None]
    ) -> None:
        self._cache = cache
        self._pool_bytes = config.pool_bytes
        self._changed = changed
        self._reset = reset
        self._in_cluster = config.cluster is not None
        self._settings: dict[str, NamespaceSettings] = {}
        if not self._in_cluster:
            self._settings = {"": NamespaceSettings()} | dict(config.cache_namespaces)
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

    def has(self, name: str) -> bool:
        """Whether the store knows a cache namespace."""
        return name in self._settings

    def set(self, name: str, settings: NamespaceSettings) -> None:
        """Set what a cache namespace may use, new or known. Its reset generation never goes back."""
        known = self._settings.get(name)
        if known == settings:
            return
        generation = known.reset_generation if known is not None else 0
        if settings.reset_generation < generation:
            settings = settings.model_copy(update={"reset_generation": generation})
        self._settings[name] = settings
        self._apply(name, settings)
        if known is not None and settings.reset_generation > generation:
            logger.info("cache namespace %r was reset: all its pages are dropped", display_name(name))
            self._reset(name)
        self._changed()

    def drop(self, name: str) -> None:
        """Forget a cache namespace and its pages; what is leased or being saved goes when that ends."""
        del self._settings[name]
        self._cache.drop_namespace(name)
        self._reset(name)
        self._changed()

    def configure(self, message: ConfigureNamespace) -> None:
        """Set what a cache namespace may use; a new name makes a new one.

        Raises:
            Refused: a field and its value.
        """
        if self._in_cluster:
            raise unsupported(
                "in a cluster a CacheNamespace object says what it may use: change that (`kubectl edit cns`)"
            )
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
            found = error.errors(include_url=False, include_input=False)
            words = "; ".join(each["msg"].removeprefix("Value error, ") for each in found)
            raise invalid(f"cache namespace {name!r}: {words}") from None
        logger.info("cache namespace %r configured", name)
        self.set(name, settings)

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
