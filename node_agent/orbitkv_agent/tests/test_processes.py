from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orbitkv.protocol.messages import Hello, Ping, Pong, Welcome
from orbitkv_agent.tests.child_engine import Connection
from orbitkv_agent.tests.harness import PAGE, World, hashes


def serve_until(world: World, condition: Callable[[], bool], seconds: float = 20) -> None:
    """Turn the agent's loop until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        world.agent.loop.run_once(0.05)


@contextlib.contextmanager
def child_engine(world: World, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """An engine in a process of its own with grants of every kind; and its forked child's id."""
    command = [sys.executable, "-m", "orbitkv_agent.tests.child_engine", world.path, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    forked = 0
    try:
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)
        serve_until(world, lambda: bool(ready.poll(0)))
        forked = int(process.stdout.readline())
        yield process, forked
    finally:
        if forked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(forked, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_a_killed_engine_held_returns_when_its_exit_is_known(world: World) -> None:
    with child_engine(world) as (process, _):
        oracle = world.agent.oracle()
        assert (oracle["saves"], oracle["restores"], oracle["leases_live"]) == (1, 1, 1)
        os.kill(process.pid, signal.SIGSTOP)
        world.pump()
        assert world.agent.oracle() == oracle, "a stopped process may go on"
        process.kill()
        serve_until(world, lambda: not any(world.agent.oracle().values()))
        assert not world.agent.server.sessions
        assert not list(world.agent.instances)
        assert world.agent.cache.stats().used_bytes == 2 * PAGE
        assert world.engine().restore(hashes(1, 2)) == 2


def test_an_agent_that_was_killed_is_replaced_on_the_same_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    settings = ["--socket-path", path, "--pool", "8MiB", "--metrics-address", "off"]
    command = [sys.executable, "-m", "orbitkv_agent", "serve", *settings]
    boots = []
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                boots.append(_connected(path).call(Hello(), Welcome).boot_id)
            finally:
                process.kill()
        assert os.path.exists(path), "it left its socket behind"
    assert boots[0] != boots[1]


def _connected(path: str) -> Connection:
    """A connection to an agent that is just starting."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return Connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < deadline, "the agent did not start"
            time.sleep(0.02)


def test_a_forked_child_does_not_keep_a_dead_engines_session_alive(world: World) -> None:
    with child_engine(world, "fork") as (process, forked):
        process.kill()
        process.wait()
        os.kill(forked, 0)  # it lives, and has the connection
        serve_until(world, lambda: not world.agent.server.sessions)
        assert not any(world.agent.oracle().values())


def test_a_stopped_client_holds_up_nobody(world: World) -> None:
    with child_engine(world) as (process, _):
        os.kill(process.pid, signal.SIGSTOP)
        assert world.client().call(Ping(), Pong).ok
        os.kill(process.pid, signal.SIGCONT)


def test_engines_killed_many_times_leak_no_descriptor(world: World) -> None:
    def once() -> None:
        with child_engine(world) as (process, _):
            process.kill()
            serve_until(world, lambda: not world.agent.server.sessions)

    once()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    assert len(os.listdir("/proc/self/fd")) == before
