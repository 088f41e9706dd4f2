"""`/metrics` and `/health` with a real owner thread behind them."""

from __future__ import annotations

import queue
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from orbitkv_agent.observe import http as http_module
from orbitkv_agent.observe.http import MetricsServer
from orbitkv_agent.observe.snapshot import Snapshot
from orbitkv_agent.observe.tests.examples import example_snapshot


class Owner:
    """A thread that runs what is posted, as the agent's loop does."""

    def __init__(self) -> None:
        self.draining = False
        self.not_ready = ""
        self.broken = False
        self.asked_on: set[str] = set()
        self._mail: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="owner")
        self._thread.start()

    def post(self, callback: Callable[[], None]) -> None:
        self._mail.put(callback)

    def snapshot(self) -> Snapshot:
        self.asked_on.add(threading.current_thread().name)
        if self.broken:
            raise RuntimeError("a defect")
        return example_snapshot()

    def is_draining(self) -> bool:
        self.asked_on.add(threading.current_thread().name)
        return self.draining

    def why_not_ready(self) -> str:
        self.asked_on.add(threading.current_thread().name)
        return self.not_ready

    def stop(self) -> None:
        self._mail.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (callback := self._mail.get()) is not None:
            callback()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "ANSWER_SECONDS", 30.0)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.stop()


@pytest.fixture
def server(owner: Owner) -> Iterator[MetricsServer]:
    server = MetricsServer(
        ("127.0.0.1", 0),
        post=owner.post,
        snapshot=owner.snapshot,
        draining=owner.is_draining,
        not_ready=owner.why_not_ready,
    )
    server.start()
    yield server
    server.close()


def get(server: MetricsServer, path: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request("http://{}:{}{}".format(*server.endpoint, path), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_metrics_are_served_and_the_owner_thread_made_the_snapshot(server: MetricsServer, owner: Owner) -> None:
    status, content_type, body = get(server, "/metrics")

    assert status == 200
    assert content_type.startswith("text/plain")
    assert "orbitkv_pool_alloc_failures_total 3.0" in body
    assert owner.asked_on == {"owner"}


def test_metrics_come_in_the_format_that_the_scraper_wants(server: MetricsServer) -> None:
    status, content_type, body = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")

    assert (status, content_type.split(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_healthy_agent_answers_200(server: MetricsServer) -> None:
    assert get(server, "/health")[::2] == (200, "ok\n")


def test_draining_agent_answers_503_with_the_reason(server: MetricsServer, owner: Owner) -> None:
    owner.draining = True
    status, _, body = get(server, "/health")

    assert status == 503
    assert "draining" in body


def test_agent_whose_owner_hangs_answers_503_and_recovers(
    server: MetricsServer, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "ANSWER_SECONDS", 0.05)
    hang = threading.Event()

    def wait() -> None:
        hang.wait(30)

    owner.post(wait)

    assert get(server, "/health")[0] == 503
    assert "did not answer" in get(server, "/health")[2]
    assert get(server, "/metrics")[0] == 503

    monkeypatch.setattr(http_module, "ANSWER_SECONDS", 10.0)
    hang.set()
    assert get(server, "/health")[0] == 200
    assert get(server, "/metrics")[0] == 200


def test_defect_in_the_snapshot_is_500_and_not_the_end(server: MetricsServer, owner: Owner) -> None:
    owner.broken = True
    assert get(server, "/metrics")[0] == 500
    owner.broken = False
    assert get(server, "/metrics")[0] == 200


def test_other_paths_and_methods_are_refused(server: MetricsServer) -> None:
    assert get(server, "/")[0] == 404
    request = urllib.request.Request("http://{}:{}/metrics".format(*server.endpoint), data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 501
    refused.value.close()


@contextmanager
def connected(server: MetricsServer, count: int, address: str = "127.0.0.2") -> Iterator[list[socket.socket]]:
    """Connections that send nothing, from one address."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(server.endpoint, timeout=10, source_address=(address, 0)))
            for _ in range(count)
        ]


def test_probe_is_answered_while_all_places_are_held(server: MetricsServer) -> None:
    with connected(server, http_module.MAX_REQUESTS):
        for _ in range(3):
            assert get(server, "/health")[0] == 200


def test_crowd_pushes_out_only_itself(server: MetricsServer) -> None:
    with connected(server, 1, "127.0.0.3") as [slow], connected(server, http_module.MAX_REQUESTS + 3) as crowd:
        assert [each.recv(1) for each in crowd[:4]] == [b""] * 4
        slow.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # it was there before all of them
        assert b" 200 " in slow.recv(1 << 12)
        crowd[-1].sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        assert b" 200 " in crowd[-1].recv(1 << 12)


def test_ready_says_what_is_missing(owner: Owner, server: MetricsServer) -> None:
    assert get(server, "/ready") == (200, "text/plain; charset=utf-8", "ok\n")
    owner.not_ready = "the pool's CacheNamespaces are not known yet"
    assert get(server, "/ready") == (503, "text/plain; charset=utf-8", "the pool's CacheNamespaces are not known yet\n")
    assert get(server, "/health")[0] == 200  # alive all the same: a restart would not help
    assert owner.asked_on == {"owner"}


def test_only_who_may_read_metrics_reads_them(owner: Owner) -> None:
    def gate(authorization: str) -> tuple[int, str]:
        return (200, "") if authorization == "Bearer good" else (403, "this user may not GET /metrics")

    server = MetricsServer(
        ("127.0.0.1", 0),
        post=owner.post,
        snapshot=owner.snapshot,
        draining=owner.is_draining,
        not_ready=owner.why_not_ready,
        gate=gate,
    )
    server.start()
    try:
        assert get(server, "/metrics") == (403, "text/plain; charset=utf-8", "this user may not GET /metrics\n")
        assert get(server, "/metrics", Authorization="Bearer good")[0] == 200
        assert get(server, "/health")[0] == get(server, "/ready")[0] == 200  # the kubelet has no token
    finally:
        server.close()


def test_close_frees_the_address(owner: Owner) -> None:
    def server_on(endpoint: tuple[str, int]) -> MetricsServer:
        return MetricsServer(
            endpoint,
            post=owner.post,
            snapshot=owner.snapshot,
            draining=owner.is_draining,
            not_ready=owner.why_not_ready,
        )

    first = server_on(("127.0.0.1", 0))
    first.start()
    with pytest.raises(OSError, match=r"metrics cannot be served on 127.0.0.1:\d+: .*; set metrics_address"):
        server_on(first.endpoint)
    first.close()
    second = server_on(first.endpoint)
    second.close()
