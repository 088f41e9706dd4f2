"""The server: TLS, bodies of all kinds, certificates that change, and its end."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from orbitkv_operator.admission import server as module
from orbitkv_operator.admission.metrics import WebhookMetrics
from orbitkv_operator.admission.server import PATH, AdmissionServer
from orbitkv_operator.admission.tests.pods import FakeWorld
from orbitkv_operator.admission.tests.test_review import asking, review, reviewer
from orbitkv_operator.certificates import Serving, read, renewed

NAMES = ("localhost", "orbitkv-webhook.orbitkv-system.svc")


@pytest.fixture(scope="module")
def serving() -> Serving:
    return read(renewed(None, NAMES))


@pytest.fixture
def metrics() -> WebhookMetrics:
    return WebhookMetrics(lambda: ())


@pytest.fixture
def server(serving: Serving, metrics: WebhookMetrics) -> Iterator[AdmissionServer]:
    found = AdmissionServer(0, reviewer(), metrics)
    found.show(serving)
    yield found
    found.close()


def connect(server: AdmissionServer, serving: Serving) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cadata=serving.bundle.decode())
    return http.client.HTTPSConnection("localhost", server.port, context=context, timeout=20)


def post(connection: http.client.HTTPSConnection, body: bytes, path: str = PATH) -> tuple[int, bytes]:
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def counted(metrics: WebhookMetrics, sample: str) -> bool:
    return f"\norbitkv_{sample}\n" in generate_latest(metrics.registry).decode()


def test_review_is_answered_and_counted(server: AdmissionServer, serving: Serving, metrics: WebhookMetrics) -> None:
    connection = connect(server, serving)
    status, body = post(connection, review(asking()))
    assert status == 200
    assert json.loads(body)["response"]["allowed"] is True
    post(connection, review(asking(mode="wrong")))
    assert counted(metrics, 'webhook_reviews_total{outcome="injected"} 1.0')
    assert counted(metrics, 'webhook_skips_total{reason="invalid-annotation"} 1.0')


def test_garbage_is_refused_and_the_next_review_is_answered(
    server: AdmissionServer, serving: Serving, metrics: WebhookMetrics
) -> None:
    connection = connect(server, serving)
    assert post(connection, b"{")[0] == 400
    assert post(connection, b"", "/elsewhere")[0] == 404
    with socket.create_connection(("localhost", server.port), timeout=20) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        plain.recv(100)
    assert post(connection, review(asking()))[0] == 200
    assert counted(metrics, 'webhook_reviews_total{outcome="malformed"} 1.0')


def test_body_of_ten_mebibytes_is_answered_and_a_larger_one_refused(server: AdmissionServer, serving: Serving) -> None:
    connection = connect(server, serving)
    pod = asking()
    pod["metadata"]["annotations"]["example.com/large"] = "x" * (10 << 20)
    status, body = post(connection, review(pod))
    assert status == 200
    assert json.loads(body)["response"]["allowed"] is True
    assert post(connect(server, serving), b" " * (module.LARGEST_BODY + 1))[0] == 413
    assert post(connect(server, serving), review(asking()))[0] == 200


def begun(server: AdmissionServer, serving: Serving, sender: str, size: int) -> ssl.SSLSocket:
    """A body of which so many bytes were sent, and more are awaited."""
    context = ssl.create_default_context(cadata=serving.bundle.decode())
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=20, source_address=(sender, 0))
    secure = context.wrap_socket(plain, server_hostname="localhost")
    secure.sendall(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2 * size}\r\n\r\n".encode())
    secure.sendall(b" " * size)
    return secure


def is_ended(connection: ssl.SSLSocket) -> bool:
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_bodies_that_would_take_all_memory_push_out_the_largest_of_who_sends_most(
    server: AdmissionServer, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BODIES", 1 << 20)
    with (
        begun(server, serving, "127.0.0.3", 300_000) as others,
        begun(server, serving, "127.0.0.2", 200_000) as first,
        begun(server, serving, "127.0.0.2", 600_000) as larger,
    ):
        assert is_ended(larger)
        for kept in (first, others):
            kept.settimeout(0.1)
            assert not is_ended(kept)
        assert post(connect(server, serving), review(asking()))[0] == 200


def test_bodies_that_were_answered_count_no_more(
    server: AdmissionServer, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = review(asking())
    monkeypatch.setattr(module, "BODIES", 2 * len(body))
    connection = connect(server, serving)
    assert [post(connection, body)[0] for _ in range(5)] == [200] * 5


def test_compressed_body_is_refused_and_not_unpacked(server: AdmissionServer, serving: Serving) -> None:
    connection = connect(server, serving)
    connection.request("POST", PATH, gzip.compress(review(asking())), {"Content-Encoding": "gzip"})
    assert connection.getresponse().status == 400


def test_body_that_does_not_come_holds_up_nobody(
    server: AdmissionServer, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BODY_SECONDS", 2.0)
    stuck = connect(server, serving)
    stuck.putrequest("POST", PATH)
    stuck.putheader("Content-Length", "1000")
    stuck.endheaders()
    assert post(connect(server, serving), review(asking()))[0] == 200
    assert stuck.getresponse().status == 408


def test_pod_that_comes_with_its_namespace_waits_for_it(
    serving: Serving, metrics: WebhookMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    class World(FakeWorld):
        """Knows the namespace once it has been asked a few times."""

        asked = 0

        def namespace_labels(self, name: str) -> Mapping[str, str] | None:
            self.asked += 1
            return {} if self.asked > 3 else None

    monkeypatch.setattr(module, "NAMESPACE_SECONDS", 20.0)
    found = AdmissionServer(0, reviewer(World()), metrics)
    found.show(serving)
    assert post(connect(found, serving), review(asking()))[0] == 200
    found.close()
    assert counted(metrics, 'webhook_reviews_total{outcome="injected"} 1.0')


def test_renewed_certificate_is_shown_to_new_connections_and_the_old_ones_live_on(
    server: AdmissionServer, serving: Serving
) -> None:
    first = connect(server, serving)
    assert post(first, review(asking()))[0] == 200
    other = read(renewed(None, NAMES))
    server.show(other)
    assert post(connect(server, other), review(asking()))[0] == 200
    assert post(first, review(asking()))[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        post(connect(server, serving), review(asking()))


def test_certificate_that_does_not_fit_its_key_is_refused_and_the_old_one_stays(
    server: AdmissionServer, serving: Serving
) -> None:
    other = read(renewed(None, NAMES, datetime.now(UTC) - timedelta(days=1)))
    with pytest.raises(ssl.SSLError):
        server.show(Serving(serving.certificate, other.key, serving.bundle, serving.expires))
    assert post(connect(server, serving), review(asking()))[0] == 200


def test_port_that_is_taken_is_named(serving: Serving, metrics: WebhookMetrics) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = AdmissionServer(port, reviewer(), metrics)
        with pytest.raises(OSError, match=f"port {port} for reviews"):
            found.show(serving)
        found.close()


def test_what_is_being_answered_at_the_end_is_answered(
    serving: Serving, metrics: WebhookMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering, release = threading.Event(), threading.Event()

    class World(FakeWorld):
        """Knows the namespace once the end has begun."""

        def namespace_labels(self, name: str) -> Mapping[str, str] | None:
            answering.set()
            return {} if release.is_set() else None

    monkeypatch.setattr(module, "NAMESPACE_SECONDS", 20.0)
    found = AdmissionServer(0, reviewer(World()), metrics)
    found.show(serving)
    connection = connect(found, serving)
    connection.request("POST", PATH, review(asking()))
    assert answering.wait(10)
    closing: Any = found._call(found._runner.cleanup())  # type: ignore[union-attr]
    release.set()
    assert connection.getresponse().status == 200
    closing.result(10)
    found.close()
