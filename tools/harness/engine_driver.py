"""One real vLLM engine in this process, driven by JSON lines over a Unix socket. Runs with the engine's Python.

    python -m tools.harness.engine_driver SOCKET            connect, build the engine that the first line says, serve
    python -m tools.harness.engine_driver --nursery SOCKET  import vLLM once, then fork an engine for each line

The engine is stepped here, as vLLM's own loop does it, and not by a thread of vLLM: so a test can hold it between
two steps, look at its scheduler, and time each step. A command is {"command": name, ...arguments}, its reply
{"result": ...} or {"error": text}. While no command runs, the engine steps by itself whenever it has work, unless it
is held.
"""

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

from tools.harness import block_bytes, connector_time, kv_events
from tools.harness.engine import DEVICE

LOOK_SECONDS = 5.0
IDLE_SECONDS = 0.001
"""vLLM's own loop sleeps this long after a step that ran no model."""


def connect(path: str) -> socket.socket:
    """A stream to the process that asked for this one."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    return stream


class Driver:
    """The engine and what became of its requests. Public methods are commands; their results go out as JSON."""

    def __init__(self, engine_arguments: dict[str, Any], connector: dict[str, Any] | None) -> None:
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._subscriber: kv_events.Subscriber | None = None
        endpoint = engine_arguments.pop("kv_events_endpoint", None)
        if endpoint is not None:
            engine_arguments["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=None
            )
            self._subscriber = kv_events.Subscriber(endpoint.replace("*", "127.0.0.1"))
        if connector is not None:
            engine_arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments))
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self._inside: dict[str, str] = {}  # id outside -> id in the engine
        self._names: dict[str, str] = {}  # and back
        self._prefill: dict[str, Any] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._preemptions: dict[str, int] = {}
        self._steps: list[tuple[float, float, int]] = []
        self._scheduled = 0
        self._thread = connector_time.ThreadClock()
        self._clock = connector_time.Clock(self.scheduler.connector, self._thread)
        self._unarmed: Any = None
        self.held = False
        self._listen_to_prefill()
        self._listen_to_scheduler()

    def _listen_to_prefill(self) -> None:
        """Keeps vLLM's own count of where each request's prompt tokens came from:
        it is on its way to the metrics here."""
        process = self.engine.output_processor.process_outputs

        def listening(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                if output.prefill_stats is not None:
                    self._prefill[output.request_id] = output.prefill_stats
            return process(outputs, *args, **kwargs)

        self.engine.output_processor.process_outputs = listening

    def _listen_to_scheduler(self) -> None:
        schedule = self.scheduler.schedule

        def listening(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._scheduled = output.total_num_scheduled_tokens
            return output

        self.scheduler.schedule = listening

    # ------------------------------------------------------------------------------------------------------- stepping

    def has_work(self) -> bool:
        """Whether the scheduler has requests, finished ones that wait for a save among them."""
        return bool(self.scheduler.has_requests())

    def _step(self) -> None:
        started = self._thread.now()
        self._scheduled = 0
        outputs = self.engine.step()
        self._steps.append(((self._thread.now() - started) * 1000, self._clock.take_ms(), self._scheduled))
        for inside, request in self.scheduler.requests.items():
            if request.num_preemptions:
                self._preemptions[self._names.get(inside, inside)] = request.num_preemptions
        for output in outputs:
            if output.finished:
                self._finish(output)
        if not outputs:
            time.sleep(IDLE_SECONDS)

    def _finish(self, output: Any) -> None:
        name = output.request_id
        prefill = self._prefill.pop(self._inside[name], None)
        completion = output.outputs[0]
        self._answers[name] = {
            "tokens": list(completion.token_ids),
            "logprobs": chosen(completion.logprobs, completion.token_ids),
            "prompt_logprobs": chosen(output.prompt_logprobs, output.prompt_token_ids),
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "hbm_tokens": prefill.num_local_cached_tokens if prefill else None,
            "orbitkv_tokens": prefill.num_external_cached_tokens if prefill else None,
            "recomputed_tokens": prefill.num_computed_tokens if prefill else None,
            "ttft_ms": output.metrics.first_token_latency * 1000 if output.metrics else None,
            "preemptions": self._preemptions.pop(name, 0),
            "kv_transfer_params": output.kv_transfer_params,
        }

    # ------------------------------------------------------------------------------------------------------- commands

    def tokens_of(self, text: str) -> list[int]:
        """The model's tokens for a text."""
        return list(self.engine.renderer.tokenizer.encode(text, add_special_tokens=False))

    def submit(self, requests: list[dict[str, Any]]) -> list[str]:
        """Hands requests to the engine and returns their ids."""
        return [self._add(request) for request in requests]

    def _add(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": request["tokens"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        transfer = request.get("kv_transfer_params")
        parameters = SamplingParams(
            temperature=0,
            max_tokens=request.get("max_tokens", 8),
            ignore_eos=True,
            logprobs=request.get("logprobs"),
            prompt_logprobs=request.get("prompt_logprobs"),
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        name = request["id"]
        inside = self.engine.add_request(name, prompt, parameters)
        self._inside[name] = inside
        self._names[inside] = name
        return str(name)

    def results(self, ids: list[str], seconds: float = 0) -> dict[str, Any] | None:
        """The answers to these requests once all are there, stepping for up to `seconds`; None if some are
        missing then."""
        deadline = time.monotonic() + seconds
        while not all(name in self._answers for name in ids):
            if time.monotonic() > deadline or not self.has_work():
                return None
            self._step()
        return {name: self._answers.pop(name) for name in ids}

    def hold(self, held: bool) -> None:
        """While held, the engine steps only on command."""
        self.held = held

    def step(self, count: int = 1) -> int:
        """Steps up to `count` times, while there is work. Returns how often."""
        done = 0
        while done < count and self.has_work():
            self._step()
            done += 1
        return done

    def settle(self, seconds: float) -> bool:
        """Steps until the scheduler has nothing left to do, not even a delayed free.
        False if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while self.has_work():
            if time.monotonic() > deadline:
                return False
            self._step()
        return True

    def step_until(self, request: str, statuses: list[str], seconds: float) -> str:
        """Steps until the scheduler holds `request` in one of `statuses`, or has no such request ("GONE").
        Returns the status."""
        deadline = time.monotonic() + seconds
        while (status := self.status(request)) not in statuses:
            if time.monotonic() > deadline:
                raise TimeoutError(f"request {request} is {status} after {seconds:g} s and not {' or '.join(statuses)}")
            self._step()
        return status

    def status(self, request: str) -> str:
        """The request's status in the scheduler, "GONE" if it is not there."""
        inside = self._inside.get(request, "")
        held = self.scheduler.requests.get(inside)
        if held is not None and inside in self.scheduler.finished_recving_kv_req_ids:
            return "RESTORED"  # and not scheduled since
        return "GONE" if held is None else str(held.status.name)

    def abort(self, requests: list[str]) -> None:
        """Aborts requests as the API server does when a client has gone."""
        inside = [self._inside[name] for name in requests]
        self.engine.abort_request(inside, internal=True)
        self.engine.engine_core.abort_requests(inside)

    def abort_in_step(self, requests: list[str]) -> None:
        """One step in which the requests' clients go away: after it was scheduled, before its outcome is looked at."""
        inside = [self._inside[name] for name in requests]
        self.engine.output_processor.abort_requests(inside, internal=True)
        self.core.aborts_queue.put_nowait(inside)
        self._step()

    def stop_process_after_hit(self, pid: int) -> None:
        """Stops (SIGSTOP) the process `pid`, the agent, as soon as the connector has promised tokens to a request."""
        self.disarm()
        connector = self.scheduler.connector
        ask = self._unarmed = connector.get_num_new_matched_tokens

        def asking(*args: Any) -> Any:
            answer = ask(*args)
            if answer[0]:
                self.disarm()
                os.kill(pid, signal.SIGSTOP)
            return answer

        connector.get_num_new_matched_tokens = asking

    def disarm(self) -> None:
        """Takes `stop_process_after_hit` back, if there was no hit."""
        if self._unarmed is not None:
            self.scheduler.connector.get_num_new_matched_tokens, self._unarmed = self._unarmed, None

    def reset(self, connector: bool = False, running: bool = False) -> bool:
        """Resets the engine's prefix cache, with `connector` the external one too."""
        return bool(self.engine.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))

    def blocks(self) -> dict[str, str]:
        """Group and hash of every block that the engine's prefix cache holds now, to the digest of the block's
        bytes on all ranks."""
        cached = block_bytes.cached_blocks(self.scheduler.kv_cache_manager.block_pool)
        ids = sorted(set(cached.values()))
        digests = dict(
            zip(
                ids,
                block_bytes.combined(self.core.model_executor.collective_rpc(block_bytes.digests, args=(ids,))),
                strict=True,
            )
        )
        return {key: digests[block] for key, block in cached.items()}

    def free_blocks(self) -> int:
        """How many blocks no request uses."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def steps(self) -> list[tuple[float, float, int]]:
        """For each step since the last call, how long it took and how much of that the connector, in ms as
        `connector_time.ThreadClock` counts them, and how many tokens it computed."""
        steps, self._steps = self._steps, []
        return steps

    def metrics(self) -> str:
        """The engine's metrics, as vLLM's own /metrics shows them."""
        import prometheus_client

        return prometheus_client.generate_latest().decode()

    def events(self) -> dict[str, list[str]]:
        """What a subscriber takes to be cached that listens until it hears nothing for a while: medium to hashes."""
        if self._subscriber is None:
            raise ValueError("this engine was started without kv_events_endpoint")
        return self._subscriber.cached()

    def threads(self) -> dict[str, int]:
        """Threads, open descriptors and resident KiB of this process."""
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "resident_kib": int(
                next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]
            ),
        }


def chosen(logprobs: Any, tokens: Any) -> list[float | None] | None:
    """The log probability of each token from vLLM's lists of dictionaries; None where there is none."""
    if logprobs is None:
        return None
    return [
        None if entry is None else float(entry[token].logprob) for entry, token in zip(logprobs, tokens, strict=False)
    ]


def serve(stream: socket.socket) -> None:
    """Builds the engine that the first line describes, says so, and carries out commands until the stream ends."""
    lines = stream.makefile("r")
    spec = json.loads(lines.readline())
    driver = Driver(spec["engine"], spec["connector"])
    send(stream, {"result": {"pid": os.getpid()}})
    while True:
        stepping = not driver.held and driver.has_work()
        if not select.select([stream], [], [], 0 if stepping else None)[0]:
            driver._step()
            continue
        line = lines.readline()
        if not line:
            return
        send(stream, carry_out(driver, json.loads(line)))


def carry_out(driver: Driver, message: dict[str, Any]) -> dict[str, Any]:
    """Runs one command."""
    try:
        return {"result": getattr(driver, message.pop("command"))(**message)}
    except Exception:
        return {"error": traceback.format_exc()}


def send(stream: socket.socket, message: dict[str, Any]) -> None:
    """Writes one line."""
    stream.sendall(json.dumps(message).encode() + b"\n")


def nursery(path: str) -> None:
    """Imports vLLM, listens, then forks a process for each line: its socket, its log, and the variables that it needs.
    Ends when the last of its clients has gone, or before one came the process that started it."""
    parent = os.getppid()
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine

    if DEVICE == "cuda":
        import vllm.v1.worker.gpu_worker
    else:
        import vllm.v1.worker.cpu_worker  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the engines
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    clients: dict[socket.socket, bytes] = {}  # and what of a line has come
    while clients or os.getppid() == parent:
        for stream in select.select([listener, *clients], [], [], LOOK_SECONDS)[0]:
            if stream is listener:
                clients[listener.accept()[0]] = b""
                continue
            try:
                received = stream.recv(1 << 16)
            except ConnectionResetError:
                received = b""
            *orders, clients[stream] = (clients[stream] + received).split(b"\n")
            for order in orders:
                if os.fork() == 0:
                    for inherited in (listener, *clients):
                        inherited.close()
                    become_engine(json.loads(order))
            if not received:
                del clients[stream]
                stream.close()
                if not clients:
                    return


def become_engine(order: dict[str, Any]) -> None:
    """What a forked process does."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["environment"])
    sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    run(order["socket"])


def run(path: str) -> None:
    """Serves one engine and ends the process at once: vLLM's own way down takes seconds, and nothing here needs it."""
    code = 0
    try:
        serve(connect(path))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--nursery":
        nursery(sys.argv[2])
    else:
        run(sys.argv[1])
