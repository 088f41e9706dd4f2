"""Fixtures: a fake apiserver with one cache namespace, much time for its answers, and none between attempts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orbitkv_agent.cluster import admission, apiserver, reviews, watcher
from orbitkv_agent.cluster.tests.fake_apiserver import FakeApiserver
from orbitkv_agent.cluster.tests.world import ClusterWorld


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiserver]:
    """One with CacheNamespace team-a/qwen of uid `one`, and a token `good` of a pod in team-a on node-a."""
    monkeypatch.setattr(apiserver, "_CALL_SECONDS", (30.0, 30.0))
    monkeypatch.setattr(watcher, "_FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(watcher, "_SHORT_S", 0.0)
    monkeypatch.setattr(reviews, "SPACING_S", 0.01)
    monkeypatch.setattr(admission, "_is_own_pod", lambda peer: False)  # the test's process is the agent's
    with FakeApiserver(tmp_path) as api:
        api.put("team-a/qwen", "one")
        api.token("good")
        yield api


@pytest.fixture
def world(tmp_path: Path, api: FakeApiserver) -> Iterator[ClusterWorld]:
    """An agent that knows its cluster."""
    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
        yield world
