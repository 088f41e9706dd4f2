"""`vllm serve` as users start it, with an HTTP client for what the tests ask of it."""

import json
import os
import socket
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.harness.engine import ROOT, engine_environment, engine_python, sum_metric
from tools.harness.process import ManagedProcess, wait_until

START_SECONDS = 300.0


def installed_as_entry_point(folder: Path) -> dict[str, str]:
    """Make OrbitKV's entry points known in `folder`, as an installation would; return the environment to find them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"orbitkv-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: orbitkv\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), engine_environment()["PYTHONPATH"]])}


class ServeProcess(ManagedProcess):
    """`vllm serve MODEL` on a free port of the loopback interface, serving when `ready()` returns."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        connector: Mapping[str, Any] | None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        name: str = "serve",
    ) -> None:
        self.port = free_port()
        self.model = str(model)
        command = [engine_python(), "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--block-size", "32", "--enforce-eager"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "16", "--num-gpu-blocks-override", "1024", *arguments]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        chosen = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", **(environment or {})}
        super().__init__(name, command, folder / f"{name}.log", engine_environment(chosen))

    def ready(self, timeout: float = START_SECONDS) -> "ServeProcess":
        """Waits until the server is healthy. Raises ProcessError with its log if it does not start."""
        try:
            wait_until(self._healthy, "vllm serve is healthy", timeout, interval=0.2)
        except TimeoutError:
            raise self.failure(f"was not healthy within {timeout:g} s") from None
        return self

    def _healthy(self) -> bool:
        if not self.running():
            raise self.failure("did not start")
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def request(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, str]:
        """One HTTP request with a JSON body. Returns status and text; raises OSError if there is no answer."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.data = json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, tokens: Sequence[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """One greedy completion of a prompt of token ids, as the API answers it. Raises ProcessError if it fails."""
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            **more,
        }
        status, text = self.request("POST", "/v1/completions", body)
        if status != 200:
            raise self.failure(f"answered a completion with {status}: {text[:500]}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def metrics(self) -> str:
        """The text of /metrics."""
        return self.request("GET", "/metrics")[1]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series that carry these labels; 0 if there is none."""
        return sum_metric(self.metrics(), name, **labels)

    def reset(self, *, external: bool = False) -> int:
        """Resets the prefix cache, with `external` the one behind the connector too. Returns the HTTP status."""
        return self.request("POST", f"/reset_prefix_cache?reset_external={str(external).lower()}")[0]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
