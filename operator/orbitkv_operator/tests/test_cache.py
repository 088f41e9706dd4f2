"""Reconciling cache namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from orbitkv_crds.agent_api.reports_pb2 import (
    VISIT_STATE_ATTACHED,
    VISIT_STATE_CONNECTED,
    LastHour,
    Pod,
    PodVisit,
    Report,
    Tier,
)
from orbitkv_crds.agent_api.reports_pb2 import CacheNamespace as CacheReport
from orbitkv_crds.guarantees import decide
from orbitkv_operator.cluster.api import CACHES, NAMESPACES, POOLS, Manifest
from orbitkv_operator.engines.pods import EnginePods, Without
from orbitkv_operator.events import Events
from orbitkv_operator.reconcile.cache import CacheReconciler, Decisions
from orbitkv_operator.reconcile.status_writer import StatusWriter
from orbitkv_operator.reports.store import FRESH, ReportStore
from orbitkv_operator.tests.fakes import FakeApi, cache_body, condition_of, pool_body
from orbitkv_operator.view import View
from orbitkv_operator.work import FORGET

MI = 1 << 20


class World:
    def __init__(self) -> None:
        self.api, self.view, self.pods, self.now = FakeApi(), View(), EnginePods(), 1000.0
        self.reported = 0
        self.restart()
        self.view.put(NAMESPACES, {"metadata": {"name": "team", "labels": {"cache": "yes"}}})

    def restart(self) -> None:
        """Another operator acts from now on; it has heard of no agent."""
        self.reports = ReportStore(clock=lambda: self.now)
        self.reports.start()
        self.reconciler = CacheReconciler(
            self.view,
            Decisions(self.view, clock=lambda: self.now),
            self.reports,
            StatusWriter(self.api, clock=lambda: self.now),
            Events(self.api, "operator-1"),
            self.pods,
        )

    def pool(self, available: bool = True, **spec: Any) -> None:
        condition = {
            "type": "Available",
            "status": str(available),
            "reason": "AgentsReady",
            "message": "2 of 2 nodes have a ready agent.",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        self.view.put(POOLS, self.api.add(POOLS, pool_body(**spec) | {"status": {"conditions": [condition]}}))

    def cache(self, name: str = "one", created: str = "2026-01-01T00:00:00Z", **spec: Any) -> None:
        body = cache_body(name, **spec)
        body["metadata"]["creationTimestamp"] = created
        self.view.put(CACHES, self.api.add(CACHES, body))

    def status(self, name: str = "one", later: float = 400) -> Manifest:
        self.now += later
        self.reconciler.reconcile("team", name)
        found = self.api.get(CACHES, "team", name)
        assert found is not None
        self.view.put(CACHES, found)
        return dict(found["status"])

    def condition(self, kind: str, name: str = "one") -> tuple[str, str]:
        found = condition_of(self.status(name), kind)
        return found["status"], found["reason"]

    def report(self, node: str = "a", visits: Sequence[PodVisit] = (), **part: Any) -> None:
        self.now += 400
        self.reported += 1
        self.reports.put(
            Report(
                pool="main",
                node=node,
                boot_id="1",
                sequence=self.reported,
                cache_namespaces=[CacheReport(namespace="team", name="one", uid="uid-of-team-one", **part)],
                pods=visits,
            )
        )
        self.now -= 400


@pytest.fixture
def world() -> World:
    return World()


def test_accepted_on_an_available_pool(world: World) -> None:
    world.pool()
    world.cache(quota={"dram": "64Mi"})
    assert world.condition("Accepted") == ("True", "Accepted")
    assert world.condition("PoolReady") == ("True", "PoolAvailable")
    assert world.condition("Ready") == ("True", "Ready")
    assert world.condition("InUse") == ("False", "Idle")
    assert world.status()["observedGeneration"] == 1


def test_pool_that_is_not_there_is_named_and_may_come_later(world: World) -> None:
    world.cache()
    assert world.condition("Accepted") == ("Unknown", "PoolNotFound")
    assert world.condition("Ready") == ("False", "PoolNotFound")
    assert "ManagerPool main" in condition_of(world.status(), "Ready")["message"]
    world.pool()
    assert world.condition("Ready") == ("True", "Ready")


def test_pool_that_is_not_available_gives_its_reason(world: World) -> None:
    world.pool(available=False)
    world.cache()
    assert world.condition("PoolReady") == ("False", "PoolNotAvailable")
    assert "2 of 2 nodes" in condition_of(world.status(), "Ready")["message"]


def test_namespace_that_the_pool_does_not_allow(world: World) -> None:
    world.pool(allowedNamespaces={"from": "Selector", "selector": {"matchLabels": {"cache": "no"}}})
    world.cache()
    assert world.condition("Accepted") == ("False", "NamespaceNotAllowed")
    world.view.put(NAMESPACES, {"metadata": {"name": "team", "labels": {"cache": "no"}}})
    assert world.condition("Accepted") == ("True", "Accepted")


def test_quota_above_the_maximum(world: World) -> None:
    world.pool(maxQuotaPerNamespace={"dram": "64Mi"})
    world.cache(quota={"dram": "128Mi"})
    assert world.condition("Accepted") == ("False", "QuotaAboveMaximum")


def test_guarantee_beyond_the_pool_is_the_youngests_and_is_taken_once_an_older_one_goes(world: World) -> None:
    world.pool(memory={"pool": "256Mi"})
    world.cache("old", "2026-01-01T00:00:00Z", quota={"guaranteedDram": "200Mi"})
    world.cache("new", "2026-01-02T00:00:00Z", quota={"guaranteedDram": "100Mi"})
    assert world.condition("Accepted", "old") == ("True", "Accepted")
    assert world.condition("Accepted", "new") == ("False", "GuaranteeExceedsPool")
    world.view.drop(CACHES, ("team", "old"))
    assert world.condition("Accepted", "new") == ("True", "Accepted")


def test_use_is_summed_over_nodes(world: World) -> None:
    world.pool()
    world.cache()
    world.status()
    for number, node in enumerate("ab", 1):
        pods = [Pod(namespace="team", name=f"engine-{node}{pod}", sessions=3) for pod in range(8)]
        world.report(
            node,
            dram=Tier(used_bytes=number * 100 * MI),
            sessions=24,
            engines=8,
            attached_pods=8,
            pods=pods,
            last_hour=LastHour(requested_tokens=1000, hit_tokens=250 * number),
        )
    found = world.status()
    assert found["tiers"] == {"dram": {"used": "300Mi"}}
    assert (found["attached"]["pods"], found["attached"]["sessions"]) == (16, 48)
    assert len(found["attached"]["first"]) == 10
    assert found["lastHour"] == {
        "hitRate": "38%",
        "requestedTokens": 2000,
        "hitTokens": 750,
        "computedTokens": 1250,
    }
    in_use = condition_of(found, "InUse")
    assert in_use["status"] == "True" and "2 nodes" in in_use["message"]


def test_attached_pods_tell_their_engine_and_tokens(world: World) -> None:
    world.pool()
    world.cache()
    pods = [Pod(namespace="team", name="engine", sessions=2)]
    visit = PodVisit(
        namespace="team",
        name="engine",
        uid="uid-of-engine",
        cache_namespace="team/one",
        state=VISIT_STATE_ATTACHED,
        sessions=2,
        engine="vllm 0.32.0",
        requested_tokens=100,
        hit_tokens=60,
    )
    world.report(engines=1, attached_pods=1, pods=pods, visits=[visit])
    (first,) = world.status()["attached"]["first"]
    assert (first["engine"], first["requestedTokens"], first["hitTokens"]) == ("vllm 0.32.0", 100, 60)
    visit.state = VISIT_STATE_CONNECTED
    world.report(engines=1, attached_pods=1, pods=pods, visits=[visit])
    after = world.status()["attached"]
    assert (after["pods"], after.get("first")) == (0, None)  # connected, and not registered yet


def test_pods_that_run_without_are_named_in_the_message_of_in_use(world: World) -> None:
    world.pool()
    world.cache()
    for number in range(7):
        why = Without(f"team/pod-{number}", "webhook-missed", "Delete the pod.")
        world.pods.runs_without(("team", f"pod-{number}"), "team/one", why)
    found = condition_of(world.status(), "InUse")
    assert (found["status"], found["reason"]) == ("False", "PodsWithoutCache")
    assert "team/pod-4 (webhook-missed: Delete the pod.)" in found["message"] and "and 2 more" in found["message"]
    assert "pod-5" not in found["message"]
    world.report(engines=1)
    after = world.status()
    found = condition_of(after, "InUse")
    assert (found["status"], found["reason"]) == ("True", "EnginesAttached") and "team/pod-0" in found["message"]
    assert after["attached"]["without"] == 7


def test_connections_without_a_registered_engine_are_no_use(world: World) -> None:
    world.pool()
    world.cache()
    world.report(sessions=2, engines=0)
    assert world.condition("InUse") == ("False", "Idle")


def test_agents_that_fall_silent_do_not_count_for_ever(world: World) -> None:
    world.pool()
    world.cache()
    world.report(engines=1)
    assert world.condition("InUse") == ("True", "EnginesAttached")
    world.now += FRESH + 1
    assert world.condition("InUse") == ("False", "Idle")


def test_new_leader_keeps_what_it_cannot_know_yet(world: World) -> None:
    world.pool()
    world.cache()
    world.report(engines=1, dram=Tier(used_bytes=100 * MI))
    before = world.status()
    world.reconciler.reports = ReportStore(clock=lambda: 0.0)
    world.reconciler.reports.start()
    after = world.status()
    assert after["tiers"] == before["tiers"]
    assert condition_of(after, "InUse")["status"] == "True"


def test_new_leader_that_has_heard_of_some_agents_takes_nothing_back_until_it_has_heard_of_all(world: World) -> None:
    world.pool()
    world.cache()
    world.report("a", engines=1, dram=Tier(used_bytes=100 * MI))
    world.report("b", engines=1, dram=Tier(used_bytes=100 * MI))
    before = world.status()
    world.restart()
    world.report("b", engines=0, dram=Tier(used_bytes=100 * MI))
    after = world.status(later=1)
    assert after["tiers"] == before["tiers"] and condition_of(after, "InUse") == condition_of(before, "InUse")
    after = world.status(later=430)
    assert after["tiers"]["dram"]["used"] == "100Mi" and condition_of(after, "InUse")["status"] == "False"


def test_new_leader_shows_at_once_that_an_engine_is_attached(world: World) -> None:
    world.pool()
    world.cache()
    world.report("a", dram=Tier(used_bytes=100 * MI))
    assert world.condition("InUse") == ("False", "Idle")
    world.restart()
    world.report("b", engines=1)
    after = world.status(later=1)
    assert after["tiers"]["dram"]["used"] == "100Mi" and condition_of(after, "InUse")["status"] == "True"


def test_thousand_that_come_in_a_burst_are_decided_on_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.pool()
    rounds = 0

    def counted(*arguments: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return decide(*arguments)

    monkeypatch.setattr("orbitkv_operator.reconcile.cache.decide", counted)
    for burst in range(10):
        for number in range(100):
            world.cache(f"cache-{burst}-{number}")
        for number in range(100):
            world.reconciler.reconcile("team", f"cache-{burst}-{number}")
            world.cache("another", quota={"dram": f"{number + 1}Mi"})
    assert rounds <= 20


def test_spec_that_cannot_be_read_is_refused_by_field(world: World) -> None:
    world.pool()
    world.cache(quota={"dram": "much"})
    found = condition_of(world.status(), "Accepted")
    assert found["reason"] == "Unreadable" and "quota.dram" in found["message"]


def test_gone_cache_namespace_is_forgotten(world: World) -> None:
    assert world.reconciler.reconcile("team", "nothing") == FORGET


def test_refusal_is_an_event_once(world: World) -> None:
    world.pool(maxQuotaPerNamespace={"dram": "64Mi"})
    world.cache(quota={"dram": "128Mi"})
    for _ in range(3):
        world.status()
    assert [write for write in world.api.writes if write[1] == "Event"][1:] == []
