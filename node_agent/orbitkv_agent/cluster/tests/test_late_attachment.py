"""An injected engine never waits for its cache: whatever is missing when it starts, it attaches when that comes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orbitkv.client import CacheManagerClient
from orbitkv.config import PluginConfig
from orbitkv.vllm import attachment
from orbitkv.vllm.attachment import Attachment, connect
from orbitkv_agent.agent import Agent
from orbitkv_agent.cluster import admission
from orbitkv_agent.cluster.tests.fake_apiserver import FakeApiserver
from orbitkv_agent.cluster.tests.test_client import wait_until
from orbitkv_agent.config import AgentConfig

Start = Callable[[], Agent]


class Attached:
    """A client, as the connector's halves keep it attached."""

    def __init__(self, client: CacheManagerClient) -> None:
        self.client = client
        self.boot_id = client.boot_id

    def alive(self) -> bool:
        return self.client.lost is None and self.client.peer_alive() and self.client.health()[0]

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def start_agent(tmp_path: Path, api: FakeApiserver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an agent of the node; the one before is ended."""
    monkeypatch.setattr(admission, "ANSWER_S", 0.5)
    running: list[tuple[Agent, threading.Thread]] = []
    cluster = {
        "pool": "default",
        "node_name": "node-a",
        "pod_name": "agent",
        "pod_namespace": "orbitkv-system",
        "pod_uid": "u",
        "live_path": str(tmp_path / "live.yaml"),
        "state_path": str(tmp_path / "state"),
        "reports_address": "off",
        "kubeconfig": api.kubeconfig,
    }
    (tmp_path / "live.yaml").touch()
    settings: dict[str, Any] = {"pool": "4MiB", "arena": "1MiB", "prefault": False, "mode": "host"}
    config = {"socket_path": str(tmp_path / "agent.sock"), "metrics_address": "off", "cluster": cluster, **settings}

    def end() -> None:
        agent, thread = running.pop()
        agent.request_stop()
        thread.join(20)
        assert not thread.is_alive()

    def start() -> Agent:
        if running:
            end()
        agent = Agent(AgentConfig.model_validate(config))
        running.append((agent, threading.Thread(target=agent.serve)))
        running[-1][1].start()
        return agent

    yield start
    if running:
        end()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the engine has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "vllm.orbitkv"]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attachment[Attached]]:
    """An engine of pod engine-0, not started, that asks for team-a/new, which does not exist yet."""
    monkeypatch.setattr(attachment, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(attachment, "LAST_RETRY_S", 0.1)
    monkeypatch.setattr(attachment, "WATCH_S", 0.05)
    (tmp_path / "token").write_text("good")
    environ = {
        "ORBITKV_BOOTSTRAP_SOCKET": str(tmp_path / "agent.sock"),
        "ORBITKV_CACHE_NAMESPACE": "team-a/new",
        "ORBITKV_TOKEN_PATH": str(tmp_path / "token"),
    }
    config = PluginConfig.load({}, environ, injected=True)
    made = Attachment("engine", lambda: Attached(connect(config, "engine", 20_000)))
    yield made
    made.stop()


def test_an_engine_attaches_when_what_it_lacked_has_come(
    engine: Attachment[Attached],
    api: FakeApiserver,
    start_agent: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No agent; then no apiserver; then no CacheNamespace; then all is there; then one after the other goes again."""
    caplog.set_level(logging.WARNING, "vllm.orbitkv")
    engine.start()

    def says(words: str) -> None:
        wait_until(lambda: any(words in each for each in said(caplog)))
        assert engine.published is None

    says("there is no such socket")
    api.refuse = 503
    start_agent()
    says("the agent has not heard from the apiserver yet")
    api.refuse = 0
    says("cache-namespace-not-found: there is no CacheNamespace 'team-a/new'")
    api.put("team-a/new", "first")
    wait_until(lambda: engine.published is not None)

    caplog.clear()
    api.delete("first")
    wait_until(lambda: engine.published is None)
    says("cache-namespace-not-found: ")
    api.put("team-a/new", "second")
    wait_until(lambda: engine.published is not None)

    boot = engine.published.boot_id if engine.published is not None else ""
    start_agent()
    wait_until(lambda: engine.published is not None and engine.published.boot_id != boot)


def test_each_thing_that_is_missing_is_said_once(
    engine: Attachment[Attached], start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.orbitkv")
    start_agent()
    engine.start()
    missing = "cache-namespace-not-found"
    wait_until(lambda: any(missing in each for each in said(caplog)))
    refused = len(caplog.records)
    wait_until(lambda: len(caplog.records) >= refused + 3)  # by the agent, which is asked again and again
    assert sum(missing in each for each in said(caplog)) == 1
