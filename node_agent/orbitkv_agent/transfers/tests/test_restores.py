from __future__ import annotations

from pathlib import Path

import pytest

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    ConfigureNamespace,
    Done,
    GroupBlocks,
    Instance,
    Nothing,
    RestoreDone,
    RestorePlan,
    StartRestore,
    TimelineWord,
)
from orbitkv.protocol.records import RecordState
from orbitkv_agent.tests.harness import BLOCKS, PAGE, Engine, World, blocks_blob, hashes, ints, start_message


@pytest.fixture
def engine(engine: Engine) -> Engine:
    engine.save(hashes(*range(8)))
    return engine


def test_a_restore_names_the_places_of_its_leased_pages(engine: Engine) -> None:
    saved = engine.worker.submit(engine.registration, hashes(20, 21))
    engine.worker.commit(saved)
    plan = engine.start(engine.ready(hashes(20, 21)))
    assert plan.pages == saved.pages
    assert engine.worker.records is not None
    assert engine.worker.records.state(plan.record) is RecordState.PENDING
    engine.worker.done(plan)
    assert engine.worker.records.state(plan.record) is RecordState.DONE
    assert engine.world.agent.counters.load_bytes == 2 * PAGE


def test_a_failed_restore_is_counted_and_releases_everything(engine: Engine) -> None:
    plan = engine.start(engine.ready(hashes(1)))
    engine.worker.done(plan, copied=False)
    assert engine.worker.records is not None
    assert engine.worker.records.state(plan.record) is RecordState.FAILED
    assert engine.world.agent.counters.load_failures == 1
    assert not any(engine.world.agent.oracle().values())


def test_skipped_pages_keep_their_place_in_the_plan(engine: Engine) -> None:
    ready = engine.ready(hashes(1, 2, 3))
    plan = engine.worker.start(engine.registration, ready.leases[0], [4, -1, 6])
    assert len(ints(plan.pages[0].arenas)) == 3
    engine.worker.done(plan)
    assert engine.world.agent.counters.load_bytes == 2 * PAGE


WRONG: dict[str, list[GroupBlocks]] = {
    "too few": [blocks_blob([1])],
    "too many": [blocks_blob([1, 2, 3])],
    "out of bounds": [blocks_blob([1, BLOCKS])],
    "negative": [blocks_blob([1, -2])],
    "twice": [blocks_blob([1, 1])],
    "another group": [blocks_blob([1, 2], 1)],
    "no group": [],
    "one group twice": [blocks_blob([1, 2]), blocks_blob([3, 4])],
}


@pytest.mark.parametrize("blocks", WRONG.values(), ids=WRONG)
def test_a_wrong_plan_is_refused_and_the_lease_stays(engine: Engine, blocks: list[GroupBlocks]) -> None:
    ready = engine.ready(hashes(1, 2))
    refusal = engine.worker.refused(StartRestore(engine.registration, ready.leases[0], blocks))
    assert refusal.kind == ErrorKind.INVALID
    assert engine.world.agent.counters.plans_refused.total() == 1
    engine.worker.done(engine.start(ready))


@pytest.mark.guard("restore-shape")
def test_a_restore_takes_exactly_the_pages_of_its_lease(engine: Engine) -> None:
    ready = engine.ready(hashes(1, 2))
    for blocks in ([1], [1, 2, 3]):
        assert engine.worker.refused(start_message(engine.registration, ready.leases[0], blocks)).kind == "invalid"


@pytest.mark.parametrize(
    ("field", "words"),
    [({"ready": TimelineWord(0, 0, 1)}, "ready"), ({"layer_words": [TimelineWord(0, 0, 1)]}, "layer_words")],
)
def test_timeline_words_are_refused_in_host_mode(engine: Engine, field: dict[str, object], words: str) -> None:
    ready = engine.ready(hashes(1))
    message = start_message(engine.registration, ready.leases[0], [0])
    for name, value in field.items():
        setattr(message, name, value)
    refusal = engine.worker.refused(message)
    assert (refusal.kind, words in refusal.message) == (ErrorKind.UNSUPPORTED, True)


@pytest.mark.guard("own-session")
def test_a_restore_is_ended_only_by_its_own_session(world: World, engine: Engine) -> None:
    other = world.engine(instance=Instance("other", "1"))
    plan = engine.start(engine.ready(hashes(1)))
    assert other.worker.refused(RestoreDone(plan.restore, True)).kind == ErrorKind.STALE
    assert world.agent.queries.leases.pinned_pages == 1
    engine.worker.done(plan)
    assert engine.worker.refused(RestoreDone(plan.restore, True)).kind == ErrorKind.STALE


def test_a_lease_of_another_instance_is_stale(world: World, engine: Engine) -> None:
    other = world.engine(instance=Instance("other", "1"))
    ready = engine.ready(hashes(1))
    refusal = other.worker.refused(start_message(other.registration, ready.leases[0], [0]))
    assert refusal.kind == ErrorKind.STALE


def test_more_restores_than_the_device_takes_wait_for_a_place(tmp_path: Path) -> None:
    with World(tmp_path, max_restores_per_device=2) as world:
        engine = world.engine()
        engine.save(hashes(*range(8)))
        messages = [
            start_message(engine.registration, engine.ready(hashes(number)).leases[0], [number]) for number in range(4)
        ]
        numbers = [engine.worker.post(message) for message in messages]
        first, second = (engine.worker.reply(number) for number in numbers[:2])
        assert isinstance(first, RestorePlan)
        assert isinstance(second, RestorePlan)
        assert [engine.worker.reply(number) for number in numbers[2:]] == [None, None]
        assert world.agent.restores.waiting == 2
        engine.worker.done(first)
        third = engine.worker.reply(numbers[2])
        assert isinstance(third, RestorePlan)
        assert engine.worker.reply(numbers[3]) is None
        for plan in (second, third):
            engine.worker.done(plan)
        fourth = engine.worker.reply(numbers[3])
        assert isinstance(fourth, RestorePlan)
        engine.worker.done(fourth)


def test_restores_that_wait_for_a_place_end_with_their_stream(tmp_path: Path) -> None:
    with World(tmp_path, max_restores_per_device=1) as world:
        engine = world.engine()
        engine.save(hashes(1, 2))
        plan = engine.start(engine.ready(hashes(1)))
        engine.worker.post(start_message(engine.registration, engine.ready(hashes(2)).leases[0], [1]))
        world.pump()
        assert world.agent.restores.waiting == 1
        session = engine.worker.session
        engine.worker.drop()
        assert (world.agent.restores.waiting, len(world.agent.restores)) == (0, 1)
        assert plan.restore
        session.close()
        assert len(world.agent.restores) == 0


def test_a_raised_reset_generation_takes_promises_back_and_lets_copies_drain(world: World, engine: Engine) -> None:
    running = engine.start(engine.ready(hashes(1)))
    promised = engine.ready(hashes(2), operation=50)
    world.client().call(ConfigureNamespace("", reset_generation=1), Done)
    refusal = engine.worker.refused(start_message(engine.registration, promised.leases[0], [5]))
    assert refusal.kind == ErrorKind.STALE
    assert engine.control.poll(50) == Nothing("gone")
    assert engine.query(hashes(1)) == Nothing("miss")
    engine.worker.done(running)
    world.advance(1)
    assert world.agent.cache.stats().used_bytes == 0


def test_a_stalled_copy_is_reported_and_nothing_is_freed(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    plan = engine.start(engine.ready(hashes(1)))
    engine.world.advance(29)
    assert engine.world.agent.watchdog.stalled == 0
    engine.world.advance(6)
    assert engine.world.agent.watchdog.stalled == 1
    assert [record for record in caplog.records if "in flight for" in record.getMessage()]
    caplog.clear()
    engine.world.advance(30)
    assert not caplog.records, "it warns once a minute"
    engine.world.advance(31)
    assert len([record for record in caplog.records if "in flight for" in record.getMessage()]) == 1
    assert engine.world.agent.queries.leases.pinned_pages == 1
    engine.worker.done(plan)
    engine.world.advance(6)
    assert engine.world.agent.watchdog.stalled == 0
