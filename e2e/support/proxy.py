"""A proxy between a client and the apiserver that fails on purpose: at a given write, on watches, or altogether.

    with FaultProxy(upstream="https://10.245.0.10:6443", authority=path_of_ca) as proxy:
        start an operator whose kubeconfig says `server: proxy.url`
        proxy.at_write(3, "before", operator.kill)       the third write never arrives, and the operator is killed
        proxy.at_write(3, "after", operator.kill)        it arrives, and its answer does not
        proxy.silence_watches()                          watches stay open and say nothing more
        proxy.partition()                                nothing gets through, open requests break
        proxy.heal()

It serves plain HTTP on this machine, or HTTPS with `certificate`, and passes the client's token on.
"""

import asyncio
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from e2e.cluster.certificates import Pair

When = Literal["before", "after"]
WRITES = ("POST", "PUT", "PATCH", "DELETE")
UNCOUNTED = ("/leases", "/events", "/tokenreviews", "/subjectaccessreviews", "/selfsubjectaccessreviews")
"""Paths whose writes are not counted: what an operator writes again and again, and what only asks."""

HOP = frozenset({"connection", "host", "keep-alive", "transfer-encoding", "content-length", "accept-encoding"})
"""Headers that concern one connection, and are not passed on. No answer is compressed, so that it can be streamed."""

START_SECONDS = 10.0


@dataclass(frozen=True)
class Seen:
    """A request that came: `write` is its number among the counted writes, from 1; 0 for all others."""

    method: str
    path: str
    agent: str
    write: int


@dataclass(frozen=True)
class Fault:
    """What is to happen at one of the writes."""

    write: int
    when: When
    action: Callable[[], None]


class FaultProxy:
    """Passes requests on until told otherwise. Its methods may be called from any thread.

    The lock guards the counters, the faults and the list of requests; it is held for no longer than it takes to read
    or change them.
    """

    def __init__(
        self, upstream: str, authority: Path, *, host: str = "127.0.0.1", certificate: Pair | None = None
    ) -> None:
        self._upstream = upstream
        self._authority = authority
        self._host = host
        self._certificate = certificate
        self._lock = threading.Lock()
        self._seen: list[Seen] = []
        self._writes = 0
        self._faults: list[Fault] = []
        self._silent = threading.Event()
        self._cut = threading.Event()
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy")
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._port = 0
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"{'http' if self._certificate is None else 'https'}://{self._host}:{self._port}"

    def seen(self) -> list[Seen]:
        """The requests that came so far."""
        with self._lock:
            return list(self._seen)

    def writes(self) -> list[Seen]:
        """The counted writes that came so far."""
        return [each for each in self.seen() if each.write]

    def forget(self) -> None:
        """Begins to count at nothing, without any fault."""
        with self._lock:
            self._seen.clear()
            self._faults.clear()
            self._writes = 0

    def at_write(self, write: int, when: When, action: Callable[[], None]) -> None:
        """Lets the write with this number fail, before or after the apiserver has it.

        `action` is called on a thread of its own at that moment; the client's connection breaks after it.
        """
        with self._lock:
            self._faults.append(Fault(write, when, action))

    def silence_watches(self) -> None:
        """From now on no watch delivers anything; new ones begin and say nothing."""
        self._silent.set()

    def partition(self) -> None:
        """From now on nothing gets through. What is open breaks."""
        self._cut.set()
        self._loop.call_soon_threadsafe(self._break_all)

    def heal(self) -> None:
        """Everything gets through again. Watches that were silent end, as their events are lost."""
        silent = self._silent.is_set()
        self._silent.clear()
        self._cut.clear()
        if silent:
            self._loop.call_soon_threadsafe(self._break_all)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or self._failure is not None:
            raise RuntimeError(f"the proxy did not start: {self._failure}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # told to the thread that waits in __enter__
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        context = ssl.create_default_context(cafile=str(self._authority))
        # no limits: a client may hold many watches, each for half an hour
        connector, timeout = TCPConnector(ssl=context, limit=0), ClientTimeout(total=None)
        async with ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            application = web.Application(client_max_size=64 << 20)

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(session, request)

            application.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
            await runner.setup()
            served = None
            if self._certificate is not None:
                served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                served.load_cert_chain(self._certificate.certificate, self._certificate.key)
            await web.TCPSite(runner, self._host, 0, ssl_context=served).start()
            self._port = runner.addresses[0][1]
            self._ready.set()
            await self._stop.wait()
            self._break_all()
            await runner.cleanup()

    def _break_all(self) -> None:
        for task in self._open:
            task.cancel()

    def _note(self, request: web.Request) -> tuple[Seen, Fault | None]:
        with self._lock:
            counted = request.method in WRITES and not any(part in request.path for part in UNCOUNTED)
            self._writes += counted
            seen = Seen(
                request.method,
                request.path_qs,
                request.headers.get("User-Agent", ""),
                self._writes if counted else 0,
            )
            self._seen.append(seen)
            return seen, next((fault for fault in self._faults if counted and fault.write == seen.write), None)

    async def _handle(self, session: ClientSession, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            return await self._pass_on(session, request)
        except asyncio.CancelledError:
            return broken(request)
        except (ClientError, ConnectionError):
            return broken(request)
        finally:
            self._open.discard(task)

    async def _pass_on(self, session: ClientSession, request: web.Request) -> web.StreamResponse:
        if self._cut.is_set():
            return broken(request)
        _, fault = self._note(request)
        body = await request.read()
        if fault is not None and fault.when == "before":
            await asyncio.to_thread(fault.action)
            return broken(request)
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP]
        url = f"{self._upstream}{request.raw_path}"
        asked = session.request(
            request.method,
            url,
            headers=headers,
            data=body or None,
            skip_auto_headers=("Content-Type", "User-Agent", "Accept"),
            allow_redirects=False,
        )
        async with asked as answer:
            if fault is not None:
                await answer.read()
                await asyncio.to_thread(fault.action)
                return broken(request)
            response = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in HOP:
                    response.headers.add(name, value)
            await response.prepare(request)
            watch = request.query.get("watch", "") in ("true", "1")
            async for chunk in answer.content.iter_any():
                if watch and self._silent.is_set():
                    continue  # lost, as on a connection that died without a word
                await response.write(chunk)
            await response.write_eof()
            return response


def broken(request: web.Request) -> web.StreamResponse:
    """Ends the client's connection without an answer. What is returned goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)
