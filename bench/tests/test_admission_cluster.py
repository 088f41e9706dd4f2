"""Tests of how `bench.admission_cluster` counts pods."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bench.admission_cluster import _running
from orbitkv_operator.cluster.api import PODS
from orbitkv_operator.tests.fakes import FakeApi


def pod(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "run", "uid": name, "resourceVersion": "7"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def test_each_pod_that_runs_is_counted_once() -> None:
    api = FakeApi()
    api.add(PODS, pod("pod-0"))
    with _running(api, "run", 3) as missing:
        deadline = time.monotonic() + 10
        while not api.streams or missing() != "1 of 3 pods run":
            assert time.monotonic() < deadline
        for name, kind in (("pod-1", "ADDED"), ("pod-1", "MODIFIED"), ("pod-2", "ADDED")):
            assert missing() != ""
            api.streams[0].send(kind, pod(name))
        while missing():
            assert time.monotonic() < deadline


def test_watch_that_fails_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object, **__: object) -> None:
        raise LookupError("a defect")

    api = FakeApi()
    monkeypatch.setattr(api, "list_to_watch", defect)
    with _running(api, "run", 3) as missing, pytest.raises(RuntimeError, match="a defect"):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            missing()
