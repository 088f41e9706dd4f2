"""Reports of agents: who may send which, over a real connection."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest

from orbitkv_crds import names
from orbitkv_crds.agent_api.reports_pb2 import (
    AGENT_STATE_DRAINING,
    AGENT_STATE_SERVING,
    AgentState,
    LastHour,
    PodVisit,
    Report,
    Tier,
)
from orbitkv_crds.agent_api.reports_pb2 import CacheNamespace as CacheReport
from orbitkv_crds.agent_api.reports_pb2_grpc import ReportsStub
from orbitkv_operator import main
from orbitkv_operator.certificates import Serving, read, renewed
from orbitkv_operator.cluster.api import CACHES, TOKEN_REVIEWS, ApiError, Manifest, Resource
from orbitkv_operator.operator import Operator
from orbitkv_operator.reports import server as reports
from orbitkv_operator.reports.server import ReportServer
from orbitkv_operator.reports.store import A_SECOND, FRESH, INTERVAL, LONGEST_INTERVAL, ReportStore
from orbitkv_operator.reviews import Reviews
from orbitkv_operator.tests.fakes import RELEASE, SETTINGS, FakeApi, cache_body

SERVER = names.reports_server_name(RELEASE)


def token(name: str, seconds: float = 3600) -> str:
    claims = json.dumps({"exp": time.time() + seconds, "name": name}).encode()
    return f"x.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.y"


class Tokens(FakeApi):
    """Answers token reviews: `users` has who a token belongs to, and on which node."""

    def __init__(self) -> None:
        super().__init__()
        self.users: dict[str, tuple[str, str]] = {}
        self.reviewed: list[str] = []
        self.down = False
        self.open = threading.Event()
        """Reviews are answered while it is set."""
        self.open.set()

    def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, *, dry_run: bool = False
    ) -> Manifest:
        assert resource is TOKEN_REVIEWS
        if self.down:
            raise ApiError(0, "away")
        spec: Any = manifest["spec"]
        self.reviewed.append(spec["token"])
        assert self.open.wait(60)
        name, node = self.users.get(spec["token"], ("", ""))
        if not name:
            return {"status": {"authenticated": False}}
        extra = {"authentication.kubernetes.io/node-name": [node]} if node else {}
        return {
            "status": {
                "authenticated": True,
                "audiences": spec["audiences"],
                "user": {"username": name, "extra": extra},
            }
        }


def certificate() -> Serving:
    return read(renewed(None, (SERVER,)))


@dataclass
class Served:
    tokens: Tokens
    server: ReportServer
    store: ReportStore
    serving: Serving
    seen: list[Report] = field(default_factory=list)

    @contextmanager
    def connected(self, bundle: bytes | None = None) -> Iterator[Callable[..., int]]:
        """A connection, and what sends a report over it and returns how many seconds to wait for the next."""
        credentials = grpc.ssl_channel_credentials(bundle or self.serving.bundle)
        options = [("grpc.ssl_target_name_override", SERVER)]
        with grpc.secure_channel(f"127.0.0.1:{self.server.port}", credentials, options) as channel:

            def push(bearer: str, timeout: float = 10, **report: Any) -> int:
                body = Report(
                    **{"pool": "main", "node": "node-a", "boot_id": "1", "sequence": time.time_ns(), **report}
                )
                metadata = (("authorization", f"Bearer {bearer}"),)
                return int(ReportsStub(channel).Push(body, timeout=timeout, metadata=metadata).interval_seconds)

            yield push

    def push(self, bearer: str, bundle: bytes | None = None, **report: Any) -> int:
        """Send a report in a connection of its own; return how many seconds to wait for the next."""
        with self.connected(bundle) as push:
            return push(bearer, **report)

    def refusal(self, bearer: str, **report: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            self.push(bearer, **report)
        error: Any = caught.value
        return error.code(), error.details()


@pytest.fixture
def served() -> Iterator[Served]:
    tokens, store, seen = Tokens(), ReportStore(), []
    server = ReportServer(0, RELEASE, Reviews(tokens), store, lambda before, report: seen.append(report))
    serving = certificate()
    server.show(serving)
    yield Served(tokens, server, store, serving, seen)
    server.close()


def agents(pool: str = "main") -> str:
    return f"system:serviceaccount:{RELEASE}:orbitkv-{pool}"


def test_report_of_an_agent_is_taken(served: Served) -> None:
    mine = token("a")
    served.tokens.users[mine] = agents(), "node-a"
    assert served.push(mine) == 15
    assert [it.node for it in served.store.of_pool("main")] == ["node-a"]
    assert len(served.seen) == 1


def test_report_for_another_node_is_refused(served: Served) -> None:
    mine = token("a")
    served.tokens.users[mine] = agents(), "node-a"
    code, words = served.refusal(mine, node="node-b")
    assert code is grpc.StatusCode.PERMISSION_DENIED and "node-a" in words and "node-b" in words
    assert served.store.of_pool("main") == [] and served.seen == []


def test_report_for_another_pool_is_refused(served: Served) -> None:
    mine = token("a")
    served.tokens.users[mine] = agents("other"), "node-a"
    assert served.refusal(mine)[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("name", ["system:serviceaccount:elsewhere:orbitkv-main", "system:admin"])
def test_report_of_somebody_else_is_refused(served: Served, name: str) -> None:
    mine = token("a")
    served.tokens.users[mine] = name, "node-a"
    assert served.refusal(mine)[0] is grpc.StatusCode.PERMISSION_DENIED


def test_token_that_is_bound_to_no_node_is_refused(served: Served) -> None:
    mine = token("a")
    served.tokens.users[mine] = agents(), ""
    assert served.refusal(mine, node="")[0] is grpc.StatusCode.PERMISSION_DENIED


def test_invalid_token_is_refused(served: Served) -> None:
    assert served.refusal("forged")[0] is grpc.StatusCode.UNAUTHENTICATED
    assert served.refusal("")[0] is grpc.StatusCode.UNAUTHENTICATED


def test_apiserver_that_is_away_is_no_refusal_for_good(served: Served) -> None:
    mine = token("a")
    served.tokens.users[mine] = agents(), "node-a"
    served.tokens.down = True
    assert served.refusal(mine)[0] is grpc.StatusCode.UNAVAILABLE
    served.tokens.down = False
    assert served.push(mine) == 15


def test_token_is_reviewed_once(served: Served) -> None:
    mine = token("a")
    served.tokens.users[mine] = agents(), "node-a"
    for _ in range(5):
        served.push(mine)
    assert served.tokens.reviewed == [mine]


def test_known_token_serves_on_while_the_apiserver_is_away(served: Served) -> None:
    mine = token("a")
    served.tokens.users[mine] = agents(), "node-a"
    served.push(mine)
    served.tokens.down = True
    assert served.push(mine) == 15


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many may wait beside those whose tokens are reviewed."""
    monkeypatch.setattr(reports, "WAITING", reports.THREADS + 3)
    return 3


def test_crowd_is_told_to_come_again_and_who_gave_up_costs_nothing(few_places: int, served: Served) -> None:
    first, late, known = [token(str(number)) for number in range(reports.THREADS)], token("late"), token("known")
    served.tokens.users |= {each: (agents(), each) for each in (*first, late, known)}

    def code(timeout: float) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            push(late, timeout, node=late)
        error: Any = caught.value
        found: grpc.StatusCode = error.code()
        return found

    with served.connected() as push, ThreadPoolExecutor(reports.THREADS + few_places) as threads:
        push(known, node=known)  # what comes now takes its place at once: the connection is there
        served.tokens.open.clear()
        running = [threads.submit(served.push, each, timeout=60, node=each) for each in first]
        deadline = time.monotonic() + 20
        while not set(first) <= set(served.tokens.reviewed):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        waiting = [threads.submit(code, 2) for _ in range(few_places)]
        codes = [each.result(20) for each in waiting] + [code(20)]
        served.tokens.open.set()
        assert {each.result(60) for each in running} == {15}
    assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED] * few_places + [grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert served.push(late, node=late) == 15
    assert served.tokens.reviewed.count(late) == 1


def test_operators_threads_hand_over_soon_so_that_reports_pass_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = sys.getswitchinterval(), []

    def run(*_: object) -> int:
        seen.append(sys.getswitchinterval())
        return 0

    monkeypatch.setattr(main, "run_program", run)
    sys.setswitchinterval(0.005)  # as Python begins
    try:
        assert main.main([]) == 0
    finally:
        sys.setswitchinterval(before)
    assert seen == [pytest.approx(0.0005)]


def test_certificate_is_changed_while_reports_come_in(served: Served) -> None:
    mine = token("a")
    served.tokens.users[mine] = agents(), "node-a"
    served.push(mine)
    another = certificate()
    both = served.serving.bundle + another.bundle
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(served.push, mine, both) for _ in range(20)]
        served.server.show(another)
        running += [threads.submit(served.push, mine, both) for _ in range(20)]
        assert {future.result(20) for future in running} == {15}
    assert served.push(mine, another.bundle) == 15
    assert served.refusal(mine, bundle=served.serving.bundle)[0] is grpc.StatusCode.UNAVAILABLE


# --------------------------------------------------------------------------------------------------------------- store


def report(sequence: int, boot: str = "1", **more: Any) -> Report:
    return Report(pool="main", node="a", boot_id=boot, sequence=sequence, **more)


def test_older_report_of_the_same_run_is_dropped() -> None:
    store = ReportStore()
    store.put(report(2, release="new"))
    store.put(report(1, release="old"))
    assert store.of_pool("main")[0].release == "new"
    store.put(report(1, "2", release="restarted"))
    assert store.of_pool("main")[0].release == "restarted"


def test_reports_grow_old() -> None:
    now = 0.0
    store = ReportStore(clock=lambda: now)
    store.start()
    store.put(report(1))
    assert not store.settled
    now = FRESH + 1
    assert store.of_pool("main") == [] and store.settled


def test_what_is_said_of_a_cache_and_its_pods_follows_the_last_report_of_each_agent() -> None:
    now = 0.0
    store = ReportStore(clock=lambda: now)

    def say(node: str, sequence: int, *uids: str, pool: str = "main") -> None:
        store.put(
            Report(
                pool=pool,
                node=node,
                boot_id="1",
                sequence=sequence,
                cache_namespaces=[CacheReport(uid=uid) for uid in uids],
                pods=[PodVisit(uid=f"pod-{node}-{uid}", cache_namespace=f"team/{uid}", sessions=1) for uid in uids],
            )
        )

    say("b", 1, "x", "y")
    now = 10
    say("a", 1, "x")
    say("a", 1, "x", pool="other")
    assert [node for node, _ in store.about("main", "x")] == ["a", "b"]
    assert [(node, it.uid) for node, it in store.visits_to("main", "team/x")] == [("b", "pod-b-x")]
    say("b", 2, "y")
    assert [node for node, _ in store.about("main", "x")] == ["a"] and not store.visits_to("main", "team/x")
    assert store.heard("main") and not store.heard("third")
    now += FRESH + 1
    assert not store.about("main", "x") and not store.visits_to("main", "team/y") and not store.heard("main")


def test_where_agents_are_many_they_report_less_often_and_are_believed_for_longer() -> None:
    now = 0.0
    store = ReportStore(clock=lambda: now)
    store.put(Report(pool="main", node="first", boot_id="1", sequence=1))
    assert store.interval == INTERVAL
    for number in range(800):
        store.put(Report(pool="main", node=f"node-{number}", boot_id="1", sequence=1))
    assert store.interval == 801 / A_SECOND
    for number in range(5000):
        store.put(Report(pool="main", node=f"more-{number}", boot_id="1", sequence=1))
    assert store.interval == LONGEST_INTERVAL
    now = 3 * INTERVAL + 1
    assert "first" in {it.node for it in store.silent()}
    assert store.of_node("more-4999")
    now = 3 * LONGEST_INTERVAL + 1
    assert not store.of_node("more-4999")


def test_sums_are_not_trusted_while_agents_are_heard_of_for_the_first_time() -> None:
    now = 0.0
    store = ReportStore(clock=lambda: now)
    store.start()
    for number in range(72):
        now = float(number)
        store.put(Report(pool="main", node=f"node-{number}", boot_id="1", sequence=1))
        assert not store.settled
    now += INTERVAL + 1
    assert store.settled
    store.put(Report(pool="main", node="node-0", boot_id="1", sequence=2))
    assert store.settled


def test_sums_are_trusted_at_last_where_nodes_come_all_the_time() -> None:
    now = 0.0
    store = ReportStore(clock=lambda: now)
    store.start()
    for number in range(0, int(3 * LONGEST_INTERVAL) + 20, 10):
        now = float(number)
        store.put(Report(pool="main", node=f"node-{number}", boot_id="1", sequence=1))
    assert store.settled


def test_agents_that_fall_silent_are_named_once() -> None:
    now = 0.0
    store = ReportStore(clock=lambda: now)
    store.put(report(1))
    now = 10
    store.put(Report(pool="main", node="b", boot_id="1", sequence=1))
    assert store.silent() == []
    now = FRESH + 1
    assert [it.node for it in store.silent()] == ["a"] and store.silent() == []
    assert [it.node for it in store.of_pool("main")] == ["b"]


# -------------------------------------------------------------------------------------------------------------- reviews


def test_token_is_forgotten_when_it_ends() -> None:
    api, now = Tokens(), datetime.now(UTC)
    moment = now.timestamp()
    reviews = Reviews(api, clock=lambda: moment)
    mine = token("a", 600)
    api.users[mine] = agents(), "node-a"
    assert reviews.user(mine, "x") is not None
    moment += timedelta(minutes=11).total_seconds()
    del api.users[mine]
    assert reviews.user(mine, "x") is None


def test_token_for_one_audience_is_none_for_another() -> None:
    api = Tokens()
    reviews = Reviews(api)
    mine = token("a")
    api.users[mine] = agents(), "node-a"
    reviews.user(mine, "one")
    reviews.user(mine, "two")
    assert len(api.reviewed) == 2


def test_absurdly_long_token_is_not_even_asked_about() -> None:
    api = Tokens()
    assert Reviews(api).user("x" * 100_000, "one") is None and api.reviewed == []


# ------------------------------------------------------------------------------------------- what a report makes known


@pytest.fixture
def acting() -> Iterator[Operator]:
    made = Operator(SETTINGS.model_copy(update={"probes_port": 0, "metrics_port": 0}), None)
    for name in ("one", "two"):
        made._view.put(CACHES, cache_body(name))
    yield made
    for server in made._http:
        server.close()


def says(
    sequence: int, engines: int = 1, used: int = 0, state: AgentState = AGENT_STATE_SERVING, asked: int = 0
) -> Report:
    dram, hour = Tier(used_bytes=used), LastHour(requested_tokens=asked)
    part = CacheReport(namespace="team", name="one", uid="u", engines=engines, dram=dram, last_hour=hour)
    return Report(
        pool="main", node="a", boot_id="1", sequence=sequence, state=state, dram=dram, cache_namespaces=[part]
    )


@pytest.mark.parametrize(
    ("before", "after", "looked_at"),
    [
        (None, says(1), {"ManagerPool main", "CacheNamespace team/one"}),
        (says(1, used=1), says(2, used=1 << 30), set()),  # a figure: looked at when it may be written
        (says(1), says(2, used=1), {"CacheNamespace team/one", "ManagerPool main"}),  # the first of it
        (says(1, asked=1), says(2, asked=9), set()),
        (says(1), says(2, asked=1), {"CacheNamespace team/one"}),
        (says(1), says(2, engines=2), set()),
        (says(1), says(2, engines=0), {"CacheNamespace team/one"}),
        (says(1, engines=0), says(2), {"CacheNamespace team/one"}),
        (says(1), says(2, state=AGENT_STATE_DRAINING), {"ManagerPool main"}),
        (says(1), Report(pool="main", node="a", boot_id="1", state=AGENT_STATE_SERVING), {"CacheNamespace team/one"}),
    ],
)
def test_report_has_looked_at_what_it_changes(
    acting: Operator, before: Report | None, after: Report, looked_at: set[str]
) -> None:
    acting._reported(before, after)
    assert {str(key) for key in acting._queue._due} == looked_at


def test_what_a_silent_agent_said_is_looked_at_again(acting: Operator) -> None:
    now = 0.0
    acting._store.clock = lambda: now
    acting._store.put(says(1))
    now = FRESH + 1
    acting._fell_silent()
    assert {str(key) for key in acting._queue._due} == {"ManagerPool main", "CacheNamespace team/one"}
