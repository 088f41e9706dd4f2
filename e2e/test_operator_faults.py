"""The operator when things fail: killed at any write, cut off, silenced, without rights, twice at once.

The control plane is real and the nodes are on paper (see e2e/operator/world.py), so these tests need no cluster.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.operator.world import NODE_NAMES, RELEASE, World, client, running, wait
from e2e.support.proxy import When
from orbitkv_crds import names
from orbitkv_operator import rights
from orbitkv_operator.cluster.api import CACHES, CONFIG_MAPS, DAEMON_SETS, POOLS, SERVICE_ACCOUNTS
from orbitkv_operator.operator import Operator
from orbitkv_operator.settings import Settings

SETTLED_SECONDS = 30.0
"""After which nothing is on its way any more: a status is written a second time 10 s after the first, if it changed."""
REST_SECONDS = 120.0

_names = itertools.count(1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("operator")) as world:
        yield world


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """The control plane without operators, pools and cache namespaces, and with a proxy that passes everything on."""
    shared.proxy.heal()
    shared.proxy.forget()
    before = len(shared.kept)
    yield shared
    if len(shared.kept) > before:
        shared.grown = time.monotonic()
    shared.proxy.heal()
    shared.stop_all()
    for kind in (CACHES, POOLS):
        for it in shared.api.list_metadata(kind):
            namespace, name = it["metadata"].get("namespace"), it["metadata"]["name"]
            if name not in shared.kept:
                shared.api.delete(kind, namespace, name, uid=it["metadata"]["uid"])
    kept = [names.pool_object_name(name) for name in shared.kept]
    wait(
        lambda: all(it["metadata"]["name"] in kept for it in shared.api.list_metadata(DAEMON_SETS)),
        "all other DaemonSets to be gone",
    )
    shared.note_versions()


def fresh() -> str:
    return f"pool-{next(_names)}"


def grow_up(world: World, pool: str, **spec: Any) -> None:
    """Create a pool and a cache namespace, roll out, resize, move and reset, each until it has converged."""
    world.pool(pool, **spec)
    world.cache(pool, pool)
    world.wait_converged(pool)
    world.pool(pool, **spec, image="registry/agent:2")
    world.wait_converged(pool)
    moved = {**spec, "nodeSelector": {"zone": "a", **spec.get("nodeSelector", {}), "here": "yes"}}
    world.pool(pool, **moved, image="registry/agent:2", memory={"pool": "128Mi"})
    world.cache(pool, pool, resetGeneration=1)
    world.wait_converged(pool)
    wait(lambda: world.observed(pool), "the reset to be observed", 90)


def go(world: World, pool: str) -> None:
    """Delete a pool and its cache namespace, and wait until nothing is left."""
    for kind, namespace in ((CACHES, "default"), (POOLS, None)):
        found = world.api.get(kind, namespace, pool)
        assert found is not None
        world.api.delete(kind, namespace, pool, uid=found["metadata"]["uid"])
    world.wait_converged(pool)


def alternating(write: int) -> When:
    """Every second write fails before it arrives, and the others after it."""
    return "before" if write % 2 else "after"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "when",
    [alternating, *((lambda _: "before", lambda _: "after") if os.environ.get("ORBITKV_TEST_THOROUGH") else ())],
    ids=lambda when: when.__name__,
)
def test_killed_at_every_write_it_converges(world: World, when: Callable[[int], When]) -> None:
    """Three replicas, of which the acting one is killed at each third write: in three rounds, at every one.

    What grew up in each round stays, and is looked at in the last test.
    """
    for _ in range(3):
        world.start()
    with world.kept_alive():
        for first in range(1, 4):
            world.wait_leader()
            doomed = fresh()
            world.pool(doomed)
            world.cache(doomed, doomed)
            world.wait_converged(doomed)
            kept, spec = world.next_kept()
            world.proxy.forget()
            for write in range(first, 60, 3):
                world.proxy.at_write(write, when(write), world.kill_leader)
            grow_up(world, kept, **spec)
            go(world, doomed)
            assert len(world.proxy.writes()) > 12


@pytest.mark.timeout(240)
def test_after_a_partition_and_a_restart_of_the_apiserver_it_converges(world: World) -> None:
    replica = world.start()
    pool, spec = world.next_kept()
    world.pool(pool, **spec)
    world.cache(pool, pool)
    world.wait_converged(pool)
    before = world.pods(pool)
    world.proxy.partition()
    wait(lambda: not replica.alive(), "the replica that lost its Lease to end", 30)
    world.pool(pool, **spec, image="registry/agent:2")
    world.proxy.heal()
    with world.kept_alive():
        world.wait_converged(pool)
        assert not set(world.pods(pool).values()) & set(before.values())
        world.plane.processes.stop("apiserver")
        world.plane.start_apiserver()
        world.plane.wait_apiserver()
        world.pool(pool, **spec, image="registry/agent:3")
        world.wait_converged(pool)


class _AlwaysActs:
    """Stands in for leader election."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def run(self, acquired: Callable[[], None], lost: Callable[[], None]) -> None:
        acquired()
        self._stop.wait()

    def stop(self) -> None:
        self._stop.set()

    def release(self) -> None:
        pass


@pytest.mark.timeout(240)
def test_two_that_act_at_once_converge_and_come_to_rest(world: World) -> None:
    common: dict[str, Any] = {"namespace": RELEASE, "agent_image": "registry/agent:1", "pod_ip": "10.0.0.1"}
    common |= {"metrics_port": 0, "probes_port": 0, "reports_port": 0}
    operators = []
    for name in ("one", "two"):
        operator = Operator(Settings(**common, pod_name=name), client(world.kubeconfig))
        operator._leader = _AlwaysActs()  # type: ignore[assignment]
        operators.append(operator)
    replica = world.start()  # and a third that has the Lease
    threads = [threading.Thread(target=operator.run) for operator in operators]
    for thread in threads:
        thread.start()
    try:
        pool, spec = world.next_kept()
        world.pool(pool, **spec)
        world.cache(pool, pool)
        world.wait_converged(pool)
        before = world.pods(pool)
        world.pool(pool, **spec, image="registry/agent:2")
        world.wait_converged(pool)
        assert world.pods(pool).keys() == before.keys()
        wait(lambda: at_rest(world, 12), "rest", 90)
    finally:
        for operator in operators:
            operator.stop()
        for thread in threads:
            thread.join(30)
    assert replica.alive()


def at_rest(world: World, seconds: float) -> bool:
    before = world.versions()
    time.sleep(seconds)
    return world.versions() == before


@pytest.mark.timeout(400)
def test_at_rest_nothing_is_written_and_nobody_is_restarted(world: World) -> None:
    """Watches that are opened again, audits, further looks and a standby change nothing, here each of them several
    times. ORBITKV_TEST_REST_SECONDS=120 looks on for longer."""
    settings = {"AUDIT_SECONDS": "10", "RESYNC_SECONDS": "15", "SILENCE_SECONDS": "12"}
    settings |= {"LEASE_SECONDS": "15", "RENEW_SECONDS": "10"}  # the acting one is to keep it on a busy machine
    acting, standby = world.start(**settings), world.start(**settings)
    pool = fresh()
    world.pool(pool)
    world.cache(pool, pool)
    world.wait_converged(pool)
    wait(lambda: world.observed(pool), "the cache namespace to be looked at")
    wait(lambda: at_rest(world, 12), "what is written 10 s after another write to have been written", 90)
    before = world.versions()
    deadline = time.monotonic() + float(os.environ.get("ORBITKV_TEST_REST_SECONDS", "30"))
    while time.monotonic() < deadline:
        assert acting.probe("/livez")[0] == standby.probe("/livez")[0] == 200
        time.sleep(2)
    assert world.versions() == before
    assert acting.alive() and standby.alive()
    managers = {
        (kind.kind, entry["manager"])
        for kind in (*world.served(), POOLS, CACHES)
        for it in world.api.list_all(kind)
        if names.pool_object_name(pool) == it["metadata"]["name"] or it["metadata"]["name"] == pool
        for entry in it["metadata"]["managedFields"]
    }
    assert managers == {
        *((kind.kind, names.OPERATOR) for kind in (*world.served(), POOLS, CACHES)),
        ("ManagerPool", "kubectl-client-side-apply"),
        ("CacheNamespace", "kubectl-client-side-apply"),
        ("DaemonSet", "kube-controller-manager"),
    }


@pytest.mark.timeout(180)
def test_standby_acts_within_30_seconds_of_the_other_ones_death(world: World) -> None:
    usual = {"LEASE_SECONDS": "15", "RENEW_SECONDS": "10", "RETRY_SECONDS": "2"}
    first = world.start(**usual)
    assert world.wait_leader() is first
    second = world.start(**usual)
    wait(lambda: second.probe("/livez")[0] == 200, "the standby to live")
    first.kill()
    began, pool = time.monotonic(), fresh()
    world.pool(pool)
    wait(lambda: world.api.get(DAEMON_SETS, RELEASE, f"orbitkv-{pool}") is not None, "the standby to act", 60)
    assert time.monotonic() - began < 30


def test_asked_to_stop_it_hands_over_at_once(world: World) -> None:
    first = world.start(LEASE_SECONDS="60", RENEW_SECONDS="40")
    assert world.wait_leader() is first
    second = world.start(LEASE_SECONDS="60", RENEW_SECONDS="40")
    wait(lambda: second.probe("/livez")[0] == 200, "the standby to live")
    first.stop()
    assert first.exit_code() == 0
    wait(lambda: world.leader() is second, "the other one to take over", 20)


@pytest.mark.timeout(180)
def test_silenced_watch_is_made_good_and_the_replica_fails_its_liveness(world: World) -> None:
    replica = world.start(AUDIT_SECONDS="5", SILENCE_SECONDS="10")
    pool = fresh()
    world.pool(pool)
    world.wait_converged(pool)
    world.proxy.silence_watches()
    another = fresh()
    world.pool(another, nodeSelector={"zone": "nowhere"})
    wait(lambda: world.api.get(DAEMON_SETS, RELEASE, f"orbitkv-{another}") is not None, "the audit to notice", 30)
    wait(lambda: replica.probe("/livez")[0] == 503, "liveness to fail", 30)
    assert "does not show what is there" in replica.probe("/livez")[1]
    world.proxy.heal()
    wait(lambda: replica.probe("/livez")[0] == 200, "liveness to come back with the watches", 90)


@pytest.mark.timeout(240)
def test_missing_right_is_named_and_costs_one_request_a_second(world: World) -> None:
    role = world.kubectl.get("role", names.OPERATOR, RELEASE)
    assert role is not None
    less = [rule for rule in role["rules"] if "daemonsets" not in rule["resources"]]
    world.kubectl.patch("role", names.OPERATOR, {"rules": less}, RELEASE)
    try:
        replica = world.start()
        pools = [fresh() for _ in range(5)]
        for pool in pools:
            world.pool(pool, nodeSelector={"zone": "nowhere"})
        wait(
            lambda: any(
                "a right is missing" in it["event"] and it["resource"] == "daemonsets" for it in replica.entries()
            ),
            "the log to name the right",
        )
        world.proxy.forget()
        time.sleep(8)
        asked = Counter((it.method, it.path.partition("?")[0].rpartition("/")[0]) for it in world.proxy.seen())
        for what, count in asked.items():
            if "daemonsets" in what[1] or what[1].endswith("/orbitkv-system"):
                assert count <= 2 * 9, f"{count} requests in 8 s: {what}"
        assert replica.alive() and replica.probe("/livez")[0] == 200
    finally:
        world.kubectl.patch("role", names.OPERATOR, {"rules": role["rules"]}, RELEASE)
    for pool in pools:
        wait(
            lambda pool=pool: world.api.get(DAEMON_SETS, RELEASE, f"orbitkv-{pool}") is not None,  # type: ignore[misc]
            "the right to be used",
        )


def test_without_any_right_it_waits_and_says_so(world: World) -> None:
    binding = world.kubectl.get("clusterrolebinding", names.OPERATOR)
    assert binding is not None
    world.kubectl.delete("clusterrolebinding", names.OPERATOR)
    try:
        replica = world.start()
        wait(lambda: "forbidden" in replica.probe("/readyz")[1], "readiness to say why")
        assert replica.probe("/livez")[0] == 200
    finally:
        metadata = {"name": names.OPERATOR}
        world.kubectl.apply(
            {key: binding[key] for key in ("apiVersion", "kind", "roleRef", "subjects")} | {"metadata": metadata}
        )
    wait(lambda: replica.probe("/readyz")[0] == 200, "the right to be used")


def test_nothing_is_kept_in_the_objects_and_delete_works_while_no_operator_runs(world: World) -> None:
    """No finalizer, and no annotation of ours on what people write."""
    replica = world.start()
    pool = fresh()
    world.pool(pool)
    world.cache(pool, pool)
    world.wait_converged(pool)
    replica.stop()
    for kind, namespace in ((POOLS, None), (CACHES, "default")):
        found = world.api.get(kind, namespace, pool)
        assert found is not None
        assert "finalizers" not in found["metadata"]
        assert set(found["metadata"]["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
    world.kubectl.run("delete", "cachenamespace", pool, "--namespace=default", "--timeout=20s")
    world.kubectl.run("delete", "managerpool", pool, "--timeout=20s")
    wait(lambda: not world.left_over(pool), "the garbage collector")


def test_children_that_people_delete_or_edit_are_repaired(world: World) -> None:
    world.start()
    pool = fresh()
    world.pool(pool)
    world.wait_converged(pool)
    before = world.pods(pool)
    name = f"orbitkv-{pool}"
    for kind in (SERVICE_ACCOUNTS, CONFIG_MAPS):
        world.kubectl.delete(kind.plural, name, RELEASE)
    world.kubectl.patch("daemonset", name, {"spec": {"updateStrategy": {"type": "RollingUpdate"}}}, RELEASE)
    wait(lambda: world.api.get(CONFIG_MAPS, RELEASE, name) is not None, "the ConfigMap to be made again", 60)
    world.kubectl.patch("configmap", name, {"data": {"live.yaml": "forged"}}, RELEASE)
    world.wait_converged(pool)
    strategy = world.api.get(DAEMON_SETS, RELEASE, name)
    assert strategy is not None and strategy["spec"]["updateStrategy"]["type"] == "OnDelete"
    assert world.pods(pool) == before and set(before) == set(NODE_NAMES)


@pytest.mark.timeout(240)
def test_its_requests_are_covered_by_its_role_and_the_role_by_its_requests(world: World) -> None:
    """In what the tests above have made it ask for; alone, it makes it ask itself."""
    if len(world.requests()) < 300:
        world.start()
        pool = fresh()
        grow_up(world, pool)
        go(world, pool)
    used: set[tuple[str, str, str]] = set()
    for request in world.requests():
        about = request.get("objectRef")
        if about is None or "resource" not in about:
            continue  # discovery
        resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
        used.add((about.get("apiGroup", ""), resource, request["verb"]))
    allowed = {
        (group, resource, verb)
        for rule in (*rights.CLUSTER_RULES, *rights.NAMESPACE_RULES)
        for group in rule.api_groups
        for resource in rule.resources
        for verb in rule.verbs
    }
    assert used <= allowed, f"asked without a right: {used - allowed}"
    seldom = {
        ("authentication.k8s.io", "tokenreviews", "create"),  # reports of agents
        ("authorization.k8s.io", "subjectaccessreviews", "create"),  # readers of metrics
        ("discovery.k8s.io", "endpointslices", "delete"),  # another address family
        ("events.k8s.io", "events", "create"),
        ("networking.k8s.io", "networkpolicies", "delete"),  # when they are switched off
        ("", "secrets", "update"),  # a certificate that is renewed
        ("", "namespaces", "get"),  # where a watch was behind
        ("", "nodes", "get"),
        ("", "pods", "get"),
        ("", "pods", "patch"),  # agents' pods, when the payload's image is another
        ("node.k8s.io", "runtimeclasses", "get"),  # pools with GPUs
        *(right for right in allowed if right[0] == "resource.k8s.io"),  # pools that claim them
        *(right for right in allowed if right[1] == "mutatingwebhookconfigurations"),  # not in this cluster
        ("orbitkv.io", "cachenamespaces", "get"),
        *(right for right in allowed if right[1] == "podmonitors"),  # not in this cluster
        # of an object that is not there yet, `create` is asked for along with `patch`
        *(right for right in allowed if right[2] == "create" and right[1] not in ("secrets", "leases")),
    }
    assert allowed - used <= seldom, f"rights that are not used: {allowed - used - seldom}"


@pytest.mark.timeout(300)
def test_what_came_through_all_this_was_at_rest_ever_since(world: World) -> None:
    """What grew up while operators were killed, cut off and doubled: nobody has written to it for two minutes."""
    if not world.kept:
        pytest.skip("this is about what the tests above leave: run all of this file")
    world.start()
    for pool in world.kept:
        world.wait_converged(pool)
    settled = world.grown + SETTLED_SECONDS
    wait(lambda: time.monotonic() > settled, "all that came with a delay", SETTLED_SECONDS + 1)
    world.note_versions()
    since, then = next(each for each in world.noted if each[0] > settled)
    assert {f"ManagerPool /{pool}" for pool in world.kept} <= then.keys()
    while time.monotonic() < since + REST_SECONDS:
        time.sleep(1)
        world.note_versions()
    for at, versions in world.noted:
        if at > since:
            changed = {what for what in then.keys() | versions.keys() if then.get(what) != versions.get(what)}
            assert not changed, f"written to after {at - since:.0f} s of rest"
