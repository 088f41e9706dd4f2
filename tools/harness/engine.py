"""A real vLLM engine in a process of its own, and the questions that a test or a demo asks it.

It runs on the CPU, or with ORBITKV_TEST_DEVICE=cuda on a GPU.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.harness.process import ManagedProcess, ProcessError, wait_until

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0
ANSWER_SECONDS = 120.0

DEVICE = os.environ.get("ORBITKV_TEST_DEVICE", "cpu")
"""What engines and agents run on here: "cpu" or "cuda"."""

NURSERY = "ORBITKV_TEST_NURSERY"

ENGINE_ARGUMENTS: dict[str, Any] = {
    "block_size": 32,
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 1024,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
    # Given, so that no engine takes another's memory, which comes and goes beside it, for its own.
    **({"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30} if DEVICE == "cuda" else {}),
    **json.loads(os.environ.get("ORBITKV_TEST_ENGINE_ARGUMENTS", "{}")),
}
"""What every engine here is started with, unless said otherwise (ORBITKV_TEST_ENGINE_ARGUMENTS: more of it, as JSON).
The CPU engine takes blocks of 32 tokens and multiples."""


def engine_python() -> str:
    """The Python that vLLM is installed for: ORBITKV_ENGINE_PYTHON, or the running one."""
    return os.environ.get("ORBITKV_ENGINE_PYTHON") or sys.executable


def engine_environment(extra: Mapping[str, str] | None = None, device: str = DEVICE) -> dict[str, str]:
    """Variables for a process that runs vLLM here: offline, with 1 GiB for the KV cache, and OrbitKV on its path."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "engine_plugins"), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # and one thread: threads bound to busy cores wait for each other
        "OMP_NUM_THREADS": "1",
        # vLLM compiles some of the sampler on first use: 20 s, and it needs a C++ compiler. CUDA graphs need compiling.
        **({"TORCHDYNAMO_DISABLE": "1"} if device == "cpu" else {}),
        "ORBITKV_TEST_DEVICE": device,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the questions about blocks are functions, sent to the ranks
        **(extra or {}),
    }


def orbitkv_connector(socket_path: Path | str, **settings: Any) -> dict[str, Any]:
    """vLLM's configuration of OrbitKV as its connector; `settings` are OrbitKV's own, without the prefix `orbitkv.`."""
    return {
        "kv_connector": "OrbitKVConnector",
        "kv_connector_module_path": "orbitkv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "orbitkv.bootstrap_socket": str(socket_path),
            **{f"orbitkv.{name}": value for name, value in settings.items()},
        },
    }


@dataclass
class Prompt:
    """One request: token ids, and what vLLM is asked to do with them. Decoding is greedy."""

    tokens: list[int]
    max_tokens: int = 8
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    id: str = ""


@dataclass
class Answer:
    """What came of a request. Token counts by source are vLLM's own, of the request's first prefill."""

    tokens: list[int]
    logprobs: list[float] | None
    prompt_logprobs: list[float | None] | None
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    hbm_tokens: int
    orbitkv_tokens: int
    recomputed_tokens: int
    ttft_ms: float
    preemptions: int
    kv_transfer_params: dict[str, Any] | None


@dataclass
class EngineSpec:
    """What to start: a model's folder, vLLM's arguments over the usual ones, a connector or none, environment
    variables."""

    model: Path
    connector: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def first_line(self) -> dict[str, Any]:
        """What the driver reads first."""
        return {"engine": {"model": str(self.model), **ENGINE_ARGUMENTS, **self.arguments}, "connector": self.connector}


class Nursery:
    """A process that has imported vLLM and forks engines, so that each start saves the 15 seconds of that.

    It ends when nobody is connected to it any more. Where ORBITKV_TEST_NURSERY names the socket of another test
    session's, that one is used: sessions side by side then import vLLM once.
    """

    def __init__(self, folder: Path, device: str = DEVICE) -> None:
        shared = os.environ.get(NURSERY)
        self.socket = Path(shared) if shared else folder / "nursery.sock"
        self._process: ManagedProcess | None = None
        if not shared:
            command = [engine_python(), "-m", "tools.harness.engine_driver", "--nursery", str(self.socket)]
            environment = engine_environment(device=device)
            self._process = ManagedProcess("the nursery of engines", command, folder / "nursery.log", environment)
        self._stream: Stream | None = None

    def fork(self, socket_path: Path, log: Path, environment: Mapping[str, str]) -> None:
        """Forks a process that connects to `socket_path` and becomes an engine."""
        order = {"socket": str(socket_path), "log": str(log), "environment": dict(environment)}
        self.ready().write(order)

    def ready(self) -> "Stream":
        """Waits until vLLM is imported. Raises ProcessError with its log if that fails."""
        if self._stream is None:
            self._stream = Stream(wait_until(self._connect, "vLLM is imported", START_SECONDS), self)
        return self._stream

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if self._process is not None and not self._process.running():
                raise self._process.failure("ended before it was ready") from None
            return None
        return connection

    def failure(self, what: str) -> ProcessError:
        """An error about it, with the end of its log."""
        if self._process is None:
            return ProcessError(f"the nursery of engines at {self.socket} {what}")
        return self._process.failure(what)

    def close(self) -> None:
        """Leaves the nursery, ends it if it is this session's own; its engines live on."""
        if self._stream is not None:
            self._stream.close()
        if self._process is not None:
            self._process.stop()


class Stream:
    """JSON lines to and from a driver."""

    def __init__(self, connection: socket.socket, process: "ManagedProcess | EngineProcess | Nursery") -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self._process = process

    def write(self, message: dict[str, Any]) -> None:
        """Sends one line. Raises ProcessError if the process is gone."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._process.failure(f"could not be asked anything ({error})") from error

    def read(self, timeout: float) -> Any:
        """The next result. Raises ProcessError if the command failed, the process died, or the answer takes
        too long."""
        self._connection.settimeout(timeout)
        try:
            line = self._lines.readline()
        except (TimeoutError, OSError) as error:
            raise self._process.failure(f"did not answer within {timeout:g} s ({error})") from error
        if not line:
            raise self._process.failure("died")
        message = json.loads(line)
        if "error" in message:
            raise self._process.failure(f"could not do it: {message['error']}")
        return message["result"]

    def close(self) -> None:
        """Closes the stream."""
        self._lines.close()
        self._connection.close()


def listen(path: Path) -> socket.socket:
    """A listening Unix socket at `path`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def accept(listener: socket.socket, process: "ManagedProcess | EngineProcess", timeout: float) -> socket.socket:
    """Waits for the one connection. Raises ProcessError if the process ends first or is too slow."""
    deadline = time.monotonic() + timeout
    listener.settimeout(0.2)
    while True:
        try:
            return listener.accept()[0]
        except TimeoutError:
            if not process.running():
                raise process.failure("ended before it was ready") from None
            if time.monotonic() > deadline:
                raise process.failure(f"was not ready within {timeout:g} s") from None


class EngineProcess:
    """One engine. `ready()` waits for it, so that several can start side by side."""

    def __init__(self, folder: Path, spec: EngineSpec, name: str = "engine", nursery: Nursery | None = None) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.pid: int | None = None
        self._numbers = itertools.count()
        self._folder = folder
        self._spec = spec
        self._stream: Stream | None = None
        self._ready = False
        self._process: ManagedProcess | None = None
        socket_path = folder / f"{name}.sock"
        self._listener = listen(socket_path)
        environment = engine_environment(spec.environment)
        if nursery is None:
            command = [engine_python(), "-m", "tools.harness.engine_driver", str(socket_path)]
            self._process = ManagedProcess(name, command, self.log, environment)
        else:
            nursery.fork(socket_path, self.log, environment)

    def begin(self, timeout: float = START_SECONDS) -> Self:
        """Waits until the engine's process is there and tells it what to be; it then starts by itself."""
        if self._stream is None:
            connection = accept(self._listener, self, timeout)
            self._stream = Stream(connection, self)
            self.pid = peer_pid(connection)
            self._stream.write(self._spec.first_line())
        return self

    def ready(self, timeout: float = START_SECONDS) -> Self:
        """Waits until the engine serves. Raises ProcessError with its log if it does not start."""
        self.begin(timeout)
        if not self._ready:
            assert self._stream is not None
            self._stream.read(timeout)
            self._ready = True
        return self

    def running(self) -> bool:
        """Whether the engine's process has not ended."""
        if self._process is not None:
            return self._process.running()
        return self.pid is None or alive(self.pid)

    def failure(self, what: str) -> ProcessError:
        """An error about this engine, with the end of its log."""
        text = self.log_text()
        lines = "\n".join(text.splitlines()[-40:])
        return ProcessError(f"{self.name} {what}. Its log, {self.log}, ends with:\n{lines}")

    def log_text(self) -> str:
        """All that the engine has written."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def call(self, command: str, *, reply_within: float = ANSWER_SECONDS, **arguments: Any) -> Any:
        """One command of `tools.harness.engine_driver.Driver`."""
        stream = self.ready()._stream
        assert stream is not None
        stream.write({"command": command, **arguments})
        return stream.read(reply_within)

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, prompts: Sequence[Prompt]) -> list[str]:
        """Hands requests over and returns their ids."""
        requests = [{**asdict(prompt), "id": prompt.id or f"{self.name}-{next(self._numbers)}"} for prompt in prompts]
        ids: list[str] = self.call("submit", requests=requests)
        return ids

    def results(self, ids: Sequence[str], seconds: float = ANSWER_SECONDS) -> list[Answer]:
        """Waits for the answers. Raises TimeoutError if not all are there in time."""
        answers = self.call("results", ids=list(ids), seconds=seconds, reply_within=seconds + 30)
        if answers is None:
            statuses = {name: self.call("status", request=name) for name in ids}
            raise TimeoutError(f"{self.name} has not answered all of its requests within {seconds:g} s: {statuses}")
        return [Answer(**answers[name]) for name in ids]

    def generate(self, prompts: Sequence[Prompt], seconds: float = ANSWER_SECONDS) -> list[Answer]:
        """All at once, answered in order; then waits until the scheduler has nothing left, as between two
        requests of a user."""
        answers = self.results(self.submit(prompts), seconds)
        self.settle()
        return answers

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        """One request alone."""
        return self.generate([Prompt(list(tokens), **options)])[0]

    def settle(self, seconds: float = ANSWER_SECONDS) -> None:
        """Steps until the scheduler has no request left, not even one whose blocks wait for a save.
        Raises TimeoutError."""
        if not self.call("settle", seconds=seconds, reply_within=seconds + 30):
            raise TimeoutError(f"{self.name}: the scheduler still holds requests after {seconds:g} s")

    def reset(self, *, connector: bool = False) -> bool:
        """Empties the engine's own prefix cache, with `connector` its external one too. Returns whether it was done."""
        return bool(self.call("reset", connector=connector))

    def blocks(self) -> dict[str, str]:
        """ "group:hash" of each block in the engine's prefix cache, to the digest of its bytes."""
        blocks: dict[str, str] = self.call("blocks")
        return blocks

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series that carry these labels; 0 if there is none."""
        return sum_metric(self.call("metrics"), name, **labels)

    # --------------------------------------------------------------------------------------------------------- ending

    def kill9(self) -> None:
        """Kills the engine and its workers with SIGKILL and waits until it is gone."""
        if self._process is not None:
            self._process.kill9()
        elif self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while alive(self.pid):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.name} (pid {self.pid}) is still there 30 s after SIGKILL")
                time.sleep(0.01)
        self._close()

    def stop(self) -> None:
        """Ends the engine: it does so by itself when its stream ends."""
        self._close()
        self.kill9()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._listener.close()
        (self._folder / f"{self.name}.sock").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def alive(pid: int) -> bool:
    """Whether a process runs: not gone, and not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def sum_metric(text: str, name: str, **labels: str) -> float:
    """Adds up the series of `name` in Prometheus text that carry all of `labels`."""
    total = 0.0
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(f'{key}="{label}"' in series for key, label in labels.items()):
            total += float(value)
    return total
