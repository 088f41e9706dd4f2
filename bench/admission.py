"""What the admission webhook costs: a review, the start of a pod, and ten thousand pods.

The webhook's program runs on one CPU, the load on another. Reviews are sent in an open loop (at their times, whatever
became of those before) and measured from the time at which each was due. The other figures need the cluster of
`make cluster`, and are left out, loudly, where it does not run.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.figures import Figure, percentile, told
from orbitkv_operator.admission.server import PATH
from orbitkv_operator.admission.tests.pods import NAMESPACE, table
from orbitkv_operator.certificates import Serving, read, renewed

RATE: Final = 200
SECONDS: Final = float(os.environ.get("ORBITKV_BENCH_SECONDS", "60"))
CONNECTIONS: Final = 16
SERVER: Final = ("localhost",)


def run() -> list[Figure]:
    """Measure what this machine can."""
    from bench import admission_cluster

    return [*told(reviews()), *admission_cluster.run()]


# -------------------------------------------------------------------------------------------------------------- reviews


def reviews() -> list[Figure]:
    """Measure the latency of reviews over TLS, at a steady rate."""
    serving = read(renewed(None, SERVER))
    cpus = sorted(os.sched_getaffinity(0))
    with webhook(serving, cpus[0]) as port:
        os.sched_setaffinity(0, cpus[1:] or cpus)
        try:
            found = asyncio.run(_load(port, serving, _bodies()))
        finally:
            os.sched_setaffinity(0, cpus)
    latencies = [1000 * each for each in found.latencies]
    return [
        Figure("review_p50_ms", percentile(latencies, 50), "ms", bound=5),
        Figure("review_p99_ms", percentile(latencies, 99), "ms", bound=50),
        Figure("review_errors", found.errors, "reviews", bound=0),
        Figure("review_rate", len(latencies) / found.seconds, "reviews/s", baseline=RATE),
    ]


@contextmanager
def webhook(serving: Serving, cpu: int) -> Iterator[int]:
    """Run the webhook's server in a process of its own on one CPU; yield its port."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tls.crt").write_bytes(serving.certificate)
        (Path(folder) / "tls.key").write_bytes(serving.key)
        (Path(folder) / "ca.crt").write_bytes(serving.bundle)
        command = [sys.executable, "-m", "bench.admission_server", folder]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            os.sched_setaffinity(process.pid, {cpu})
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(20)


def _bodies() -> list[bytes]:
    """Return a review of each template."""
    return [
        json.dumps(
            {
                "kind": "AdmissionReview",
                "apiVersion": "admission.k8s.io/v1",
                "request": {
                    "uid": f"review-{number}",
                    "kind": {"group": "", "version": "v1", "kind": "Pod"},
                    "resource": {"group": "", "version": "v1", "resource": "pods"},
                    "operation": "CREATE",
                    "namespace": NAMESPACE,
                    "object": row.pod,
                },
            }
        ).encode()
        for number, row in enumerate(table())
    ]


@dataclass
class _Found:
    """What came of a load."""

    latencies: list[float] = field(default_factory=list)
    """Seconds from when each was due."""
    errors: int = 0
    seconds: float = 0.0


async def _load(port: int, serving: Serving, bodies: Sequence[bytes]) -> _Found:
    """Send reviews at their times and wait for the answers."""
    import aiohttp

    context = ssl.create_default_context(cadata=serving.bundle.decode())
    connector = aiohttp.TCPConnector(ssl=context, limit=CONNECTIONS)
    found = _Found()
    url = f"https://{SERVER[0]}:{port}{PATH}"
    async with aiohttp.ClientSession(connector=connector) as session:

        async def send(body: bytes) -> None:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                found.errors += answer.status != 200 or not json.loads(await answer.read())["response"]["allowed"]

        await asyncio.gather(*(send(body) for body in bodies))  # connections are made, and code has run once
        found.errors = 0
        began = time.perf_counter()

        async def send_at(due: float, body: bytes) -> None:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            try:
                await send(body)
            except aiohttp.ClientError:
                found.errors += 1
            found.latencies.append(time.perf_counter() - due)

        count = int(RATE * SECONDS)
        waiting: set[asyncio.Task[None]] = set()
        for number in range(count):
            due = began + number / RATE
            await asyncio.sleep(max(0.0, due - 0.05 - time.perf_counter()))
            task = asyncio.create_task(send_at(due, bodies[number % len(bodies)]))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        await asyncio.gather(*waiting)
        found.seconds = time.perf_counter() - began
    return found
