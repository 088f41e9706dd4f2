"""A whole agent in a cluster of which only the apiserver is fake. Time passes as in `harness.World`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from orbitkv.protocol.messages import Hello, Refusal
from orbitkv_agent.cluster.cluster import Cluster
from orbitkv_agent.cluster.tests.fake_apiserver import FakeApiserver
from orbitkv_agent.tests.harness import Client, World

MIB = 1 << 20


class ClusterWorld(World):
    """An agent of pool `default` on node `node-a`.

    Args:
        token: what clients show unless they are told otherwise.
    """

    def __init__(self, folder: Path, api: FakeApiserver, token: bytes = b"good", **settings: Any) -> None:
        self.token = token
        cluster: dict[str, Any] = {
            "pool": "default",
            "node_name": "node-a",
            "pod_name": "agent",
            "pod_namespace": "orbitkv-system",
            "pod_uid": "uid-of-agent",
            "live_path": str(folder / "live.yaml"),
            "state_path": str(folder / "state"),
            "reports_address": "off",
            "kubeconfig": api.kubeconfig,
        }
        (folder / "live.yaml").touch()
        super().__init__(folder, cluster=cluster | settings.pop("cluster", {}), **settings)
        assert self.agent.cluster is not None
        self.cluster: Cluster = self.agent.cluster
        self.cluster.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.agent.cluster = None  # it was started here, and `serve` would start it again
        try:
            super().__exit__(kind, error, trace)
        finally:
            self.cluster.stop()

    def pump(self, rounds: int = 3) -> None:
        """Let the agent, and the threads beside it, do what there is to do now."""
        for _ in range(rounds):
            self.agent.loop.run_once(0.001)

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Turn the loop until a condition holds; the agent's time passes at least as fast as real time does."""
        now = time.monotonic()
        deadline = now + seconds
        while not condition():
            assert now < deadline, "it did not happen in time"
            self.agent.loop.run_once(0.01)
            before, now = now, time.monotonic()
            self.clock.now += max(0.01, now - before)

    def until_ready(self) -> None:
        """Wait for the lists."""
        self.until(lambda: not self.agent.not_ready())

    def client(self, namespace: str = "team-a/qwen", *, hello: bool = True, token: bytes | None = None) -> Client:
        """A connected client, after the handshake if `hello`."""
        client = super().client(namespace, hello=False)
        if hello:
            client.hello(Hello(cache_namespace=namespace, token=self.token if token is None else token, client="test"))
        return client

    def refused(self, namespace: str = "team-a/qwen", token: bytes | None = None) -> Refusal:
        """The refusal of a handshake."""
        hello = Hello(cache_namespace=namespace, token=self.token if token is None else token, client="test")
        return self.client(namespace, hello=False).refused(hello)
