"""The program: settings, what it waits for, and what the operator tells it."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time

import pytest

from orbitkv_crds import names
from orbitkv_operator.admission import webhook as module
from orbitkv_operator.admission.findings import Findings
from orbitkv_operator.admission.main import main
from orbitkv_operator.admission.server import PATH
from orbitkv_operator.admission.settings import load_settings
from orbitkv_operator.admission.tests.pods import NAMESPACE, table
from orbitkv_operator.admission.tests.test_review import asking, review
from orbitkv_operator.admission.webhook import Webhook
from orbitkv_operator.certificates import read, renewed
from orbitkv_operator.cluster.api import CACHES, NAMESPACES, POOLS, SECRETS, Resource
from orbitkv_operator.settings import SettingsError
from orbitkv_operator.tests.fakes import FakeApi, cache_body, pool_body

NEEDED = {"POD_NAMESPACE": "orbitkv-system", "ORBITKV_WEBHOOK_PAYLOAD_IMAGE": "payload:1"}


def test_settings_come_from_the_environment_and_flags_win() -> None:
    found = load_settings(
        ["--log-level", "debug"],
        NEEDED
        | {
            "ORBITKV_WEBHOOK_LOG_LEVEL": "error",
            "ORBITKV_WEBHOOK_PAYLOAD_PULL_SECRETS": "a, b",
            "ORBITKV_WEBHOOK_LMCACHE": "true",
        },
    )
    assert (found.namespace, found.log_level, found.lmcache) == ("orbitkv-system", "debug", True)
    assert found.payload_pull_secrets == ("a", "b")


def test_wrong_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="ORBITKV_WEBHOOK_PAYLOAD_MODE"):
        load_settings([], NEEDED | {"ORBITKV_WEBHOOK_PAYLOAD_MODE": "copy"})


def test_wrong_setting_ends_the_command_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "a")
    assert main(["--port", "many"]) == 2
    error = capsys.readouterr().err
    assert "--port" in error and "--payload-image" in error and "Traceback" not in error


def test_findings_are_read_as_they_were_written() -> None:
    found = Findings("payload:1", True, "not found")
    assert Findings.read(found.write()) == found
    assert Findings.read(None) == Findings.read({"imageVolumes": "perhaps"}) == Findings()


class NoFeed:
    """Watches of which nothing comes."""

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


def test_no_review_asks_the_apiserver(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the API is asked for comes before the first review, whatever the pods and their namespaces."""
    api, asked = FakeApi(), list[tuple[str, Resource]]()
    api.before = lambda verb, resource: asked.append((verb, resource))
    data = renewed(None, ["localhost"])
    assert data is not None
    api.add(SECRETS, {"metadata": {"name": names.WEBHOOK, "namespace": "orbitkv-system"}, "data": data})
    api.add(NAMESPACES, {"metadata": {"name": NAMESPACE, "labels": {}}})
    api.add(CACHES, cache_body("chat", NAMESPACE))
    api.add(POOLS, pool_body())
    monkeypatch.setattr(module, "KubernetesApi", lambda _: api)
    monkeypatch.setattr(module, "Feed", NoFeed)
    flags = ["--port", "0", "--metrics-port", "0", "--probes-port", "0", "--look-seconds", "3600"]
    found = Webhook(load_settings(flags, NEEDED), None)
    running = threading.Thread(target=found.run)
    running.start()
    try:
        deadline = time.monotonic() + 20
        while found._waits_for:
            assert time.monotonic() < deadline, found._waits_for
            time.sleep(0.01)
        assert ("list", CACHES) in asked
        asked.clear()
        context = ssl.create_default_context(cadata=read(data).bundle.decode())
        connection = http.client.HTTPSConnection("localhost", found._server.port, context=context, timeout=20)
        reviews = [review(row.pod) for row in table()]
        for body in (*reviews, review(asking(cache_namespace="other/one")), review(asking(), namespace="unknown")):
            connection.request("POST", PATH, body, {"Content-Type": "application/json"})
            assert json.loads(connection.getresponse().read())["response"]["allowed"] is True
        assert asked == []
    finally:
        found.stop()
        running.join(20)
