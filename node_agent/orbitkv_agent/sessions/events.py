"""What leaves the store, told to the schedulers that asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orbitkv.protocol.messages import Events, GroupHashes, TakeEvents
from orbitkv.protocol.records import Header
from orbitkv_agent.guards import guard
from orbitkv_agent.sessions.errors import invalid
from orbitkv_agent.sessions.instances import Instance, Instances
from orbitkv_agent.store.cache import PageCache
from orbitkv_agent.store.index import KeySpace

if TYPE_CHECKING:
    from orbitkv_agent.sessions.session import Session

MAX_PENDING: Final = 1 << 14
"""Hashes kept for one instance; beyond it they are dropped, and the next answer says so."""


class EventFeed:
    """Removed pages by instance, until they are taken. Used by the owner thread only.

    There is nothing below memory yet: a page that leaves it is gone, whatever became of its save before.
    """

    def __init__(self, cache: PageCache, instances: Instances) -> None:
        self._cache = cache
        self._instances = instances
        self._pending: dict[Instance, dict[tuple[int, int], list[bytes]]] = {}
        self._counts: dict[Instance, int] = {}
        self._lost: set[Instance] = set()

    def follow(self, instance: Instance) -> None:
        """Take note of whether an instance wants events."""
        wanted = instance.wants_events and instance.scheduler is not None
        if wanted and instance not in self._pending:
            if not self._pending:
                self._cache.on_evicted.append(self._evicted)
            self._pending[instance] = {}
            self._counts[instance] = 0
        elif not wanted and instance in self._pending:
            del self._pending[instance], self._counts[instance]
            self._lost.discard(instance)
            if not self._pending:
                self._cache.on_evicted.remove(self._evicted)

    def cleared(self, instance: Instance) -> None:
        """All that an instance could find was dropped at once."""
        if instance in self._pending:
            self._lose(instance)
            self._tell(instance)

    def take(self, session: Session, message: TakeEvents) -> Events:
        """What came since the last call.

        Raises:
            Refused: INVALID, the session did not ask for events of this instance.
        """
        instance = self._instances.get(session, message.instance)
        if instance not in self._pending or instance.scheduler is not session:
            raise invalid(f"instance {instance}: this session did not attach it with events")
        found = self._pending[instance]
        self._pending[instance] = {}
        self._counts[instance] = 0
        lost = instance in self._lost
        self._lost.discard(instance)
        removed = [GroupHashes(group, size, b"".join(hashes)) for (group, size), hashes in found.items()]
        return Events(removed, lost)

    def _evicted(self, space: KeySpace, group: int, hashes: list[bytes]) -> None:
        if not guard("commit-is-dram"):
            return
        for instance, pending in self._pending.items():
            if any(each is space for each in instance.spaces.values()):
                first = not self._counts[instance] and instance not in self._lost
                self._counts[instance] += len(hashes)
                if self._counts[instance] > MAX_PENDING:
                    self._lose(instance)
                else:
                    pending.setdefault((group, space.hash_bytes), []).extend(hashes)
                if first:
                    self._tell(instance)

    def _lose(self, instance: Instance) -> None:
        self._pending[instance].clear()
        self._counts[instance] = 0
        self._lost.add(instance)

    @staticmethod
    def _tell(instance: Instance) -> None:
        if instance.scheduler is not None:
            instance.scheduler.notify(Header.EVENTS)
