"""Agents that only report: what a thousand nodes say to the operator, from one thread of one process.

Each pushes as a real one does: over a connection of its own that it keeps, with the token of its pod, at the operator's
interval give or take a fifth, and at once when engines come or go. Its figures change every 10 s.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from orbitkv_agent.cluster.reports import BUSY_S, PUSH_S
from orbitkv_crds.agent_api import reports_pb2 as pb
from orbitkv_crds.agent_api.reports_pb2_grpc import ReportsStub

CHANGE_SECONDS: Final = 10.0
"""Figures are others after this time."""
GIB: Final = 1 << 30


@dataclass(frozen=True)
class Cache:
    """A CacheNamespace that engines on a node use."""

    namespace: str
    name: str
    uid: str


@dataclass
class Agent:
    """One node's agent. `engines` may be changed from outside by `Fleet.set_engines` only."""

    node: str
    pod: str
    uid: str
    token: str
    caches: Sequence[Cache]
    gpus: int
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    idle: set[str] = field(default_factory=set)
    """Uids of caches that have no engine at present."""
    taken: bool = False
    """Whether the operator has taken a report of it."""

    def report(self, pool: str, sequence: int) -> pb.Report:
        """Return its state: figures follow from node, cache and time."""
        now = int(time.time() / CHANGE_SECONDS)
        made = pb.Report(
            pool=pool,
            node=self.node,
            pod_name=self.pod,
            pod_uid=self.uid,
            boot_id=self.uid,
            sequence=sequence,
            release="bench",
            state=pb.AGENT_STATE_SERVING,
            cache_namespaces_synced=True,
            gpus=self.gpus,
        )
        for cache in self.caches:
            chance = random.Random(f"{self.node} {cache.uid} {now}")
            used = int(GIB * chance.uniform(2, 8))
            asked = int(chance.uniform(1e6, 5e6))
            found = int(asked * chance.uniform(0.3, 0.9))
            busy = cache.uid not in self.idle
            pod = f"engine-{cache.name}-{self.node}"
            made.dram.used_bytes += used
            made.cache_namespaces.append(
                pb.CacheNamespace(
                    namespace=cache.namespace,
                    name=cache.name,
                    uid=cache.uid,
                    observed_generation=1,
                    dram=pb.Tier(used_bytes=used),
                    sessions=2 * busy,
                    engines=int(busy),
                    attached_pods=int(busy),
                    pods=[pb.Pod(namespace=cache.namespace, name=pod, uid=pod, sessions=2)] if busy else [],
                    last_hour=pb.LastHour(requested_tokens=asked, hit_tokens=found),
                    decision="Accepted",
                )
            )
            made.pods.append(
                pb.PodVisit(
                    namespace=cache.namespace,
                    name=pod,
                    uid=pod,
                    cache_namespace=f"{cache.namespace}/{cache.name}",
                    state=pb.VISIT_STATE_ATTACHED if busy else pb.VISIT_STATE_LEFT,
                    engine="vllm 0.32.0",
                    sessions=2 * busy,
                    engines=int(busy),
                    requested_tokens=now * 100_000,
                    hit_tokens=now * 60_000,
                )
            )
        made.dram.capacity_bytes = 128 * GIB
        return made


class Fleet:
    """All agents of one pool. They live in a thread, from the first `start` until `close`."""

    def __init__(self, address: str, server_name: str, authority: bytes, pool: str) -> None:
        self.pushed = 0
        self.failed = 0
        self.sent_away = 0
        """Pushes that the operator was too busy for."""
        self.problem = ""
        """What the last push that failed was answered."""
        self._address = address
        self._pool = pool
        self._credentials = grpc.ssl_channel_credentials(authority)
        self._options = [("grpc.ssl_target_name_override", server_name), ("grpc.use_local_subchannel_pool", 1)]
        self._agents: dict[str, tuple[Agent, asyncio.Task[None]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()

    def start(self, agents: Sequence[Agent]) -> None:
        """Let agents begin to report."""
        self._do(self._start(agents))

    def stop(self, nodes: Sequence[str]) -> None:
        """End the agents of nodes that went, without a word."""
        self._do(self._stop(nodes))

    def set_engines(self, uids: set[str], attached: bool) -> None:
        """Let the engines of caches come, or go, on all nodes."""
        self._do(self._set_engines(uids, attached))

    def silent(self) -> int:
        """Return how many agents have not had a push taken yet."""
        return sum(not agent.taken for agent, _ in list(self._agents.values()))

    def close(self) -> None:
        """End all of them, and the thread."""
        self._do(self._stop(list(self._agents)))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(120)

    async def _start(self, agents: Sequence[Agent]) -> None:
        for agent in agents:
            self._agents[agent.node] = agent, asyncio.create_task(self._run(agent))

    async def _stop(self, nodes: Sequence[str]) -> None:
        tasks = [self._agents.pop(node)[1] for node in nodes if node in self._agents]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _set_engines(self, uids: set[str], attached: bool) -> None:
        for agent, _ in self._agents.values():
            mine = uids & {cache.uid for cache in agent.caches}
            if mine:
                agent.idle = agent.idle - mine if attached else agent.idle | mine
                agent.wake.set()

    async def _run(self, agent: Agent) -> None:
        interval = 15.0
        await asyncio.sleep(random.uniform(0, interval))  # nodes are not made in the same moment either
        metadata = (("authorization", f"Bearer {agent.token}"),)
        async with grpc.aio.secure_channel(self._address, self._credentials, self._options) as channel:
            stub: Any = ReportsStub(channel)  # its types know calls that block only
            for sequence in itertools.count(1):
                agent.wake.clear()
                wait = 0.0
                try:
                    report = agent.report(self._pool, sequence)
                    ack = await stub.Push(report, timeout=PUSH_S, metadata=metadata)
                    interval = ack.interval_seconds or interval
                    self.pushed += 1
                    agent.taken = True
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                        self.sent_away += 1
                        wait = BUSY_S * random.uniform(0.5, 1.5)
                    else:
                        self.failed += 1
                        self.problem = f"{error.code().name}: {error.details()}"
                try:
                    await asyncio.wait_for(agent.wake.wait(), wait or interval * random.uniform(0.8, 1.2))
                except TimeoutError:
                    continue
