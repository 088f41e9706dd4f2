"""What `orbitkv explain pod` says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_crds.stamps import ANNOTATION_INJECTED, ANNOTATION_SKIP_REASON, Injected, Note
from orbitkv_operator.admission.asks import LMCACHE_ENGINE, LMCACHE_LABEL
from orbitkv_operator.cli.cluster import Cluster
from orbitkv_operator.cli.explain import NoSuchPodError, explain
from orbitkv_operator.cli.findings import Finding, Level
from orbitkv_operator.cli.main import OK as WELL
from orbitkv_operator.cli.main import PROBLEMS, run_explain
from orbitkv_operator.cluster.api import CACHES, EVENTS, NAMESPACES, PODS, POOLS, ApiError, Manifest
from orbitkv_operator.names import pool_labels
from orbitkv_operator.tests.fakes import RELEASE, FakeApi, cache_body, pool_body

READY = [{"type": "Ready", "status": "True"}]


def ready_condition(status: str = "True", reason: str = "Ready", message: str = "Engines can attach.") -> Manifest:
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


class World:
    """A cluster in which pod team/engine uses CacheNamespace team/one of pool main."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.api.add(POOLS, pool_body())
        self.cache()
        self.agent()
        self.pod(injected())
        self.events = 0

    def cache(self, *conditions: Manifest, **status: Any) -> None:
        body = cache_body() | {"status": {"conditions": list(conditions) or [ready_condition()], **status}}
        self.api.add(CACHES, body)

    def agent(self, pool: str = "main", node: str = "node-a", ready: bool = True) -> None:
        metadata = {"name": f"orbitkv-{pool}-1", "namespace": RELEASE, "labels": pool_labels(pool)}
        conditions = [{"type": "Ready", "status": str(ready)}]
        self.api.add(PODS, {"metadata": metadata, "spec": {"nodeName": node}, "status": {"conditions": conditions}})

    def pod(self, annotations: dict[str, str], labels: dict[str, str] | None = None, **status: Any) -> None:
        metadata = {
            "name": "engine",
            "namespace": "team",
            "uid": "uid-of-engine",
            "annotations": annotations,
            "labels": labels or {},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        spec = {"nodeName": "node-a", "containers": [{"name": "server", "image": "vllm"}]}
        self.api.add(
            PODS,
            {
                "metadata": metadata,
                "spec": spec,
                "status": {"phase": "Running", "conditions": READY, **status},
            },
        )

    def event(self, reason: str, note: str, moment: str = "2026-01-01T00:00:00Z", uid: str = "uid-of-engine") -> None:
        self.events += 1
        self.api.add(
            EVENTS,
            {
                "metadata": {"name": f"event-{self.events}", "namespace": "team"},
                "reportingController": "orbitkv.io/operator",
                "regarding": {"uid": uid},
                "reason": reason,
                "note": note,
                "eventTime": moment,
            },
        )

    def explain(self) -> list[Finding]:
        return explain(Cluster(self.api, RELEASE), "team", "engine")

    def bad(self) -> list[tuple[str, str]]:
        """What is wrong: about and the message."""
        return [(it.about, it.message) for it in self.explain() if it.level in (Level.PROBLEM, Level.WARNING)]


def injected(*info: Note) -> dict[str, str]:
    stamp = Injected("0.1.0", "team/one", "server", "vllm", "init", info).write()
    return {names.ANNOTATION_CACHE_NAMESPACE: "one", ANNOTATION_INJECTED: stamp}


@pytest.fixture
def world() -> World:
    return World()


def test_pod_that_uses_its_cache(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.event("CacheAttached", "vllm 0.32.0 uses CacheNamespace team/one through the agent on node node-a.")
    first = {
        "namespace": "team",
        "name": "engine",
        "node": "node-a",
        "sessions": 2,
        "requestedTokens": 200,
        "hitTokens": 50,
    }
    world.cache(attached={"pods": 1, "first": [first]})
    assert world.bad() == []
    assert run_explain(world.api, RELEASE, "team", "engine", False) == WELL
    said = capsys.readouterr().out
    assert "50 came from the cache (25 %)" in " ".join(said.split())
    assert said.endswith("Pod team/engine uses its cache.\n")


def test_signs_that_a_terminal_obeys_are_not_passed_on(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A tenant writes what is on its pods; who runs the cluster reads it."""
    world.pod(
        {names.ANNOTATION_CACHE_NAMESPACE: "one", ANNOTATION_SKIP_REASON: "internal-error: \x1b[2J\x9b1;31m\x85 red"}
    )
    run_explain(world.api, RELEASE, "team", "engine", False)
    said = capsys.readouterr().out
    assert "red" in said and not [sign for sign in said if not sign.isprintable() and sign != "\n"]


def test_forgotten_events_leave_the_status(world: World) -> None:
    first = {"namespace": "team", "name": "engine", "node": "node-a", "sessions": 2}
    world.cache(attached={"pods": 1, "first": [first]})
    assert world.explain()[-1].level is Level.OK


def test_latest_word_counts(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.event("CacheAttached", "It is attached.", "2026-01-01T00:00:00Z")
    world.event("CacheDetached", "disconnected: The engine's connection has ended.", "2026-01-01T01:00:00Z")
    world.event("CacheAttached", "Another pod of that name.", "2026-01-01T02:00:00Z", uid="another")
    assert "disconnected" in world.bad()[-1][1]
    assert run_explain(world.api, RELEASE, "team", "engine", True) == PROBLEMS
    found = json.loads(capsys.readouterr().out)
    assert found["usesCache"] is False and found["counts"]["problem"] == 1


def test_engine_that_was_not_heard_of_yet_may_still_load(world: World) -> None:
    last = world.explain()[-1]
    assert last.level is Level.INFO and "Nothing was heard of it yet" in last.message


def test_information_of_the_webhook_is_shown(world: World) -> None:
    world.pod(injected(Note("pool-not-ready", "the pool was not ready")))
    assert any("pool-not-ready" in it.message for it in world.explain())


def test_skipped_pod_gives_the_reason_and_what_it_means(world: World) -> None:
    world.pod(
        {
            names.ANNOTATION_CACHE_NAMESPACE: "one",
            ANNOTATION_SKIP_REASON: "target-container-not-found: containers a and b.",
        }
    )
    *_, last = world.explain()
    assert last.level is Level.PROBLEM and "target-container-not-found: containers a and b." in last.message
    assert "orbitkv.io/container" in last.fix


def test_missed_pod_is_tried_anew(world: World) -> None:
    asks = {names.ANNOTATION_CACHE_NAMESPACE: "one"}
    world.pod(asks)
    sent: list[Manifest] = []

    def webhook(pod: Manifest) -> Manifest:
        sent.append(pod)
        pod["metadata"]["annotations"] |= injected()
        return pod

    world.api.admit = webhook
    found = {it.about: it for it in world.explain()}
    assert "webhook-missed" in found["Injection"].message
    assert found["If made anew now"].level is Level.OK
    assert "nodeName" not in sent[0]["spec"] and "uid" not in sent[0]["metadata"]
    world.api.admit = lambda pod: pod
    assert "would miss it again" in world.bad()[-1][1]

    def refuses(verb: str, resource: Any) -> None:
        if verb == "dry-run":
            raise ApiError(403, "pods is forbidden")

    world.api.before = refuses
    assert any("could not be tried" in it.message for it in world.explain())


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({}, "does not ask for a cache"),
        ({names.ANNOTATION_CACHE_NAMESPACE: "one", "orbitkv.io/inject": "false"}, "opted out"),
    ],
)
def test_pod_that_does_not_ask(world: World, annotations: dict[str, str], words: str) -> None:
    world.pod(annotations)
    assert words in world.explain()[-1].message


def test_pod_that_asks_by_the_label_of_lmcache_only_is_tried_anew(world: World) -> None:
    world.pod({LMCACHE_ENGINE: "one"}, labels={LMCACHE_LABEL: "true"})
    found = {it.about: it for it in world.explain()}
    assert "compat.lmcache" in found["Injection"].fix and found["If made anew now"].level is Level.PROBLEM

    def webhook(pod: Manifest) -> Manifest:
        pod["metadata"]["annotations"] |= injected()
        return pod

    world.api.admit = webhook
    found = {it.about: it for it in world.explain()}
    assert found["If made anew now"].level is Level.OK


def test_pod_in_a_namespace_with_a_default_is_told_so(world: World) -> None:
    world.pod({})
    metadata = {
        "name": "team",
        "labels": {"orbitkv.io/inject": "true"},
        "annotations": {names.ANNOTATION_CACHE_NAMESPACE: "one"},
    }
    world.api.add(NAMESPACES, {"metadata": metadata})
    assert "gives its engines CacheNamespace one" in world.bad()[-1][1]


def test_chain_is_followed_to_what_is_missing(world: World) -> None:
    del world.api.objects[CACHES, "team", "one"]
    assert ("CacheNamespace team/one", "It does not exist.") in world.bad()
    world.cache(ready_condition("False", "QuotaAboveMaximum", "too much"))
    assert "QuotaAboveMaximum: too much." in world.bad()[0][1]
    del world.api.objects[POOLS, "", "main"]
    assert "ManagerPool main, which does not exist" in world.bad()[0][1]


def test_agent_of_the_node_is_looked_at(world: World) -> None:
    world.agent(ready=False)
    assert "is not ready" in world.bad()[0][1]
    world.agent(node="node-b")
    assert "no agent on node node-a" in world.bad()[0][1]
    world.agent("other")
    assert "belongs to ManagerPool other" in world.bad()[0][1]


def test_person_without_rights_on_the_system_namespace_sees_the_rest(world: World) -> None:
    def refuses(verb: str, resource: Any) -> None:
        if verb == "list" or (resource in (CACHES, POOLS, NAMESPACES) and reach == 0):
            raise ApiError(403, f"{resource.plural} is forbidden")

    reach = 1
    world.api.before = refuses
    found = {it.about: it for it in explain(Cluster(world.api), "team", "engine")}
    assert "Your rights" in found["Agent"].message and found["Engine"].level is Level.INFO
    reach = 0
    found = {it.about: it for it in explain(Cluster(world.api), "team", "engine")}
    assert "Your rights" in found["CacheNamespace team/one"].message
    world.pod({})
    assert "does not ask" in explain(Cluster(world.api), "team", "engine")[-1].message


def test_payload_that_cannot_be_pulled_is_named(world: World) -> None:
    waiting = {
        "name": "orbitkv-payload",
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
    }
    world.pod(injected(), initContainerStatuses=[waiting])
    assert world.bad()[0] == ("Container orbitkv-payload", "It waits: ImagePullBackOff: no such image.")


def test_pod_that_does_not_exist_is_an_error_in_words(world: World) -> None:
    with pytest.raises(NoSuchPodError, match="no pod nobody in namespace team"):
        explain(Cluster(world.api, RELEASE), "team", "nobody")
