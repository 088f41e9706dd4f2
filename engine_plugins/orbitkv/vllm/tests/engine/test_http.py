"""The same over HTTP, as users have it: `vllm serve`, its engine core in a process of its own, a real client."""

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from orbitkv.vllm.tests.engine.checks import BLOCK, assert_close, full_blocks, tokens
from orbitkv.vllm.tests.engine.models import Service
from tools.harness.process import wait_until

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def service(service_in_advance: Service) -> Service:
    service_in_advance.server.ready()
    return service_in_advance


def cached_tokens(answer: dict[str, Any]) -> int:
    """Prompt tokens that the server did not compute."""
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


def settle(service: Service) -> None:
    """Waits until all that was computed is stored."""
    service.agent.wait_at_rest()
    wait_until(lambda: service.server.metric("vllm:num_requests_running") == 0, "the server's requests have ended", 20)


def restored(service: Service, prompt: list[int]) -> dict[str, Any]:
    """The answer once it comes from OrbitKV after a reset of HBM:
    a slow moment of the agent costs a hit, not an error."""

    def ask() -> dict[str, Any] | None:
        assert service.server.reset() == 200, "the server refused to reset its own cache"
        before = service.server.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        answer = service.server.complete(prompt)
        settle(service)
        after = service.server.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        return answer if after - before == full_blocks(len(prompt)) else None

    return wait_until(ask, "the prompt comes from OrbitKV", 20)


def test_prompt_comes_back_over_http_with_the_same_log_probabilities(service: Service) -> None:
    server, _ = service
    prompt = tokens("http", 300)
    assert cached_tokens(server.complete(prompt)) == 0
    hbm = server.complete(prompt)
    assert cached_tokens(hbm) == full_blocks(300)
    settle(service)
    answer = restored(service, prompt)
    assert cached_tokens(answer) == full_blocks(300)
    found, expected = answer["choices"][0], hbm["choices"][0]
    assert found["text"] == expected["text"], "the text from OrbitKV and from the engine's own cache"
    assert_close(
        found["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"], "log probabilities over HTTP"
    )


def test_external_reset_over_http_forgets_everything(service: Service) -> None:
    server, agent = service
    prompt = tokens("http external reset", 300)
    server.complete(prompt)
    settle(service)
    restored(service, prompt)
    wait_until(lambda: server.reset(external=True) == 200, "the idle server resets the external cache", 20)
    answer = server.complete(prompt)
    assert cached_tokens(answer) == 0, "tokens were cached after a reset of the external cache"
    agent.wait_at_rest()


def test_metrics_show_orbitkvs_numbers(service: Service) -> None:
    server, agent = service
    prompt = tokens("http metrics", 10 * BLOCK + 7)
    before = server.metric("vllm:orbitkv_prompt_tokens_restored_total")
    server.complete(prompt)
    settle(service)
    restored(service, prompt)
    text = server.metrics()
    for name in (
        "attached",
        "restores_total",
        "saves_total",
        "prompt_tokens_hbm_total",
        "prompt_tokens_computed_total",
    ):
        assert f"vllm:orbitkv_{name}" in text, f"/metrics does not show vllm:orbitkv_{name}"
    wait_until(
        lambda: server.metric("vllm:orbitkv_prompt_tokens_restored_total") - before >= full_blocks(len(prompt)),
        "the restored tokens are counted",
        20,
    )
    assert server.metric("vllm:orbitkv_attached") == 1
    assert server.metric("vllm:orbitkv_errors_total") == 0
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0, "vLLM's own metric of external hits"
    assert agent.status()["transfer"]["load_bytes"] > 0


def hang_up(service: Service, prompt: list[int], lines: int | None) -> None:
    """A client of a streamed completion goes away once it has read so many lines of it; None: once it has asked."""
    body = {"model": service.server.model, "prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with closing(HTTPConnection("127.0.0.1", service.server.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if lines is None:
            return
        with connection.getresponse() as response:
            assert response.status == 200, response.read()
            for _ in range(lines):
                assert response.readline(), "the stream ended before the client hung up"


def test_client_that_hangs_up_leaves_nothing_behind(service: Service) -> None:
    server, agent = service
    prompt = tokens("http hang up", 800)
    before = server.metric("vllm:generation_tokens_total")
    for lines in (None, 0, 1, 20):
        hang_up(service, prompt, lines)
    settle(service)
    agent.wait_at_rest()
    assert server.metric("vllm:generation_tokens_total") - before < 4 * 1000, "no request was ended early"
    assert server.request("GET", "/health")[0] == 200
    assert server.complete(prompt)["usage"]["completion_tokens"] == 8
