"""The watch of engines' pods: what it shows, and that it loses nothing and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from orbitkv_crds import names
from orbitkv_operator.audit import Watch
from orbitkv_operator.cluster.api import ENGINE_PODS, ApiError, Manifest
from orbitkv_operator.engines import watch as watch_module
from orbitkv_operator.engines.pods import EnginePods
from orbitkv_operator.engines.watch import PodWatch
from orbitkv_operator.names import ENGINE_FIELDS, ENGINE_SELECTOR
from orbitkv_operator.queue import KeyedQueue
from orbitkv_operator.router import Router
from orbitkv_operator.tests.fakes import FakeApi, FakeStream
from orbitkv_operator.tests.test_engine_pods import START, at, pod_body
from orbitkv_operator.view import View

ENGINE = ("team", "engine")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class World:
    """A cluster with one engine's pod, and the watch, which has begun."""

    def __init__(self) -> None:
        self.api, self.pods, self.failures = FakeApi(), EnginePods(), list[str]()
        self.body = self.api.add(ENGINE_PODS, pod_body())
        self.record = Watch(ENGINE_PODS, None, ENGINE_SELECTOR, ENGINE_FIELDS)
        router = Router(View(), KeyedQueue(), self.pods)
        self.watch = PodWatch(self.api, self.record, router, 70.0, self.failures.append)

    def stream(self, number: int) -> FakeStream:
        """The watch's connection number so many, once it is there."""
        until(lambda: len(self.api.streams) >= number)
        return self.api.streams[number - 1]

    def shown(self, name: str = "engine") -> bool:
        return self.pods.get(("team", name)) is not None


def changed(body: Manifest, version: str, **status: object) -> Manifest:
    return body | {
        "metadata": body["metadata"] | {"resourceVersion": version},
        "status": body["status"] | status,
    }


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(watch_module, "AGAIN_SECONDS", 0.01)
    found = World()
    found.watch.start()
    yield found
    found.watch.stop()
    assert found.failures == []


def test_pods_come_change_and_go(world: World) -> None:
    stream = world.stream(1)
    assert world.shown()
    stream.send("ADDED", pod_body("another", resourceVersion="101"))
    until(lambda: world.shown("another"))
    ready = [{"type": "Ready", "status": "True", "lastTransitionTime": at(START), "more": [1]}]
    stream.send(
        "MODIFIED", changed(world.body, "102", conditions=ready) | {"spec": {"nodeName": "node-b", "volumes": []}}
    )
    until(lambda: world.record.shown()[ENGINE][1] == "102")
    pod = world.pods.get(ENGINE)
    assert pod is not None and pod.ready_since == START and pod.node == "node-b" and pod.injected is not None
    stream.send("DELETED", changed(world.body, "103"))
    until(lambda: not world.shown())
    assert set(world.record.shown()) == {("team", "another")}


def test_it_goes_on_where_a_connection_ended_or_was_lost(world: World) -> None:
    first = world.stream(1)
    first.send("MODIFIED", changed(world.body, "200"))
    first.end()
    second = world.stream(2)
    assert second.since == "200"
    second.send("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "300", "creationTimestamp": None}})
    second.cut_off()
    assert world.stream(3).since == "300"


def test_what_happened_in_a_time_that_the_apiserver_forgot_is_found_by_a_list(world: World) -> None:
    first = world.stream(1)
    del world.api.objects[ENGINE_PODS, "team", "engine"]
    world.api.add(ENGINE_PODS, pod_body("another"))
    first.send("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
    second = world.stream(2)
    assert second.since not in ("", first.since)
    assert world.shown("another") and not world.shown() and set(world.record.shown()) == {("team", "another")}


def test_apiserver_that_is_away_is_asked_again(world: World) -> None:
    refusals = iter([ApiError(0, "no answer"), ApiError(403, "not yet"), ApiError(410, "expired")])

    def refuses(verb: str, _: object) -> None:
        if verb == "watch" and (error := next(refusals, None)) is not None:
            raise error

    world.stream(1)
    world.api.before = refuses
    world.api.streams[0].end()
    assert world.stream(2).since != world.api.streams[0].since


def test_pod_with_nothing_in_it_is_read(world: World) -> None:
    metadata: Manifest = {
        "name": "bare",
        "namespace": "team",
        "uid": "1",
        "resourceVersion": "400",
        "creationTimestamp": None,
    }
    bare: Manifest = {
        "metadata": metadata | {"labels": None, "annotations": {names.LABEL_CACHE: "x"}},
        "spec": None,
        "status": {},
    }
    world.stream(1).send("ADDED", bare)
    until(lambda: world.shown("bare"))


def test_what_it_cannot_read_is_a_failure_and_not_silence() -> None:
    world = World()
    world.watch.start()
    world.stream(1).send("ADDED", {"metadata": "no"})
    until(lambda: bool(world.failures))
    world.watch.stop()
    assert "engines' pods" in world.failures[0]


def test_stop_ends_a_watch_on_which_nothing_comes() -> None:
    world = World()
    world.watch.start()
    world.stream(1)
    world.watch.stop()
    assert world.watch._thread is not None and not world.watch._thread.is_alive()
