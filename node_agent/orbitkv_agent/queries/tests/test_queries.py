from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    CancelQuery,
    Done,
    GroupHashes,
    Instance,
    LeasedPages,
    Loading,
    Nothing,
    PollQuery,
    Query,
    Ready,
    Release,
    RestorePlan,
    SavePlan,
)
from orbitkv.protocol.records import RecordState
from orbitkv_agent.queries.service import OPERATION_BYTES
from orbitkv_agent.tests.harness import HASH_BYTES, INSTANCE, PAGE, Engine, World, hashes, start_message

# 4 MiB of pool: the budget of 75 % is 768 pages; 1.6 % is 16.
SMALL_BUDGET: dict[str, Any] = {"query_budget_percent": 1, "pool": "4MiB"}  # 10 pages


def test_a_hit_is_the_leading_run(engine: Engine) -> None:
    engine.save(hashes(1, 2, 4))
    ready = engine.ready(hashes(1, 2, 3, 4))
    assert ready.pages == [LeasedPages(0, 0, 2)]
    assert ready.boundaries == [(1, 2, 1)]
    assert (len(ready.leases), ready.bytes, ready.tier) == (1, 2 * PAGE, "dram")


def test_nothing_is_an_answer(engine: Engine) -> None:
    assert engine.query(hashes(1)) == Nothing("miss")
    assert engine.query(b"") == Nothing("miss")


def test_the_same_query_again_polls(engine: Engine) -> None:
    engine.save(hashes(1))
    ready = engine.ready(hashes(1), operation=5)
    assert engine.query(hashes(1), operation=5) == ready
    assert engine.control.poll(5, 1) == ready
    assert engine.world.agent.queries.leases.live == 1


def test_an_answer_that_cannot_be_sent_leases_nothing(engine: Engine) -> None:
    """What is promised is pinned after the reply was sent: unless the one who asked was gone by then."""
    engine.save(hashes(1))
    engine.control.post(Query(INSTANCE, 5, 1, [GroupHashes(0, HASH_BYTES, hashes(1))]))
    engine.control.drop()
    queries = engine.world.agent.queries
    assert (queries.leases.live, queries.outstanding, queries.budget.reserved) == (0, 0, 0)


@pytest.mark.guard("same-hashes")
def test_one_revision_is_one_list_of_hashes(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    engine.ready(hashes(1), operation=5)
    query = Query(INSTANCE, 5, 1, [GroupHashes(0, HASH_BYTES, hashes(2))])
    refusal = engine.control.refused(query)
    assert (refusal.kind, "other hashes are a new revision" in refusal.message) == (ErrorKind.INVALID, True)


def test_a_new_revision_retires_the_one_before(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    first = engine.ready(hashes(1), operation=5)
    second = engine.ready(hashes(1, 2), operation=5, revision=2)
    refusal = engine.worker.refused(start_message(engine.registration, first.leases[0], [0]))
    assert refusal.kind == ErrorKind.STALE
    engine.worker.done(engine.start(second))


@pytest.mark.guard("stale-revision")
def test_a_stale_revision_gets_no_answer_of_a_newer_one(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    engine.ready(hashes(1), operation=5, revision=2)
    assert engine.control.refused(PollQuery(5, 1)).kind == ErrorKind.STALE
    query = Query(INSTANCE, 5, 1, [GroupHashes(0, HASH_BYTES, hashes(1, 2))])
    assert engine.control.refused(query).kind == ErrorKind.STALE


def test_a_cancelled_query_is_gone_and_its_lease_returns(engine: Engine) -> None:
    engine.save(hashes(1))
    ready = engine.ready(hashes(1), operation=5)
    engine.control.cancel(5)
    assert engine.control.poll(5) == Nothing("gone")
    assert engine.worker.refused(start_message(engine.registration, ready.leases[0], [0])).kind == ErrorKind.STALE
    engine.control.call(CancelQuery([5, 6, 7]), Done)


def test_a_lease_is_consumed_once(engine: Engine) -> None:
    engine.save(hashes(1))
    ready = engine.ready(hashes(1))
    plan = engine.start(ready)
    assert engine.worker.refused(start_message(engine.registration, ready.leases[0], [1])).kind == ErrorKind.STALE
    engine.worker.done(plan)
    assert engine.worker.refused(start_message(engine.registration, ready.leases[0], [1])).kind == ErrorKind.STALE


def test_a_lease_expires_without_another_poll(engine: Engine) -> None:
    engine.save(hashes(1))
    ready = engine.ready(hashes(1), operation=5)
    engine.world.advance(59.9)
    assert engine.world.agent.queries.leases.live == 1
    engine.world.advance(0.2)
    assert engine.world.agent.queries.leases.live == 0
    assert engine.world.agent.counters.leases_expired == 1
    assert engine.control.poll(5) == Nothing("gone")
    assert engine.worker.refused(start_message(engine.registration, ready.leases[0], [0])).kind == ErrorKind.STALE


def test_a_restore_outlives_the_time_of_its_lease(engine: Engine) -> None:
    engine.save(hashes(1))
    plan = engine.start(engine.ready(hashes(1)))
    engine.world.advance(1000)
    assert engine.world.agent.queries.leases.pinned_pages == 1
    engine.worker.done(plan)


@pytest.mark.guard("own-lease")
def test_only_its_owner_gives_a_lease_back(engine: Engine) -> None:
    engine.save(hashes(1))
    ready = engine.ready(hashes(1))
    stranger = engine.world.client()
    stranger.call(Release([*ready.leases, 12345]), Done)  # an answer that tells nothing about either
    engine.worker.done(engine.start(ready))


def test_releasing_twice_or_what_is_unknown_is_harmless(engine: Engine) -> None:
    engine.save(hashes(1))
    ready = engine.ready(hashes(1))
    engine.control.call(Release([*ready.leases, *ready.leases, 12345]), Done)
    engine.control.call(Release(list(ready.leases)), Done)


def test_cancelling_one_owner_leaves_anothers_read_alone(world: World) -> None:
    first, second = world.engine(), world.engine(instance=Instance("other", "1"))
    first.save(hashes(1, 2))
    mine, theirs = first.ready(hashes(1, 2), operation=5), second.ready(hashes(1, 2))
    assert world.agent.queries.budget.reserved == 4 * PAGE, "each owner is charged"
    first.control.cancel(5)
    assert first.worker.refused(start_message(first.registration, mine.leases[0], [0, 1])).kind == ErrorKind.STALE
    plan = second.start(theirs)
    world.agent.cache.check_invariants()
    second.worker.done(plan)


@pytest.mark.guard("held-copies")
def test_a_page_under_a_running_copy_is_not_reused_when_its_engine_disconnects(tmp_path: Path) -> None:
    with World(tmp_path, pool="1MiB", arena="1MiB") as world:
        reader, writer = world.engine(), world.engine(instance=Instance("other", "1"))
        reader.save(hashes(1, 2))
        plan = reader.start(reader.ready(hashes(1, 2)))
        reader.control.drop()
        reader.worker.drop()  # the stream is gone, its process lives and copies
        places = set(_places(plan))
        for first in range(1000, 3000, 50):
            granted = writer.save(hashes(*range(first, first + 50)))
            assert not places & set(_places(granted)), "the memory was given to somebody else"
            writer.restore(hashes(*range(first, first + 50)))  # used pages push out older ones of their class


def _places(plan: RestorePlan | SavePlan) -> list[tuple[int, int]]:
    found = []
    for part in plan.pages:
        found += list(
            zip(np.frombuffer(part.arenas, "<u4").tolist(), np.frombuffer(part.offsets, "<u8").tolist(), strict=True)
        )
    return found


@pytest.mark.guard("budget-limit")
def test_a_query_waits_for_bytes_and_is_answered_in_order(tmp_path: Path) -> None:
    with World(tmp_path, **SMALL_BUDGET) as world:
        engine = world.engine()
        engine.save(hashes(*range(10)))
        holders = [engine.ready(hashes(*range(5))) for _ in range(2)]
        waiting = [engine.query(hashes(*range(5)), operation=100 + number) for number in range(2)]
        assert all(isinstance(each, Loading) and each.admitted for each in waiting)
        assert world.agent.counters.query_budget_waits == 2
        engine.control.release(*holders[0].leases)
        first, second = waiting
        assert isinstance(first, Loading)
        assert isinstance(second, Loading)
        assert engine.control.records is not None
        assert first.record is not None
        assert second.record is not None
        assert engine.control.records.state(first.record) is RecordState.SETTLED
        assert engine.control.records.state(second.record) is RecordState.PENDING
        assert isinstance(engine.control.poll(100), Ready)
        assert isinstance(engine.control.poll(101), Loading)
        assert world.agent.queries.budget.peak <= world.agent.queries.budget.limit


def test_a_query_that_waits_too_long_gets_nothing(tmp_path: Path) -> None:
    with World(tmp_path, **SMALL_BUDGET) as world:
        engine = world.engine()
        engine.save(hashes(*range(10)))
        engine.ready(hashes(*range(10)))
        loading = engine.query(hashes(1), operation=100, max_wait_ms=2000)
        assert isinstance(loading, Loading)
        assert engine.query(hashes(2), operation=101, max_wait_ms=0) == Nothing("budget")
        world.advance(1.9)
        assert isinstance(engine.control.poll(100), Loading)
        world.advance(0.2)
        assert engine.control.records is not None
        assert loading.record is not None
        assert engine.control.records.state(loading.record) is RecordState.SETTLED
        assert engine.control.poll(100) == Nothing("budget")
        assert engine.control.poll(100) == Nothing("gone")


def test_a_query_larger_than_the_budget_gets_nothing_at_once(tmp_path: Path) -> None:
    with World(tmp_path, **SMALL_BUDGET) as world:
        engine = world.engine()
        engine.save(hashes(*range(11)))
        assert engine.query(hashes(*range(11))) == Nothing("oversized")
        assert world.agent.counters.query_oversized == 1


def test_one_instances_share_holds_up_nobody_else(tmp_path: Path) -> None:
    with World(tmp_path, instance_budget="32KiB") as world:  # 8 pages each
        first, second = world.engine(), world.engine(instance=Instance("other", "1"))
        first.save(hashes(*range(8)))
        first.ready(hashes(*range(8)))
        assert isinstance(first.query(hashes(1)), Loading)
        assert isinstance(second.query(hashes(*range(8))), Ready)


def test_a_small_query_does_not_overtake_one_that_waits_for_more(tmp_path: Path) -> None:
    with World(tmp_path, **SMALL_BUDGET) as world:
        first, second = world.engine(), world.engine(instance=Instance("other", "1"))
        first.save(hashes(*range(10)))
        held = first.ready(hashes(*range(6)))
        assert isinstance(first.query(hashes(*range(8)), operation=100), Loading)
        assert isinstance(second.query(hashes(1), operation=100), Loading), "it fits, but is younger"
        first.control.release(*held.leases)
        assert isinstance(first.control.poll(100), Ready)
        assert isinstance(second.control.poll(100), Ready)


def test_a_query_that_finds_nothing_does_not_wait_behind_one_that_waits_for_bytes(tmp_path: Path) -> None:
    with World(tmp_path, **SMALL_BUDGET) as world:
        engine = world.engine()
        engine.save(hashes(*range(10)))
        engine.ready(hashes(*range(10)))
        assert isinstance(engine.query(hashes(1), operation=100), Loading)
        assert engine.query(hashes(77), operation=101) == Nothing("miss")


@pytest.mark.guard("budget-drain")
def test_bytes_come_back_only_when_the_restore_ended(tmp_path: Path) -> None:
    with World(tmp_path, **SMALL_BUDGET) as world:
        engine = world.engine()
        engine.save(hashes(*range(10)))
        plan = engine.start(engine.ready(hashes(*range(10))))
        assert isinstance(engine.query(hashes(1), operation=100), Loading)
        world.advance(1)
        assert isinstance(engine.control.poll(100), Loading)
        engine.worker.done(plan)
        assert isinstance(engine.control.poll(100), Ready)


def test_one_more_than_the_outstanding_queries_is_not_admitted_and_reserves_nothing(tmp_path: Path) -> None:
    with World(tmp_path, max_session_queries=2) as world:
        engine = world.engine()
        engine.save(hashes(1))
        first = engine.ready(hashes(1))
        engine.ready(hashes(1))
        reserved = world.agent.queries.budget.reserved
        loading = engine.query(hashes(1), operation=100)
        assert isinstance(loading, Loading)
        assert not loading.admitted
        assert world.agent.queries.budget.reserved == reserved
        assert world.agent.counters.query_unadmitted == 1
        # A session at its limit holds up nobody else.
        other = world.engine(instance=Instance("other", "1"))
        assert isinstance(other.query(hashes(1)), Ready)
        engine.worker.done(engine.start(first))
        assert isinstance(engine.control.poll(100), Ready)


def test_the_limit_in_all_is_served_in_the_order_of_arrival(tmp_path: Path) -> None:
    with World(tmp_path, max_queries=1) as world:
        engines = [world.engine(instance=Instance(f"e{number}", "1")) for number in range(3)]
        engines[0].save(hashes(1))
        held = engines[0].ready(hashes(1))
        assert isinstance(engines[1].query(hashes(1), operation=100), Loading)
        assert isinstance(engines[2].query(hashes(1), operation=100), Loading)
        engines[0].control.release(*held.leases)
        assert isinstance(engines[1].control.poll(100), Ready)
        assert isinstance(engines[2].control.poll(100), Loading)
        engines[1].control.cancel(100)
        assert isinstance(engines[2].control.poll(100), Ready)


def test_a_query_that_was_not_admitted_in_time_gets_nothing(tmp_path: Path) -> None:
    with World(tmp_path, max_queries=1) as world:
        engine = world.engine()
        engine.save(hashes(1))
        engine.ready(hashes(1))
        assert isinstance(engine.query(hashes(1), operation=100), Loading)
        world.advance(2.1)
        assert engine.control.poll(100) == Nothing("budget")


def test_a_lost_session_leaves_its_turn_to_others(tmp_path: Path) -> None:
    with World(tmp_path, max_queries=1) as world:
        first, second, third = (world.engine(instance=Instance(f"e{number}", "1")) for number in range(3))
        first.save(hashes(1))
        first.ready(hashes(1))
        second.query(hashes(1), operation=100)
        third.query(hashes(1), operation=100)
        second.control.drop()
        first.control.drop()
        assert isinstance(third.control.poll(100), Ready)


TWO_TENANTS: dict[str, Any] = {"cache_namespaces": {"a/one": {}, "a/two": {}, "b/one": {}}}


@pytest.mark.guard("tenants-share")
def test_a_tenant_that_leases_all_it_can_leaves_bytes_to_others(tmp_path: Path) -> None:
    """Also with several engines in several cache namespaces, and with queries of others that wait for its bytes."""
    with World(tmp_path, query_budget_percent=2, **TWO_TENANTS) as world:  # 20 pages
        other = world.engine(namespace="b/one")
        other.save(hashes(*range(5)))
        greedy = [world.engine(namespace=f"a/{name}") for name in ("one", "two")]
        for engine in greedy:
            engine.save(hashes(*range(5)))
        held = [engine.ready(hashes(*range(5))) for engine in greedy]
        waiting = [engine.query(hashes(1), operation=100, max_wait_ms=1000) for engine in greedy]
        assert all(isinstance(each, Loading) and each.admitted for each in waiting)
        assert greedy[0].query(hashes(2), max_wait_ms=0) == Nothing("budget")
        for _ in range(3):
            lease = other.ready(hashes(*range(5)), max_wait_ms=0)
            other.control.release(*lease.leases)
        world.advance(1.1)
        assert [engine.control.poll(100) for engine in greedy] == [Nothing("budget")] * 2
        greedy[0].control.release(*held[0].leases)
        assert isinstance(greedy[1].query(hashes(*range(5)), max_wait_ms=0), Ready)


@pytest.mark.guard("tenants-share")
def test_a_tenant_that_asks_all_it_can_leaves_places_to_others(tmp_path: Path) -> None:
    with World(tmp_path, max_session_queries=4, max_queries=8, **TWO_TENANTS) as world:
        other = world.engine(namespace="b/one")
        other.save(hashes(1))
        greedy = [world.engine(namespace="a/one", instance=Instance(f"e{number}", "1")) for number in range(3)]
        greedy[0].save(hashes(1))
        held = [engine.ready(hashes(1)) for engine in greedy[:2] for _ in range(2)]
        for engine in greedy:
            loading = engine.query(hashes(1), operation=100)
            assert isinstance(loading, Loading) and not loading.admitted
        lease = other.ready(hashes(1), max_wait_ms=0)
        other.control.release(*lease.leases)
        greedy[0].control.release(*held[0].leases)
        assert isinstance(greedy[0].control.poll(100), Ready), "the oldest of its tenant has its turn"
        assert isinstance(greedy[1].control.poll(100), Loading)


def test_the_older_query_of_a_tenant_is_answered_first_while_there_are_others(tmp_path: Path) -> None:
    with World(tmp_path, query_budget_percent=2, **TWO_TENANTS) as world:
        first, second = (world.engine(namespace="a/one", instance=Instance(f"e{number}", "1")) for number in range(2))
        world.engine(namespace="b/one")
        first.save(hashes(*range(10)))
        held = first.ready(hashes(*range(6)))
        assert isinstance(first.query(hashes(*range(8)), operation=100), Loading)
        assert isinstance(second.query(hashes(1), operation=100), Loading), "it fits, but is younger"
        first.control.release(*held.leases)
        assert isinstance(first.control.poll(100), Ready)
        assert isinstance(second.control.poll(100), Ready)


def test_a_tenant_that_is_alone_again_has_everything(tmp_path: Path) -> None:
    with World(tmp_path, query_budget_percent=2, **TWO_TENANTS) as world:
        engine, other = world.engine(namespace="a/one"), world.engine(namespace="b/one")
        engine.save(hashes(*range(20)))
        assert engine.query(hashes(*range(11))) == Nothing("oversized")
        other.close()
        assert isinstance(engine.query(hashes(*range(20))), Ready)


def test_operations_of_a_session_are_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbitkv_agent.queries.service.MAX_OPERATIONS", 2)
    engine.save(hashes(1))
    engine.ready(hashes(1))
    second = engine.ready(hashes(1))
    query = Query(INSTANCE, 100, 1, [GroupHashes(0, HASH_BYTES, hashes(1))])
    assert engine.control.refused(query).kind == ErrorKind.BUSY
    engine.control.release(*second.leases)
    engine.control.call(query, Ready)


def test_hashes_of_waiting_queries_of_a_cache_namespace_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.queries.service.MAX_HELD", 3 * OPERATION_BYTES + 3 * HASH_BYTES)
    with World(tmp_path, max_queries=1, cache_namespaces={"a": {}}) as world:
        engine, other = world.engine(), world.engine(instance=Instance("other", "1"))
        tenant = world.engine(namespace="a")
        engine.save(hashes(1))
        ready = engine.ready(hashes(1, 2, 3, 4, 5))  # answered: its hashes are not kept
        assert isinstance(engine.query(hashes(2, 3), operation=100), Loading)
        query = Query(other.instance, 101, 1, [GroupHashes(0, HASH_BYTES, hashes(4, 5))])
        assert other.control.refused(query).kind == ErrorKind.BUSY
        assert isinstance(tenant.query(hashes(2, 3, 4), operation=100), Loading), "another namespace's"
        engine.control.cancel(100)
        other.control.call(query, Loading)
        engine.control.release(*ready.leases)
        for each in (engine, other, tenant):
            each.control.drop()
        world.pump()
        assert not world.agent.queries._held


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (GroupHashes(0, 33, b"x" * 33), "hash_bytes is 33"),
        (GroupHashes(0, 0, b""), "hash_bytes is 0"),
        (GroupHashes(0, 32, b"x" * 31), "no multiple of 32"),
        (GroupHashes(9, 32, b""), "groups [9]"),
    ],
)
def test_wrong_hashes_are_refused_by_name(engine: Engine, part: GroupHashes, words: str) -> None:
    refusal = engine.control.refused(Query(INSTANCE, 1, 1, [part]))
    assert refusal.kind == ErrorKind.INVALID
    assert words in refusal.message


def test_hits_and_misses_are_counted_by_page(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    engine.ready(hashes(1, 2, 3))
    engine.query(hashes(9))
    counters = engine.world.agent.counters
    assert (counters.cache_block_hits, counters.cache_block_misses) == (2, 2)


@pytest.mark.guard("boot-ids")
def test_a_handle_of_an_earlier_agent_means_nothing(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        engine = world.engine()
        engine.save(hashes(1))
        old = engine.ready(hashes(1)).leases[0]
        registration = engine.registration
    with World(tmp_path) as world:
        engine = world.engine()
        engine.save(hashes(1))
        assert engine.ready(hashes(1)).leases[0] != old
        assert engine.worker.refused(start_message(engine.registration, old, [0])).kind == ErrorKind.STALE
        assert engine.registration != registration


def test_four_thousand_aborted_requests_leak_nothing(engine: Engine) -> None:
    engine.save(hashes(*range(8)))
    for number in range(4000):
        engine.control.post(Query(INSTANCE, number, 1, [GroupHashes(0, HASH_BYTES, hashes(*range(8)))]))
        engine.control.post(CancelQuery([number]))
        if number % 100 == 99:
            engine.world.pump()
            engine.world.until(lambda: not engine.control.session.backlog)
            engine.control.read()
            engine.control.replies.clear()
    engine.world.pump()
    engine.world.until(lambda: not engine.control.session.backlog)
    assert not any(engine.world.agent.oracle().values())
    assert not engine.control.session.operations
