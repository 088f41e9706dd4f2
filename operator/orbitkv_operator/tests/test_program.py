"""Settings, log, rights, events and requests."""

from __future__ import annotations

import io
import json
import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration

from orbitkv_operator import rights
from orbitkv_operator.cluster import api as requests
from orbitkv_operator.cluster.api import CACHES, EVENTS, POOLS, ApiError, KubernetesApi
from orbitkv_operator.events import QUIET_SECONDS, Events
from orbitkv_operator.logs import set_up_logging
from orbitkv_operator.main import main
from orbitkv_operator.settings import Settings, SettingsError, load_settings
from orbitkv_operator.tests.fakes import FakeApi, cache_body, pool_body

NEEDED = {"POD_NAMESPACE": "orbitkv-system", "POD_NAME": "me", "ORBITKV_OPERATOR_AGENT_IMAGE": "agent:1"}


def load(*flags: str, **environment: str) -> Settings:
    return load_settings(flags, NEEDED | environment)


def test_settings_come_from_the_environment_and_flags_win() -> None:
    found = load("--log-level", "debug", ORBITKV_OPERATOR_LOG_LEVEL="error", ORBITKV_OPERATOR_NETWORK_POLICY="false")
    assert (found.namespace, found.pod_name, found.log_level, found.network_policy) == (
        "orbitkv-system",
        "me",
        "debug",
        False,
    )


def test_lists_are_read() -> None:
    peers = '[{"namespaceSelector": {}}]'
    found = load(ORBITKV_OPERATOR_AGENT_PULL_SECRETS="a, b,", ORBITKV_OPERATOR_METRICS_FROM=peers)
    assert found.agent_pull_secrets == ("a", "b") and found.metrics_from == ({"namespaceSelector": {}},)
    assert load(ORBITKV_OPERATOR_METRICS_FROM="").metrics_from == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("METRICS_PORT", "99999"), ("CERTIFICATES", "mine"), ("METRICS_FROM", "{"), ("AGENT_IMAGE", "")],
)
def test_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"ORBITKV_OPERATOR_{name}"):
        load(**{f"ORBITKV_OPERATOR_{name}": value})


def test_wrong_setting_ends_the_command_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in NEEDED.items():
        monkeypatch.setenv(name, value)
    assert main(["--probes-port", "many"]) == 2
    error = capsys.readouterr().err
    assert "--probes-port" in error and "Traceback" not in error


# ----------------------------------------------------------------------------------------------------------------- log


@pytest.fixture
def log() -> Any:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = io.StringIO()
    set_up_logging("info", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before
    root.setLevel(level)


def test_entries_are_objects_without_secrets(log: Any) -> None:
    logging.getLogger("orbitkv_operator").info(
        "told", extra={"pool": "main", "token": "abc", "inner": {"secret": "abc"}}
    )
    (entry,) = log()
    assert (entry["event"], entry["level"], entry["pool"], entry["token"]) == ("told", "info", "main", "(withheld)")
    assert "abc" not in json.dumps(entry)


def test_library_that_repeats_itself_is_heard_once_a_minute(log: Any) -> None:
    for attempt in range(5):
        logging.getLogger("kopf.clients").error("Request attempt #%d failed", attempt)
    assert len(log()) == 1


# -------------------------------------------------------------------------------------------------------------- rights


def test_no_right_has_a_wildcard() -> None:
    for rule in (*rights.CLUSTER_RULES, *rights.NAMESPACE_RULES):
        assert "*" not in (*rule.api_groups, *rule.resources, *rule.verbs)


def test_operator_can_neither_write_workloads_nor_grant_rights() -> None:
    for rule in (*rights.CLUSTER_RULES, *rights.NAMESPACE_RULES):
        writes = set(rule.verbs) - {"get", "list", "watch"}
        assert not (writes and {"deployments", "statefulsets", "jobs", "replicasets"} & set(rule.resources))
        assert "rbac.authorization.k8s.io" not in rule.api_groups
        assert not {"bind", "escalate", "impersonate"} & set(rule.verbs)


# -------------------------------------------------------------------------------------------------------------- events


def test_event_is_said_once_in_a_while() -> None:
    api, now = FakeApi(), 1000.0
    events = Events(api, "me", clock=lambda: now)
    for _ in range(3):
        events.post(pool_body(), "Warning", "NoPod", "node a has none")
    events.post(pool_body(), "Warning", "NoPod", "node b has none")
    assert len(api.writes) == 2
    now += QUIET_SECONDS + 1
    events.post(pool_body(), "Warning", "NoPod", "node a has none")
    assert len(api.writes) == 3


def test_event_goes_where_its_object_is() -> None:
    api = FakeApi()
    events = Events(api, "me")
    events.post(pool_body(), "Normal", "R", "cluster-wide")
    events.post(cache_body(), "Normal", "R", "in a namespace")
    first, second = (it for (kind, _, _), it in api.objects.items() if kind is EVENTS)
    assert first["metadata"]["namespace"] == "default" and "namespace" not in first["regarding"]
    assert second["metadata"]["namespace"] == second["regarding"]["namespace"] == "team"


def test_long_words_fit_into_an_event_in_any_script() -> None:
    api = FakeApi()
    Events(api, "me").post(pool_body(), "Warning", "R", "ж" * 900)
    [event] = api.list_all(EVENTS)
    assert event["note"] == "ж" * 512  # the apiserver counts bytes


def test_event_that_cannot_be_posted_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeApi()

    def forbidden(verb: str, resource: Any) -> None:
        raise ApiError(403, "events is forbidden")

    api.before = forbidden
    Events(api, "me").post(pool_body(), "Normal", "R", "m")
    assert "could not be posted" in caplog.text


# ------------------------------------------------------------------------------------------------------------ requests


class Apiserver(BaseHTTPRequestHandler):
    requests: ClassVar[list[str]] = []
    status = 200
    message = 'managerpools is forbidden: User "me" cannot list resource "managerpools"'
    pages: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        type(self).requests.append(self.path)
        body: dict[str, Any] = {"message": self.message}
        if self.status == 200:
            body = self.pages[min(len(self.requests), len(self.pages)) - 1]
        text = json.dumps(body).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def apiserver() -> Any:
    handler = type("Handler", (Apiserver,), {"requests": [], "pages": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    settings = Configuration()
    settings.host = f"http://127.0.0.1:{server.server_address[1]}"
    yield handler, KubernetesApi(ApiClient(settings))
    server.shutdown()
    server.server_close()


def test_missing_right_costs_one_request_a_second_and_one_line(
    apiserver: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, api = apiserver
    handler.status = 403
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for second in (1, 2):
        for _ in range(50):
            with pytest.raises(ApiError) as caught:
                api.list_all(POOLS)
            assert caught.value.reason == "forbidden"
        assert len(handler.requests) == second
        clock.now += 1
    assert sum("a right is missing" in record.message for record in caplog.records) == 1
    with pytest.raises(ApiError):
        api.list_all(CACHES)  # another kind is another right
    assert "cachenamespaces" in handler.requests[-1]


def test_what_admission_refuses_is_no_missing_right(apiserver: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It concerns one object: the next one is tried."""
    handler, api = apiserver
    handler.status, handler.message = 403, 'pods "x" is forbidden: violates PodSecurity "baseline:latest"'
    for _ in range(3):
        with pytest.raises(ApiError, match="PodSecurity"):
            api.list_all(POOLS)
    assert len(handler.requests) == 3 and not caplog.records


def test_long_lists_come_in_pages(apiserver: Any) -> None:
    handler, api = apiserver
    handler.pages = [
        {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "more"}},
        {"items": [{"metadata": {"name": "b"}}], "metadata": {}},
    ]
    assert [it["metadata"]["name"] for it in api.list_all(POOLS)] == ["a", "b"]
    assert "continue=more" in handler.requests[-1]


def test_list_of_metadata_leaves_out_who_manages_which_field(apiserver: Any) -> None:
    handler, api = apiserver
    kept = {"name": "a", "uid": "1", "labels": {"zone": "a"}, "deletionGracePeriodSeconds": 30}
    handler.pages = [{"items": [{"metadata": kept | {"managedFields": [{"manager": "kubectl"}]}}], "metadata": {}}]
    assert api.list_metadata(POOLS) == [{"metadata": kept}]


def test_list_without_items_is_empty(apiserver: Any) -> None:
    handler, api = apiserver
    handler.pages = [{"items": None, "metadata": {}}]
    assert api.list_metadata(POOLS) == []


def test_apiserver_that_is_away_is_named_as_such() -> None:
    settings = Configuration()
    settings.host = "http://127.0.0.1:9"
    with pytest.raises(ApiError, match="no answer") as caught:
        KubernetesApi(ApiClient(settings)).get(POOLS, None, "main")
    assert caught.value.reason == "unreachable"
