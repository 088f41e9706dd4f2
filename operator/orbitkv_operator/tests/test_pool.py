"""Reconciling pools, on an API in memory with a DaemonSet controller."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_crds.agent_api.reports_pb2 import Problem, Report, Tier
from orbitkv_operator.builders.children import CHILD_KINDS
from orbitkv_operator.cluster.api import (
    CONFIG_MAPS,
    DAEMON_SETS,
    NETWORK_POLICIES,
    NODES,
    POD_MONITORS,
    PODS,
    POOLS,
    SERVICE_ACCOUNTS,
    ApiError,
    Manifest,
    Resource,
)
from orbitkv_operator.engines.pods import EnginePods
from orbitkv_operator.events import Events
from orbitkv_operator.queue import KeyedQueue
from orbitkv_operator.reconcile.pool import PoolReconciler
from orbitkv_operator.reconcile.status_writer import StatusWriter
from orbitkv_operator.reports.store import ReportStore
from orbitkv_operator.router import Router
from orbitkv_operator.tests.fakes import RELEASE, SETTINGS, FakeApi, condition_of, node, pool_body
from orbitkv_operator.view import View
from orbitkv_operator.work import FORGET


class World:
    """An operator's view of a cluster that runs DaemonSets."""

    def __init__(self, *nodes: Manifest) -> None:
        self.api = FakeApi()
        self.now = 1000.0
        self.good_images: Callable[[str], bool] = lambda image: "bad" not in image
        for each in nodes or (node("a", {"zone": "a"}), node("b", {"zone": "b"})):
            self.api.add(NODES, each)
        self.restart()

    def restart(self) -> None:
        """A new process: it knows what is in the API and nothing else."""
        self.view = View()
        self.reports = ReportStore(clock=lambda: self.now)
        self.reconciler = PoolReconciler(
            self.api,
            self.view,
            SETTINGS,
            self.reports,
            StatusWriter(self.api, clock=lambda: self.now),
            Events(self.api, "operator-1"),
            lambda: "the CA",
        )

    def look(self) -> None:
        for kind in (NODES, POOLS, PODS):
            for name in self.view.names(kind):
                self.view.drop(kind, name)
            for manifest in self.api.list_all(kind):
                self.view.put(kind, manifest)

    def step(self) -> None:
        """Everything that happens in a while: pools are looked at, and DaemonSets run."""
        self.look()
        for pool in self.api.list_all(POOLS):
            self.reconciler.reconcile(pool["metadata"]["name"])
        self.api.run_daemon_sets(self.good_images)
        self.now += 20

    def settle(self, steps: int = 20) -> None:
        for _ in range(steps):
            before = len(self.changes())
            self.step()
            if len(self.changes()) == before:
                return
        raise AssertionError(f"never at rest: {self.api.writes[-5:]}")

    def changes(self) -> list[tuple[str, str, str]]:
        return [write for write in self.api.writes if write[1] != "Event"]

    def pool(self, name: str = "main", **spec: Any) -> None:
        known = self.api.get(POOLS, None, name)
        created = f"2026-01-0{1 + len(self.api.list_all(POOLS))}T00:00:00Z"
        body = pool_body(name, created, **spec)
        if known:
            body["metadata"] = known["metadata"]
            body["status"] = known.get("status") or {}
        self.api.add(POOLS, body)

    def child(self, resource: Resource, pool: str = "main") -> Manifest:
        found = self.api.get(resource, RELEASE, f"orbitkv-{pool}")
        assert found is not None, f"no {resource.kind}"
        return found

    def status(self, name: str = "main") -> Manifest:
        found = self.api.get(POOLS, None, name)
        assert found is not None
        return dict(found["status"])

    def condition(self, kind: str, name: str = "main") -> tuple[str, str]:
        found = condition_of(self.status(name), kind)
        return found["status"], found["reason"]

    def message(self, kind: str, name: str = "main") -> str:
        return str(condition_of(self.status(name), kind)["message"])

    def pods(self, pool: str = "main") -> dict[str, str]:
        """Uid of each node's agent."""
        found = self.api.list_all(PODS, RELEASE, labels=f"{names.LABEL_POOL}={pool}")
        return {it["spec"]["nodeName"]: it["metadata"]["uid"] for it in found}


@pytest.fixture
def world() -> World:
    return World()


def test_new_pool_becomes_ready(world: World) -> None:
    world.pool()
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert world.status()["nodes"] == {"desired": 2, "ready": 2, "updated": 2, "unhealthy": 0}
    assert world.status()["observedGeneration"] == 1
    assert {it for it in CHILD_KINDS if world.api.get(it, RELEASE, "orbitkv-main")} == set(CHILD_KINDS) - {POD_MONITORS}


def test_children_end_with_their_pool(world: World) -> None:
    world.pool()
    world.settle()
    for kind in (SERVICE_ACCOUNTS, CONFIG_MAPS, DAEMON_SETS, NETWORK_POLICIES):
        (owner,) = world.child(kind)["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["controller"]) == ("ManagerPool", True)
        assert "blockOwnerDeletion" not in owner  # it would take a right on finalizers


def test_at_rest_nothing_is_written(world: World) -> None:
    world.pool()
    world.settle()
    world.api.writes.clear()
    for _ in range(20):
        world.step()
    assert world.api.writes == []


def test_restarted_operator_changes_nothing(world: World) -> None:
    world.pool()
    world.settle()
    world.api.writes.clear()
    world.restart()
    world.settle()
    assert world.changes() == []


def test_deleted_child_is_made_again(world: World) -> None:
    world.pool()
    world.settle()
    for kind in (SERVICE_ACCOUNTS, CONFIG_MAPS, DAEMON_SETS, NETWORK_POLICIES):
        del world.api.objects[kind, RELEASE, "orbitkv-main"]
        world.step()
        world.child(kind)


def test_edited_child_is_repaired(world: World) -> None:
    world.pool()
    world.settle()
    edited = world.child(DAEMON_SETS)
    edited["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    world.api.add(DAEMON_SETS, edited)
    world.step()
    repaired = world.child(DAEMON_SETS)["spec"]["template"]["spec"]["containers"][0]["image"]
    assert repaired == SETTINGS.agent_image


def test_agent_goes_only_if_no_other_has_gone_that_the_watch_has_not_shown_yet(world: World) -> None:
    world.pool()
    world.settle()
    world.pool(image="registry/agent:2")
    world.look()
    (gone, *_) = world.api.list_all(PODS, RELEASE)
    del world.api.objects[PODS, RELEASE, gone["metadata"]["name"]]
    world.reconciler.reconcile("main")
    assert not [write for write in world.api.writes if write[:2] == ("delete", "Pod")]
    world.step()
    world.settle()
    assert len([write for write in world.api.writes if write[:2] == ("delete", "Pod")]) == 1


def test_new_operator_keeps_the_figures_until_it_has_heard_of_all_agents(world: World) -> None:
    def report(node: str) -> None:
        tier = Tier(capacity_bytes=64 << 20)
        world.reports.put(Report(pool="main", node=node, boot_id="1", sequence=1, dram=tier))

    world.pool()
    world.settle()
    report("a")
    report("b")
    world.step()
    before = world.status()["tiers"]
    assert before["dram"]["capacity"] == "128Mi"
    world.restart()
    report("a")
    world.step()
    assert world.status()["tiers"] == before


def test_placement_changes_restart_nothing_that_stays(world: World) -> None:
    world.pool()
    world.settle()
    before = world.pods()
    world.pool(nodeSelector={"zone": "a"})
    world.settle()
    assert world.pods() == {"a": before["a"]}
    world.pool()
    world.settle()
    assert world.pods()["a"] == before["a"] and world.pods().keys() == {"a", "b"}


def test_live_changes_restart_nothing_and_arrive(world: World) -> None:
    world.pool()
    world.settle()
    before = world.pods()
    world.pool(memory={"pool": "1Gi", "queryBudgetPercent": 30})
    world.settle()
    assert world.pods() == before
    assert "query_budget_percent: 30" in world.child(CONFIG_MAPS)["data"]["live.yaml"]


def test_other_changes_replace_agents_one_by_one(world: World) -> None:
    world.pool()
    world.settle()
    before = world.pods()
    world.pool(image="registry/agent:2")
    seen = []
    for _ in range(6):
        world.step()
        seen.append(sum(world.pods().get(name) == uid for name, uid in before.items()))
    assert seen[:3] == [1, 0, 0]
    assert world.condition("Ready") == ("True", "Ready") and world.status()["nodes"]["updated"] == 2


def test_rollout_is_visible_while_it_lasts(world: World) -> None:
    world.pool()
    world.settle()
    world.pool(image="registry/agent:2")
    world.step()
    assert world.condition("Progressing") == ("True", "RollingOut")
    assert world.condition("Ready") == ("False", "RollingOut")
    assert world.condition("Available") == ("True", "AgentsReady")


def test_paused_rollout_waits(world: World) -> None:
    world.pool()
    world.settle()
    before = world.pods()
    world.pool(image="registry/agent:2", updateStrategy={"paused": True})
    world.settle()
    assert world.pods() == before
    assert world.condition("Progressing") == ("False", "Paused") and world.condition("Ready") == ("True", "Ready")
    world.pool(image="registry/agent:2")
    world.settle()
    assert not set(world.pods().values()) & set(before.values())


def test_bad_image_is_named_and_stops_the_rollout(world: World) -> None:
    world.pool()
    world.settle()
    before = world.pods()
    world.pool(image="registry/bad:1")
    world.settle()
    assert world.pods()["b"] == before["b"]  # one of two still serves
    assert world.condition("Progressing") == ("False", "Stalled") and "registry/bad:1" in world.message("Progressing")
    (sick,) = world.status()["unhealthyNodes"]
    assert (sick["name"], sick["reason"]) == ("a", "ImagePullBackOff") and "registry/bad:1" in sick["message"]
    assert world.condition("Available") == ("True", "AgentsReady")
    world.pool()  # back to the image that works
    world.settle()
    assert world.condition("Ready") == ("True", "Ready") and world.pods()["b"] == before["b"]


def test_first_ten_unhealthy_nodes_are_named_and_all_are_counted() -> None:
    world = World(*(node(f"n{number:02}") for number in range(30)))
    world.pool(image="registry/bad:1")
    world.settle()
    assert world.status()["nodes"]["unhealthy"] == 30
    assert [it["name"] for it in world.status()["unhealthyNodes"]] == [f"n{number:02}" for number in range(10)]


def test_agent_that_was_evicted_is_named_until_its_pool_is_made_otherwise() -> None:
    """The pod is gone before anybody looks: the DaemonSet's controller has made another one in its place."""
    world = World()
    world.pool()
    world.settle()
    (pod, *_) = world.api.list_all(PODS)
    when = datetime.now(UTC).isoformat()
    ended = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": when}
    evicted = pod | {"status": {"phase": "Failed", "reason": "Evicted", "message": "Too much.", "conditions": [ended]}}
    Router(world.view, KeyedQueue(), EnginePods()).changed(PODS, evicted, gone=True)
    world.settle()
    (sick,) = world.status()["unhealthyNodes"]
    assert (sick["name"], sick["reason"]) == (pod["spec"]["nodeName"], "Evicted") and "Too much." in sick["message"]
    world.pool(memory={"pool": "2Gi"})
    world.settle()
    assert not world.status().get("unhealthyNodes")


def test_problem_that_an_agent_reports_is_shown(world: World) -> None:
    world.pool()
    world.settle()
    problem = Problem(reason="LiveSettingsRefused", message="query_budget_percent: must be at most 100.")
    world.reports.put(
        Report(pool="main", node="b", pod_name="agent-b", pod_uid=world.pods()["b"], boot_id="1", problems=[problem])
    )
    world.settle()
    (sick,) = world.status()["unhealthyNodes"]
    assert (sick["name"], sick["reason"], sick["pod"]) == ("b", "LiveSettingsRefused", "agent-b")
    assert world.condition("Ready") == ("True", "Ready")


def test_capacity_and_use_are_summed(world: World) -> None:
    world.pool()
    world.settle()
    assert "tiers" not in world.status()
    for number, name in enumerate("ab", 1):
        tier = Tier(capacity_bytes=1 << 30, used_bytes=number << 28)
        world.reports.put(Report(pool="main", node=name, boot_id="1", dram=tier))
    world.settle()
    assert world.status()["tiers"] == {"dram": {"capacity": "2Gi", "used": "768Mi"}}


def test_share_of_nodes_may_be_unavailable() -> None:
    world = World(*(node(f"n{number}") for number in range(8)))
    world.pool(updateStrategy={"maxUnavailable": "25%"})
    world.settle()
    before = world.pods()
    world.pool(image="registry/agent:2", updateStrategy={"maxUnavailable": "25%"})
    world.step()
    assert sum(world.pods().get(name) == uid for name, uid in before.items()) == 6


def test_no_node_says_what_to_look_at(world: World) -> None:
    world.pool(nodeSelector={"zone": "nowhere"})
    world.settle()
    assert world.condition("Ready") == ("False", "NoNodes") and "nodeSelector" in world.message("Ready")


def test_running_agents_outlive_a_refused_change(world: World) -> None:
    world.pool()
    world.settle()
    before = world.pods()
    world.pool(gpu={"access": "runtimeClass"}, image="registry/agent:2")
    world.settle()
    assert world.pods() == before and world.condition("Ready") == ("False", "RuntimeClassNotFound")


def test_memory_limit_below_the_pool_is_refused_before_agents_are_killed_for_it(world: World) -> None:
    world.pool(memory={"pool": "4Gi"}, resources={"limits": {"memory": "4Gi"}})
    world.settle()
    assert world.condition("ConfigValid") == ("False", "MemoryBelowPool")
    assert not world.api.list_all(DAEMON_SETS)


# ------------------------------------------------------------------------------------------------------------- overlap


def test_of_two_overlapping_pools_the_older_serves_and_both_are_named(world: World) -> None:
    world.pool("old")
    world.settle()
    before = world.pods("old")
    world.pool("new", nodeSelector={"zone": "b"})
    world.settle()
    assert world.pods("old") == before and world.pods("new") == {}
    for name in ("old", "new"):
        assert world.condition("ConfigValid", name) == ("False", "NodesOverlap")
        message = world.message("ConfigValid", name)
        assert "old" in message and "new" in message and "node b" in message
    assert world.condition("Ready", "old") == ("True", "Ready")
    assert world.condition("Ready", "new") == ("False", "NodesOverlap")


def test_younger_pool_keeps_the_placement_it_had(world: World) -> None:
    world.pool("old", nodeSelector={"zone": "a"})
    world.pool("new", nodeSelector={"zone": "b"})
    world.settle()
    before = world.pods("new")
    assert before.keys() == {"b"}
    world.pool("new")  # everywhere: also where the older one is
    world.settle()
    assert world.pods("new") == before
    world.pool("old", nodeSelector={"zone": "nowhere"})
    world.settle()
    assert world.pods("new")["b"] == before["b"] and world.pods("new").keys() == {"a", "b"}
    assert world.condition("ConfigValid", "new") == ("True", "Valid")


def test_nothing_that_runs_is_removed_when_an_older_pool_grows(world: World) -> None:
    world.pool("old", nodeSelector={"zone": "a"})
    world.pool("new", nodeSelector={"zone": "b"})
    world.settle()
    before = world.pods("new")
    world.pool("old")
    world.settle()
    assert world.pods("new") == before


def test_younger_pool_still_rolls_out_where_it_runs(world: World) -> None:
    world.pool("old", nodeSelector={"zone": "a"})
    world.pool("new", nodeSelector={"zone": "b"})
    world.settle()
    before = world.pods("new")
    world.pool("new", image="registry/agent:2")
    world.settle()
    assert world.pods("new").keys() == {"b"} and world.pods("new") != before


def test_younger_pool_takes_over_when_the_older_is_deleted(world: World) -> None:
    world.pool("old")
    world.pool("new")
    world.settle()
    for key in [key for key in world.api.objects if key[2].startswith(("old", "orbitkv-old"))]:
        del world.api.objects[key]
    world.settle()
    assert world.pods("new").keys() == {"a", "b"} and world.condition("Ready", "new") == ("True", "Ready")


# ----------------------------------------------------------------------------------------------------------- ownership


def test_object_of_somebody_else_is_left_alone_and_named(world: World) -> None:
    metadata = {"name": "orbitkv-main", "namespace": RELEASE, "labels": {"app.kubernetes.io/managed-by": "Helm"}}
    theirs = world.api.add(SERVICE_ACCOUNTS, {"metadata": metadata})
    world.pool()
    world.settle()
    assert world.child(SERVICE_ACCOUNTS) == theirs
    assert world.condition("ConfigValid") == ("False", "NameTaken")
    assert "ServiceAccount orbitkv-main" in world.message("ConfigValid")


def test_orphan_is_adopted(world: World) -> None:
    world.pool()
    world.settle()
    orphan = world.child(DAEMON_SETS)
    orphan["metadata"]["ownerReferences"] = []
    world.api.add(DAEMON_SETS, orphan)
    before = world.pods()
    world.settle()
    assert world.child(DAEMON_SETS)["metadata"]["ownerReferences"] and world.pods() == before


def test_pool_made_again_waits_for_the_objects_of_the_former(world: World) -> None:
    world.pool()
    world.settle()
    del world.api.objects[POOLS, "", "main"]
    world.api.add(POOLS, pool_body(uid="another"))
    world.settle()
    assert world.condition("Progressing") == ("True", "Waiting")
    for kind in CHILD_KINDS:  # the garbage collector
        world.api.objects.pop((kind, RELEASE, "orbitkv-main"), None)
    world.settle()
    assert world.child(DAEMON_SETS)["metadata"]["ownerReferences"][0]["uid"] == "another"


def test_only_objects_with_our_uid_are_deleted(world: World) -> None:
    world.api.absent.clear()
    world.pool()
    world.settle()
    world.child(POD_MONITORS)
    world.pool(metrics={"podMonitor": {"enabled": False}})
    world.settle()
    assert world.api.get(POD_MONITORS, RELEASE, "orbitkv-main") is None
    theirs = {"metadata": {"name": "orbitkv-main", "namespace": RELEASE}}
    world.api.add(POD_MONITORS, theirs)
    world.settle()
    assert world.api.get(POD_MONITORS, RELEASE, "orbitkv-main") is not None


def test_pods_that_only_carry_our_labels_are_not_touched(world: World) -> None:
    world.pool()
    world.settle()
    stray = world.api.list_all(PODS, RELEASE)[0]
    stray["metadata"] |= {"name": "stray", "annotations": {}, "ownerReferences": []}
    world.api.add(PODS, stray)
    world.settle()
    assert world.api.get(PODS, RELEASE, "stray") is not None
    assert world.status()["nodes"]["updated"] == 2


def test_deleted_pool_is_forgotten(world: World) -> None:
    world.pool()
    world.settle()
    del world.api.objects[POOLS, "", "main"]
    world.api.writes.clear()
    assert world.reconciler.reconcile("main") == FORGET
    assert world.api.writes == []


def test_pool_that_is_being_deleted_gets_no_children_back(world: World) -> None:
    world.pool()
    world.settle()
    body = world.api.get(POOLS, None, "main")
    assert body is not None
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.api.add(POOLS, body)
    del world.api.objects[DAEMON_SETS, RELEASE, "orbitkv-main"]
    world.reconciler.reconcile("main")
    assert world.api.get(DAEMON_SETS, RELEASE, "orbitkv-main") is None


def test_spec_that_cannot_be_read_changes_nothing_and_says_which_field(world: World) -> None:
    world.pool()
    world.settle()
    before = world.pods()
    world.pool(memory={"pool": "a lot"})
    world.settle()
    assert world.condition("ConfigValid") == ("False", "Unreadable") and "memory.pool" in world.message("ConfigValid")
    assert world.pods() == before


# ------------------------------------------------------------------------------------------------ failures at any time


SCENARIO: tuple[dict[str, Any], ...] = (
    {},
    {"nodeSelector": {"zone": "a"}},
    {"image": "registry/agent:2", "memory": {"pool": "2Gi"}},
    {"image": "registry/agent:2", "memory": {"pool": "2Gi"}, "metrics": {"podMonitor": {"enabled": False}}},
)


def fingerprint(world: World) -> dict[str, Any]:
    """What does not depend on when things happened."""
    found = {}
    for kind in CHILD_KINDS:
        live = world.api.get(kind, RELEASE, "orbitkv-main")
        found[kind.kind] = live and {key: value for key, value in live.items() if key != "metadata"}
    status = world.status()
    conditions = {it["type"]: (it["status"], it["reason"]) for it in status["conditions"]}
    return found | {"nodes": status["nodes"], "conditions": conditions, "pods": sorted(world.pods())}


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
def test_killed_at_any_write_it_ends_where_it_would_have(after: bool) -> None:
    reference = World()
    reference.api.absent.clear()
    for spec in SCENARIO:
        reference.pool(**spec)
        reference.settle()
    expected, writes = fingerprint(reference), len(reference.api.writes)

    for fatal in range(1, writes + 1):
        world = World()
        world.api.absent.clear()
        count = 0

        def maybe_die(verb: str, resource: Resource, world: World = world, fatal: int = fatal) -> None:
            nonlocal count
            if verb in ("get", "list", "discover"):
                if after and count == fatal and len(world.api.writes) >= fatal:
                    count += 1
                    raise ApiError(0, "killed")
                return
            count += 1
            if count == fatal and not after:
                raise ApiError(0, "killed")

        world.api.before = maybe_die
        for spec in SCENARIO:
            world.pool(**spec)
            for _ in range(30):
                before = len(world.changes())
                try:
                    world.step()
                except ApiError:
                    world.restart()
                    continue
                if len(world.changes()) == before:
                    break
        assert fingerprint(world) == expected, f"killed at write {fatal}"
