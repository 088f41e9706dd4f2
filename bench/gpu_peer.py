"""PegaFlow on the same pages: another cache for vLLM, whose server copies by kernels or by copies of each piece."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.figures import say
from tools.harness.process import wait_until

if TYPE_CHECKING:
    from bench.gpu import Report

BACKENDS: Final = ("kernel", "direct")
URL: Final = "http://127.0.0.1:50055"
LAYERS: Final = 36
BLOCKS: Final = 2048
PAGES: Final = 1024
PIECE: Final = 32 << 10
"""Bytes of K, and of V, of a layer in a page."""
ROUNDS: Final = 4
SMALL: Final = 8
START_S: Final = 90.0
SAVED_S: Final = 20.0


def why_not() -> str:
    """Why this machine cannot run it, "" when it can."""
    return "" if importlib.util.find_spec("pegaflow") else "pegaflow is not installed"


@contextmanager
def served(folder: Path) -> Iterator[Any]:
    """A running server; its client."""
    package, binaries = importlib.import_module("pegaflow"), importlib.import_module("pegaflow._bin_utils")
    program = binaries.find_binary("pegaflow-server-py")
    command = [program, "--pool-size", "24gb", "--log-level", "warn", "--devices", "0"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=binaries.binary_env(), stdout=log, stderr=subprocess.STDOUT)
    try:
        clients: list[Any] = []
        refused: list[Exception] = []

        def healthy() -> bool:
            if server.poll() is not None:
                raise RuntimeError(f"PegaFlow's server ended: {(folder / 'server.log').read_text()[-2000:]}")
            try:
                clients[:] = [package.EngineRpcClient(URL)]
                return bool(clients[0].health()[0])
            except Exception as error:  # it does not listen yet, most likely; its errors have no type of their own
                refused[:] = [error]
                return False

        try:
            wait_until(healthy, "PegaFlow's server answers", START_S)
        except TimeoutError as error:
            raise error from (refused[0] if refused else None)
        yield clients[0]
    finally:
        server.terminate()
        server.wait(30)


class Peer:
    """Pages of the shape of `bench.gpu`'s under one of its backends."""

    def __init__(self, client: Any, backend: str, tensors: list[Any]) -> None:
        wrapper = importlib.import_module("pegaflow.ipc_wrapper").CudaIPCWrapper
        package = importlib.import_module("pegaflow")
        self._state, self._ready = package.PyLoadState, importlib.import_module("pegaflow.pegaflow").QueryReady
        self._client, self._name, self._asked = client, f"bench-{backend}", 0
        self._layers = [f"layer-{number}" for number in range(LAYERS)]
        client.start_session_watcher(self._name, self._name, 1, 1)
        time.sleep(0.5)  # the server does not say when it has taken the session
        client.register_context_batch(
            *(self._name, self._name, 0, 0, 1, 1, 0, self._layers),
            [pickle.dumps(wrapper(tensor)) for tensor in tensors],
            *([BLOCKS] * LAYERS, [PIECE] * LAYERS, [BLOCKS * PIECE] * LAYERS, [2] * LAYERS, backend, False),
            layer_group_ids=[0] * LAYERS,
        )

    def save(self, hashes: list[bytes], blocks: list[int]) -> float:
        """Save pages; seconds."""
        start = time.perf_counter()
        self._client.save(self._name, 0, 0, 0, [(layer, blocks, hashes) for layer in self._layers])
        return time.perf_counter() - start

    def ask(self, hashes: list[bytes]) -> tuple[float, Any]:
        """Ask for pages; seconds until the answer, and the answer."""
        self._asked += 1
        start = time.perf_counter()
        answer = self._client.query_prefetch(self._name, hashes, f"ask-{self._asked}")
        return time.perf_counter() - start, answer

    def found(self, hashes: list[bytes]) -> Any:
        """Ask until all of them are there; their lease."""
        answers: list[Any] = []

        def all_there() -> bool:
            answers[:] = [self.ask(hashes)[1]]
            return isinstance(answers[0], self._ready) and answers[0].num_hit_blocks == len(hashes)

        wait_until(all_there, "PegaFlow has the pages", SAVED_S)
        return answers[0].lease

    def query(self, hashes: list[bytes]) -> float:
        """Ask, and give back what was found; seconds until the answer."""
        seconds, answer = self.ask(hashes)
        if isinstance(answer, self._ready):
            self._client.release(answer.lease)
        return seconds

    def restore(self, hashes: list[bytes], blocks: list[int]) -> float:
        """Restore pages that are there; seconds until they are in place."""
        lease, state = self.found(hashes), self._state()
        start = time.perf_counter()
        self._client.load(self._name, 0, 0, state.shm_name(), [self._layers], [(lease, [blocks])])
        while not state.is_ready():
            pass
        return time.perf_counter() - start

    def close(self) -> None:
        """Leave the server."""
        self._client.unregister_context(self._name)


def pegaflow(report: Report) -> None:
    """Its speeds and times, beside those of the same name without `pegaflow_`: the better of its two backends."""
    import torch

    tensors = [torch.zeros(2, BLOCKS, PIECE, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
    size = PAGES * LAYERS * 2 * PIECE
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as client:
        for backend in BACKENDS:
            peer = Peer(client, backend, tensors)
            found: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                hashes = [secrets.token_bytes(32) for _ in range(PAGES)]
                blocks = torch.randperm(BLOCKS).tolist()
                torch.cuda.synchronize()
                found.setdefault("save_gb_s", []).append(size / peer.save(hashes, blocks[:PAGES]) / 1e9)
                found.setdefault("restore_gb_s", []).append(size / peer.restore(hashes, blocks[PAGES:]) / 1e9)
            for _ in range(200):
                found.setdefault("restore_8_us", []).append(peer.restore(hashes[:SMALL], blocks[:SMALL]) * 1e6)
                found.setdefault("query_64_us", []).append(peer.query(hashes[:64]) * 1e6)
                found.setdefault("query_1024_us", []).append(peer.query(hashes) * 1e6)
            peer.close()
            for name, values in found.items():
                value = statistics.median(values)
                say(f"  pegaflow, {backend}: {name} {value:.1f}")
                better = max if name.endswith("gb_s") else min
                best[name] = better(best.get(name, value), value)
    for name, value in best.items():
        report.add(f"pegaflow_{name}", value, "GB/s" if name.endswith("gb_s") else "us")
    del tensors
    torch.cuda.empty_cache()
