"""Saving and restoring pages of a GPU, against one large copy of the same bytes in the same run.

Every ratio is the median of rounds in which the two are measured by turns, because clocks drift. Nothing is measured
inside the agent: a restore lasts from the client's call until its handle says that all bytes are in place.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import gpu_beside, gpu_peer
from bench.figures import Figure, machine, percentile, say
from orbitkv import QueryReady, RestoreStatus, SaveStatus
from tools.harness.agent import AgentProcess
from tools.harness.memory_engine import numbered_hashes, temporary_agent

RESULTS: Final = Path(__file__).parent / "results" / "gpu.json"
ROUNDS: Final = 5
PAGES: Final = 2048
LARGE: Final = 1 << 30
"""Bytes of the one large copy that is the limit."""


def why_not() -> str:
    """Why this machine cannot run it, "" when it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "there is no GPU here"


def gpus() -> int:
    """GPUs of this machine."""
    import torch

    return int(torch.cuda.device_count())


class Limit:
    """What one large copy reaches: the same bytes, pinned memory, one call. For the GPU that is current when it is
    made."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._device = torch.cuda.current_device()
        self._host = [torch.empty(LARGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._gpu = [torch.empty(LARGE, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)]

    def restore(self) -> float:
        """GB/s to the GPU."""
        return self._timed(lambda: self._gpu[0].copy_(self._host[0], non_blocking=True), LARGE)

    def save(self) -> float:
        """GB/s from the GPU."""
        return self._timed(lambda: self._host[0].copy_(self._gpu[0], non_blocking=True), LARGE)

    def both(self) -> float:
        """GB/s in both directions at once, in all."""

        def copies() -> None:
            with self._torch.cuda.stream(self._streams[0]):
                self._gpu[0].copy_(self._host[0], non_blocking=True)
            with self._torch.cuda.stream(self._streams[1]):
                self._host[1].copy_(self._gpu[1], non_blocking=True)

        return self._timed(copies, 2 * LARGE)

    def start_restore(self) -> None:
        """Copy to the GPU; `wait` tells the end."""
        with self._torch.cuda.device(self._device):
            self._gpu[0].copy_(self._host[0], non_blocking=True)

    def wait(self) -> None:
        """Wait for all copies of this GPU."""
        self._torch.cuda.synchronize(self._device)

    def _timed(self, copy: Callable[[], Any], size: int) -> float:
        self._torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        self._torch.cuda.synchronize()
        return size / (time.perf_counter() - start) / 1e9


class Bench:
    """Pages of one shape, all of them kept by the agent."""

    def __init__(self, agent: AgentProcess, pages: int, **shape: Any) -> None:
        from tools.harness.gpu_engine import GpuEngine, Shape

        self.engine = GpuEngine(agent.socket_path, Shape(blocks=2 * pages, **shape))
        self.pages = pages
        self.bytes = pages * self.engine.shape.page_bytes
        self._random = np.random.default_rng(1)
        self._saved = 0
        self._asked = 0
        self.dropped = 0
        self.hashes = self.fresh()
        self.engine.save(self.hashes, self.blocks())

    def fill(self, agent: AgentProcess) -> None:
        """Save until all of the agent's memory is there, pinned and in use: from then on a save evicts."""
        while True:
            pool = agent.status()["pool"]
            if pool["prefaulted_bytes"] >= pool["capacity_bytes"] * 0.95 and pool["alloc_failures"]:
                break
            self.engine.save(self.fresh(), self.blocks())
        self.hashes = self.fresh()
        self.engine.save(self.hashes, self.blocks())

    def fresh(self) -> Any:
        """Hashes that were never saved."""
        self._saved += 1
        return numbered_hashes(self.pages, first=self._saved * self.pages)

    def blocks(self) -> np.ndarray[Any, Any]:
        """Scattered blocks."""
        return self._random.permutation(2 * self.pages)[: self.pages]

    def start_restore(self, *, layer_order: bool = False) -> Any:
        """Restore all pages into scattered blocks."""
        _, lease = self.engine.lease(self.hashes)
        client, registration, blocks = self.engine.client, self.engine.registration, self.blocks()
        start = time.perf_counter()
        return start, client.start_restore(registration, lease, [blocks], layer_order=layer_order)

    def end_restore(self, started: float, handle: Any) -> float:
        """Wait for it; seconds."""
        if self.engine.client.wait_restore(handle, timeout=60) is not RestoreStatus.DONE:
            raise RuntimeError(f"a restore failed: {handle.error}")
        return time.perf_counter() - started

    def restore(self) -> float:
        """GB/s of a restore."""
        return self.bytes / self.end_restore(*self.start_restore()) / 1e9

    def ask(self, pages: int = 64) -> float:
        """Ask for pages, and give them back; seconds until the answer."""
        self._asked += 1
        hashes = self.hashes[:pages]
        start = time.perf_counter()
        answer = self.engine.client.query_prefetch(f"ask-{self._asked}", [hashes], instance=self.engine.instance)
        seconds = time.perf_counter() - start
        if not isinstance(answer, QueryReady):
            raise RuntimeError(f"pages that are there were not found: {answer}")
        self.engine.client.release(answer)
        return seconds

    def save(self) -> float:
        """GB/s of a save of pages that are new, until the engine's blocks are free."""
        started, handles = self.start_save()
        return self.bytes / self.end_save(started, handles) / 1e9

    def start_save(self) -> tuple[float, Any]:
        """Save as many new pages."""
        hashes, blocks = self.fresh(), self.blocks()
        start = time.perf_counter()
        return start, self.engine.start_saves(hashes, blocks)

    def end_save(self, started: float, handles: Any) -> float:
        """Wait until all blocks are free; seconds."""
        client = self.engine.client
        for handle in handles:
            client.wait_save_copied(handle, timeout=60)
        seconds = time.perf_counter() - started
        for handle in handles:
            if client.wait_save(handle, timeout=60) is not SaveStatus.COMMITTED:
                raise RuntimeError(f"a save ended as {handle.status.value}: {handle.error}")
            self.dropped += sum(handle.dropped.values())
        return seconds

    def close(self) -> None:
        """Give the GPU's memory back."""
        import torch

        self.engine.close()
        del self.engine
        torch.cuda.empty_cache()


def all_is_pinned(agent: AgentProcess) -> None:
    """Wait until the agent has all of its memory: while it pins some, copies wait now and then."""
    agent.wait(
        lambda status: status["pool"]["prefaulted_bytes"] >= status["pool"]["capacity_bytes"] * 0.95,
        "all memory is pinned",
        120,
    )


def cpu_seconds(process: int) -> float:
    """Processor time that a process used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def alternate(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Measure by turns; the first round is not counted."""
    found: list[list[float]] = [[] for _ in measures]
    for turn in range(rounds + 1):
        for measure, values in zip(measures, found, strict=True):
            value = measure()
            if turn:
                values.append(value)
    return found


class Report:
    """The figures so far."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def add(self, *figure: Any, **more: Any) -> None:
        """Add a figure as it is."""
        self.figures.append(Figure(*figure, **more))

    def ratio(self, name: str, values: list[float], limits: list[float], bound: float | None, note: str) -> None:
        """Add a speed and its ratio to the limit, from rounds of both."""
        value, best = statistics.median(values), statistics.median(limits)
        say(f"  {name}: {value / best:.3f} ({value:.1f} of {best:.1f} GB/s; {note})")
        self.add(name.replace("_ratio", "_gb_s"), value, "GB/s", baseline=best)
        self.add(name, value / best, "ratio", bound=bound, at_least=True)


def whole_pages(agent: AgentProcess, limit: Limit, report: Report) -> None:
    """2,048 scattered pages of 2.25 MiB, one piece each, in either direction and in both."""
    bench = Bench(agent, PAGES)
    bench.fill(agent)
    values = alternate(ROUNDS, bench.restore, limit.restore, bench.save, limit.save)
    report.ratio("restore_ratio", values[0], values[1], 0.97, "2,048 scattered pages")
    report.ratio("save_ratio", values[2], values[3], 0.97, "2,048 scattered pages")

    def both() -> float:
        restore, save = bench.start_restore(), bench.start_save()
        seconds = max(bench.end_restore(*restore), bench.end_save(*save))
        return 2 * bench.bytes / seconds / 1e9

    values = alternate(ROUNDS, both, limit.both)
    report.ratio("duplex_ratio", values[0], values[1], 0.97, "both directions at once")
    used, started = cpu_seconds(agent.pid), time.perf_counter()
    for _ in range(20):
        bench.restore()
    cores = (cpu_seconds(agent.pid) - used) / (time.perf_counter() - started)
    report.add("cpu_cores", cores, "cores of the agent at full restore speed")
    eight_pages(bench, limit, report)
    for pages in (64, 1024):
        report.add(f"query_{pages}_us", statistics.median(bench.ask(pages) for _ in range(300)) * 1e6, "us")
    bench.close()


def eight_pages(bench: Bench, limit: Limit, report: Report) -> None:
    """8 pages on an idle GPU: from the call until the status says so, which is asked without a pause, and waited for in
    the kernel."""
    client, small = bench.engine.client, bench.hashes[:8]
    polled: list[float] = []
    waited: list[float] = []
    for turn in range(1040):
        blocks = bench.blocks()[:8]
        _, lease = bench.engine.lease(small)
        start = time.perf_counter()
        handle = client.start_restore(bench.engine.registration, lease, [blocks])
        if turn % 2:
            client.wait_restore(handle, timeout=60)
        else:
            while not client.poll_restore(handle).final:
                os.sched_yield()  # the client's own thread needs the interpreter too
        seconds = time.perf_counter() - start
        if client.wait_restore(handle, timeout=60) is not RestoreStatus.DONE:
            raise RuntimeError(f"a restore failed: {handle.error}")
        if turn >= 40:
            (waited if turn % 2 else polled).append(seconds * 1e6)
    least = 8 * bench.engine.shape.page_bytes / statistics.median(alternate(ROUNDS, limit.restore)[0]) / 1e3
    report.add("restore_8_us", statistics.median(polled), "us", baseline=least, bound=450)
    report.add("restore_8_p99_us", percentile(polled, 99), "us")
    report.add("restore_8_waited_us", statistics.median(waited), "us", baseline=least)


def small_behind_large(agent: AgentProcess, report: Report) -> None:
    """8 pages while 10 GB are being restored, in the usual order and layer by layer."""
    bench = Bench(agent, 4400)
    report.add("small_behind_large_ms", behind_large(bench, layer_order=False), "ms", bound=3)
    report.add("small_behind_layered_ms", behind_large(bench, layer_order=True), "ms")
    bench.close()


def behind_large(bench: Bench, *, layer_order: bool) -> float:
    """8 pages while all of them are being restored, ms; median of 10."""
    behind = []
    for _ in range(10):
        large = bench.start_restore(layer_order=layer_order)
        _, lease = bench.engine.lease(bench.hashes[:8])
        time.sleep(0.02)  # in the midst of it
        start = time.perf_counter()
        handle = bench.engine.client.start_restore(bench.engine.registration, lease, [np.arange(8)])
        behind.append(bench.end_restore(start, handle) * 1e3)
        if large[1].status.final:
            raise RuntimeError("the large restore ended before the small one began")
        bench.end_restore(*large)
    return statistics.median(behind)


def small_pieces(agent: AgentProcess, limit: Limit, report: Report) -> None:
    """Pages of 144 KiB, and pages in segments of 16, 32 and 64 KiB."""
    for name, bound, note, pages, shape in (
        ("small_page", 0.93, "144 KiB", 16384, {"layers": 9, "heads": 2}),
        ("segments_16k", None, "16 tokens a page", 1024, {"layout": "LBNHC", "tokens": 16, "heads": 2}),
        ("segments_32k", None, "32 tokens a page", 1024, {"layout": "LBNHC", "tokens": 32, "heads": 2}),
        (
            "segments_64k",
            None,
            "64 tokens a page avoid small segments",
            1024,
            {"layout": "LBNHC", "tokens": 64, "heads": 2},
        ),
    ):
        bench = Bench(agent, pages, **shape)
        for _ in range(3):  # pages of the size before make room
            bench.engine.save(bench.fresh(), bench.blocks())
        bench.hashes = bench.fresh()
        bench.engine.save(bench.hashes, bench.blocks())
        values = alternate(ROUNDS, bench.restore, limit.restore, bench.save, limit.save)
        report.ratio(f"{name}_ratio", values[0], values[1], bound, f"{note}, restore")
        left = f", {bench.dropped} of {6 * pages} pages dropped" if bench.dropped else ""
        report.ratio(f"{name}_save_ratio", values[2], values[3], None, f"{note}, save{left}")
        bench.close()


def two_gpus(agent: AgentProcess, report: Report) -> None:
    """A restore to each of two GPUs at once, and what queries cost meanwhile."""
    import torch

    limits: list[Limit] = []
    benches: list[Bench] = []
    for number in range(2):
        with torch.cuda.device(number):
            limits.append(Limit())
            benches.append(Bench(agent, PAGES))
    all_is_pinned(agent)
    queries: list[float] = []

    def large() -> float:
        start = time.perf_counter()
        for limit in limits:
            limit.start_restore()
        for limit in limits:
            limit.wait()
        return 2 * LARGE / (time.perf_counter() - start) / 1e9

    def restores() -> float:
        leases = [bench.engine.lease(bench.hashes)[1] for bench in benches]
        start = time.perf_counter()
        handles = [
            bench.engine.client.start_restore(bench.engine.registration, lease, [bench.blocks()])
            for bench, lease in zip(benches, leases, strict=True)
        ]
        while not all(handle.status.final for handle in handles):
            queries.append(benches[0].ask())
        seconds = max(bench.end_restore(start, handle) for bench, handle in zip(benches, handles, strict=True))
        return sum(bench.bytes for bench in benches) / seconds / 1e9

    values = alternate(ROUNDS, restores, large)
    report.ratio("two_gpu_ratio", values[0], values[1], 0.95, "to two GPUs at once")
    report.add("two_gpu_query_p99_ms", percentile(queries, 99) * 1e3, "ms of 64 pages meanwhile", bound=2)
    for bench in benches:
        bench.close()


def run() -> list[Figure]:
    """See the module.

    Raises:
        RuntimeError: there is no GPU, or a copy failed.
    """
    if why_not():
        raise RuntimeError(f"bench gpu: {why_not()}")
    report, limit = Report(), Limit()
    with temporary_agent(mode="cuda", pool="24GiB") as agent:
        whole_pages(agent, limit, report)
        small_behind_large(agent, report)
        small_pieces(agent, limit, report)
        for context in agent.status()["transfer"]["gpu_context_bytes"].values():
            report.add("gpu_context_mib", context / 2**20, "MiB of a GPU", bound=600)
    if gpus() > 1:
        with temporary_agent(mode="cuda", pool="16GiB") as agent:  # two restores take no more of it than leases may
            two_gpus(agent, report)
    keep(report.figures)  # what follows starts large programs, and may take long
    why = gpu_beside.why_not()
    if why:
        say(f"  beside_engine_ratio: left out, because {why}")
    else:
        with temporary_agent(mode="cuda", pool="8GiB") as agent:
            bench = Bench(agent, PAGES)
            all_is_pinned(agent)
            gpu_beside.beside_engine(bench, limit, report)
            bench.close()
        keep(report.figures)
    why = gpu_peer.why_not()
    if why:
        say(f"  pegaflow: left out, because {why}")
    else:
        gpu_peer.pegaflow(report)
    keep(report.figures)
    return report.figures


def keep(figures: list[Figure], bench: str = "gpu", results: Path = RESULTS) -> None:
    """Write the figures of a bench down with the machine, the date and the commit."""
    import torch

    described = {
        "bench": bench,
        "machine": f"{torch.cuda.get_device_name()}, {machine()}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("ORBITKV_COMMIT") or _commit(),
        "figures": [figure.as_json() for figure in figures],
    }
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(described) + "\n")
    say(f"  kept in {results}")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
