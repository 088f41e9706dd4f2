"""Processes that outlive the program that started them."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.processes import ClusterError, Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    for record in (tmp_path / "run").glob("*.json"):
        made.stop(record.stem, signal.SIGKILL)


def test_another_instance_finds_and_stops_what_one_started(processes: Processes, tmp_path: Path) -> None:
    processes.start("sleeper", ["sleep", "60"])
    other = Processes(tmp_path)
    assert other.running("sleeper")
    other.stop("sleeper")
    assert not processes.running("sleeper")


def test_a_number_that_was_given_to_another_process_is_not_touched(processes: Processes, tmp_path: Path) -> None:
    processes.start("sleeper", ["sleep", "60"])
    processes.stop("sleeper")
    path = tmp_path / "run" / "sleeper.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "pid": os.getpid()}))  # as if the kernel had used the number again
    assert not processes.running("sleeper")
    processes.stop("sleeper")  # would end this test


def test_a_process_that_ignores_the_signal_is_killed(processes: Processes) -> None:
    processes.start("stubborn", ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
    processes.wait_ready("stubborn", lambda: "ready" in processes.log("stubborn").read_text(), "the trap")
    processes.stop("stubborn", timeout=0.3)
    assert not processes.running("stubborn")


def test_a_process_that_ends_is_named_with_the_end_of_its_log(processes: Processes) -> None:
    processes.start("broken", ["sh", "-c", "echo no such option; exit 2"])
    with pytest.raises(ClusterError, match=r"a service: broken has ended(.|\n)*no such option"):
        processes.wait_ready("broken", lambda: False, "a service", timeout=10)


def test_a_process_that_ends_before_anybody_looks_at_it_does_not_run(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = os.posix_spawn

    def spawn_and_see_it_end(*command: Any, **options: Any) -> int:
        pid = spawn(*command, **options)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    monkeypatch.setattr(os, "posix_spawn", spawn_and_see_it_end)
    processes.start("broken", ["true"])
    assert not processes.running("broken")
    processes.stop("broken")


def test_a_process_that_is_never_ready_is_named_too(processes: Processes) -> None:
    processes.start("slow", ["sleep", "60"])
    with pytest.raises(ClusterError, match=r"waited 0\.2 s in vain: a service"):
        processes.wait_ready("slow", lambda: False, "a service", timeout=0.2)


def test_what_was_stopped_starts_again_as_before(processes: Processes) -> None:
    processes.start("speaker", ["sh", "-c", "echo $GREETING; sleep 60"], {"GREETING": "good day"})
    processes.wait_ready("speaker", lambda: processes.log("speaker").read_text() == "good day\n", "a greeting")
    processes.stop("speaker")
    processes.restart("speaker")
    processes.wait_ready("speaker", lambda: processes.log("speaker").read_text() == "good day\n" * 2, "two greetings")


def test_a_lock_of_who_starts_them_is_not_held_on(processes: Processes, tmp_path: Path) -> None:
    """As of `flock FILE make cluster`, whose lock would be held for as long as the cluster runs."""
    with (tmp_path / "lock").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        pid = processes.start("sleeper", ["sleep", "60"])
        processes.wait_ready("sleeper", lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the program")
        held = set()
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it just starts: what it opens for that, it closes
                held.add(os.readlink(each))
    assert held and str(tmp_path / "lock") not in held
