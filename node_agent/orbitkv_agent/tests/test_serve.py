"""The program as people run it: start, look, change, stop."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orbitkv.scheduling import SHORT_SLICE_S, slice_s
from orbitkv_agent.admin import AdminConnection, parse_status
from orbitkv_agent.cli import FAILED, NO_AGENT, OK, main
from orbitkv_agent.observe.metrics import METRICS, OTHER

START_SECONDS = 30.0


def command(socket_path: str, metrics_address: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "orbitkv_agent", "serve", "--pool", "8MiB", "--prefault", "false"),
        *("--socket-path", socket_path, "--metrics-address", metrics_address, *more),
    ]


class Serving:
    """`orbitkv-agent serve` in a process of its own, which logs JSON without buffering."""

    def __init__(self, process: subprocess.Popen[bytes], socket_path: str) -> None:
        self.process = process
        self.socket_path = socket_path
        self.metrics_address = self.wait_for("serving metrics")["address"]
        self.wait_for("serving")

    def wait_for(self, event: str) -> dict[str, str]:
        """Return the next entry of the log with this event."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            ready, _, _ = select.select([self.process.stderr], [], [], max(0.0, deadline - time.monotonic()))
            line = self.process.stderr.readline() if ready else b""
            assert line, f"the agent did not log {event!r}"
            entry: dict[str, str] = json.loads(line)
            if entry["event"] == event:
                return entry

    def get(self, path: str) -> str:
        """Ask until the agent has time to answer."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://{self.metrics_address}{path}", timeout=10) as answer:
                    return str(answer.read().decode())
            except urllib.error.HTTPError as error:
                error.close()
                assert error.code == 503 and time.monotonic() < deadline, error


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    socket_path = str(tmp_path / "agent.sock")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ORBITKV_AGENT_")}
    arguments = command(socket_path, "127.0.0.1:0", "--log-format", "json")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, bufsize=0, env=environ) as process:
        try:
            yield Serving(process, socket_path)
        finally:
            process.kill()


def test_agent_serves_tells_about_itself_and_drains_on_sigterm(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    socket_path = serving.socket_path
    assert serving.get("/health") == "ok\n"
    families = text_string_to_metric_families(serving.get("/metrics"))
    samples = [sample for family in families for sample in family.samples]
    unlabelled = {row.name for row in METRICS if not row.labels and row.kind != "histogram"}
    assert unlabelled <= {sample.name.removeprefix("orbitkv_") for sample in samples}
    assert not [sample for sample in samples if OTHER in sample.labels.values()]

    assert main(["configure-namespace", "team-a", "--quota", "1MiB", "--socket", socket_path]) == OK
    assert main(["configure-namespace", "team-a", "--guaranteed", "512KiB", "--socket", socket_path]) == OK
    assert main(["configure-namespace", "team-a", "--guaranteed", "2MiB", "--socket", socket_path]) == FAILED
    assert "guaranteed (2097152) must not be larger than quota (1048576)\n" in capsys.readouterr().err
    with AdminConnection(socket_path) as agent:
        status = parse_status(agent.status())
    team_a = next(row for row in status["namespaces"] if row["name"] == "team-a")
    assert (team_a["quota_bytes"], team_a["guaranteed_bytes"]) == (1 << 20, 1 << 19)
    assert status["agent"]["pid"] == serving.process.pid
    if slice_s():  # otherwise this kernel has none to choose
        assert slice_s(serving.process.pid) == SHORT_SLICE_S

    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(timeout=30) == OK
    assert main(["status", "--socket", socket_path]) == NO_AGENT


_THIEF = """
import ctypes, os, socket, sys
agent = socket.socket(socket.AF_UNIX)
agent.connect(sys.argv[1])
pidfd = agent.getsockopt(socket.SOL_SOCKET, 77)  # SO_PEERPIDFD
getfd = 438
library = ctypes.CDLL(None)
print(sum(library.syscall(getfd, pidfd, number, 0) >= 0 for number in range(64)))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv")
def test_no_root_of_another_container_takes_descriptors_of_the_agent(tmp_path: Path) -> None:
    """A pod's root without a tracer's right, and the agent without any."""
    socket_path = str(tmp_path / "agent.sock")
    without = ["setpriv", "--inh-caps=-all"]
    agent = [*without, "--bounding-set=-all", *command(socket_path, "127.0.0.1:0", "--log-format", "json")]
    with subprocess.Popen(agent, stderr=subprocess.PIPE, bufsize=0) as process:
        try:
            Serving(process, socket_path)
            thief = [*without, "--bounding-set=-sys_ptrace", sys.executable, "-c", _THIEF, socket_path]
            assert subprocess.check_output(thief, text=True, timeout=START_SECONDS) == "0\n"
        finally:
            process.kill()


def test_second_agent_on_the_same_socket_is_refused_and_the_first_serves_on(serving: Serving) -> None:
    arguments = command(serving.socket_path, "off", "--log-level", "error")
    second = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    assert second.returncode == FAILED
    assert second.stderr.count("\n") == 1
    assert f"another agent (pid {serving.process.pid}) serves {serving.socket_path}" in second.stderr
    assert main(["status", "--socket", serving.socket_path]) == OK


def test_told_to_end_while_it_starts_it_ends_at_once(tmp_path: Path) -> None:
    """By itself: the first process of a container would not be ended by a signal that it does not handle."""
    config = tmp_path / "agent.yaml"
    os.mkfifo(config)
    process = subprocess.Popen([*command(str(tmp_path / "agent.sock"), "off"), "--config", str(config)])
    deadline = time.monotonic() + START_SECONDS
    writer = -1
    while writer < 0:  # until it reads its settings, which never come
        assert time.monotonic() < deadline
        with suppress(OSError):
            writer = os.open(config, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.01)
    try:
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_SECONDS) == 128 + signal.SIGTERM
    finally:
        os.close(writer)
        process.kill()
