from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    Allocation,
    AttachInstance,
    Done,
    Events,
    GroupGeometry,
    GroupHashes,
    Instance,
    InstanceState,
    LayerRegion,
    Nothing,
    ProofReport,
    Query,
    Ranks,
    Ready,
    Refusal,
    Register,
    Registered,
    ResetDone,
    ResetInstance,
    SaveRequest,
    SavesAccepted,
    SubmitSaves,
    TakeEvents,
    Unregister,
)
from orbitkv.protocol.records import Header
from orbitkv_agent.sessions import membership
from orbitkv_agent.sessions.errors import Refused
from orbitkv_agent.tests.harness import (
    HASH_BYTES,
    INSTANCE,
    PAGE,
    Client,
    World,
    blocks_blob,
    group_geometry,
    hashes,
    register_message,
    save_request,
    start_message,
)


def test_an_instance_serves_once_scheduler_and_workers_are_there_and_proven(world: World) -> None:
    control, worker = world.client(), world.client()
    assert control.attach().missing == "no worker has registered"
    registration = worker.register().registration
    assert "not proven" in control.attach().missing
    worker.prove(registration)
    assert control.attach() == InstanceState(True, "", "")


def test_a_worker_may_come_before_the_scheduler(world: World) -> None:
    worker, control = world.client(), world.client()
    worker.prove(worker.register().registration)
    assert control.attach().serving


def test_the_header_tells_all_sessions_of_an_instance_that_it_changed(world: World) -> None:
    control, worker = world.client(), world.client()
    control.attach()
    assert control.records is not None
    before = control.records.counter(Header.INSTANCE)
    worker.register()
    assert control.records.counter(Header.INSTANCE) > before


def test_tensor_parallel_workers_are_all_needed(world: World) -> None:
    control, first, second = world.client(), world.client(), world.client()
    control.attach()
    first.prove(first.register(ranks=Ranks(tensor=0, tensor_size=2)).registration)
    assert "workers [1] of 2" in control.attach().missing
    assert control.query(hashes(1)) == Nothing("not-serving")
    second.prove(second.register(ranks=Ranks(tensor=1, tensor_size=2)).registration)
    assert control.attach().serving


@pytest.mark.guard("duplicate-rank")
def test_a_rank_registers_once(world: World) -> None:
    world.client().register()
    refusal = world.client().refused(register_message())
    assert refusal.kind == ErrorKind.BUSY, "the one that is there may be over, which the agent has not seen yet"
    assert "worker 0 of instance engine/1 is registered already" in refusal.message


def test_a_rank_may_register_again_once_its_session_ended(world: World) -> None:
    first = world.client()
    first.register()
    first.drop()
    assert world.client().register().registration


def test_a_second_scheduler_is_refused(world: World) -> None:
    world.client().attach()
    refusal = world.client().refused(AttachInstance(INSTANCE))
    assert (refusal.kind, "another session" in refusal.message) == (ErrorKind.INVALID, True)


def test_a_geometry_proven_once_in_a_process_is_not_proven_again(world: World) -> None:
    control, worker = world.client(), world.client()
    control.attach()
    registration = worker.register()
    assert registration.proof_required
    worker.prove(registration.registration)
    worker.call(Unregister(registration.registration), Done)
    again = worker.register()
    assert not again.proof_required
    assert control.attach().serving
    worker.call(Unregister(again.registration), Done)
    moved = worker.register(groups=[group_geometry(offset=4096)])
    assert moved.proof_required


def test_a_failed_proof_turns_the_cache_off_and_says_why(world: World) -> None:
    engine = world.engine()
    engine.save(hashes(1))
    ready = engine.ready(hashes(1))
    engine.worker.call(ProofReport(engine.registration, False, "layer0: strides (1, 2)"), Done)
    assert "layer0: strides (1, 2)" in engine.control.attach().off
    assert engine.query(hashes(1)) == Nothing("not-serving")
    assert engine.worker.refused(start_message(engine.registration, ready.leases[0], [0])).kind == ErrorKind.STALE
    assert engine.worker.submit(engine.registration, hashes(2)).dropped == {"unproven": 1}


def test_nothing_is_saved_before_the_layout_is_proven(world: World) -> None:
    control, worker = world.client(), world.client()
    control.attach()
    registration = worker.register().registration
    plan = worker.submit(registration, hashes(1, 2))
    assert (plan.dropped, plan.positions) == ({"unproven": 2}, [b""])
    worker.commit(plan)
    worker.prove(registration)
    assert control.query(hashes(1)) == Nothing("miss")


def test_proof_pages_are_found_by_their_own_worker_only_and_only_as_proof(world: World) -> None:
    control, worker = world.client(), world.client()
    control.attach()
    registration = worker.register().registration
    worker.save(registration, hashes(7), proof=True)
    ready = worker.ready(hashes(7), proof=True)
    worker.done(worker.start(registration, ready.leases[0], [5]))
    worker.prove(registration)
    assert control.query(hashes(7)) == Nothing("miss")
    assert worker.query(hashes(7), operation=2, proof=True) == Nothing("miss"), "proofs are dropped once reported"


def test_the_loss_of_the_scheduler_ends_serving(world: World) -> None:
    engine = world.engine()
    engine.save(hashes(1))
    engine.control.drop()
    other = world.client()
    assert other.query(hashes(1)) == Nothing("not-serving")
    other.attach()
    assert isinstance(other.query(hashes(1), operation=2), Ready)


def _tensor_parallel(world: World) -> tuple[Client, list[Client], list[int]]:
    control = world.client()
    control.attach()
    workers = [world.client(), world.client()]
    numbers = []
    for rank, worker in enumerate(workers):
        numbers.append(worker.register(ranks=Ranks(tensor=rank, tensor_size=2)).registration)
        worker.prove(numbers[-1])
    return control, workers, numbers


@pytest.mark.guard("revoked-lease")
def test_a_revoked_lease_cannot_be_restored(world: World) -> None:
    control, workers, numbers = _tensor_parallel(world)
    for worker, number in zip(workers, numbers, strict=True):
        worker.save(number, hashes(1, 2))
    ready = control.ready(hashes(1, 2))
    assert len(ready.leases) == 2
    workers[1].drop()
    refusal = workers[0].refused(start_message(numbers[0], ready.leases[0], [0, 1]))
    assert refusal.kind == ErrorKind.STALE


@pytest.mark.guard("live-lease")
def test_an_answer_is_not_given_again_after_its_lease_was_revoked(world: World) -> None:
    control, workers, numbers = _tensor_parallel(world)
    for worker, number in zip(workers, numbers, strict=True):
        worker.save(number, hashes(1))
    ready = control.ready(hashes(1))
    assert control.poll() == ready
    workers[1].drop()
    assert control.poll() == Nothing("gone")


def test_a_page_is_found_only_when_every_shard_has_it(world: World) -> None:
    control, workers, numbers = _tensor_parallel(world)
    workers[0].save(numbers[0], hashes(1, 2, 3))
    assert control.query(hashes(1, 2, 3)) == Nothing("miss")
    workers[1].save(numbers[1], hashes(1, 2))
    ready = control.ready(hashes(1, 2, 3), operation=2)
    assert ready.pages[0].count == 2
    plans = [
        worker.start(number, lease, [0, 1])
        for worker, number, lease in zip(workers, numbers, ready.leases, strict=True)
    ]
    assert plans[0].pages[0].offsets != plans[1].pages[0].offsets
    for worker, plan in zip(workers, plans, strict=True):
        worker.done(plan)


def test_a_lease_is_for_the_worker_of_its_shard(world: World) -> None:
    control, workers, numbers = _tensor_parallel(world)
    for worker, number in zip(workers, numbers, strict=True):
        worker.save(number, hashes(1))
    ready = control.ready(hashes(1))
    assert workers[0].refused(start_message(numbers[0], ready.leases[1], [0])).kind == ErrorKind.STALE


def test_registrations_that_wait_for_their_memory_count_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_REGISTRATIONS", 2)
    opening: list[Callable[[object], None]] = []
    monkeypatch.setattr(world.agent.device, "open", lambda session, message, opened: opening.append(opened))
    worker = world.client()
    first, second = (worker.post(register_message(Instance(name, "1"))) for name in ("1", "2"))
    refusal = worker.refused(register_message(Instance("3", "1")))
    assert refusal.kind == ErrorKind.BUSY
    opening[0](None)
    assert isinstance(worker.reply(first), Registered)
    opening[1](Refused(ErrorKind.UNSUPPORTED, "it cannot be opened"))
    assert isinstance(worker.reply(second), Refusal)
    worker.post(register_message(Instance("3", "1")))
    world.pump()
    worker.drop()
    world.pump()
    opening[2](None)
    assert not world.agent.membership._coming
    assert world.agent.server._held.total == 0


def test_instances_that_a_session_and_a_cache_namespace_attach_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MAX_INSTANCES", 2)
    monkeypatch.setattr(membership, "MAX_INSTANCES_OF_ONE", 3)
    with World(tmp_path, cache_namespaces={"a": {}}) as world:
        first, second, third, tenant = world.client(), world.client(), world.client(), world.client("a")
        for name in ("1", "2", "2"):
            first.attach(Instance(name, "1"))
        assert "this session has attached 2" in first.refused(AttachInstance(Instance("3", "1"))).message
        second.attach(Instance("3", "1"))
        third.register(Instance("4", "1"))  # is known, and nobody has attached it
        assert "has 3 engines attached" in third.refused(AttachInstance(Instance("4", "1"))).message
        tenant.attach(Instance("1", "1"))
        first.drop()
        world.pump()
        third.attach(Instance("4", "1"))


@pytest.mark.guard("key-space")
@pytest.mark.parametrize(
    "change",
    [
        {"model_identity": "another model"},
        {"groups": [group_geometry(tokens=32)]},
        {"groups": [group_geometry(dtype="float16")]},
        {"groups": [group_geometry(name="another layer")]},
    ],
    ids=["model", "tokens", "dtype", "layer"],
)
def test_bytes_are_not_found_under_another_meaning(world: World, change: dict[str, Any]) -> None:
    world.engine().save(hashes(1))
    other = world.engine(instance=Instance("other", "1"), **change)
    assert other.query(hashes(1)) == Nothing("miss")


def test_engines_of_one_model_share_what_they_saved(world: World) -> None:
    world.engine().save(hashes(1))
    other = world.engine(instance=Instance("other", "1"), groups=[group_geometry(blocks=32, block_stride=8192)])
    assert other.restore(hashes(1)) == 1


def test_cache_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    with World(tmp_path, cache_namespaces={"a": {}, "b": {}}) as world:
        world.engine(namespace="a").save(hashes(1))
        other = world.engine(namespace="b")
        assert other.query(hashes(1)) == Nothing("miss")
        assert world.engine(namespace="a", instance=Instance("a2", "1")).restore(hashes(1)) == 1


def test_an_instance_of_another_namespace_is_not_known(tmp_path: Path) -> None:
    with World(tmp_path, cache_namespaces={"a": {}, "b": {}}) as world:
        world.engine(namespace="a").save(hashes(1))
        assert world.client("b").query(hashes(1)) == Nothing("not-serving")


def test_a_reset_moves_an_idle_instance_to_new_keys(world: World) -> None:
    engine = world.engine()
    engine.save(hashes(1))
    ready = engine.ready(hashes(1))
    assert engine.control.refused(ResetInstance(INSTANCE)).kind == ErrorKind.BUSY
    engine.control.release(*ready.leases)
    generation = engine.control.call(ResetInstance(INSTANCE), ResetDone).key_generation
    assert generation
    assert engine.query(hashes(1)) == Nothing("miss")
    engine.save(hashes(1))
    assert engine.restore(hashes(1)) == 1
    used = world.agent.cache.stats().used_bytes
    second = engine.control.call(ResetInstance(INSTANCE), ResetDone).key_generation
    assert second != generation
    world.advance(1)
    assert world.agent.cache.stats().used_bytes == used - PAGE, "nobody finds what was stored under the first one"
    # An engine that did not ask for it keeps what there was; one that continues the generation has what is new.
    assert world.engine(instance=Instance("other", "1")).restore(hashes(1)) == 1
    engine.save(hashes(1, 2))
    continued = world.engine(instance=Instance("third", "1"))
    assert continued.query(hashes(1, 2)).pages[0].count == 1  # type: ignore[union-attr]
    continued.control.cancel(1)
    continued.control.call(AttachInstance(Instance("third", "1"), key_generation=second), InstanceState)
    assert continued.restore(hashes(1, 2)) == 2


REFUSALS: list[tuple[str, dict[str, Any], ErrorKind, str]] = [
    ("pieces", {"groups": [group_geometry(pieces=2)]}, ErrorKind.UNSUPPORTED, "2 pieces"),
    ("kind", {"groups": [group_geometry(kind="sliding_window")]}, ErrorKind.UNSUPPORTED, "'sliding_window'"),
    ("replica", {"groups": [group_geometry(replica_class=3)]}, ErrorKind.UNSUPPORTED, "replica_class 3"),
    ("handle", {"allocations": [Allocation(1 << 20, b"x")]}, ErrorKind.UNSUPPORTED, "allocations[0].handle"),
    ("device", {"device": "GPU-1234"}, ErrorKind.UNSUPPORTED, "'GPU-1234'"),
    ("identity", {"model_identity": ""}, ErrorKind.INVALID, "model_identity"),
    ("size", {"allocations": [Allocation(0)]}, ErrorKind.INVALID, "allocations[0].size is 0"),
    ("no groups", {"groups": []}, ErrorKind.INVALID, "groups is empty"),
    ("long name", {"groups": [group_geometry(name="x" * 257)]}, ErrorKind.INVALID, "name has 257 characters"),
    ("long identity", {"model_identity": "x" * 257}, ErrorKind.INVALID, "model_identity has 257 characters"),
    (
        "groups without end",
        {"groups": [group_geometry(group=number, name=str(number)) for number in range(65)]},
        ErrorKind.INVALID,
        "65 groups; at most 64 are accepted",
    ),
    ("no layers", {"groups": [GroupGeometry(0, "full", 16, [])]}, ErrorKind.INVALID, "no layers"),
    ("tokens", {"groups": [group_geometry(tokens=0)]}, ErrorKind.INVALID, "block_tokens is 0"),
    ("stride", {"groups": [group_geometry(block_stride=4095)]}, ErrorKind.INVALID, "block_stride 4095"),
    ("outside", {"groups": [group_geometry(blocks=257)]}, ErrorKind.INVALID, "outside its allocation"),
    ("offset", {"groups": [group_geometry(offset=-1)]}, ErrorKind.INVALID, "offset -1"),
    ("count", {"groups": [group_geometry(blocks=0)]}, ErrorKind.INVALID, "block_count 0"),
    ("bytes", {"groups": [group_geometry(block_bytes=0)]}, ErrorKind.INVALID, "block_bytes 0"),
    ("allocation", {"groups": [group_geometry(allocation=1)]}, ErrorKind.INVALID, "allocation 1"),
    ("group twice", {"groups": [group_geometry(), group_geometry(name="x")]}, ErrorKind.INVALID, "group 0"),
    (
        "layer twice",
        {"groups": [group_geometry(name="x"), group_geometry(1, name="x")]},
        ErrorKind.INVALID,
        "layer 'x' is registered twice",
    ),
    ("rank", {"ranks": Ranks(tensor=2, tensor_size=2)}, ErrorKind.INVALID, "ranks.tensor is 2 of 2"),
    ("ranks", {"ranks": Ranks(context_size=65)}, ErrorKind.INVALID, "ranks.context"),
    ("nonce", {"instance": Instance("engine", "")}, ErrorKind.INVALID, "instance.nonce"),
    (
        "page",
        {"groups": [group_geometry(page=2 << 20, blocks=1)], "allocations": [Allocation(4 << 20)]},
        ErrorKind.UNSUPPORTED,
        "arenas of this agent hold at most",
    ),
]


@pytest.mark.parametrize(
    ("changes", "kind", "words"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_a_registration_is_refused_by_field_and_value(
    world: World, changes: dict[str, Any], kind: ErrorKind, words: str
) -> None:
    client = world.client()
    refusal = client.refused(register_message(**changes))
    assert refusal.kind == kind
    assert words in refusal.message
    assert client.register().registration, "a refused registration leaves nothing behind"


def test_layers_of_a_group_have_equally_many_blocks(world: World) -> None:
    layers = [LayerRegion(name, 0, 0, count, 4096, 4096, "u8") for name, count in (("a", 8), ("b", 9))]
    refusal = world.client().refused(register_message(groups=[GroupGeometry(0, "full", 16, layers)]))
    assert "block_count is 9, and 8 for layer 'a'" in refusal.message


AGREEMENT: list[tuple[str, Callable[[], Register], str]] = [
    ("model", lambda: register_message(ranks=Ranks(1, 2), model_identity="other"), "model_identity"),
    ("sizes", lambda: register_message(ranks=Ranks(1, 3)), "sizes"),
    ("tokens", lambda: register_message(ranks=Ranks(1, 2), groups=[group_geometry(tokens=8)]), "groups differ"),
    ("page", lambda: register_message(ranks=Ranks(1, 2), groups=[group_geometry(page=8192)]), "must agree"),
]


@pytest.mark.parametrize(("message", "words"), [case[1:] for case in AGREEMENT], ids=[case[0] for case in AGREEMENT])
def test_workers_of_one_stage_agree(world: World, message: Callable[[], Register], words: str) -> None:
    world.client().register(ranks=Ranks(0, 2))
    refusal = world.client().refused(message())
    assert refusal.kind == ErrorKind.INVALID
    assert words in refusal.message


def test_pipeline_stages_may_have_different_layers(world: World) -> None:
    control = world.client()
    control.attach()
    for stage, page in enumerate((4096, 8192)):
        worker = world.client()
        ranks = Ranks(pipeline=stage, pipeline_size=2)
        worker.prove(
            worker.register(ranks=ranks, groups=[group_geometry(page=page, name=f"stage{stage}")]).registration
        )
    assert control.attach().serving


def test_a_retired_registration_takes_nothing_new_and_answers_when_its_copies_ended(world: World) -> None:
    engine = world.engine()
    plan = engine.worker.submit(engine.registration, hashes(1))
    number = engine.worker.post(Unregister(engine.registration))
    assert engine.worker.reply(number) is None, "a copy is running"
    assert engine.worker.refused(_saves(engine.registration)).kind == ErrorKind.STALE
    engine.worker.commit(plan)
    assert engine.worker.reply(number) == Done()


def _saves(registration: int) -> SubmitSaves:
    return SubmitSaves([save_request(registration, hashes(9))])


@pytest.mark.guard("own-session")
def test_a_registration_of_another_session_is_stale(world: World) -> None:
    engine = world.engine()
    assert world.client().refused(_saves(engine.registration)).kind == ErrorKind.STALE


def test_registering_waits_for_the_first_memory(tmp_path: Path) -> None:
    with World(tmp_path, prefault=True) as world:
        client = world.client()
        assert isinstance(client.register(), Registered)
        assert world.agent.cache.is_ready("")


@pytest.mark.guard("commit-is-dram")
def test_a_committed_page_that_leaves_memory_is_reported_gone_and_missed(tmp_path: Path) -> None:
    with World(tmp_path, pool="1MiB", arena="1MiB") as world:
        engine = world.engine()
        engine.control.attach(events=True)
        engine.save(hashes(1))
        assert engine.restore(hashes(1)) == 1
        for first in range(100, 1000, 50):
            engine.save(hashes(*range(first, first + 50)))
        assert engine.control.records is not None
        assert engine.control.records.counter(Header.EVENTS) > 0
        events = engine.control.call(TakeEvents(INSTANCE), Events)
        removed = b"".join(part.blob for part in events.removed)
        assert not events.lost
        assert hashes(100) in removed
        assert engine.query(hashes(100)) == Nothing("miss")
        assert engine.control.call(TakeEvents(INSTANCE), Events) == Events([], False)


def test_events_are_for_the_scheduler_that_asked(world: World) -> None:
    engine = world.engine()
    assert engine.control.refused(TakeEvents(INSTANCE)).kind == ErrorKind.INVALID
    engine.control.attach(events=True)
    assert engine.worker.refused(TakeEvents(INSTANCE)).kind == ErrorKind.INVALID
    engine.control.call(ResetInstance(INSTANCE), ResetDone)
    assert engine.control.call(TakeEvents(INSTANCE), Events).lost


def test_an_instance_is_asked_for_and_reset_by_its_scheduler_only(world: World) -> None:
    engine = world.engine()
    engine.save(hashes(1))
    stranger = world.client()
    assert stranger.query(hashes(1)) == Nothing("not-serving")
    assert stranger.refused(ResetInstance(INSTANCE)).kind == ErrorKind.INVALID
    assert engine.restore(hashes(1)) == 1


def test_a_proof_is_asked_for_by_the_process_of_the_worker_only(world: World) -> None:
    engine = world.engine()
    engine.worker.save(engine.registration, hashes(7), proof=True)
    stranger = world.client()
    stranger.session.peer = dataclasses.replace(stranger.session.peer, process=("pid", 1))
    query = Query(INSTANCE, 1, 1, [GroupHashes(0, HASH_BYTES, hashes(7))], proof=True)
    assert stranger.refused(query).kind == ErrorKind.INVALID


def test_workers_in_containers_that_cannot_be_told_apart_find_each_their_own_proof(world: World) -> None:
    """As in pods on older kernels: every process of another pid namespace has the number 0."""
    two = [world.client(), world.client()]
    world.client().attach()
    for rank, worker in enumerate(two):
        worker.session.peer = dataclasses.replace(worker.session.peer, pid=0, process=None)
        registration = worker.register(ranks=Ranks(tensor=rank, tensor_size=2)).registration
        worker.save(registration, hashes(rank + 1), proof=True)
    for rank, worker in enumerate(two):
        registration = next(iter(worker.session.registrations))
        ready = worker.ready(hashes(rank + 1), proof=True)
        worker.done(worker.start(registration, ready.leases[0], [5]))
        worker.prove(registration)
    first = next(iter(two[0].session.registrations))
    two[0].call(Unregister(first), Done)
    two[0].goodbye()
    restarted = world.client()
    restarted.session.peer = dataclasses.replace(restarted.session.peer, pid=0, process=None)
    # It may be another process, so what was proven there proves nothing here.
    assert restarted.register(ranks=Ranks(tensor=0, tensor_size=2)).proof_required


@pytest.mark.parametrize("hash_bytes", [0, 33])
def test_a_proof_is_not_looked_for_under_hashes_that_are_none(world: World, hash_bytes: int) -> None:
    engine = world.engine()
    stranger = world.client()
    stranger.session.peer = dataclasses.replace(stranger.session.peer, process=None)
    engine.worker.session.peer = dataclasses.replace(engine.worker.session.peer, process=None)
    refusal = stranger.refused(Query(INSTANCE, 1, 1, [GroupHashes(0, hash_bytes, bytes(66))], proof=True))
    assert refusal.kind == ErrorKind.INVALID and "hash_bytes" in refusal.message


@pytest.mark.guard("all-groups")
def test_a_hit_covers_every_group(world: World) -> None:
    groups = [group_geometry(0), group_geometry(1, page=8192, blocks=16, tokens=32)]
    engine = world.engine(groups=groups)
    engine.save(hashes(1, 2))
    only_first = Query(INSTANCE, 1, 1, [GroupHashes(0, HASH_BYTES, hashes(1, 2))])
    refusal = engine.control.refused(only_first)
    assert "every group" in refusal.message


def test_groups_of_different_page_sizes_meet_at_a_common_boundary(world: World) -> None:
    groups = [group_geometry(0), group_geometry(1, page=8192, blocks=16, tokens=32)]
    engine = world.engine(groups=groups)
    engine.save(hashes(1, 2, 3, 4, 5))
    request = SaveRequest(
        engine.registration, [GroupHashes(1, HASH_BYTES, hashes(11, 12, 13))], [blocks_blob([0, 1, 2], 1)]
    )
    plan = engine.worker.call(SubmitSaves([request]), SavesAccepted).plans[0]
    engine.worker.commit(plan)
    query = Query(
        INSTANCE,
        1,
        1,
        [GroupHashes(0, HASH_BYTES, hashes(1, 2, 3, 4, 5)), GroupHashes(1, HASH_BYTES, hashes(11, 12, 13))],
    )
    ready = engine.control.call(query, Ready)
    assert [(part.group, part.count) for part in ready.pages] == [(0, 4), (1, 2)]
    assert ready.boundaries == [(2, 4, 2)]
    assert ready.bytes == 4 * 4096 + 2 * 8192
