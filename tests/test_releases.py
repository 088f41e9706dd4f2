"""A plugin and an agent that are not of the same release: one apart they work, further apart they say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orbitkv.protocol.versions import MESSAGES, VersionRange
from tests.engine_of_release import PAGES
from tools.harness.agent import AgentProcess
from tools.harness.engine import ROOT
from tools.harness.releases import BEFORE, LONG_AFTER, LONG_BEFORE, NEXT, plugin_with


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugins")


def run_engine(agent: AgentProcess, plugin: Path) -> dict[str, Any]:
    """What an engine with this plugin says after it saved and restored."""
    command = [sys.executable, "-m", "tests.engine_of_release", str(agent.socket_path)]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(plugin), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=plugin, env=path, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("plugin", "agent"),
    [(BEFORE, MESSAGES), (NEXT, MESSAGES), (MESSAGES, BEFORE), (MESSAGES, NEXT)],
    ids=["plugin before", "plugin after", "agent before", "agent after"],
)
def test_releases_that_are_one_apart_save_and_restore(
    tmp_path: Path, plugins: Path, plugin: VersionRange, agent: VersionRange
) -> None:
    with AgentProcess(tmp_path, plugin=plugin_with(agent, plugins)) as process:
        found = run_engine(process, plugin_with(plugin, plugins))
        assert found == {"messages": str(plugin), "right": PAGES}
        process.wait_at_rest()


@pytest.mark.parametrize(
    ("plugin", "agent"),
    [(LONG_BEFORE, MESSAGES), (LONG_AFTER, MESSAGES), (MESSAGES, LONG_BEFORE), (MESSAGES, LONG_AFTER)],
    ids=["old plugin", "new plugin", "old agent", "new agent"],
)
def test_releases_that_are_further_apart_say_both_versions(
    tmp_path: Path, plugins: Path, plugin: VersionRange, agent: VersionRange
) -> None:
    with AgentProcess(tmp_path, plugin=plugin_with(agent, plugins)) as process:
        found = run_engine(process, plugin_with(plugin, plugins))
    assert found["kind"] == "incompatible" and found["error"].startswith("version-mismatch: "), found
    assert f"speaks versions {plugin}" in found["error"] and f"speaks {agent}" in found["error"]
