"""Probes and metrics over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orbitkv_operator.audit import Watch
from orbitkv_operator.cluster.api import ACCESS_REVIEWS, POOLS, ApiError, Manifest, Resource
from orbitkv_operator.metrics import METRICS, PREFIX, Metrics
from orbitkv_operator.reviews import METRICS_SECONDS, Reviews
from orbitkv_operator.tests.fakes import FakeApi, pool_body
from orbitkv_operator.web import MAX_REQUESTS, Answerer, HttpServer, metrics, probes


@contextmanager
def serving(answer: Answerer) -> Iterator[str]:
    server = HttpServer(0, answer, "test")
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.close()


def get(url: str, token: str | None = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Rights(FakeApi):
    """Everybody is who the token says; only `reader` may read metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.down = False

    def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, *, dry_run: bool = False
    ) -> Manifest:
        if self.down:
            raise ApiError(0, "away")
        self.asked += 1
        spec: Any = manifest["spec"]
        if resource is ACCESS_REVIEWS:
            assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
            return {"status": {"allowed": spec["user"] == "reader"}}
        known = spec["token"] != "forged"
        return {"status": {"authenticated": known, "user": {"username": spec["token"]}}}


def test_probes_tell_what_is_wrong() -> None:
    problem = ""
    with serving(probes(lambda: problem, lambda: "waiting for the CRDs")) as url:
        assert get(f"{url}/livez") == (200, "ok\n")
        assert get(f"{url}/readyz") == (503, "waiting for the CRDs\n")
        problem = "the watch of managerpools does not show what is there"
        assert get(f"{url}/livez")[0] == 503
        assert get(f"{url}/other")[0] == 404


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("forged", 401), ("stranger", 403), ("reader", 200)])
def test_metrics_want_a_token_with_the_right(token: str | None, status: int) -> None:
    registry = Metrics(lambda: []).registry
    with serving(metrics(registry, Reviews(Rights()).may_read_metrics)) as url:
        found, body = get(f"{url}/metrics", token)
        assert found == status
        assert ("orbitkv_" in body) is (status == 200)


def test_right_is_remembered_for_ten_minutes() -> None:
    api, now = Rights(), 0.0
    reviews = Reviews(api, clock=lambda: now)
    assert reviews.may_read_metrics("reader") and reviews.may_read_metrics("reader")
    assert api.asked == 2
    now = METRICS_SECONDS + 1
    assert reviews.may_read_metrics("reader")
    assert api.asked == 4


def test_apiserver_that_is_away_opens_nothing() -> None:
    api = Rights()
    api.down = True
    with serving(metrics(Metrics(lambda: []).registry, Reviews(api).may_read_metrics)) as url:
        assert get(f"{url}/metrics", "reader")[0] == 503


def test_all_metrics_of_the_table_are_there() -> None:
    watch = Watch(POOLS)
    manifest = pool_body()
    manifest["metadata"]["resourceVersion"] = "1"
    watch.show(manifest, False)
    counts = Metrics(lambda: [watch], lambda: {"never-came": 2})
    counts.reconciled("ManagerPool", 0.0)
    counts.failed("ManagerPool", "conflict")
    counts.webhook_probed(True)
    with serving(metrics(counts.registry, lambda token: True)) as url:
        body = get(f"{url}/metrics", "reader")[1]
    families = text_string_to_metric_families(body)
    found = {family.name: family for family in families if not family.name.endswith("_created")}
    assert found.keys() == {PREFIX + row.name.removesuffix("_total") for row in METRICS}
    for row in METRICS:
        family = found[PREFIX + row.name.removesuffix("_total")]
        assert family.type == row.kind
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        assert labels == set(row.labels)


def test_probe_is_answered_while_all_places_are_held() -> None:
    with serving(probes(str, str)) as url, ExitStack() as held:
        port = int(url.rpartition(":")[2])
        crowd = [
            held.enter_context(socket.create_connection(("127.0.0.1", port), 5, source_address=("127.0.0.2", 0)))
            for _ in range(MAX_REQUESTS)
        ]
        assert get(f"{url}/livez") == (200, "ok\n")
        assert crowd[0].recv(1) == b""
        crowd[-1].sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert b" 200 " in crowd[-1].recv(1 << 12)


def test_port_that_is_taken_is_named() -> None:
    with serving(probes(str, str)) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(OSError, match=f"port {port} for probes"):
            HttpServer(port, probes(str, str), "probes")
