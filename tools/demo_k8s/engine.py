"""An engine behind a Service, asked over HTTP as any client would ask it."""

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SOURCES = {"hbm": "local_cache_hit", "orbitkv": "external_kv_transfer", "computed": "local_compute"}
"""vLLM's names for where the tokens of prompts came from."""
PORT = 8000
ANSWER_SECONDS = 120.0
COUNT_SECONDS = 10.0


class EngineError(Exception):
    """The engine could not be asked, or did not answer as it should; the message says which question it was."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of an answer, the time to the first of them, and where the prompt's tokens came from."""

    tokens: list[int]
    ttft_ms: float
    prompt_tokens: int
    hbm: int
    orbitkv: int
    computed: int


class Engine:
    """vLLM's HTTP server at `host`."""

    def __init__(self, host: str, model: str) -> None:
        self._host = host
        self._model = model

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        asked = {"model": self._model, "prompt": text, "add_special_tokens": False}
        answer = json.loads(self._whole("POST", "/tokenize", asked))
        return [int(token) for token in answer["tokens"]]

    def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """One completion. The engine must have nothing else to do meanwhile: its counters tell the sources."""
        before = self._counted()
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        began = time.perf_counter()
        first = 0.0
        tokens: list[int] = []
        for event in self._events("/v1/completions", body):
            found = event["choices"][0].get("token_ids") or []
            if found and not tokens:
                first = time.perf_counter()
            tokens += found
        deadline = time.monotonic() + COUNT_SECONDS
        while True:
            counts = {name: count - before[name] for name, count in self._counted().items()}
            if sum(counts.values()) == len(prompt):
                return Answer(tokens, 1000 * (first - began), len(prompt), **counts)
            if time.monotonic() > deadline:
                raise EngineError(f"of {len(prompt)} prompt tokens the engine counted {counts}")
            time.sleep(0.05)

    def _counted(self) -> dict[str, int]:
        counts = dict.fromkeys(SOURCES, 0)
        for line in self._whole("GET", "/metrics").splitlines():
            if line.startswith("vllm:prompt_tokens_by_source_total{"):
                for name, source in SOURCES.items():
                    if f'source="{source}"' in line:
                        counts[name] += int(float(line.rpartition(" ")[2]))
        return counts

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream, up to its end."""
        connection, response = self._open("POST", path, body)
        try:
            for raw in response:
                text = raw.decode().strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    yield json.loads(text.removeprefix("data: "))
        except OSError as error:
            raise EngineError(f"{path} broke off: {error}") from None
        finally:
            connection.close()

    def _whole(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        connection, response = self._open(method, path, body)
        try:
            return response.read().decode()
        except OSError as error:
            raise EngineError(f"{path} broke off: {error}") from None
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, PORT, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            raise EngineError(f"{method} {path} of {self._host}: {error}") from None
        if response.status != 200:
            text = response.read(500).decode(errors="replace")
            connection.close()
            raise EngineError(f"{method} {path} of {self._host} was answered with {response.status}: {text}")
        return connection, response
