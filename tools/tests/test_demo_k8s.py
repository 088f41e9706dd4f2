"""What `make demo-k8s` applies, and how it reads an engine's answers. That it works is for the demo itself."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from e2e.support.engine_image import EngineImage
from orbitkv_crds.names import ANNOTATION_CACHE_NAMESPACE, GROUP
from tools.demo.report import Report, Turn
from tools.demo_k8s import engine as http_engine
from tools.demo_k8s.__main__ import deployment, first_tokens
from tools.demo_k8s.engine import Engine, EngineError

IMAGE = EngineImage("localhost/engine:1", (Path("/env"), Path("/python")))


def test_the_deployment_has_one_annotation_and_nothing_else_of_ours() -> None:
    objects = deployment(IMAGE)
    template = objects[0]["spec"]["template"]
    assert template["metadata"]["annotations"] == {ANNOTATION_CACHE_NAMESPACE: "chat"}
    del template["metadata"]["annotations"]
    text = json.dumps(objects)
    assert GROUP not in text
    assert "orbitkv" not in text.lower()
    assert {each["mountPath"] for each in template["spec"]["containers"][0]["volumeMounts"]} == {
        "/dev/shm",
        "/env",
        "/python",
    }


class Handler(BaseHTTPRequestHandler):
    """An engine that has counted 32 tokens of its own cache, 64 from OrbitKV and 4 computed after the first answer."""

    answered = 0
    status = 200

    def do_GET(self) -> None:
        counts = {"local_cache_hit": 32, "external_kv_transfer": 64, "local_compute": 4}
        lines = [
            f'vllm:prompt_tokens_by_source_total{{engine="0",source="{name}"}} {float(count * Handler.answered)}'
            for name, count in counts.items()
        ]
        self._send("\n".join(["# HELP", *lines]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send(json.dumps({"tokens": [len(body["prompt"])]}))
            return
        Handler.answered += 1
        events = [{"choices": [{"token_ids": [number]}]} for number in (7, 8)]
        self._send("".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n")

    def _send(self, text: str) -> None:
        self.send_response(Handler.status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Be silent."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(http_engine, "PORT", server.server_address[1])
    Handler.answered, Handler.status = 0, 200
    yield Engine("127.0.0.1", "tiny")
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_answer_says_where_its_prompts_tokens_came_from(engine: Engine) -> None:
    for _ in range(2):
        answer = engine.ask([1] * 100, 2)
        assert answer.tokens == [7, 8]
        assert (answer.hbm, answer.orbitkv, answer.computed) == (32, 64, 4)
        assert answer.ttft_ms > 0
    assert engine.tokens_of("abc") == [3]


def test_counts_that_do_not_add_up_are_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "COUNT_SECONDS", 0.1)
    with pytest.raises(EngineError, match=r"of 99 prompt tokens the engine counted \{'hbm': 32"):
        engine.ask([1] * 99, 2)


def test_an_engine_that_answers_with_an_error_is_named(engine: Engine) -> None:
    Handler.status = 503
    with pytest.raises(EngineError, match=r"POST /tokenize of 127.0.0.1 was answered with 503"):
        engine.tokens_of("abc")


def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "PORT", 1)
    with pytest.raises(EngineError, match=r"POST /tokenize of 127\.0\.0\.1: "):
        Engine("127.0.0.1", "tiny").tokens_of("abc")


def test_the_first_token_of_either_pod_is_told_with_what_was_computed_for_it() -> None:
    turns = [Turn(1, 1, "first", 500, 0, 0, 500, 100.4), Turn(1, 2, "restarted", 600, 0, 576, 24, 20.6)]
    text = first_tokens(Report(turns, []))
    assert "100 ms, with 500 of 500 prompt tokens computed; of the next pod: 21 ms, with 24 of 600 computed" in text
