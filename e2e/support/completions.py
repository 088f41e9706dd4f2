"""Clients that ask engines over HTTP all the time: each request has a connection of its own, and none is repeated."""

import http.client
import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

PORT = 8000
SECONDS = 120.0
SOURCES = {"hbm": "local_cache_hit", "orbitkv": "external_kv_transfer", "computed": "local_compute"}


def complete(host: str, prompt: str, max_tokens: int = 8) -> str:
    """The greedy completion of a prompt. Raises OSError, also where the answer is not what it should be."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = json.loads(_exchange(host, "POST", "/v1/completions", body))
    text: str = answer["choices"][0]["text"]
    return text


def sources(host: str) -> dict[str, int]:
    """Prompt tokens so far by where they came from: `hbm`, `orbitkv`, `computed`. Raises OSError."""
    return {name: counter(host, "vllm:prompt_tokens_by_source", source) for name, source in SOURCES.items()}


def counter(host: str, name: str, source: str = "") -> int:
    """What a counter of an engine has come to, that of one source if there are more; 0 if it does not have it. Raises
    OSError."""
    lines = _exchange(host, "GET", "/metrics", None).splitlines()
    found = [line for line in lines if line.startswith((f"{name}_total{{", f"{name}_total "))]
    return sum(int(float(line.rpartition(" ")[2])) for line in found if not source or f'source="{source}"' in line)


def _exchange(host: str, method: str, path: str, body: object) -> str:
    connection = http.client.HTTPConnection(host, PORT, timeout=SECONDS)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{method} {path} of {host}: {error!r}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"{method} {path} of {host} was answered with {response.status}: {text[:300]}")
    return text


@dataclass
class Heard:
    """What one client's requests came to."""

    asked: int = 0
    failures: list[str] = field(default_factory=list)
    answers: dict[str, Counter[str]] = field(default_factory=dict)
    """Prompt to its answers, and how often each came."""


class Load:
    """Asks `hosts` (name to address) the same prompts, over and over, at the same time, until it is left."""

    def __init__(self, hosts: dict[str, str], prompts: Sequence[str], clients: int = 2) -> None:
        self.heard = {name: Heard() for name in hosts}
        self._prompts = prompts
        self._ended = threading.Event()
        self._lock = threading.Lock()  # Invariant: what was heard is whole. Held for additions only.
        self._threads = [
            threading.Thread(target=self._ask, args=(name, host, number), name=f"load-{name}-{number}")
            for name, host in hosts.items()
            for number in range(clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def asked(self) -> int:
        """Requests that every host has been asked so far, at least."""
        with self._lock:
            return min(heard.asked for heard in self.heard.values())

    def _ask(self, name: str, host: str, number: int) -> None:
        heard = self.heard[name]
        turn = number
        while not self._ended.is_set():
            prompt = self._prompts[turn % len(self._prompts)]
            turn += 1
            answer = failure = ""
            try:
                answer = complete(host, prompt)
            except (OSError, ValueError, LookupError) as error:
                failure = str(error)
            with self._lock:
                heard.asked += 1
                if failure:
                    heard.failures.append(failure)
                else:
                    heard.answers.setdefault(prompt, Counter())[answer] += 1
            self._ended.wait(0.5)  # what starts beside it needs the processors too
