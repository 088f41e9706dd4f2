"""HTTP: `/livez` and `/readyz` for the kubelet, `/metrics` for whoever has the right to read it."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from orbitkv_operator.cluster.api import ApiError

logger = logging.getLogger(__name__)

CLIENT_SECONDS: Final = 5.0
MAX_REQUESTS: Final = 16
"""Connections that are served at one time. One more takes the place of another: the kubelet's probe gets in, however
many hold on to theirs."""


class Answer(NamedTuple):
    """What a request gets."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Answerer = Callable[[str, str, str], Answer]
"""From path, Accept and Authorization to an answer."""


def probes(live: Callable[[], str], ready: Callable[[], str]) -> Answerer:
    """Return what answers probes; `live` and `ready` return what is wrong in words, or nothing."""

    def answer(path: str, accept: str, authorization: str) -> Answer:
        checks = {"/livez": live, "/readyz": ready}
        if path not in checks:
            return Answer(404, b"there is /livez and /readyz here\n")
        problem = checks[path]()
        return Answer(503, f"{problem}\n".encode()) if problem else Answer(200, b"ok\n")

    return answer


def metrics(registry: CollectorRegistry, may_read: Callable[[str], bool | None]) -> Answerer:
    """Return what answers requests for metrics; `may_read` judges a token (None: it is not valid)."""

    def answer(path: str, accept: str, authorization: str) -> Answer:
        if path != "/metrics":
            return Answer(404, b"there is /metrics here\n")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return Answer(401, b"a bearer token is needed\n")
        try:
            allowed = may_read(token.strip())
        except ApiError as error:
            logger.warning("a token could not be reviewed", extra={"error": str(error)})
            return Answer(503, b"the token cannot be reviewed at present\n")
        if allowed is None:
            return Answer(401, b"the apiserver does not accept this token\n")
        if not allowed:
            return Answer(
                403, b"the token's owner may not get /metrics: bind ClusterRole orbitkv-metrics-reader to it\n"
            )
        encoder, content_type = choose_encoder(accept)
        return Answer(200, encoder(registry), content_type)

    return answer


class HttpServer:
    """Serves from `start` to `close`, each request in a thread.

    Raises:
        OSError: the port cannot be had; the message names it.
    """

    def __init__(self, port: int, answer: Answerer, name: str) -> None:
        try:
            self._server = _Server(port, answer)
        except OSError as error:
            raise OSError(f"port {port} for {name} cannot be had: {error.strerror}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name=name, daemon=True)

    @property
    def port(self) -> int:
        """The port that is bound."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answer requests."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, answer: Answerer) -> None:
        self.answer = answer
        # Invariant: `_served` are the connections that are open and that nobody pushed out, oldest first, with their
        # addresses; each is closed only after it was taken out. Nothing waits under the lock.
        self._lock = threading.Lock()
        self._served: dict[Any, str] = {}
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, and also right after a container that had the port before."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "orbitkv-operator", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; where all places are taken, in the place of another."""
        with self._lock:
            if len(self._served) >= MAX_REQUESTS:
                self._push_out()
            self._served[request] = client_address[0]
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Give a connection's place back and close it."""
        with self._lock:
            self._served.pop(request, None)
        super().shutdown_request(request)

    def _push_out(self) -> None:
        """End the oldest connection of whoever has most: a crowd from one address pushes out itself."""
        of_each = Counter(self._served.values())
        most = max(of_each.values())
        oldest = next(request for request, address in self._served.items() if of_each[address] == most)
        del self._served[oldest]
        with suppress(OSError):  # the client has ended it already
            oldest.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is no event."""
        logger.debug("an HTTP request ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS
    server_version = "orbitkv-operator"
    sys_version = ""

    def do_GET(self) -> None:
        headers = self.headers
        try:
            answer = self.server.answer(
                self.path.partition("?")[0], headers.get("Accept", ""), headers.get("Authorization", "")
            )
        except Exception:
            logger.exception("a request could not be answered", extra={"path": self.path[:100]})
            answer = Answer(500, b"the operator's log says why\n")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Leave requests out of the log."""
