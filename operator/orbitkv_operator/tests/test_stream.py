"""A watch over HTTP: lines however the pieces come, and its ends."""

from __future__ import annotations

import base64
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration

from orbitkv_operator.certificates import renewed
from orbitkv_operator.cluster.api import ENGINE_PODS, ApiError, KubernetesApi, Stream

Send = Callable[[bytes], None]


@contextmanager
def apiserver(
    certificates: Path, answer: Callable[[Send], None], asked: list[str] | None = None, status: int = 200
) -> Iterator[KubernetesApi]:
    """Serves one kind of answer, in the pieces in which it is written."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.path)
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            answer(self.write_piece)
            self.write_piece(b"")

        def write_piece(self, piece: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    settings = Configuration(host=f"https://localhost:{server.server_port}")
    settings.__dict__.update(retries=False, ssl_ca_cert=str(certificates / "ca.crt"))
    try:
        yield KubernetesApi(ApiClient(settings))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a server's certificate and the CA that signed it."""
    folder = tmp_path_factory.mktemp("certificates")
    made = renewed(None, ["localhost"])
    assert made is not None
    for name, data in made.items():
        (folder / name).write_bytes(base64.b64decode(data))
    return folder


def one_line_until(ended: threading.Event) -> Callable[[Send], None]:
    """Answers with one line, and then with nothing for a while."""

    def answer(send: Send) -> None:
        send(b"{}\n")
        ended.wait(60)

    return answer


def watch(api: KubernetesApi, silence: float = 60.0) -> Stream:
    return api.stream(ENGINE_PODS, "7", labels="a=true", fields="status.phase!=Pending", silence_seconds=silence)


def test_lines_come_whole_however_they_were_cut_and_one_at_a_time(certificates: Path) -> None:
    asked: list[str] = []
    seen = threading.Event()

    def answer(send: Send) -> None:
        send(b'{"a":')
        send(b'1}\n{"b":2}\n{"c"')
        assert seen.wait(5), "the first lines come before the answer is whole"
        send(b":3}\n")

    with apiserver(certificates, answer, asked) as api:
        lines = []
        for line in watch(api):
            lines.append(line)
            if len(lines) == 2:
                seen.set()
    assert lines == [b'{"a":1}', b'{"b":2}', b'{"c":3}']
    (path,) = asked
    query = {name: value for name, (value,) in parse_qs(urlparse(path).query).items()}
    assert urlparse(path).path == "/api/v1/pods" and query.pop("timeoutSeconds")
    assert query == {
        "watch": "1",
        "allowWatchBookmarks": "true",
        "resourceVersion": "7",
        "labelSelector": "a=true",
        "fieldSelector": "status.phase!=Pending",
    }


def test_silence_is_a_lost_connection(certificates: Path) -> None:
    ended = threading.Event()
    with apiserver(certificates, one_line_until(ended)) as api:
        lines = iter(watch(api, silence=3))
        assert next(lines) == b"{}"
        with pytest.raises(ApiError, match="cut off"):
            next(lines)
        ended.set()


def test_who_reads_is_let_go_by_another_thread(certificates: Path) -> None:
    ended = threading.Event()
    with apiserver(certificates, one_line_until(ended)) as api:
        stream, lines = watch(api), list[bytes]()
        first = threading.Event()

        def read() -> None:
            for line in stream:
                lines.append(line)
                first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(20)
        stream.end()
        reader.join(20)
        assert not reader.is_alive() and lines == [b"{}"]
        stream.end()
        ended.set()


def test_refusal_has_its_status(certificates: Path) -> None:
    body = b'{"kind": "Status", "message": "too old resource version", "code": 410}'
    with (
        apiserver(certificates, lambda send: send(body), status=410) as api,
        pytest.raises(ApiError, match="too old") as error,
    ):
        watch(api)
    assert error.value.status == 410


def test_list_to_watch_goes_on_from_the_version_of_its_first_page(certificates: Path) -> None:
    pages = iter(
        [
            b'{"metadata": {"resourceVersion": "5", "continue": "x"}, "items": [{"metadata": {"name": "a"}}]}',
            b'{"metadata": {"resourceVersion": "5"}, "items": [{"metadata": {"name": "b"}}]}',
        ]
    )
    with apiserver(certificates, lambda send: send(next(pages))) as api:
        found, version = api.list_to_watch(ENGINE_PODS, labels="a=true")
    assert [it["metadata"]["name"] for it in found] == ["a", "b"] and version == "5"
