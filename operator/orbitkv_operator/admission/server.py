"""The HTTPS server that the apiserver asks: reads a body, answers at once, and never holds a pod up."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from orbitkv_operator.admission.metrics import WebhookMetrics
from orbitkv_operator.admission.review import Reviewer, ReviewError, read
from orbitkv_operator.certificates import Serving

logger = logging.getLogger(__name__)

PATH: Final = "/mutate"
LARGEST_BODY: Final = 16 << 20
"""The apiserver takes objects up to 3 MiB; a review has two of them, written out."""
BODIES: Final = 3 * LARGEST_BODY
"""Bytes of bodies that are read or answered at one time: they come from anybody, and must not take all memory. Beyond
it the largest of the address that has most is given up."""
BODY_SECONDS: Final = 5.0
KEEP_ALIVE_SECONDS: Final = 300.0
"""Longer than the apiserver keeps an idle connection: whoever closes first must not be us, or a review gets lost."""
NAMESPACE_SECONDS: Final = 0.6
"""How long a pod waits for its namespace to be shown by the watch, where both are made at once."""
LOOK_AGAIN_SECONDS: Final = 0.02
CLOSE_SECONDS: Final = 5.0


class AdmissionServer:
    """Serves from the first certificate (`show`) to `close`, in a thread with an event loop of its own."""

    def __init__(self, port: int, reviewer: Reviewer, metrics: WebhookMetrics) -> None:
        self._wanted_port = port
        self._reviewer = reviewer
        self._metrics = metrics
        # For the loop only. Invariant: `_bodies` are those that are being read or answered, of `_held` bytes together.
        self._bodies: dict[_Body, None] = {}
        self._held = 0
        self._context: ssl.SSLContext | None = None
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()
        self.port = 0
        """The port that is bound; 0: none yet."""

    def show(self, serving: Serving) -> None:
        """Show this certificate from now on; the first one opens the port.

        Raises:
            OSError: the port cannot be had; the message names it. Or the certificate cannot be used (ssl.SSLError).
        """
        self._call(self._show(serving)).result(CLOSE_SECONDS)

    def close(self) -> None:
        """Finish what is being answered, and end."""
        if self._runner is not None:
            self._call(self._runner.cleanup()).result(2 * CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _call(self, what: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _show(self, serving: Serving) -> None:
        """In the loop, where handshakes are: a context must not change under one."""
        context = self._context or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:  # the library reads it from files only
            pair = Path(folder, "tls.pem")
            pair.touch(0o600)
            pair.write_bytes(serving.certificate + b"\n" + serving.key)
            context.load_cert_chain(pair)
        if self._context is None:
            await self._open(context)
            self._context = context

    async def _open(self, context: ssl.SSLContext) -> None:
        app = web.Application()
        app.router.add_post(PATH, self._answer)
        runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            shutdown_timeout=CLOSE_SECONDS,
            auto_decompress=False,  # the apiserver compresses nothing, and a little could become much
        )
        await runner.setup()
        try:
            listening = _listen(self._wanted_port)
        except OSError as error:
            await runner.cleanup()
            raise OSError(f"port {self._wanted_port} for reviews cannot be had: {error.strerror}") from error
        await web.SockSite(runner, listening, ssl_context=context, backlog=1024).start()
        self._runner = runner
        self.port = int(listening.getsockname()[1])

    async def _answer(self, request: web.Request) -> web.Response:
        body = _Body(request)
        self._bodies[body] = None
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._read(body)
            return await self._review(body.data)
        except TimeoutError:
            self._metrics.malformed()
            return web.Response(status=408, text="the body did not come in time\n")
        except (ConnectionError, web.RequestPayloadError):  # whoever sent it is gone, or was given up
            self._metrics.malformed()
            return web.Response(status=400)
        finally:
            del self._bodies[body]
            self._held -= len(body.data)

    async def _read(self, body: _Body) -> None:
        async for piece in body.request.content.iter_any():
            body.data += piece
            self._held += len(piece)
            if len(body.data) > LARGEST_BODY:
                raise web.HTTPRequestEntityTooLarge(LARGEST_BODY, len(body.data))
            while self._held > BODIES:
                self._give_up_largest()
            if body.given_up:
                raise ConnectionAbortedError

    def _give_up_largest(self) -> None:
        of_each: Counter[str] = Counter()
        for body in self._bodies:
            of_each[body.sender] += len(body.data)
        ((most, _),) = of_each.most_common(1)
        largest = max((body for body in self._bodies if body.sender == most), key=lambda body: len(body.data))
        logger.warning("a body was given up: too many are coming in", extra={"sender": most})
        self._held -= len(largest.data)
        largest.give_up()

    async def _review(self, body: bytearray) -> web.Response:
        began = time.perf_counter()
        try:
            review = read(body)
            while self._reviewer.waits_for(review) and time.perf_counter() - began < NAMESPACE_SECONDS:
                await asyncio.sleep(LOOK_AGAIN_SECONDS)
            answer = self._reviewer.answer(review)
        except ReviewError as error:
            self._metrics.malformed()
            logger.warning("what came is no review", extra={"error": str(error), "bytes": len(body)})
            return web.Response(status=400, text=f"{error}\n")
        self._metrics.reviewed(answer.outcome, answer.reason, time.perf_counter() - began)
        return web.Response(body=msgspec.json.encode(answer.body), content_type="application/json")


class _Body:
    """A body that is being read or answered."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.sender = request.remote or ""
        self.data = bytearray()
        self.given_up = False

    def give_up(self) -> None:
        """End the connection."""
        self.given_up = True
        self.data = bytearray()
        if self.request.transport is not None:
            self.request.transport.abort()


def _listen(port: int) -> socket.socket:
    """Return a socket for all addresses, of both versions where the machine has both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 may be switched off
                raise
    return socket.create_server(("", port))
