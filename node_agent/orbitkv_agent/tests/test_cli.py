"""The command line, against an agent that a thread plays."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from orbitkv.cuda import CudaUnavailableError
from orbitkv.protocol import framing
from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    ConfigureNamespace,
    Done,
    GetStatus,
    Hello,
    Refusal,
    Reply,
    Request,
    Status,
    Welcome,
)
from orbitkv_agent import cli
from orbitkv_agent.admin import may_be_trusted
from orbitkv_agent.cli import FAILED, NO_AGENT, OK, USAGE, main
from orbitkv_agent.config import AgentConfig
from orbitkv_agent.host_memory import MemoryAllowance
from orbitkv_agent.observe.tests.examples import MIB, example_snapshot
from orbitkv_agent.sessions.server import SocketTakenError
from orbitkv_crds.names import AGENT_SEES_NO_GPU


class FakeAgent:
    """Answers one connection after the other; `silent` ones get no answer, `refusal` answers everything."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.snapshot = example_snapshot()
        self.refusal: Refusal | None = None
        self.body: bytes | None = None
        self.silent = False
        self.descriptors: list[int] = []
        self.requests: list[Request] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                reader = framing.FrameReader(framing.MAX_FRAME_BYTES)
                while data := connection.recv(1 << 16):
                    for sequence, body in reader.feed(data):
                        request = framing.request_decoder.decode(body)
                        self.requests.append(request)
                        if not self.silent:
                            descriptors = self.descriptors if isinstance(request, Hello) else []
                            frame = framing.encode(self._reply(request), sequence)
                            framing.send_with_descriptors(connection, frame, descriptors)

    def _reply(self, request: Request) -> Reply:
        if isinstance(request, Hello):
            return Welcome("b00t", 1, "0.1.0", 1, 1, 1, "host", "", 128, 60_000, 1, 0)
        if self.refusal is not None:
            return self.refusal
        if isinstance(request, GetStatus):
            return Status(msgspec.json.encode(self.snapshot) if self.body is None else self.body)
        return Done()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    agent = FakeAgent(tmp_path / "agent.sock")
    yield agent
    agent.close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("ORBITKV_AGENT_"):
            monkeypatch.delenv(variable)


def exit_code(arguments: list[str]) -> int:
    """Return what the shell would see."""
    try:
        return main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


# ------------------------------------------------------------------------------------------------------------- status


def test_status_prints_the_table(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--socket", agent.path]) == OK
    printed = capsys.readouterr().out

    assert printed.startswith("agent     serving")
    assert "team-a/qwen  800 MiB" in printed


def test_status_as_json_is_what_the_agent_said(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--socket", agent.path]) == OK
    assert json.loads(capsys.readouterr().out) == agent.snapshot


def test_status_finds_the_socket_by_the_settings(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBITKV_AGENT_SOCKET_PATH", agent.path)
    assert main(["status"]) == OK


def test_descriptors_that_come_along_are_closed(agent: FakeAgent, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with shared.open("wb") as file:
        agent.descriptors = [file.fileno()] * 3
        assert main(["status", "--socket", agent.path]) == OK
        targets = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert targets.count(str(shared.resolve())) == 1  # the one that this test opened


def test_draining_agent_is_unhealthy(agent: FakeAgent) -> None:
    agent.snapshot["agent"]["draining"] = True
    assert main(["status", "--socket", agent.path]) == FAILED
    assert main(["status", "--json", "--socket", agent.path]) == FAILED


def test_refusal_is_told_and_is_a_failure(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.refusal = Refusal(ErrorKind.DENIED, "only the owner of the socket may ask for the status")
    assert main(["status", "--socket", agent.path]) == FAILED
    assert capsys.readouterr().err == (
        "orbitkv-agent: the agent refused: only the owner of the socket may ask for the status\n"
    )


def test_state_of_another_release_is_no_stack_trace(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.body = b'{"agent": {"draining": false}, "other": 1}'
    assert main(["status", "--socket", agent.path]) == FAILED
    assert "another release" in capsys.readouterr().err
    assert main(["status", "--json", "--socket", agent.path]) == OK


def test_agent_that_hangs_is_a_failure_in_bounded_time(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.admin.ANSWER_SECONDS", 0.05)
    agent.silent = True
    assert main(["status", "--socket", agent.path]) == FAILED
    assert "did not answer within" in capsys.readouterr().err


def test_no_agent_names_the_socket_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent.sock"
    left_behind = tmp_path / "left-behind.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(left_behind))
    for path in (absent, left_behind):
        assert main(["status", "--socket", str(path)]) == NO_AGENT
        message = capsys.readouterr().err
        assert f"no agent listens on {path}" in message
        assert "orbitkv-agent serve" in message


def test_socket_of_a_stranger_is_not_spoken_to(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv_agent.admin.may_be_trusted", lambda server, own: False)
    assert main(["status", "--socket", agent.path]) == FAILED
    assert "nothing was sent" in capsys.readouterr().err
    assert agent.requests == []


def test_agents_of_the_same_user_and_of_root_are_trusted() -> None:
    assert may_be_trusted(server=1000, own=1000)
    assert may_be_trusted(server=0, own=1000)
    assert may_be_trusted(server=1000, own=0)
    assert not may_be_trusted(server=1001, own=1000)


# ------------------------------------------------------------------------------------------------- configure-namespace


def test_configuring_a_namespace_changes_only_what_is_given(agent: FakeAgent) -> None:
    assert main(["configure-namespace", "team-a/qwen", "--quota", "1GiB", "--socket", agent.path]) == OK
    assert agent.requests[-1] == ConfigureNamespace(
        "team-a/qwen",
        quota_bytes=1024 * MIB,
        guaranteed_bytes=256 * MIB,
        insert_class="retained",
        reset_generation=3,
    )


def test_quota_can_be_taken_away_again(agent: FakeAgent) -> None:
    arguments = ["--quota", "none", "--guaranteed", "0", "--class", "probationary", "--reset-generation", "4"]
    assert main(["configure-namespace", "team-a/qwen", *arguments, "--socket", agent.path]) == OK
    assert agent.requests[-1] == ConfigureNamespace("team-a/qwen", quota_bytes=None, reset_generation=4)


def test_namespace_that_the_agent_does_not_know_starts_from_the_defaults(agent: FakeAgent) -> None:
    assert main(["configure-namespace", "new", "--quota", "1MiB", "--socket", agent.path]) == OK
    assert agent.requests[-1] == ConfigureNamespace("new", quota_bytes=MIB)


def test_wrong_limits_are_refused_before_anything_is_asked(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quota", "big", "--guaranteed", "none", "--class", "gold", "--reset-generation", "-1"]
    assert (
        exit_code(["configure-namespace", "a", *arguments[:-2], f"{arguments[-2]}=-1", "--socket", agent.path]) == USAGE
    )
    assert capsys.readouterr().err.splitlines() == [
        "orbitkv-agent: --quota is 'big': must be a size such as 512MiB, 4GiB or a number of bytes",
        "orbitkv-agent: --guaranteed is 'none': must be a size such as 512MiB, 4GiB or a number of bytes",
        "orbitkv-agent: --class is 'gold': must be probationary or retained",
        "orbitkv-agent: --reset-generation is '-1': must be a whole number",
    ]
    assert agent.requests == []


# -------------------------------------------------------------------------------------------------------------- serve


class PlayedAgent:
    """Stands for the agent's core: runs until it is asked to stop."""

    clean = True
    start_error: Exception | None = None

    def __init__(self, config: AgentConfig) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.config = config
        self.stopped = threading.Event()

    def run(self) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        assert self.stopped.wait(10)
        return self.clean

    def request_stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PlayedAgent]]:
    class Agent(PlayedAgent):
        pass

    module = types.ModuleType("orbitkv_agent.agent")
    module.Agent = Agent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orbitkv_agent.agent", module)
    root = logging.getLogger()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), root.handlers[:], root.level
    yield Agent
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGINT, before[1])
    root.handlers[:] = before[2]
    root.setLevel(before[3])


def test_serve_runs_until_sigterm_and_tells_the_size_of_the_pool(
    played: type[PlayedAgent], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--log-format", "json"]) == OK
    entry = json.loads(capsys.readouterr().err.splitlines()[0])

    assert entry["event"] == "pool sized"
    assert entry["pool_bytes"] > 0
    assert entry["given_by"].startswith("default: half of ")


def test_serve_says_that_the_pool_is_larger_than_the_memory(
    played: type[PlayedAgent], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "memory_allowance", lambda: MemoryAllowance(1 << 30, "control group limit in /x"))
    for pool, warnings in (("1GiB", 0), ("1025MiB", 1)):
        main(["serve", "--pool", pool, "--log-level", "warning"])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == warnings
        assert all("1 GiB (control group limit in /x)" in line and "lower --pool" in line for line in lines)


def test_serve_that_could_not_drain_is_a_failure(played: type[PlayedAgent]) -> None:
    played.clean = False
    assert main(["serve", "--pool", "1MiB"]) == FAILED


@pytest.mark.parametrize(
    "error",
    [OSError("metrics cannot be served on 127.0.0.1:1"), SocketTakenError("another agent (pid 1) serves /tmp/a.sock")],
)
def test_serve_that_cannot_start_says_why_in_one_line(
    played: type[PlayedAgent], error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    played.start_error = error
    assert main(["serve", "--pool", "1MiB", "--log-level", "error"]) == FAILED
    assert capsys.readouterr().err == f"orbitkv-agent: {error}\n"


def test_agent_that_is_to_serve_gpus_and_sees_none_ends_with_a_code_of_its_own(
    played: type[PlayedAgent], capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is how the operator tells it from other failures."""
    played.start_error = CudaUnavailableError("the CUDA driver shows no GPU to this process")
    assert main(["serve", "--pool", "1MiB", "--log-level", "error"]) == AGENT_SEES_NO_GPU
    assert "shows no GPU" in capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------- config and usage


def test_config_prints_values_with_their_sources(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORBITKV_AGENT_LOG_LEVEL", "debug")
    assert main(["config", "--pool", "4GiB"]) == OK
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}

    assert lines["pool"] == ["4GiB", "flag --pool"]
    assert lines["log_level"] == ["debug", "environment ORBITKV_AGENT_LOG_LEVEL"]
    assert lines["port"] == ["50055", "default"]
    assert lines["arena"] == ["-", "default"]


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--pool", "4GiB", "--cache-namespaces", "{a: {quota: 1GiB}}"]) == OK
    printed = json.loads(capsys.readouterr().out)

    assert printed["pool"] == {"value": "4GiB", "source": "flag --pool"}
    assert printed["cache_namespaces"]["value"]["a"]["quota"] == "1GiB"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["serve", "--poool", "4GiB"],
            "'--poool' is not known here; the nearest is --pool (see orbitkv-agent serve --help)",
        ),
        (["status", "--jsno"], "the nearest is --json"),
        (["serve", "--pool"], "expected one argument"),
        (["serve", "extra"], "'extra' is not known here"),
        (["srve"], "invalid choice: 'srve'"),
        ([], "COMMAND"),
        (["serve", "--mode", "gpu"], "mode is 'gpu' (flag --mode): must be 'auto', 'host' or 'cuda'"),
        (["serve", "--pool", "4x", "--log-level", "info"], "pool is '4x' (flag --pool): must be a size"),
    ],
)
def test_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(arguments) == USAGE
    printed = capsys.readouterr()

    assert printed.out == ""
    assert words in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "status", "config", "configure-namespace"])
def test_help_teaches_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([command, "--help"]) == OK
    assert f"examples:\n  orbitkv-agent {command}" in capsys.readouterr().out


def test_a_module_run_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "orbitkv_agent", "config", "--port", "x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert run.returncode == USAGE
    assert run.stderr == "orbitkv-agent: port is 'x' (flag --port): must be a valid integer\n"
