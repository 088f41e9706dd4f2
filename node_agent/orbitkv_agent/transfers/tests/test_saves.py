from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    Arenas,
    CommitSave,
    ConfigureNamespace,
    Done,
    GroupBlocks,
    GroupHashes,
    Instance,
    MapArenas,
    Nothing,
    Ping,
    Refusal,
    SaveRequest,
    SavesAccepted,
    SubmitSaves,
    TimelineWord,
)
from orbitkv.protocol.records import SLOTS, RecordState
from orbitkv_agent import faults
from orbitkv_agent.store import cache as cache_module
from orbitkv_agent.tests.harness import (
    BLOCKS,
    HASH_BYTES,
    PAGE,
    Client,
    Engine,
    World,
    blocks_blob,
    group_geometry,
    hashes,
    ints,
    save_request,
)
from orbitkv_agent.transfers import saves as saves_module


def test_a_page_is_visible_only_after_its_commit(engine: Engine) -> None:
    plan = engine.worker.submit(engine.registration, hashes(1, 2))
    assert ints(plan.positions[0]) == [0, 1]
    assert len(ints(plan.pages[0].offsets, "<u8")) == 2
    assert engine.query(hashes(1)) == Nothing("miss")
    records = engine.worker.records
    assert records is not None
    assert records.state(plan.record) is RecordState.PENDING
    engine.worker.commit(plan)
    assert records.state(plan.record) is RecordState.DONE
    assert engine.restore(hashes(1, 2)) == 2
    assert engine.world.agent.counters.save_bytes == 2 * PAGE


def test_a_save_that_was_not_copied_leaves_nothing(engine: Engine) -> None:
    plan = engine.worker.submit(engine.registration, hashes(1))
    engine.worker.commit(plan, copied=False)
    assert engine.worker.records is not None
    assert engine.worker.records.state(plan.record) is RecordState.FAILED
    assert engine.query(hashes(1)) == Nothing("miss")
    assert engine.world.agent.counters.save_dropped == {"failed": 1}
    assert engine.world.agent.cache.stats().used_bytes == 0


def test_pages_present_are_not_copied_again(engine: Engine) -> None:
    engine.save(hashes(1, 3))
    plan = engine.worker.submit(engine.registration, hashes(1, 2, 3, 4))
    assert (ints(plan.positions[0]), plan.present, plan.dropped) == ([1, 3], 2, {})
    engine.worker.commit(plan)
    whole = engine.save(hashes(1, 2, 3, 4))
    assert (whole.positions, whole.present) == ([b""], 4)


def test_a_page_that_another_engine_is_saving_is_not_copied_twice(world: World) -> None:
    first, second = world.engine(), world.engine(instance=Instance("other", "1"))
    mine = first.worker.submit(first.registration, hashes(1))
    theirs = second.worker.submit(second.registration, hashes(1, 2))
    assert (ints(theirs.positions[0]), theirs.present) == ([1], 1)
    second.worker.commit(theirs)
    assert second.query(hashes(1)) == Nothing("miss"), "the first one has not committed"
    first.worker.commit(mine)
    assert second.restore(hashes(1, 2)) == 2


def test_skipped_pages_have_no_position(engine: Engine) -> None:
    plan = engine.worker.submit(engine.registration, hashes(1, 2, 3), [5, -1, 7])
    assert ints(plan.positions[0]) == [0, 2]
    engine.worker.commit(plan)
    assert engine.restore(hashes(1, 2, 3)) == 1


def test_a_page_named_twice_is_kept_once(engine: Engine) -> None:
    plan = engine.save(hashes(1, 1), blocks=[3, 4])
    assert (ints(plan.positions[0]), plan.present) == ([0], 1)


def test_saved_bytes_come_back_bit_for_bit(world: World) -> None:
    """What a client writes at the places of a save is what it reads at the places of a restore."""
    first, second = world.engine(), world.engine(instance=Instance("other", "1"))
    pages = [os.urandom(PAGE) for _ in range(3)]
    plan = first.worker.submit(first.registration, hashes(1, 2, 3))
    with _mapped(first.worker, plan.pages[0].arenas) as maps:
        for arena, offset, page in zip(
            ints(plan.pages[0].arenas), ints(plan.pages[0].offsets, "<u8"), pages, strict=True
        ):
            maps[arena][offset : offset + PAGE] = page
    first.worker.commit(plan)
    restore = second.start(second.ready(hashes(1, 2, 3)))
    with _mapped(second.worker, restore.pages[0].arenas) as maps:
        places = zip(ints(restore.pages[0].arenas), ints(restore.pages[0].offsets, "<u8"), strict=True)
        assert [maps[arena][offset : offset + PAGE] for arena, offset in places] == pages
    second.worker.done(restore)


class _mapped:
    """The arenas of a blob of ids, mapped."""

    def __init__(self, client: Client, arenas: bytes) -> None:
        wanted = sorted(set(ints(arenas)))
        before = len(client.descriptors)
        reply = client.call(MapArenas(wanted), Arenas)
        self.maps = {
            arena: mmap.mmap(fd, size)
            for (arena, size), fd in zip(reply.arenas, client.descriptors[before:], strict=True)
        }

    def __enter__(self) -> dict[int, mmap.mmap]:
        return self.maps

    def __exit__(self, *_: object) -> None:
        for each in self.maps.values():
            each.close()


REFUSED = {
    "bounds": blocks_blob([BLOCKS]),
    "negative": blocks_blob([-2]),
    "count": blocks_blob([1, 2]),
    "odd": GroupBlocks(0, b"\0\0\0"),
    "group": blocks_blob([1], 1),
}


@pytest.mark.parametrize("blocks", REFUSED.values(), ids=REFUSED)
def test_a_wrong_plan_refuses_the_whole_batch(engine: Engine, blocks: GroupBlocks) -> None:
    good = save_request(engine.registration, hashes(1))
    bad = SaveRequest(engine.registration, [GroupHashes(0, HASH_BYTES, hashes(2))], [blocks])
    assert engine.worker.refused(SubmitSaves([good, bad])).kind == ErrorKind.INVALID
    assert engine.world.agent.cache.stats().used_bytes == 0
    assert engine.world.agent.counters.plans_refused.total() == 1
    assert engine.save(hashes(1)).dropped == {}


def test_a_block_named_twice_is_refused(engine: Engine) -> None:
    refusal = engine.worker.refused(SubmitSaves([save_request(engine.registration, hashes(1, 2), [3, 3])]))
    assert (refusal.kind, "named twice" in refusal.message) == (ErrorKind.INVALID, True)


def test_a_producer_word_is_refused_in_host_mode(engine: Engine) -> None:
    request = save_request(engine.registration, hashes(1))
    request.producer = TimelineWord(0, 0, 1)
    refusal = engine.worker.refused(SubmitSaves([request]))
    assert (refusal.kind, "producer" in refusal.message) == (ErrorKind.UNSUPPORTED, True)


def test_a_batch_that_fails_half_way_is_rolled_back(engine: Engine) -> None:
    calls = []

    def fail_second() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("injected")

    faults.install("save-granted", fail_second)
    try:
        batch = SubmitSaves([save_request(engine.registration, hashes(number)) for number in (1, 2, 3)])
        assert engine.worker.refused(batch).kind == ErrorKind.INTERNAL
    finally:
        faults.clear()
    assert engine.world.agent.cache.stats().used_bytes == 0
    assert len(engine.world.agent.saves) == 0
    engine.save(hashes(1, 2, 3))
    assert engine.restore(hashes(1, 2, 3)) == 3


def batch_of(engine: Engine, count: int) -> SubmitSaves:
    """As many saves of a page each."""
    return SubmitSaves([save_request(engine.registration, hashes(number)) for number in range(1, count + 1)])


def grant_some_of(engine: Engine, count: int) -> int:
    """Submit a batch and stop while a part of it is granted; return its number."""
    number, saves = engine.worker.post(batch_of(engine, count)), engine.world.agent.saves
    while not len(saves):
        engine.world.agent.loop.run_once(0)
    assert 0 < len(saves) < count
    return number


def test_others_are_served_while_a_batch_of_saves_is_granted(world: World) -> None:
    first, second = world.engine(), world.engine(instance=Instance("other", "1"))
    second.save(hashes(9))
    number = first.worker.post(batch_of(first, 40))
    second.ready(hashes(9))
    first.worker.read()
    assert number not in first.worker.replies, "the whole batch was granted before anybody else was served"
    world.until(lambda: first.worker.reply(number) or world.agent.saves)
    world.until(lambda: len(world.agent.saves) == 40)


@pytest.fixture
def large(world: World, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with 256 blocks; 32 pages are granted in a turn."""
    monkeypatch.setattr(saves_module, "_TURN_PAGES", 32)
    return world.engine(groups=[group_geometry(blocks=256)])


def begin_large_save(large: Engine, blocks: list[int]) -> int:
    """Submit one save of many pages and stop when some of them have a place; return its number."""
    names = range(1, len(blocks) + 1)
    number = large.worker.post(SubmitSaves([save_request(large.registration, hashes(*names), blocks)]))
    agent = large.world.agent
    while not agent.cache.stats().used_bytes:
        agent.loop.run_once(0)
    assert agent.cache.stats().used_bytes < len(blocks) * PAGE
    assert not len(agent.saves)
    return number


def test_a_large_save_is_granted_in_several_turns_and_others_are_served_between(world: World, large: Engine) -> None:
    blocks = [block if block % 5 else -1 for block in range(200)]
    blocks[150] = -1
    kept = [position for position, block in enumerate(blocks) if block >= 0]
    other = world.client()
    number = begin_large_save(large, blocks)
    asked = other.post(Ping())
    while asked not in other.replies:
        world.agent.loop.run_once(0)
        other.read()
    assert not len(world.agent.saves), "nobody was served before all of it was granted"
    world.until(lambda: len(world.agent.saves))
    large.worker.read()
    accepted = large.worker.replies.pop(number)
    assert isinstance(accepted, SavesAccepted)
    [plan] = accepted.plans
    assert ints(plan.positions[0]) == kept
    assert len(plan.pages[0].arenas) == 4 * len(kept) and len(plan.pages[0].offsets) == 8 * len(kept)
    places = zip(ints(plan.pages[0].arenas), np.frombuffer(plan.pages[0].offsets, "<u8").tolist(), strict=True)
    assert len(set(places)) == len(kept)
    large.worker.commit(plan)
    assert large.restore(hashes(*range(152, 155))) == 3


def test_a_page_named_in_two_turns_of_a_save_is_kept_once(large: Engine) -> None:
    names = [*range(1, 150), 3]
    plan = large.save(hashes(*names), blocks=range(150))
    assert ints(plan.positions[0]) == list(range(149)) and plan.present == 1


def test_a_session_that_ends_in_the_middle_of_a_large_save_leaves_nothing(large: Engine) -> None:
    begin_large_save(large, list(range(200)))
    large.worker.session.end_stream("expelled")
    large.world.pump(30)
    assert large.world.agent.cache.stats().used_bytes == 0


def test_a_registration_that_is_retired_in_the_middle_of_a_large_save_takes_nothing(large: Engine) -> None:
    number = begin_large_save(large, list(range(200)))
    agent = large.world.agent
    agent.membership._retire(large.worker.session.registrations[large.registration])
    reply = None
    while reply is None:
        reply = large.worker.reply(number)
    assert isinstance(reply, Refusal) and reply.kind == ErrorKind.STALE
    assert agent.cache.stats().used_bytes == 0 and not len(agent.saves)


@pytest.mark.parametrize("retired", [False, True])
def test_a_save_whose_places_took_long_is_granted_in_the_next_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, retired: bool
) -> None:
    monkeypatch.setattr(saves_module, "_LONG_TURN_S", 0.0)
    agent = engine.world.agent
    number = engine.worker.post(SubmitSaves([save_request(engine.registration, hashes(1, 2))]))
    while not agent.cache.stats().used_bytes:
        agent.loop.run_once(0)
    assert not len(agent.saves)
    if retired:
        agent.membership._retire(engine.worker.session.registrations[engine.registration])
    reply = None
    while reply is None:
        reply = engine.worker.reply(number)
    assert isinstance(reply, Refusal if retired else SavesAccepted)
    assert len(agent.saves) == (not retired)
    assert (agent.cache.stats().used_bytes == 0) is retired


def test_a_save_that_finds_no_completion_record_is_refused_and_keeps_no_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, records = engine.world.agent, engine.worker.session.records
    assert records is not None
    monkeypatch.setattr(records, "_fresh", SLOTS)
    refusal = engine.worker.ask(SubmitSaves([save_request(engine.registration, hashes(1, 2))]))
    assert isinstance(refusal, Refusal) and refusal.kind == ErrorKind.BUSY
    assert agent.cache.stats().used_bytes == 0 and not len(agent.saves)


def test_room_for_a_save_is_made_in_a_turn_of_its_own(tmp_path: Path) -> None:
    with World(tmp_path, pool="1MiB", arena="1MiB") as world:
        engine, agent = world.engine(), world.agent
        for first in range(0, (1 << 20) // PAGE, BLOCKS):  # all that there is room for
            engine.save(hashes(*range(first, first + BLOCKS)))

        def evictions() -> int:
            return sum(agent.cache.stats().total_by_key("evictions").values())

        engine.worker.post(SubmitSaves([save_request(engine.registration, hashes(1000, 1001))]))
        while not evictions():
            agent.loop.run_once(0)
        assert len(agent.saves) == 0
        world.until(lambda: len(agent.saves))
        assert evictions() == 2


def test_a_request_that_comes_after_a_batch_of_saves_is_served_after_it(engine: Engine) -> None:
    saves, after = engine.worker.post(batch_of(engine, 10)), engine.worker.post(Ping())
    while after not in engine.worker.replies:
        engine.world.pump()
        engine.worker.read()
    accepted = engine.worker.replies[saves]
    assert isinstance(accepted, SavesAccepted) and len(accepted.plans) == 10
    assert list(engine.worker.replies) == [saves, after]


def test_a_session_that_is_ended_while_its_saves_are_granted_leaves_nothing(engine: Engine) -> None:
    grant_some_of(engine, 10)
    engine.worker.session.end_stream("expelled")
    engine.world.pump(30)
    assert len(engine.world.agent.saves) == 0
    assert engine.world.agent.cache.stats().used_bytes == 0


def test_a_process_that_exits_while_its_saves_are_granted_leaves_nothing(engine: Engine) -> None:
    grant_some_of(engine, 10)
    more = engine.worker.post(batch_of(engine, 3))  # what it sent last is read, and grants nobody anything
    engine.worker.session._on_exit(0)
    assert len(engine.world.agent.saves) == 0 and more not in engine.worker.replies
    engine.world.pump(30)
    assert len(engine.world.agent.saves) == 0
    assert engine.world.agent.cache.stats().used_bytes == 0


def test_a_batch_that_is_being_granted_when_the_agent_stops_is_refused_whole(engine: Engine) -> None:
    number = grant_some_of(engine, 10)
    engine.world.agent.request_stop()
    refusal = None
    while refusal is None:
        refusal = engine.worker.reply(number)
    assert isinstance(refusal, Refusal) and refusal.kind == ErrorKind.UNAVAILABLE
    assert len(engine.world.agent.saves) == 0
    assert engine.world.agent.cache.stats().used_bytes == 0


@pytest.mark.guard("own-session")
def test_a_result_is_never_credited_to_another_owners_save(world: World) -> None:
    first, second = world.engine(), world.engine(instance=Instance("other", "1"))
    plan = first.worker.submit(first.registration, hashes(1))
    assert second.worker.refused(CommitSave(plan.save, True)).kind == ErrorKind.STALE
    assert first.query(hashes(1)) == Nothing("miss")
    first.worker.commit(plan)
    assert first.worker.refused(CommitSave(plan.save, True)).kind == ErrorKind.STALE


def test_a_pool_full_of_leased_pages_drops_saves_and_still_restores(tmp_path: Path) -> None:
    with World(tmp_path, pool="1MiB", arena="1MiB", query_budget_percent=100) as world:
        engine = world.engine()
        everything = hashes(*range(256))
        for first in range(0, 256, 64):
            engine.save(everything[first * HASH_BYTES : (first + 64) * HASH_BYTES])
        ready = engine.ready(hashes(*range(64)))
        rest = [engine.ready(everything[first * HASH_BYTES : (first + 64) * HASH_BYTES]) for first in (64, 128, 192)]
        plan = engine.save(hashes(1000))
        assert plan.dropped == {"pool-full": 1}
        assert world.agent.counters.save_dropped["pool-full"] == 1
        engine.worker.done(engine.start(ready))
        assert engine.save(hashes(1000)).dropped == {}
        engine.control.release(*(lease for each in rest for lease in each.leases))


def test_a_quota_bounds_a_namespace(tmp_path: Path) -> None:
    with World(tmp_path, cache_namespaces={"a": {"quota": "8KiB"}}) as world:
        engine = world.engine(namespace="a")
        assert engine.save(hashes(1, 2, 3)).dropped == {"quota": 1}


def test_pages_of_one_model_too_many_are_dropped_and_named(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_GROUPS_OF_ONE", 1)
    engine.save(hashes(1))
    other = world.engine(instance=Instance("other", "1"), model_identity="another")
    assert other.save(hashes(1, 2)).dropped == {"too-many-models": 2}
    assert engine.restore(hashes(1)) == 1
    engine.save(hashes(2))
    assert engine.restore(hashes(1, 2)) == 2


def test_a_save_under_way_when_its_namespace_is_reset_is_not_found_afterwards(world: World) -> None:
    engine = world.engine()
    plan = engine.worker.submit(engine.registration, hashes(1))
    world.client().call(ConfigureNamespace("", reset_generation=1), Done)
    engine.worker.commit(plan)
    assert engine.query(hashes(1)) == Nothing("miss")
    engine.save(hashes(1))
    assert engine.restore(hashes(1)) == 1


@pytest.mark.guard("held-copies")
def test_memory_of_a_save_is_held_until_its_process_is_gone(engine: Engine) -> None:
    plan = engine.worker.submit(engine.registration, hashes(1))
    session = engine.worker.session
    engine.worker.drop()
    assert engine.world.agent.saves.inflight_bytes == PAGE
    engine.world.advance(3600)
    assert engine.world.agent.saves.inflight_bytes == PAGE, "no timeout proves that a copy ended"
    session.close()  # what the exit of its process leads to
    assert engine.world.agent.saves.inflight_bytes == 0
    assert engine.world.agent.cache.stats().used_bytes == 0
    assert plan.save


def test_goodbye_ends_what_was_not_committed(engine: Engine) -> None:
    engine.worker.submit(engine.registration, hashes(1))
    engine.worker.goodbye()
    assert engine.world.agent.saves.inflight_bytes == 0
    assert engine.world.agent.counters.save_dropped == {"aborted": 1}


def test_saves_in_flight_are_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbitkv_agent.transfers.saves.MAX_SAVES", 2)
    batch = SubmitSaves([save_request(engine.registration, hashes(number)) for number in range(3)])
    assert engine.worker.refused(batch).kind == ErrorKind.BUSY
    plans = engine.worker.call(SubmitSaves(batch.saves[:2]), SavesAccepted).plans
    assert engine.worker.refused(SubmitSaves(batch.saves[2:])).kind == ErrorKind.BUSY
    for plan in plans:
        engine.worker.commit(plan)


def test_a_defect_in_a_commit_is_an_internal_error_and_the_session_goes_on(engine: Engine) -> None:
    plan = engine.worker.submit(engine.registration, hashes(1))

    def fail() -> None:
        raise RuntimeError("injected")

    faults.install("save-commit", fail)
    try:
        assert engine.worker.refused(CommitSave(plan.save, True)).kind == ErrorKind.INTERNAL
    finally:
        faults.clear()
    engine.worker.commit(plan)
    assert engine.restore(hashes(1)) == 1
