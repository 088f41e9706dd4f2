from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import ConfigureNamespace, Nothing, Ping, Pong, Refusal
from orbitkv_agent.cluster import live
from orbitkv_agent.cluster.tests.fake_apiserver import CACHE_NAMESPACES, FakeApiserver
from orbitkv_agent.cluster.tests.world import ClusterWorld
from orbitkv_agent.sessions.namespaces import key_of
from orbitkv_agent.store.namespaces import RetentionClass
from orbitkv_agent.tests.harness import PAGE, hashes

MIB = 1 << 20
NAME = "team-a/qwen"
KEY = key_of("team-a", "qwen", "one")


def used(world: ClusterWorld, key: str = KEY) -> int:
    """Bytes that a cache namespace takes."""
    known = world.agent.cache.stats().namespaces.get(key)
    return 0 if known is None else known.used_bytes


def limits(world: ClusterWorld, key: str = KEY) -> tuple[int | None, int, RetentionClass, int]:
    """Quota, guarantee, class and reset generation that the store goes by."""
    namespace = world.agent.cache._namespaces[key]
    return namespace.quota_bytes, namespace.guaranteed_bytes, namespace.insert_class, namespace.reset_generation


# --------------------------------------------------------------------------------------- live settings


def test_what_an_object_says_is_in_force_while_engines_run(world: ClusterWorld, api: FakeApiserver) -> None:
    engine = world.engine(namespace=NAME)
    assert limits(world) == (None, 0, RetentionClass.PROBATIONARY, 0)
    api.put(
        NAME, "one", quota={"dram": "2Mi", "guaranteedDram": "1Mi"}, retention={"class": "retained"}, resetGeneration=3
    )
    world.until(lambda: limits(world) == (2 * MIB, MIB, RetentionClass.RETAINED, 3))
    assert engine.control.call(Ping(), Pong).ok


def test_a_lower_quota_evicts_the_namespaces_own_pages(world: ClusterWorld, api: FakeApiserver) -> None:
    engine = world.engine(namespace=NAME)
    for first in range(0, 512, 32):
        engine.save(hashes(*range(first, first + 32)))
    assert used(world) == 512 * PAGE
    api.put(NAME, "one", quota={"dram": "1Mi"})
    world.until(lambda: used(world) <= MIB)


def test_raising_the_reset_generation_retires_every_page(world: ClusterWorld, api: FakeApiserver) -> None:
    engine = world.engine(namespace=NAME)
    engine.save(hashes(1, 2))
    assert engine.restore(hashes(1, 2)) == 2
    api.put(NAME, "one", resetGeneration=1)
    world.until(lambda: isinstance(engine.query(hashes(1, 2)), Nothing))
    engine.save(hashes(1, 2))
    assert engine.restore(hashes(1, 2)) == 2


def test_options_are_told_to_engines_that_attach(world: ClusterWorld, api: FakeApiserver) -> None:
    api.put(NAME, "one", mode="save_only", maxWaitMs=7)
    world.until(lambda: world.cluster._tenants.find(NAME).settings.options)  # type: ignore[union-attr]
    welcome = world.client().welcome
    assert welcome is not None
    assert welcome.namespace_options == {"mode": "save_only", "max_wait_ms": 7}


def test_guarantees_beyond_the_pool_are_not_given_to_the_youngest(world: ClusterWorld, api: FakeApiserver) -> None:
    api.put("team-a/old", "old", created="2026-01-01T00:00:01Z", quota={"guaranteedDram": "3Mi"})
    api.put("team-a/young", "young", created="2026-01-01T00:00:02Z", quota={"guaranteedDram": "2Mi"})
    old, young = key_of("team-a", "old", "old"), key_of("team-a", "young", "young")
    world.until(lambda: world.cluster._tenants.find("team-a/young"))
    world.client("team-a/old")
    world.client("team-a/young")  # it is served all the same
    assert (limits(world, old)[1], limits(world, young)[1]) == (3 * MIB, 0)
    api.delete("old")
    world.until(lambda: limits(world, young)[1] == 2 * MIB)


def test_a_quota_above_the_pools_maximum_gets_no_session(tmp_path: Path, api: FakeApiserver) -> None:
    (tmp_path / "live.yaml").write_text(f"max_quota_dram: {MIB}\n")
    api.put(NAME, "one", quota={"dram": "2Mi"})
    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
        refusal = world.refused()
        assert refusal.kind == ErrorKind.DENIED
        assert "QuotaAboveMaximum" in refusal.message
        (tmp_path / "live.yaml").write_text(f"max_quota_dram: {4 * MIB}\n")
        world.advance(live.LOOK_S)
        world.until(lambda: world.cluster._tenants.find(NAME).decision.accepted)  # type: ignore[union-attr]
        assert world.client().call(Ping(), Pong).ok


def test_live_settings_are_read_again_when_the_file_changes(tmp_path: Path, api: FakeApiserver) -> None:
    path = tmp_path / "live.yaml"
    path.write_text("query_budget_percent: 50\n")
    level = logging.getLogger().level
    try:
        with ClusterWorld(tmp_path, api) as world:
            budget = world.agent.queries.budget
            assert budget.limit == budget.owner_limit == 2 * MIB
            # As the kubelet does it: another folder, and a link that is swapped.
            path.unlink()
            (tmp_path / "..data").mkdir()
            (tmp_path / "..data" / "live.yaml").write_text(
                f"query_budget_percent: 25\ninstance_budget: {MIB // 2}\nlog_level: error\n"
            )
            path.symlink_to("..data/live.yaml")
            world.advance(live.LOOK_S)
            assert (budget.limit, budget.owner_limit) == (MIB, MIB // 2)
            assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().setLevel(level)


def test_live_settings_that_cannot_be_used_leave_the_ones_before(tmp_path: Path, api: FakeApiserver) -> None:
    path = tmp_path / "live.yaml"
    path.write_text("query_budget_percent: 50\n")
    with ClusterWorld(tmp_path, api) as world:
        path.write_text("query_budget_percent: 500\n")
        world.advance(live.LOOK_S)
        assert world.agent.queries.budget.limit == 2 * MIB
        ((reason, words),) = [each for each in world.cluster.problems if each[0] == "LiveSettingsInvalid"]
        assert "query_budget_percent" in words
        path.write_text("query_budget_percent: 25\n")
        world.advance(live.LOOK_S)
        assert world.agent.queries.budget.limit == MIB
        assert reason not in dict(world.cluster.problems)


def test_in_a_cluster_only_objects_configure(world: ClusterWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    refusal = world.client("", token=b"").refused(ConfigureNamespace(KEY, quota_bytes=1))
    assert refusal.kind == ErrorKind.UNSUPPORTED
    assert "CacheNamespace object" in refusal.message


# ------------------------------------------------------------------------------------------- deletion


def test_a_deleted_namespaces_pages_go_and_its_sessions_end(world: ClusterWorld, api: FakeApiserver) -> None:
    engine = world.engine(namespace=NAME)
    engine.save(hashes(1, 2, 3))
    api.delete("one")
    world.until(engine.control.closed)
    assert isinstance(engine.control.replies[0], Refusal)
    world.until(lambda: not used(world))
    assert world.refused().kind == ErrorKind.DENIED
    assert not world.agent.namespaces.has(KEY)


def test_a_deleted_namespace_made_again_starts_empty(world: ClusterWorld, api: FakeApiserver) -> None:
    engine = world.engine(namespace=NAME)
    engine.save(hashes(1, 2, 3))
    api.delete("one")
    api.put(NAME, "two")
    world.until(engine.control.closed)
    again = world.engine(namespace=NAME)
    assert again.restore(hashes(1, 2, 3)) == 0
    again.save(hashes(1, 2, 3))
    assert again.restore(hashes(1, 2, 3)) == 3


def test_a_namespace_deleted_and_made_again_while_the_watch_is_away_starts_empty(
    world: ClusterWorld, api: FakeApiserver
) -> None:
    engine = world.engine(namespace=NAME)
    engine.save(hashes(1))
    api.refuse = 503
    api.break_streams()
    world.until(lambda: world.cluster.problems)
    assert engine.restore(hashes(1)) == 1  # nothing changes while nobody can say what there is
    api.delete("one")
    api.put(NAME, "two")
    api.forget_history()
    api.refuse = 0
    world.until(engine.control.closed)
    assert world.engine(namespace=NAME).restore(hashes(1)) == 0
    world.until(lambda: not used(world))


def test_pages_that_are_being_restored_stay_until_that_ends(world: ClusterWorld, api: FakeApiserver) -> None:
    engine = world.engine(namespace=NAME)
    engine.save(hashes(1, 2))
    engine.start(engine.ready(hashes(1, 2)))
    api.delete("one")
    world.until(engine.worker.closed)
    world.pump(50)
    assert used(world) == 2 * PAGE  # the copy may still run: its process has not ended
    for session in list(world.agent.server.sessions):
        session.close()
    world.until(lambda: not used(world))


def test_an_object_that_cannot_be_read_keeps_its_pages_and_admits_nobody(
    world: ClusterWorld, api: FakeApiserver
) -> None:
    engine = world.engine(namespace=NAME)
    engine.save(hashes(1))
    api.put(NAME, "one", resetGeneration="newer kind of value")
    world.until(engine.control.closed)
    assert used(world) == PAGE
    assert "cannot be read by this agent" in world.refused().message
    assert any("resetGeneration" in words for _, words in world.cluster.problems)


# --------------------------------------------------------------------------------- watches and the disk


def test_a_change_of_the_status_is_no_change(world: ClusterWorld, api: FakeApiserver) -> None:
    tenant = world.cluster._tenants.find(NAME)
    with api._changed:
        body = api._objects[CACHE_NAMESPACES]["one"]
        body["status"] = {"attached": {"pods": 3}}
        api._happened("MODIFIED", CACHE_NAMESPACES, body)
    api.put("team-a/marker", "marker")
    world.until(lambda: world.cluster._tenants.find("team-a/marker"))
    assert world.cluster._tenants.find(NAME) is tenant


def test_broken_streams_are_taken_up_again(world: ClusterWorld, api: FakeApiserver) -> None:
    for number in range(3):
        api.break_streams()
        api.put("team-a/more", f"more-{number}", created=f"2026-01-01T00:00:0{number}Z")
        api.delete(f"more-{number}")
        api.put("team-a/last", f"last-{number}")
        world.until(lambda number=number: _uid(world, "team-a/last") == f"last-{number}")  # type: ignore[misc]
        api.delete(f"last-{number}")


def test_a_thousand_agents_open_a_stream_every_few_seconds_at_most(world: ClusterWorld, api: FakeApiserver) -> None:
    world.until(lambda: len(api.stream_seconds) == 2)
    assert sum(1000 / seconds for seconds in api.stream_seconds.values()) < 0.28


def test_a_version_that_the_apiserver_forgot_is_listed_again(world: ClusterWorld, api: FakeApiserver) -> None:
    lists = api.requests[CACHE_NAMESPACES]
    api.forget_history()
    api.break_streams()
    world.until(lambda: api.requests[CACHE_NAMESPACES] > lists)
    api.put("team-a/more", "more")
    world.until(lambda: _uid(world, "team-a/more") == "more")


def test_a_failing_apiserver_is_not_asked_without_end(world: ClusterWorld, api: FakeApiserver) -> None:
    api.refuse = 403
    api.break_streams()
    world.until(lambda: world.cluster.problems)
    before = api.requests.total()
    world.until(lambda: api.requests.total() > before)
    ((_, words), *_rest) = world.cluster.problems
    assert "403" in words
    assert api.requests.total() - before < 20


def test_after_a_restart_without_the_apiserver_the_agent_knows_its_namespaces(
    tmp_path: Path, api: FakeApiserver
) -> None:
    api.put(NAME, "one", quota={"dram": "2Mi"})
    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
    api.refuse = 503
    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
        tenant = world.cluster._tenants.find(NAME)
        assert tenant is not None
        assert tenant.settings.quota_bytes == 2 * MIB
        assert not world.cluster._tenants.listed
        api.refuse = 0
        world.until(lambda: world.cluster._tenants.listed)


def test_what_was_made_again_while_the_agent_was_down_has_another_key(tmp_path: Path, api: FakeApiserver) -> None:
    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
        world.engine(namespace=NAME).save(hashes(1))
    api.delete("one")
    api.put(NAME, "two")
    with ClusterWorld(tmp_path, api) as world:
        world.until(lambda: _uid(world, NAME) == "two")
        assert world.engine(namespace=NAME).restore(hashes(1)) == 0


def test_the_file_is_for_root_alone_and_replaced_as_a_whole(world: ClusterWorld, api: FakeApiserver) -> None:
    folder = Path(world.cluster._settings.state_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {"agent.lock", "cache-namespaces.json", "namespaces.json"}
    path = folder / "cache-namespaces.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    inode = path.stat().st_ino
    api.put("team-a/more", "more")
    world.until(lambda: _uid(world, "team-a/more"))
    assert path.stat().st_ino != inode
    assert len(json.loads(path.read_text())["objects"]) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "about": "default", "objects": []}'])
def test_a_file_that_cannot_be_used_is_as_none(tmp_path: Path, api: FakeApiserver, content: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "cache-namespaces.json").write_text(content)
    api.refuse = 503
    with ClusterWorld(tmp_path, api) as world:
        world.until(lambda: world.cluster.problems)
        assert world.agent.not_ready()
        api.refuse = 0
        world.until_ready()


def test_a_file_of_another_pool_is_not_believed(tmp_path: Path, api: FakeApiserver) -> None:
    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
    api.refuse = 503
    with ClusterWorld(tmp_path, api, cluster={"pool": "other"}) as world:
        world.until(lambda: world.cluster.problems)
        assert world.agent.not_ready()


def test_a_file_that_cannot_be_written_is_a_problem_and_no_end(tmp_path: Path, api: FakeApiserver) -> None:
    (tmp_path / "state" / "cache-namespaces.new").mkdir(parents=True)
    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
        assert world.client().call(Ping(), Pong).ok
        assert any("cannot be written" in words for _, words in world.cluster.problems)


def test_threads_end_with_the_agent(tmp_path: Path, api: FakeApiserver) -> None:
    import threading

    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
        started = {thread.name for thread in threading.enumerate() if thread.name.startswith("orbitkv-")}
        assert len(started) == 3
    assert not {thread.name for thread in threading.enumerate()} & started


def test_a_thousand_namespaces_cost_the_owner_little(world: ClusterWorld, api: FakeApiserver) -> None:
    with api._changed:
        for number in range(1000):
            metadata: dict[str, Any] = {
                "namespace": "team-a",
                "name": f"n{number}",
                "uid": f"u{number}",
                "generation": 1,
                "creationTimestamp": "2026-01-02T00:00:00Z",
            }
            body = {"metadata": metadata, "spec": {"poolRef": {"name": "default"}, "quota": {"dram": "1Mi"}}}
            api._objects[CACHE_NAMESPACES][f"u{number}"] = body
        api.forget_history()
    api.break_streams()
    world.until(lambda: _uid(world, "team-a/n999"))
    assert world.client("team-a/n999").call(Ping(), Pong).ok
    assert len(list(world.agent.namespaces)) == 1  # the store knows only what is used
    api.delete("u0")
    world.until(lambda: not _uid(world, "team-a/n0"))


def _uid(world: ClusterWorld, name: str) -> str:
    tenant = world.cluster._tenants.find(name)
    return "" if tenant is None else tenant.object.metadata.uid
