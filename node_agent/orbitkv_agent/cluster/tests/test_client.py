"""The engine's side in a cluster: the client shows its token, and each newer one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orbitkv.client import CacheManagerClient, ErrorKind, OrbitKVError
from orbitkv.client import session as client_session
from orbitkv_agent.agent import Agent
from orbitkv_agent.cluster import admission
from orbitkv_agent.cluster.tests.fake_apiserver import TOKEN_REVIEWS, FakeApiserver
from orbitkv_agent.config import AgentConfig

NAME = "team-a/qwen"


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a state that other threads bring about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def agent(tmp_path: Path, api: FakeApiserver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """A serving agent that looks at tokens many times a second."""
    monkeypatch.setattr(admission, "ROUND_S", 0.05)
    monkeypatch.setattr(admission, "AGE_S", 0.1)
    monkeypatch.setattr(client_session, "TOKEN_LOOK_S", 0.05)
    (tmp_path / "live.yaml").touch()
    config = AgentConfig.model_validate(
        {
            "socket_path": str(tmp_path / "agent.sock"),
            "pool": "4MiB",
            "arena": "1MiB",
            "prefault": False,
            "mode": "host",
            "metrics_address": "off",
            "cluster": {
                "pool": "default",
                "node_name": "node-a",
                "pod_name": "agent",
                "pod_namespace": "orbitkv-system",
                "pod_uid": "u",
                "live_path": str(tmp_path / "live.yaml"),
                "state_path": str(tmp_path / "state"),
                "reports_address": "off",
                "kubeconfig": api.kubeconfig,
            },
        }
    )
    agent = Agent(config)
    thread = threading.Thread(target=agent.serve)
    thread.start()
    yield agent
    agent.request_stop()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine-token"
    path.write_text("good\n")
    return path


def attach(agent: Agent, token_file: Path) -> CacheManagerClient:
    """Attach as soon as the agent knows its cluster."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return CacheManagerClient(agent.config.socket_path, cache_namespace=NAME, token_path=str(token_file))
        except OrbitKVError as error:
            if error.kind is not ErrorKind.UNAVAILABLE or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_client_shows_each_newer_token_by_itself(agent: Agent, api: FakeApiserver, token_file: Path) -> None:
    with attach(agent, token_file) as client:
        newer = token_file.with_suffix(".new")
        newer.write_bytes(api.token("newer"))
        newer.rename(token_file)
        wait_until(lambda: any(visitor.token.decode() == "newer" for visitor in visitors(agent)))
        del api.tokens["good"]
        reviews = api.requests[TOKEN_REVIEWS]
        wait_until(lambda: api.requests[TOKEN_REVIEWS] > reviews + 3)
        assert client.health() == (True, "ok")


def test_a_client_whose_pod_is_gone_is_told_so(agent: Agent, api: FakeApiserver, token_file: Path) -> None:
    with attach(agent, token_file) as client:
        del api.tokens["good"]
        wait_until(lambda: not visitors(agent))
        with pytest.raises(OrbitKVError, match="token-invalid: unknown token") as caught:
            client.health()
        assert caught.value.kind is ErrorKind.DENIED
    with pytest.raises(OrbitKVError, match="token-invalid: unknown token") as denied:
        attach(agent, token_file)
    assert denied.value.kind is ErrorKind.DENIED


def test_a_token_that_cannot_be_read_is_named(agent: Agent, tmp_path: Path) -> None:
    with pytest.raises(OrbitKVError, match=r"the token in .*nowhere \(orbitkv.token_path\) cannot be read"):
        CacheManagerClient(agent.config.socket_path, cache_namespace=NAME, token_path=str(tmp_path / "nowhere"))


def visitors(agent: Agent) -> list[admission._Visitor]:
    """Those that the agent has let in."""
    assert agent.cluster is not None
    return list(agent.cluster.admission._visitors.values())
