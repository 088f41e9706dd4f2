"""What people are told of pods that asked for a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_crds.agent_api import reports_pb2 as pb
from orbitkv_crds.stamps import ANNOTATION_INJECT, ANNOTATION_INJECTED, ANNOTATION_SKIP_REASON, Injected, Note
from orbitkv_operator.admission.asks import LMCACHE_ENGINE, LMCACHE_LABEL
from orbitkv_operator.cluster.api import CACHES, ENGINE_PODS, EVENTS, NAMESPACES, PODS, POOLS, ApiError, Manifest
from orbitkv_operator.engines.missed import MOST, Sweep, is_missed
from orbitkv_operator.engines.pods import EnginePod, EnginePods, Without
from orbitkv_operator.engines.probe import Probe
from orbitkv_operator.engines.verdict import CAUSES
from orbitkv_operator.events import Events
from orbitkv_operator.metrics import Metrics
from orbitkv_operator.queue import KeyedQueue
from orbitkv_operator.reconcile import pod as pod_module
from orbitkv_operator.reconcile.pod import PodReconciler, Turns
from orbitkv_operator.reports.store import FRESH, INTERVAL, ReportStore
from orbitkv_operator.router import Router
from orbitkv_operator.tests.fakes import RELEASE, FakeApi, cache_body, pool_body
from orbitkv_operator.view import View
from orbitkv_operator.work import FORGET

START = 1_790_000_000.0
"""When the tests begin (seconds since the epoch)."""
CACHE = "team/one"
PATIENCE = 300.0


def at(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def injected(cache: str = CACHE, *info: Note) -> dict[str, str]:
    return {ANNOTATION_INJECTED: Injected("0.1.0", cache, "server", "vllm", "init", info).write()}


def skipped(reason: str = "runtime-isolated", message: str = "the pod runs in Kata.") -> dict[str, str]:
    return {ANNOTATION_SKIP_REASON: f"{reason}: {message}"}


def pod_body(
    name: str = "engine", stamps: dict[str, str] | None = None, *, ready: float | None = None, **metadata: Any
) -> Manifest:
    status: Manifest = {"phase": "Running", "conditions": []}
    if ready is not None:
        status["conditions"].append({"type": "Ready", "status": "True", "lastTransitionTime": at(ready)})
    stamps = injected() if stamps is None else stamps
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-of-{name}",
            "creationTimestamp": at(START),
            "labels": {names.LABEL_CACHE: "true"} if stamps else {},
            "annotations": {names.ANNOTATION_CACHE_NAMESPACE: "one", **stamps},
            "resourceVersion": "1",
            **metadata,
        },
        "spec": {"nodeName": "node-a", "containers": []},
        "status": status,
    }


class World:
    """A cluster with a pool, a CacheNamespace and an agent on node-a."""

    def __init__(self) -> None:
        self.api, self.view, self.pods, self.queue, self.now = FakeApi(), View(), EnginePods(), KeyedQueue(), START
        self.reports = ReportStore(clock=lambda: self.now)
        self.reports.start()
        self.events = Events(self.api, "operator-1", clock=lambda: self.now)
        self.changed: list[str] = []
        self.router = Router(self.view, self.queue, self.pods)
        self.reconciler = PodReconciler(
            self.view, self.pods, self.reports, self.events, self.changed.append, clock=lambda: self.now
        )
        self.sweep = Sweep(self.api, RELEASE, self.view, self.pods, self.events, self.changed.append)
        self.view.put(POOLS, pool_body())
        self.view.put(CACHES, cache_body())
        self._number = 0
        self.said: pb.PodVisit | None = None
        self.node = "node-a"

    def show(self, manifest: Manifest) -> None:
        self.router.changed(ENGINE_PODS, manifest, False)

    def look(self, name: str = "engine") -> float | None:
        return self.reconciler.reconcile("team", name)

    def report(self, pool: str = "main", node: str = "node-a", boot: str = "1") -> None:
        self._number += 1
        pods = [] if self.said is None else [self.said]
        self.reports.put(pb.Report(pool=pool, node=node, boot_id=boot, sequence=self._number, pods=pods))

    def visit(self, state: int, reason: str = "", message: str = "", age: int = 0, name: str = "engine") -> None:
        """The agent says this of the pod from now on."""
        self.said = pb.PodVisit(
            namespace="team",
            name=name,
            uid=f"uid-of-{name}",
            cache_namespace=CACHE,
            state=state,  # type: ignore[arg-type]
            reason=reason,
            message=message,
            engine="vllm 0.32.0",
            age_seconds=age,
        )
        self.report()

    def after(self, seconds: float) -> None:
        """Time passes, and the agent reports all the while."""
        for _ in range(int(seconds // INTERVAL) + 1):
            self.now += INTERVAL
            self.report()

    def told(self) -> list[tuple[str, str]]:
        return [(it["reason"], it["note"]) for (kind, _, _), it in self.api.objects.items() if kind is EVENTS]

    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.told()]


@pytest.fixture
def world() -> World:
    return World()


# ------------------------------------------------------------------------------------------------------ what is said


def test_injected_pod_is_told_which_cache_and_container_and_all_information(world: World) -> None:
    note = Note("pool-not-ready", "the pool was not ready.")
    world.show(pod_body(stamps=injected(CACHE, note)))
    world.look()
    ((reason, words),) = world.told()
    assert reason == "CacheInjected"
    assert "server" in words and CACHE in words and "pool-not-ready: the pool was not ready." in words


def test_pod_whose_images_were_pulled_for_an_hour_is_told_all_the_same(world: World) -> None:
    manifest = pod_body()
    manifest["status"]["containerStatuses"] = [
        {"name": "server", "state": {"running": {"startedAt": at(START + 3600)}}}
    ]
    world.now = START + 3601
    world.show(manifest)
    world.look()
    assert world.reasons() == ["CacheInjected"]


def test_thousands_that_start_at_once_keep_no_warning_waiting(world: World) -> None:
    for number in range(4000):
        world.show(pod_body(f"engine-{number}"))
        world.look(f"engine-{number}")
    world.show(pod_body("left-out", skipped()))
    world.look("left-out")
    assert world.reasons() == [*["CacheInjected"] * 50, "CacheSkipped"]
    # those that would be told after ten minutes are not: the stamp on them says the same
    world.now += 500
    world.show(pod_body("new", creationTimestamp=at(world.now)))
    wait = world.look("new")
    assert wait is not None and 0 < wait <= 101


def test_skipped_pod_is_told_why_and_is_named_with_its_cache(world: World) -> None:
    world.show(pod_body(stamps=skipped()))
    assert world.look() == FORGET
    ((reason, words),) = world.told()
    assert reason == "CacheSkipped" and "runtime-isolated: the pod runs in Kata." in words
    assert [(it.pod, it.reason) for it in world.pods.without(CACHE)] == [("team/engine", "runtime-isolated")]
    assert world.changed == [CACHE]


def test_attaching_and_detaching_are_told_once_each(world: World) -> None:
    world.show(pod_body(ready=START))
    world.visit(pb.VISIT_STATE_ATTACHED)
    for _ in range(3):
        world.look()
    assert world.reasons() == ["CacheInjected", "CacheAttached"]
    assert "vllm 0.32.0" in world.told()[1][1] and "node-a" in world.told()[1][1]
    world.visit(pb.VISIT_STATE_LEFT, "access-denied", "access.namespaces is Same")
    for _ in range(3):
        world.look()
    assert world.reasons()[2:] == ["CacheDetached"]
    assert "access-denied" in world.told()[2][1]


def test_agent_that_was_replaced_detaches(world: World) -> None:
    world.show(pod_body(ready=START))
    world.visit(pb.VISIT_STATE_ATTACHED)
    world.look()
    world.said = None
    world.report(boot="2")
    world.look()
    assert world.reasons()[-1] == "CacheDetached"


def test_refused_pod_and_engine_that_stays_off_are_told_at_once(world: World) -> None:
    world.show(pod_body())
    world.visit(
        pb.VISIT_STATE_REFUSED, "access-denied", "access-denied: the ServiceAccount is not among access.serviceAccounts"
    )
    world.look()
    assert world.told()[1] == (
        "CacheNotAttached",
        "access-denied: the ServiceAccount is not among access.serviceAccounts.",
    )
    world.visit(pb.VISIT_STATE_OFF, "kv-transfer-config-present", "the engine has a configuration of its own")
    world.look()
    assert "kv-transfer-config-present" in world.told()[2][1]
    assert [it.reason for it in world.pods.without(CACHE)] == ["kv-transfer-config-present"]


def test_pod_that_uses_its_cache_is_named_no_more(world: World) -> None:
    world.show(pod_body())
    world.visit(pb.VISIT_STATE_REFUSED, "access-denied", "no")
    world.look()
    world.visit(pb.VISIT_STATE_ATTACHED)
    world.look()
    assert not world.pods.without(CACHE)
    assert world.changed == [CACHE, CACHE]


def test_pod_that_ends_is_named_no_more(world: World) -> None:
    world.show(pod_body(stamps=skipped()))
    world.look()
    world.show(pod_body(stamps=skipped(), deletionTimestamp=at(START)))
    assert world.look() == FORGET
    assert not world.pods.without(CACHE)


# ----------------------------------------------------------------------------------------------------- never attached


def test_ready_pod_is_given_five_minutes(world: World) -> None:
    world.show(pod_body(ready=START))
    world.after(PATIENCE - 60)
    again = world.look()
    assert again is not None and 0 < again <= 60
    assert world.reasons() == ["CacheInjected"]
    world.after(60)
    world.look()
    assert world.reasons()[-1] == "CacheNotAttached"
    assert "never-came" in world.told()[-1][1] and "kubectl -n team logs engine -c server" in world.told()[-1][1]


def test_pod_that_is_not_ready_is_left_in_peace(world: World) -> None:
    world.show(pod_body())
    world.after(4 * PATIENCE)
    world.look()
    assert "CacheNotAttached" not in world.reasons()


def test_new_leader_waits_for_the_agents_before_it_says_that_a_pod_is_not_attached(world: World) -> None:
    world.show(pod_body(ready=START - 1000))
    world.now = START + 1
    assert world.look() == INTERVAL
    assert "CacheNotAttached" not in world.reasons()
    world.after(FRESH)
    world.look()
    assert "CacheNotAttached" in world.reasons()


def test_what_still_holds_after_an_hour_is_said_again(world: World) -> None:
    world.show(pod_body(ready=START))
    for _ in range(3):
        world.after(PATIENCE)
        world.look()
    assert world.reasons().count("CacheNotAttached") == 1
    world.after(pod_module.AGAIN_SECONDS)
    world.look()
    assert world.reasons().count("CacheNotAttached") == 2


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ("no cache", "cache-namespace-not-found", "no CacheNamespace one in namespace team"),
        ("no pool", "pool-not-found", "ManagerPool main, which does not exist"),
        ("not accepted", "cache-namespace-not-accepted", "QuotaAboveMaximum"),
        ("no agent", "agent-absent", "No agent of ManagerPool main reports from node node-a"),
        ("other pool", "other-pool", "belongs to ManagerPool other"),
        ("connected", "not-registered", "workers [1] of 2"),
        ("left", "disconnected", "has ended"),
        ("nothing", "never-came", "PYTHONPATH"),
    ],
)
def test_likely_cause_is_named(world: World, change: str, reason: str, words: str) -> None:
    world.show(pod_body(ready=START))
    if change == "no cache":
        world.view.drop(CACHES, ("team", "one"))
    elif change == "no pool":
        world.view.drop(POOLS, ("", "main"))
    elif change == "not accepted":
        refused = {
            "type": "Accepted",
            "status": "False",
            "reason": "QuotaAboveMaximum",
            "message": "too much",
            "lastTransitionTime": at(START),
        }
        world.view.put(CACHES, cache_body() | {"status": {"conditions": [refused]}})
    elif change == "connected":
        world.visit(pb.VISIT_STATE_CONNECTED, "not-registered", "workers [1] of 2 have not registered")
    elif change == "left":
        world.visit(pb.VISIT_STATE_LEFT)
    if change == "no agent":
        world.now += PATIENCE + 60
    else:
        for _ in range(30):
            world.now += INTERVAL
            world.report(pool="other" if change == "other pool" else "main")
    world.look()
    assert [it.reason for it in world.pods.without(CACHE)] == [reason]
    assert words in world.told()[-1][1]


def test_guarantee_that_does_not_fit_keeps_nobody_out(world: World) -> None:
    refused = {
        "type": "Accepted",
        "status": "False",
        "reason": "GuaranteeExceedsPool",
        "message": "m",
        "lastTransitionTime": at(START),
    }
    world.view.put(CACHES, cache_body() | {"status": {"conditions": [refused]}})
    world.show(pod_body(ready=START))
    world.after(PATIENCE)
    world.look()
    assert [it.reason for it in world.pods.without(CACHE)] == ["never-came"]


def test_every_cause_is_explained_on_the_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "kubernetes.md").read_text()
    assert [cause for cause in CAUSES if f"`{cause}`" not in page] == []


# ----------------------------------------------------------------------------------------------- a change of leader


def test_new_leader_does_not_tell_old_news(world: World) -> None:
    world.now = START + 5000
    world.show(pod_body(ready=START))
    world.visit(pb.VISIT_STATE_ATTACHED, age=4000)
    world.look()
    assert world.told() == []


def test_pods_that_are_gone_keep_no_turns() -> None:
    turns = Turns(rate=10)
    for number in range(10_000):
        turns.wait(f"pod-{number}", 100.0)
    for number in range(10_000):
        turns.forget(f"pod-{number}")
    assert turns.wait("new", 100.5) == 0
    assert turns.wait("newer", 100.5) == pytest.approx(0.1)


def test_thousands_of_pods_are_told_in_turns() -> None:
    turns, now = Turns(rate=10), 100.0
    first = [turns.wait(f"pod-{number}", now) for number in range(30)]
    assert first[0] == 0 and first[-1] == pytest.approx(2.9)
    assert turns.wait("pod-29", now + 1) == pytest.approx(1.9)
    assert turns.wait("pod-29", now + 3) == 0


def test_a_days_work_is_told_at_once_and_what_is_more_in_turns() -> None:
    turns, now = Turns(rate=10, at_once=5), 100.0
    assert [turns.wait(f"pod-{number}", now) for number in range(5)] == [0] * 5
    assert [turns.wait(f"late-{number}", now) for number in range(2)] == pytest.approx([0.1, 0.2])
    assert [turns.wait(f"late-{number}", now + 0.2) for number in range(2)] == [0, 0]
    assert turns.wait("later", now + 0.2) == pytest.approx(0.1)
    turns.forget("later")
    assert [turns.wait(f"next-{number}", now + 0.5) for number in range(4)] == pytest.approx([0, 0, 0, 0.1])


def test_who_would_wait_too_long_keeps_nobody_waiting() -> None:
    turns, now = Turns(rate=10), 100.0
    waits = [turns.wait(f"pod-{number}", now, longest=1.0) for number in range(30)]
    assert waits[10] == pytest.approx(1.0) and waits[11:] == [None] * 19
    assert turns.wait("later", now + 1, longest=1.0) == pytest.approx(0.1)


def test_agent_that_fell_silent_has_no_word_any_more(world: World) -> None:
    world.visit(pb.VISIT_STATE_ATTACHED)
    assert world.reports.visit("uid-of-engine") is not None and world.reports.of_node("node-a")
    world.now += FRESH + 1
    assert world.reports.visit("uid-of-engine") is None and not world.reports.of_node("node-a")


def test_detached_pod_without_an_agent_is_told_after_the_agent_fell_silent(world: World) -> None:
    world.show(pod_body(ready=START))
    world.visit(pb.VISIT_STATE_ATTACHED)
    world.look()
    world.now += FRESH + 1
    world.look()
    assert world.reasons()[-1] == "CacheDetached" and "agent-absent" in world.told()[-1][1]


def test_pod_that_waits_for_its_turn_is_looked_at_all_the_same(world: World) -> None:
    for number in range(100):
        world.show(pod_body(f"pod-{number}", skipped()))
        again = world.look(f"pod-{number}")
    assert again is not None and 0 < again < 10
    assert len(world.told()) < 100
    assert len(world.pods.without(CACHE)) == 100
    world.now += again
    assert world.look("pod-99") == FORGET
    assert "CacheSkipped" in world.reasons()


# ------------------------------------------------------------------------------------------------------------- routes


def test_reports_and_events_lead_to_the_pod(world: World) -> None:
    world.show(pod_body())
    assert {str(key) for key in world.queue._due} == {"Pod team/engine"}
    world.pods.runs_without(("team", "engine"), CACHE, Without("team/engine", "never-came", ""))
    world.router.gone(ENGINE_PODS, ("team", "engine"))
    assert "CacheNamespace team/one" in {str(key) for key in world.queue._due}
    assert world.pods.get(("team", "engine")) is None and not world.pods.without(CACHE)


def test_forged_label_without_stamps_earns_nothing(world: World) -> None:
    world.show(pod_body(stamps={ANNOTATION_INJECTED: "yes, really"}, labels={names.LABEL_CACHE: "true"}))
    assert world.look() == FORGET
    assert world.told() == []


def test_pod_names_its_cache_with_and_without_a_namespace() -> None:
    plain = EnginePod.of(pod_body(stamps=skipped()))
    assert plain.cache == "team/one"
    other = pod_body(stamps=skipped())
    other["metadata"]["annotations"][names.ANNOTATION_CACHE_NAMESPACE] = "elsewhere/two"
    assert EnginePod.of(other).cache == "elsewhere/two"


# ------------------------------------------------------------------------------------------------------------- missed


def test_pod_without_a_stamp_is_missed_and_named_with_its_cache(world: World) -> None:
    world.api.add(PODS, pod_body(stamps={}))
    world.api.add(PODS, pod_body("fine"))
    world.sweep.run()
    ((reason, words),) = world.told()
    assert reason == "CacheMissed" and "webhook-missed" in words and "Delete the pod" in words
    assert [(it.pod, it.reason) for it in world.pods.without(CACHE)] == [("team/engine", "webhook-missed")]
    assert world.changed == [CACHE]
    world.sweep.run()
    assert len(world.told()) == 1


def test_missed_pod_that_is_gone_or_has_ended_is_named_no_more(world: World) -> None:
    body = world.api.add(PODS, pod_body(stamps={}))
    world.sweep.run()
    world.api.add(PODS, body | {"status": {"phase": "Succeeded"}})
    world.sweep.run()
    assert not world.pods.without(CACHE)
    gets = 0

    def count(verb: str, resource: Any) -> None:
        nonlocal gets
        gets += verb == "get"

    world.api.before = count
    world.sweep.run()
    assert gets == 0  # what has ended is not looked at again


def test_forged_stamp_does_not_hide_a_missed_pod(world: World) -> None:
    world.api.add(PODS, pod_body(stamps={ANNOTATION_INJECTED: "{}"}, labels={names.LABEL_CACHE: "true"}))
    world.sweep.run()
    assert world.reasons() == ["CacheMissed"]


@pytest.mark.parametrize(
    ("metadata", "missed"),
    [
        ({"annotations": {names.ANNOTATION_CACHE_NAMESPACE: "one"}}, True),
        ({"annotations": {f"{names.GROUP}/cache-namspace": "one"}}, True),
        ({"annotations": {names.ANNOTATION_CACHE_NAMESPACE: "one", ANNOTATION_INJECT: "false"}}, False),
        ({"annotations": {"other.io/x": "y"}}, False),
        ({}, False),
        ({"annotations": injected()}, False),
        ({"annotations": {names.ANNOTATION_CACHE_NAMESPACE: "one"}, "namespace": RELEASE}, False),
        ({"annotations": {names.ANNOTATION_CACHE_NAMESPACE: "one"}, "namespace": "kube-system"}, False),
    ],
)
def test_which_pods_the_webhook_should_have_seen(metadata: Manifest, missed: bool) -> None:
    assert is_missed({"namespace": "team", **metadata}, RELEASE) is missed


def labelled_for_lmcache(value: str = "true", **annotations: str) -> Manifest:
    return pod_body(stamps={}, labels={LMCACHE_LABEL: value}, annotations={LMCACHE_ENGINE: "one", **annotations})


@pytest.mark.parametrize(
    ("pod", "served", "told"),
    [
        (labelled_for_lmcache(), True, ["CacheMissed"]),
        (labelled_for_lmcache(), False, []),
        (labelled_for_lmcache("false"), True, []),
        (labelled_for_lmcache(**{ANNOTATION_INJECT: "false"}), True, []),
        (labelled_for_lmcache(**injected()), True, []),
    ],
)
def test_missed_pod_that_asked_by_the_label_of_lmcache_is_named_where_such_pods_are_served(
    world: World, pod: Manifest, served: bool, told: list[str]
) -> None:
    world.sweep.lmcache = served
    world.api.add(PODS, pod)
    world.sweep.run()
    assert world.reasons() == told
    assert [it.pod for it in world.pods.without(CACHE)] == ["team/engine"] * len(told)


def test_skipped_pod_that_asked_by_the_label_of_lmcache_is_named_with_its_cache(world: World) -> None:
    world.show(labelled_for_lmcache(**skipped()))
    world.look()
    assert [it.reason for it in world.pods.without(CACHE)] == ["runtime-isolated"]


def test_sweep_looks_closely_at_a_bounded_number_of_pods(world: World) -> None:
    for number in range(MOST + 20):
        world.api.add(PODS, pod_body(f"pod-{number}", stamps={}))
    world.sweep.run()
    assert len(world.told()) == MOST


def with_default(world: World, cache: str = "one", **annotations: str) -> None:
    """Namespace team has a cache for its engines."""
    metadata = {
        "name": "team",
        "labels": {ANNOTATION_INJECT: "true"},
        "annotations": {names.ANNOTATION_CACHE_NAMESPACE: cache, **annotations},
    }
    world.view.put(NAMESPACES, {"metadata": metadata})


def plain_pod(name: str, command: str, **metadata: Any) -> Manifest:
    """A pod that nobody annotated and the webhook did not stamp."""
    body = pod_body(name, stamps={}, **{"annotations": {}, **metadata})
    body["spec"]["containers"] = [{"name": "main", "image": "example.com/app:1", "command": command.split()}]
    return body


def test_engine_that_gets_the_cache_by_its_namespace_and_was_missed_is_named(world: World) -> None:
    world.api.add(PODS, plain_pod("engine", "vllm serve model"))
    world.sweep.run()
    assert not world.told()
    with_default(world)
    world.sweep.run()
    ((reason, words),) = world.told()
    assert reason == "CacheMissed" and "webhook-missed" in words and "Namespace team" in words
    assert [(it.pod, it.reason) for it in world.pods.without(CACHE)] == [("team/engine", "webhook-missed")]


@pytest.mark.parametrize(
    "pod",
    [
        plain_pod("other", "nginx"),
        plain_pod("opted-out", "vllm serve model", annotations={ANNOTATION_INJECT: "false"}),
        plain_pod("injected", "vllm serve model", annotations=injected()),
        plain_pod("elsewhere", "vllm serve model", namespace="another"),
    ],
    ids=lambda pod: pod["metadata"]["name"],
)
def test_what_a_namespace_s_default_leaves_alone_is_not_missed(world: World, pod: Manifest) -> None:
    with_default(world)
    world.api.add(PODS, pod)
    world.sweep.run()
    assert not world.told()


def test_pod_without_an_engine_is_looked_at_once(world: World) -> None:
    with_default(world)
    world.api.add(PODS, plain_pod("other", "nginx"))
    world.sweep.run()
    gets: list[str] = []
    world.api.before = lambda verb, resource: gets.append(verb) if verb == "get" else None
    world.sweep.run()
    assert not gets


def test_default_that_cannot_be_used_is_still_missed_by_engines_only(world: World) -> None:
    with_default(world, **{f"{names.GROUP}/cache-namspace": "one"})
    world.api.add(PODS, plain_pod("engine", "vllm serve model"))
    world.api.add(PODS, plain_pod("other", "nginx"))
    world.sweep.run()
    assert world.reasons() == ["CacheMissed"]


def test_pod_that_sets_only_the_engine_gets_its_namespace_s_cache_and_is_named_with_it(world: World) -> None:
    with_default(world)
    world.api.add(PODS, plain_pod("odd", "start.sh", annotations={f"{names.GROUP}/engine": "vllm"}))
    world.sweep.run()
    assert [it.pod for it in world.pods.without(CACHE)] == ["team/odd"]


def test_new_engine_is_named_at_once_among_many_pods_that_are_none(world: World) -> None:
    with_default(world)
    for number in range(2 * MOST):
        world.api.add(PODS, plain_pod(f"other-{number}", "nginx"))
    world.api.add(PODS, plain_pod("engine", "vllm serve model", creationTimestamp=at(START + 60)))
    world.api.add(PODS, plain_pod("old", "vllm serve model", creationTimestamp=at(START - 60)))
    world.sweep.run()
    assert [it.pod for it in world.pods.without(CACHE)] == ["team/engine"]
    world.sweep.run()
    world.sweep.run()
    assert [it.pod for it in world.pods.without(CACHE)] == ["team/engine", "team/old"]


# ------------------------------------------------------------------------------------------------------------- probe


def stamp(manifest: Manifest) -> Manifest:
    manifest["metadata"]["labels"][names.LABEL_CACHE] = "true"
    return manifest


def value(metrics: Metrics, name: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(name)
    return found


def test_probe_leaves_nothing_and_tells_whether_the_webhook_answers(world: World) -> None:
    metrics = Metrics(list)
    assert value(metrics, "orbitkv_webhook_probe_success") is None  # a standby has nothing to say
    probe = Probe(world.api, RELEASE, "agent:1", metrics.webhook_probed)
    probe.run()
    assert value(metrics, "orbitkv_webhook_probe_success") == 0
    world.api.admit = stamp
    probe.run()
    assert value(metrics, "orbitkv_webhook_probe_success") == 1
    assert value(metrics, "orbitkv_webhook_probe_timestamp_seconds")
    assert not world.api.objects


def test_dry_run_that_is_refused_says_nothing_about_the_webhook(world: World) -> None:
    metrics = Metrics(list)

    def forbidden(verb: str, resource: Any) -> None:
        raise ApiError(403, "forbidden")

    world.api.before = forbidden
    with pytest.raises(ApiError):
        Probe(world.api, RELEASE, "agent:1", metrics.webhook_probed).run()
    assert value(metrics, "orbitkv_webhook_probe_success") is None


def test_pods_without_their_cache_are_counted_by_reason(world: World) -> None:
    metrics = Metrics(list, world.pods.counts)
    world.show(pod_body(stamps=skipped()))
    world.look()
    found = metrics.registry.get_sample_value("orbitkv_pods_without_cache", {"reason": "runtime-isolated"})
    assert found == 1
