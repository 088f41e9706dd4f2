"""What an injected plugin says when it stays off, and to whom."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from orbitkv import injection
from orbitkv.injection import StayOff, stay_off, tell_agent
from orbitkv.protocol.reasons import OffReason
from orbitkv.sglang import plugin
from tools.harness.agent import AgentProcess
from tools.harness.process import wait_until

OFF = StayOff(OffReason.SETTING_INVALID, "ORBITKV_MODE is 'x'; correct it")


@pytest.fixture(autouse=True)
def injected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORBITKV_INJECTED", "0.1.0")
    monkeypatch.setenv("ORBITKV_BOOTSTRAP_SOCKET", str(tmp_path / "agent.sock"))
    monkeypatch.setenv("ORBITKV_MODE", "x")  # what is wrong must not keep the agent from being told


def test_the_agent_is_told_why_and_the_engines_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AgentProcess(tmp_path, pool="16MiB") as agent:
        monkeypatch.setenv("ORBITKV_BOOTSTRAP_SOCKET", str(agent.socket_path))
        stay_off(logging.getLogger("engine"), "vllm 0.32.0", OFF)
        told = "vllm 0.32.0 does without the cache: setting-invalid: ORBITKV_MODE is 'x'; correct it"
        wait_until(lambda: told in agent.log_text(), "the agent's log says it", 10)  # nobody waits for its answer
    (record,) = caplog.records
    assert record.getMessage() == (
        "OrbitKV stays off, and the engine serves without it: setting-invalid: ORBITKV_MODE is 'x'; correct it "
        "(the node's agent was told)"
    )


def test_without_an_agent_the_log_says_that_too() -> None:
    assert "could not be told: no OrbitKV agent at " in tell_agent("vllm 0.32.0", OFF)


def test_telling_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBITKV_PORT", "no number")
    assert "could not be told: ORBITKV_PORT" in tell_agent("vllm 0.32.0", OFF)


def test_every_reason_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    assert [reason for reason in OffReason if f"| `{reason}` |" not in page] == []


def test_the_entry_points_need_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; sys.modules['msgspec'] = sys.modules['numpy'] = None\n"
        "import orbitkv.vllm.plugin, orbitkv.sglang.plugin\n"
        "orbitkv.sglang.plugin.register()\n"
        "try: orbitkv.injection.check_payload()\n"
        "except orbitkv.injection.StayOff as off: print(off.reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["packages-missing"], done.stderr
    assert "engine-not-served" in done.stderr


def test_sglang_is_left_as_it_is_and_says_why_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_said", False)
    for _ in range(2):
        plugin.register()
    assert [OffReason.ENGINE_NOT_SERVED in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setattr(plugin, "_said", False)
    monkeypatch.delenv(injection.INJECTED_VARIABLE)
    plugin.register()
    assert len(caplog.records) == 1
