"""The program: settings, what it waits for, and what the operator tells it."""

from __future__ import annotations

import pytest

from orbitkv_operator.admission.findings import Findings
from orbitkv_operator.admission.main import main
from orbitkv_operator.admission.settings import load_settings
from orbitkv_operator.settings import SettingsError

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
