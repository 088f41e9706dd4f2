"""A child process with a log file, which can be stopped, paused, killed, and waited for with a deadline."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

Answer = TypeVar("Answer")


class ProcessError(Exception):
    """A child process did not do what was asked of it. The message ends with the last lines of its log."""


def wait_until(probe: Callable[[], Answer | None], what: str, timeout: float, interval: float = 0.02) -> Answer:
    """Asks `probe` until it answers something true, and returns that.
    Raises TimeoutError, naming `what`, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(interval)


class ManagedProcess:
    """One child in a session of its own, so that Ctrl-C reaches only its owner, and its children end with it."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self._over = False
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """The process id; after the end, that of the process that was."""
        return self._child.pid

    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._child.poll() is None

    def log_text(self) -> str:
        """All that the process has written so far."""
        return self.log.read_text(errors="replace")

    def failure(self, what: str) -> ProcessError:
        """An error about this process, with the end of its log."""
        code = self._child.poll()
        state = "is running" if code is None else f"ended with {code}"
        lines = "\n".join(self.log_text().splitlines()[-25:])
        return ProcessError(f"{self.name} {what} (it {state}). Its log, {self.log}, ends with:\n{lines}")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and what it started; none once they have been seen to end."""
        if not self._over:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def pause(self) -> None:
        """Stops the process where it stands (SIGSTOP)."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused process go on."""
        self.signal(signal.SIGCONT)

    def kill9(self) -> None:
        """Kills the process and what it started with SIGKILL and waits for the end."""
        self.signal(signal.SIGKILL)
        self._child.wait(timeout=30)
        self._over = True  # the number may be another process's from now on

    def stop(self, timeout: float = 20) -> int:
        """Asks the process to end (SIGTERM), kills it if it does not within `timeout` seconds, returns its exit code.

        What it started and left behind is killed.
        """
        if self.running():
            self.resume()
            os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout)
        self.kill9()
        return self._child.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
