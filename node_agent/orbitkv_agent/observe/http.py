"""`/metrics`, `/health` and `/ready` over HTTP, from threads that own nothing.

A request asks the owner thread by its mailbox and waits for the answer for at most a second; an owner that does not
answer in that time is what `/health` is there to report.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, TypeVar

from prometheus_client.exposition import choose_encoder

from orbitkv_agent.observe.metrics import make_registry
from orbitkv_agent.observe.snapshot import Snapshot

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 1.0
"""Longest wait for the owner thread."""
CLIENT_SECONDS: Final = 5.0
"""Longest wait for a client to send its request or take its answer."""
MAX_REQUESTS: Final = 16
"""Connections that are served at one time. One more takes the place of another: the kubelet's probe gets in, however
many hold on to theirs."""
T = TypeVar("T")


class MetricsServer:
    """Serves from construction on: the address is bound when it returns, and `start` has the requests answered.

    Args:
        endpoint: (host, port); port 0 takes any free one.
        post: hands a callable to the owner thread (`Loop.post`).
        snapshot, draining, not_ready: called on the owner thread.
        gate: says who may read `/metrics`, given the header `Authorization`: an HTTP status (200 for yes) and words. It
            is called in the threads of requests. None: everybody may.

    Raises:
        OSError: the address cannot be bound; the message names it and the setting.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        *,
        post: Callable[[Callable[[], None]], None],
        snapshot: Callable[[], Snapshot],
        draining: Callable[[], bool],
        not_ready: Callable[[], str],
        gate: Callable[[str], tuple[int, str]] | None = None,
    ) -> None:
        self._post = post
        self._draining = draining
        self._not_ready = not_ready
        self.gate = gate
        self._registry = make_registry(lambda: self._ask(snapshot))
        try:
            self._server = _Server(endpoint, self)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise OSError(
                f"metrics cannot be served on {endpoint[0]}:{endpoint[1]}: {reason}; "
                "set metrics_address to another one, or to off"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="orbitkv-http", daemon=True
        )

    @property
    def endpoint(self) -> tuple[str, int]:
        """The (host, port) that is bound."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        """Answer requests, in threads."""
        self._thread.start()
        logger.info("serving metrics", extra={"address": "{}:{}".format(*self.endpoint)})

    def close(self) -> None:
        """Stop answering and free the address. Requests that wait for the owner get their answer or a 503."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def health(self) -> tuple[bool, str]:
        """Return whether the agent serves, and why not in words."""
        try:
            draining = self._ask(self._draining)
        except FutureTimeoutError:
            return False, f"the agent's main thread did not answer within {ANSWER_SECONDS:g} s"
        return (False, "the agent is draining: it finishes what it began and then stops") if draining else (True, "ok")

    def ready(self) -> tuple[bool, str]:
        """Return whether engines can be served, and why not in words."""
        try:
            why = self._ask(self._not_ready)
        except FutureTimeoutError:
            return False, f"the agent's main thread did not answer within {ANSWER_SECONDS:g} s"
        return not why, why or "ok"

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition in the best format that `accept` (an HTTP header) names, and its content type.

        Raises:
            TimeoutError: the owner thread did not answer.
        """
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def _ask(self, question: Callable[[], T]) -> T:
        answer: Future[T] = Future()

        def on_owner() -> None:
            if answer.set_running_or_notify_cancel():  # cancelled: whoever asked has gone
                try:
                    answer.set_result(question())
                except Exception as error:
                    answer.set_exception(error)

        self._post(on_owner)
        try:
            return answer.result(ANSWER_SECONDS)
        finally:
            answer.cancel()


class _Server(ThreadingMixIn, TCPServer):
    """A thread a connection, bounded. (http.server's own would look up the host's name at start.)"""

    allow_reuse_address = True
    request_queue_size = 64
    daemon_threads = True
    block_on_close = False

    def __init__(self, endpoint: tuple[str, int], metrics: MetricsServer) -> None:
        if ":" in endpoint[0]:
            self.address_family = socket.AF_INET6
        self.metrics = metrics
        # Invariant: `_served` are the connections that are open and that nobody pushed out, oldest first, with their
        # addresses; each is closed only after it was taken out. Nothing waits under the lock.
        self._lock = threading.Lock()
        self._served: dict[Any, str] = {}
        super().__init__(endpoint, _Handler)

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
        """A client that breaks off is no event; anything else is a defect."""
        logger.debug("an HTTP request ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS
    server_version = "orbitkv-agent"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            healthy, words = self.server.metrics.health()
            self._answer(200 if healthy else 503, words)
        elif path == "/ready":
            ready, words = self.server.metrics.ready()
            self._answer(200 if ready else 503, words)
        elif path == "/metrics":
            gate = self.server.metrics.gate
            status, words = (200, "") if gate is None else gate(self.headers.get("Authorization", ""))
            if status != 200:
                self._answer(status, words)
                return
            try:
                body, content_type = self.server.metrics.metrics(self.headers.get("Accept", ""))
            except FutureTimeoutError:
                self._answer(503, f"the agent's main thread did not answer within {ANSWER_SECONDS:g} s")
            except Exception:
                logger.exception("the metrics could not be made")
                self._answer(500, "the metrics could not be made; the agent's log says why")
            else:
                self._send(200, body, content_type)
        else:
            self._answer(404, "there is /metrics, /health and /ready here")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Leave requests out of the log."""

    def _answer(self, status: int, words: str) -> None:
        self._send(status, f"{words}\n".encode(), "text/plain; charset=utf-8")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
