"""Takes the agents' reports: gRPC over TLS, with a certificate that can be changed while it serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn, cast

import grpc

from orbitkv_crds import names
from orbitkv_crds.agent_api.reports_pb2 import Ack, Report
from orbitkv_crds.agent_api.reports_pb2_grpc import ReportsServicer, add_ReportsServicer_to_server
from orbitkv_operator.certificates import Serving
from orbitkv_operator.cluster.api import ApiError
from orbitkv_operator.reports.store import ReportStore
from orbitkv_operator.reviews import Reviews

logger = logging.getLogger(__name__)

THREADS: Final = 8
WAITING: Final = 64
"""Reports that are worked on or wait for it; whoever comes beyond that is told at once to come again. Each takes a few
milliseconds, a first one with its token's review some tens, and who sent it waits for five seconds."""
LARGEST_REPORT: Final = 4 << 20


class ReportServer:
    """Serves from the first `show` to `close`. `show` sets the certificate, and does so again whenever there is
    another."""

    def __init__(
        self,
        port: int,
        namespace: str,
        reviews: Reviews,
        store: ReportStore,
        changed: Callable[[Report | None, Report], None],
    ) -> None:
        self._lock = threading.Lock()  # guards _next
        self._next: Serving | None = None
        """What the next connection is shown for the first time; None: the same as the one before."""
        self._shown: Serving | None = None
        self._wanted_port = port
        self._service = _Service(namespace, reviews, store, changed)
        self._store = store
        self._server: grpc.Server | None = None
        self.port = 0

    def show(self, serving: Serving) -> None:
        """Show this certificate in every connection from now on; the first one starts the server.

        Raises:
            OSError: the port cannot be had.
        """
        if serving == self._shown:
            return
        self._shown = serving
        if self._server is None:
            self._start(serving)
        else:
            with self._lock:
                self._next = serving

    def close(self) -> None:
        """Stop taking reports; those on the way are answered."""
        if self._server is not None:
            self._server.stop(2).wait()

    def _start(self, serving: Serving) -> None:
        server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="reports"),
            options=[("grpc.max_receive_message_length", LARGEST_REPORT), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=WAITING,  # the answer beyond it is RESOURCE_EXHAUSTED
        )
        add_ReportsServicer_to_server(self._service, server)
        # that None means "as before" is what grpc documents, and its types do not know
        changed = cast(Callable[[], grpc.ServerCertificateConfiguration], self._changed_certificate)
        credentials = grpc.dynamic_ssl_server_credentials(_configuration(serving), changed)
        try:
            self.port = server.add_secure_port(f"[::]:{self._wanted_port}", credentials)
        except RuntimeError as error:
            raise OSError(f"port {self._wanted_port} for reports cannot be had: {error}") from error
        server.start()
        self._server = server
        self._store.start()
        logger.info("taking reports", extra={"port": self.port})

    def _changed_certificate(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificate for this connection and those to come, or None where it is the same as before:
        reading one costs more than the rest of a connection."""
        with self._lock:
            serving, self._next = self._next, None
        return None if serving is None else _configuration(serving)


def _configuration(serving: Serving) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(serving.key, serving.certificate)])


class _Service(ReportsServicer):
    def __init__(
        self,
        namespace: str,
        reviews: Reviews,
        store: ReportStore,
        changed: Callable[[Report | None, Report], None],
    ) -> None:
        self._namespace = namespace
        self._reviews = reviews
        self._store = store
        self._changed = changed

    def Push(self, request: Report, context: grpc.ServicerContext) -> Ack:
        """Take a report if the caller is the agent that it is about."""
        sent: dict[str, Any] = dict(context.invocation_metadata())
        scheme, _, token = str(sent.get("authorization", "")).partition(" ")
        if scheme.lower() != "bearer":
            _refuse(
                context, grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed in the metadata `authorization`"
            )
        try:
            user = self._reviews.user(token.strip(), names.REPORTS_AUDIENCE)
        except ApiError as error:
            logger.warning("a token could not be reviewed", extra={"error": str(error)})
            _refuse(context, grpc.StatusCode.UNAVAILABLE, "the token cannot be reviewed at present: try again")
        if user is None:
            _refuse(
                context,
                grpc.StatusCode.UNAUTHENTICATED,
                f"token-audience: the token is not valid for {names.REPORTS_AUDIENCE}",
            )
        expected = f"system:serviceaccount:{self._namespace}:{names.pool_object_name(request.pool)}"
        if user.name != expected:
            _refuse(
                context,
                grpc.StatusCode.PERMISSION_DENIED,
                f"reports of pool {request.pool[:60]} come from {expected[:200]}, not from {user.name}",
            )
        if not user.node or user.node != request.node:
            _refuse(
                context,
                grpc.StatusCode.PERMISSION_DENIED,
                f"the token belongs to a pod on node {user.node or '(none)'}: a report for node "
                f"{request.node[:200]} is not taken",
            )
        self._changed(self._store.put(request), request)
        return Ack(interval_seconds=round(self._store.interval))


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, words: str) -> NoReturn:
    if code is grpc.StatusCode.PERMISSION_DENIED:
        logger.warning("a report was refused", extra={"reason": words, "peer": context.peer()})
    context.abort(code, words)
    raise AssertionError("abort raises")
