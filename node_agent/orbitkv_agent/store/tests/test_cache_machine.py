"""Random interleavings of everything that the page cache offers, against a simple model of what must hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitkv_agent.store import ArenaPool, Entries, KeySpace, PageCache, Reservation, RetentionClass
from orbitkv_agent.store.index import entries_of

UNIT = 4096
NAMESPACES = ("red", "blue")
numbers = st.lists(st.integers(0, 11), min_size=1, max_size=8)
runs = st.builds(lambda first, length: list(range(first, first + length)), st.integers(0, 9), st.integers(1, 6))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def page_bytes(space: KeySpace, shard: int) -> int:
    """Shards and namespaces have different page sizes."""
    return (1 + shard + (space.namespace.name == "blue")) * UNIT - 96


@dataclass(eq=False)
class Lease:
    entries: Entries
    generations: np.ndarray


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # Room for two arenas of eight units: pressure all the time.
        self.cache = PageCache(
            ArenaPool(16 * UNIT, 8 * UNIT, prefault=False, threaded=False), pause_seconds=float("inf")
        )
        self.reservations: list[Reservation] = []
        self.leases: list[Lease] = []
        self.spaces: list[KeySpace] = []
        self.known: dict[KeySpace, set[bytes]] = {}
        self.generation = 0
        self.cache.on_inserted.append(self.inserted)
        self.cache.on_evicted.append(self.evicted)

    def inserted(self, space: KeySpace, group: int, hashes: list[bytes]) -> None:
        for one in hashes:
            assert one not in self.known[space], "inserted twice"
            self.known[space].add(one)

    def evicted(self, space: KeySpace, group: int, hashes: list[bytes]) -> None:
        for one in hashes:
            self.known[space].remove(one)

    @rule(namespace=st.sampled_from(NAMESPACES), shards=st.integers(1, 2))
    def open(self, namespace: str, shards: int) -> None:
        space = self.cache.open_key_space(namespace, f"model-{shards}", shards=shards, hash_bytes=16)
        if space not in self.spaces:
            self.spaces.append(space)
            self.known[space] = set()

    @precondition(lambda self: self.spaces)
    @rule(data=st.data(), chosen=numbers)
    def reserve(self, data: st.DataObject, chosen: list[int]) -> None:
        space = data.draw(st.sampled_from(self.spaces))
        shard = data.draw(st.integers(0, space.shards - 1))
        blob = b"".join(map(key, chosen))
        reservation = self.cache.reserve(space, 0, blob, shard, page_bytes(space, shard))
        total = len(reservation) + reservation.present + reservation.in_flight + sum(reservation.dropped.values())
        # A hash that is present and named twice counts as present once and in flight once.
        assert total == len(chosen)
        self.reservations.append(reservation)

    @precondition(lambda self: self.spaces)
    @rule(data=st.data(), chosen=runs)
    def save_all_shards(self, data: st.DataObject, chosen: list[int]) -> None:
        space = data.draw(st.sampled_from(self.spaces))
        for shard in range(space.shards):
            self.cache.commit(self.cache.reserve(space, 0, b"".join(map(key, chosen)), shard, page_bytes(space, shard)))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(self.reservations))
        self.cache.commit(reservation)
        self.reservations.remove(reservation)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(self.reservations))
        self.cache.abort(reservation)
        self.reservations.remove(reservation)

    @precondition(lambda self: self.spaces)
    @rule(data=st.data(), chosen=numbers | runs, promote=st.booleans())
    def lease(self, data: st.DataObject, chosen: list[int], promote: bool) -> None:
        space = data.draw(st.sampled_from(self.spaces))
        run = entries_of(space.lookup_run(0, b"".join(map(key, chosen))))
        expected = 0
        while expected < len(chosen) and key(chosen[expected]) in self.known[space]:
            expected += 1
        assert len(run) == expected, "the leading run of complete pages, no more and no less"
        assert space.hashes(run) == [key(number) for number in chosen[:expected]]
        if len(run):
            self.cache.pin(run)
            self.leases.append(Lease(run, self.cache.generations(run)))
            if promote:
                self.cache.demand_hit(run)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.cache.unpin(lease.entries)

    @precondition(lambda self: self.spaces)
    @rule(data=st.data())
    def drop_key_space(self, data: st.DataObject) -> None:
        space = data.draw(st.sampled_from(self.spaces))
        self.spaces.remove(space)
        self.cache.drop_key_space(space)
        assert len(space.lookup_run(0, key(0))) == 0

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        quota=st.none() | st.integers(0, 16),
        guarantee=st.integers(0, 8),
        insert=st.sampled_from([RetentionClass.RECLAIMABLE, RetentionClass.PROBATIONARY, RetentionClass.RETAINED]),
    )
    def configure(self, namespace: str, quota: int | None, guarantee: int, insert: RetentionClass) -> None:
        self.cache.configure_namespace(
            namespace,
            quota_bytes=None if quota is None else quota * UNIT,
            guaranteed_bytes=guarantee * UNIT,
            insert_class=insert,
        )

    @rule()
    def reclaim(self) -> None:
        self.cache.reclaim_step()

    @invariant()
    def parts_agree(self) -> None:
        self.cache.check_invariants()

    @invariant()
    def what_is_leased_stays_as_it_was(self) -> None:
        for lease in self.leases:
            entries = self.cache._entries
            assert (entries.generation[lease.entries] == lease.generations).all()
            assert (entries.pins[lease.entries] > 0).all()

    def teardown(self) -> None:
        for reservation in self.reservations:
            self.cache.abort(reservation)
        for lease in self.leases:
            self.cache.unpin(lease.entries)
        for namespace in NAMESPACES:
            self.cache.drop_namespace(namespace)
        while self.cache.reclaim_step():
            pass
        self.cache.check_invariants()
        stats = self.cache.stats()
        assert (stats.used_bytes, stats.entries) == (0, 0)
        assert sum(stats.total_by_key("resident_blocks").values()) == 0
        assert not self.cache._entries.pins.any()
        self.cache.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
