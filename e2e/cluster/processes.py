"""The processes of a cluster, which outlive the program that started them: each is known by a record in a folder.

A record holds the process's number and its start time, so that a number which the kernel has given to another process
since is never taken for ours. Where control groups are given, a process joins them before anything else (cgroups.py).
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LOG_LINES = 25


class ClusterError(Exception):
    """The cluster, or a part of it, could not do what was asked. The message says what to look at."""


def wait_until(probe: Callable[[], bool], what: str, timeout: float, interval: float = 0.1) -> None:
    """Asks `probe` until it says yes. Raises ClusterError, naming `what`, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not probe():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(interval)


def start_time(pid: int) -> str:
    """When a process was started, in the kernel's own count; empty if there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def inherited() -> list[int]:
    """The descriptors beyond standard error that a process started now would have too: locks of whoever runs this.

    What outlives its caller must not hold them.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this list
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


@dataclass(frozen=True)
class Record:
    """What was started, and as which process."""

    command: list[str]
    environment: dict[str, str]
    pid: int
    started: str


class Processes:
    """Starts, stops and finds the processes of one folder. `enter` is put before each command: see Node."""

    def __init__(self, folder: Path, *, prefix: Sequence[str] = (), groups: Sequence[Path] = ()) -> None:
        self._records = folder / "run"
        self.logs = folder / "log"
        self._prefix = list(prefix)
        self._groups = [str(group / "cgroup.procs") for group in groups]

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self.logs / f"{name}.log"

    def record(self, name: str) -> Record | None:
        """What is known of a process that was started; None if none was."""
        try:
            return Record(**json.loads((self._records / f"{name}.json").read_text()))
        except FileNotFoundError:
            return None

    def running(self, name: str) -> bool:
        """Whether a process that was started has not ended."""
        record = self.record(name)
        # one that had ended before its start could be read has none
        return record is not None and bool(record.started) and start_time(record.pid) == record.started

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> int:
        """Starts a process in a session of its own and returns its number. Its output goes to its log."""
        self._records.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        # joins the control groups first, so that nothing is ever started outside of them
        join = 'for g in $GROUPS_TO_JOIN; do echo $$ > "$g" || exit 1; done; unset GROUPS_TO_JOIN; exec "$@"'
        variables = {**os.environ, **(environment or {}), "GROUPS_TO_JOIN": " ".join(self._groups)}
        output = (os.POSIX_SPAWN_OPEN, 1, str(self.log(name)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        pid = os.posix_spawn(
            "/bin/sh",
            ["/bin/sh", "-c", join, name, *self._prefix, *command],
            variables,
            file_actions=[
                *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in inherited()),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                output,
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        record = Record(list(command), environment or {}, pid, start_time(pid))
        (self._records / f"{name}.json").write_text(json.dumps(asdict(record)))
        return pid

    def restart(self, name: str) -> int:
        """Starts a process that has ended once more, as before."""
        record = self.record(name)
        if record is None:
            raise ClusterError(f"{name} was never started")
        return self.start(name, record.command, record.environment)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM, timeout: float = 20) -> None:
        """Sends a signal to a process, waits for its end, and kills it after `timeout` seconds. None is fine too."""
        record = self.record(name)
        if record is None:
            return
        for attempt in (number, signal.SIGKILL):
            if not self.running(name):
                return
            os.kill(record.pid, attempt)
            try:
                wait_until(lambda: not self.running(name), f"the end of {name}", timeout, 0.02)
            except ClusterError:
                if attempt == signal.SIGKILL:
                    raise

    def forget(self, name: str) -> None:
        """Removes what is known of a process that was stopped, as if it had never been started."""
        (self._records / f"{name}.json").unlink(missing_ok=True)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a process that runs."""
        record = self.record(name)
        if record is None or not self.running(name):
            raise ClusterError(f"{name} does not run")
        os.kill(record.pid, number)

    def resume(self, names: Iterable[str]) -> None:
        """Lets processes go on that were paused by SIGSTOP."""
        for name in filter(self.running, names):
            self.signal(name, signal.SIGCONT)

    def failure(self, name: str, what: str) -> ClusterError:
        """An error about a process, with the end of its log."""
        try:
            lines = self.log(name).read_text(errors="replace").splitlines()[-LOG_LINES:]
        except FileNotFoundError:
            lines = []
        return ClusterError("\n".join([f"{what}. The end of {self.log(name)}:", *lines]))

    def wait_ready(self, name: str, probe: Callable[[], bool], what: str, timeout: float = 60) -> None:
        """Waits until `probe` says yes. Raises ClusterError with the log's end when the process ends, or time is up."""

        deadline = time.monotonic() + timeout
        while not probe():
            if not self.running(name):
                raise self.failure(name, f"{what}: {name} has ended")
            if time.monotonic() > deadline:
                raise self.failure(name, f"waited {timeout:g} s in vain: {what}")
            time.sleep(0.1)
