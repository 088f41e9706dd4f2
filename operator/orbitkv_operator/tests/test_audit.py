"""Watches that fall silent, and what events lead to."""

from __future__ import annotations

from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_operator.audit import Auditor, Watch
from orbitkv_operator.cluster.api import (
    CACHES,
    CONFIG_MAPS,
    ENGINE_PODS,
    NAMESPACES,
    NODES,
    PODS,
    POOLS,
    RUNTIME_CLASSES,
    Manifest,
)
from orbitkv_operator.engines.pods import EnginePods
from orbitkv_operator.names import ENGINE_FIELDS, ENGINE_SELECTOR
from orbitkv_operator.queue import Key, KeyedQueue
from orbitkv_operator.router import Router
from orbitkv_operator.tests.fakes import RELEASE, FakeApi, cache_body, node, pool_body
from orbitkv_operator.view import View


class World:
    """A cluster, one watch on it, and what has been queued since."""

    def __init__(self, watch: Watch) -> None:
        self.api, self.view, self.queue, self.now = FakeApi(), View(), KeyedQueue(), 1000.0
        self.router = Router(self.view, self.queue, EnginePods())
        self.watch = watch
        watch.clock = lambda: self.now
        self.auditor = Auditor(self.api, self.view, [watch], self.router, 60.0)

    def show(self, manifest: Manifest, gone: bool = False) -> None:
        """The watch works."""
        self.watch.show(manifest, gone)
        self.router.changed(self.watch.resource, manifest, gone)

    def audit(self) -> None:
        self.auditor.audit(self.watch)

    def queued(self) -> set[str]:
        found = {str(key) for key in self.queue._due}
        self.queue._due.clear()
        self.queue._heap.clear()
        return found


@pytest.fixture
def pools() -> World:
    return World(Watch(POOLS))


def test_watch_that_shows_everything_is_fine_for_ever(pools: World) -> None:
    pools.show(pools.api.add(POOLS, pool_body()))
    pools.queued()
    for _ in range(50):
        pools.now += 60
        pools.audit()
    assert pools.auditor.problem() == "" and pools.queued() == set()


def test_kind_without_objects_is_fine_for_ever(pools: World) -> None:
    for _ in range(50):
        pools.now += 60
        pools.audit()
    assert pools.auditor.problem() == ""


def test_change_that_was_not_shown_is_queued_and_a_minute_later_proves_the_watch_dead(pools: World) -> None:
    pools.show(pools.api.add(POOLS, pool_body()))
    pools.queued()
    pools.api.add(POOLS, pool_body(memory={"pool": "2Gi"}))
    pools.audit()
    assert pools.queued() == {"ManagerPool main"}
    known = pools.view.pool("main")
    assert known is not None and known["spec"]["memory"]["pool"] == "2Gi"
    assert pools.auditor.problem() == ""
    pools.now += 60
    pools.audit()
    assert "managerpools" in pools.auditor.problem()


def test_object_that_the_watch_never_showed(pools: World) -> None:
    pools.api.add(POOLS, pool_body())
    pools.audit()
    assert pools.queued() == {"ManagerPool main"}
    pools.now += 60
    pools.audit()
    assert pools.auditor.problem() != ""


def test_deletion_that_was_not_shown(pools: World) -> None:
    pools.show(pools.api.add(POOLS, pool_body()))
    pools.queued()
    del pools.api.objects[POOLS, "", "main"]
    pools.audit()
    assert pools.queued() == {"ManagerPool main"} and pools.view.pool("main") is None
    pools.now += 60
    pools.audit()
    assert pools.auditor.problem() != ""


def test_watch_that_is_a_little_behind_is_forgiven(pools: World) -> None:
    late = pools.api.add(POOLS, pool_body())
    pools.audit()
    pools.show(late)
    pools.now += 60
    pools.audit()
    assert pools.auditor.problem() == ""


def test_busy_watch_that_differs_each_time_anew_is_alive(pools: World) -> None:
    for number in range(10):
        changed = pools.api.add(POOLS, pool_body(memory={"pool": f"{number + 1}Gi"}))
        pools.audit()
        pools.now += 60
        pools.show(changed)
    assert pools.auditor.problem() == ""


def test_list_that_is_behind_the_watch_accuses_nobody(pools: World) -> None:
    listed = [pools.api.add(POOLS, pool_body())]
    before = pools.watch.shown()
    pools.show(pools.api.add(POOLS, pool_body(memory={"pool": "2Gi"})))
    assert pools.watch.compare(listed, before) == set()


def test_time_without_a_list_is_not_the_watchs_fault(pools: World) -> None:
    pools.api.add(POOLS, pool_body())
    pools.audit()
    pools.now += 3600  # the apiserver is away
    assert pools.auditor.problem() == ""


def test_ghost_from_before_the_watch_is_dropped(pools: World) -> None:
    pools.view.put(POOLS, pool_body("ghost"))
    pools.audit()
    assert pools.view.pool("ghost") is None


def test_object_that_comes_while_the_list_is_made_is_not_gone(pools: World) -> None:
    listing = pools.api.list_metadata

    def late(*asked: Any, **how: Any) -> list[Manifest]:
        found = listing(*asked, **how)
        pools.show(pools.api.add(POOLS, pool_body()))
        return found

    pools.api.list_metadata = late  # type: ignore[method-assign]
    pools.audit()
    assert pools.view.pool("main") is not None


def test_what_the_watch_shows_while_the_audit_reads_an_object_is_newer(pools: World) -> None:
    pools.api.add(POOLS, pool_body())
    reading = pools.api.get

    def slow(*asked: Any) -> Manifest | None:
        found = reading(*asked)
        pools.show(pools.api.add(POOLS, pool_body(memory={"pool": "2Gi"})))
        return found

    pools.api.get = slow  # type: ignore[assignment,method-assign]
    pools.audit()
    known = pools.view.pool("main")
    assert known is not None and known["spec"]["memory"]["pool"] == "2Gi"


def test_many_differences_are_listed_at_once() -> None:
    world = World(Watch(NODES))
    for number in range(200):
        world.api.add(NODES, node(f"n{number}"))
    verbs = []
    world.api.before = lambda verb, resource: verbs.append(verb)
    world.audit()
    assert verbs == ["list", "list"] and len(world.view.nodes()) == 200


def test_childs_difference_queues_its_pool() -> None:
    world = World(Watch(CONFIG_MAPS, RELEASE))
    metadata = {"name": "orbitkv-main", "namespace": RELEASE, "labels": {names.LABEL_POOL: "main"}}
    child = world.api.add(CONFIG_MAPS, {"metadata": metadata})
    world.show(child)
    world.queued()
    del world.api.objects[CONFIG_MAPS, RELEASE, "orbitkv-main"]
    world.audit()
    assert world.queued() == {"ManagerPool main"}


def test_runtime_class_that_went_unnoticed_queues_all_pools() -> None:
    world = World(Watch(RUNTIME_CLASSES))
    world.view.put(POOLS, pool_body())
    world.show(world.api.add(RUNTIME_CLASSES, {"metadata": {"name": "nvidia"}, "handler": "nvidia"}))
    world.queued()
    world.audit()
    assert world.queued() == set()
    del world.api.objects[RUNTIME_CLASSES, "", "nvidia"]
    world.audit()
    assert world.queued() == {"ManagerPool main"}


def test_engines_pod_that_has_not_begun_is_not_owed_by_its_watch() -> None:
    world = World(Watch(ENGINE_PODS, None, ENGINE_SELECTOR, ENGINE_FIELDS))
    metadata = {"name": "engine", "namespace": "team", "labels": {names.LABEL_CACHE: "true"}}
    world.api.add(ENGINE_PODS, {"metadata": metadata, "status": {"phase": "Pending"}})
    world.audit()
    assert world.queued() == set()
    world.api.add(ENGINE_PODS, {"metadata": metadata, "status": {"phase": "Running"}})
    world.audit()
    assert world.queued() == {"Pod team/engine"}


# -------------------------------------------------------------------------------------------------------------- router


@pytest.fixture
def world() -> World:
    found = World(Watch(POOLS))
    for manifest in (pool_body("main"), pool_body("other")):
        found.view.put(POOLS, manifest)
    for name, pool in (("one", "main"), ("two", "main"), ("three", "other")):
        found.view.put(CACHES, cache_body(name, pool=pool))
    found.view.put(NODES, node("a"))
    found.view.put(NAMESPACES, {"metadata": {"name": "team", "labels": {}}})
    return found


ALL_POOLS = {"ManagerPool main", "ManagerPool other"}


def test_changed_spec_concerns_other_pools_and_the_pools_caches(world: World) -> None:
    changed = pool_body("main")
    changed["metadata"]["generation"] = 2
    world.router.changed(POOLS, changed, False)
    assert world.queued() == ALL_POOLS | {"CacheNamespace team/one", "CacheNamespace team/two"}


def test_written_figures_concern_the_pool_alone(world: World) -> None:
    world.router.changed(POOLS, pool_body("main") | {"status": {"tiers": {}}}, False)
    assert world.queued() == {"ManagerPool main"}


def test_pool_that_becomes_available_concerns_its_caches(world: World) -> None:
    status = {"conditions": [{"type": "Available", "status": "True", "reason": "AgentsReady"}]}
    world.router.changed(POOLS, pool_body("main") | {"status": status}, False)
    assert "CacheNamespace team/one" in world.queued()


def test_deleted_cache_concerns_its_pool_and_its_neighbours(world: World) -> None:
    world.router.changed(CACHES, cache_body("one"), True)
    assert world.queued() == {"CacheNamespace team/one", "CacheNamespace team/two", "ManagerPool main"}


def test_new_label_of_a_node_concerns_all_pools_and_its_heartbeat_nobody(world: World) -> None:
    beat = node("a")
    beat["status"]["images"] = ["more"]
    world.router.changed(NODES, beat, False)
    assert world.queued() == set()
    world.router.changed(NODES, node("a", {"zone": "a"}), False)
    assert world.queued() == ALL_POOLS


@pytest.mark.parametrize("gone", [False, True])
def test_runtime_class_that_comes_or_goes_concerns_all_pools(world: World, gone: bool) -> None:
    world.router.changed(RUNTIME_CLASSES, {"metadata": {"name": "nvidia"}, "handler": "nvidia"}, gone)
    assert world.queued() == ALL_POOLS


def test_labels_of_a_namespace_concern_caches_of_pools_that_it_uses(world: World) -> None:
    world.router.changed(NAMESPACES, {"metadata": {"name": "team", "labels": {"cache": "yes"}}}, False)
    assert world.queued() == {f"CacheNamespace team/{name}" for name in ("one", "two", "three")}


def test_pods_of_agents_concern_their_pool(world: World) -> None:
    world.router.changed(PODS, {"metadata": {"name": "x", "labels": {names.LABEL_POOL: "main"}}}, False)
    world.router.changed(PODS, {"metadata": {"name": "stranger", "labels": {}}}, False)
    assert world.queued() == {"ManagerPool main"}


def test_everything_is_looked_at_after_a_start(world: World) -> None:
    world.router.everything()
    assert world.queued() == ALL_POOLS | {f"CacheNamespace team/{name}" for name in ("one", "two", "three")}


def test_keys_read_well() -> None:
    assert str(Key("ManagerPool", "main")) == "ManagerPool main"
