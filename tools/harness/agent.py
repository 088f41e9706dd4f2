"""A node agent in a process of its own."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orbitkv.client.session import Endpoint, Session
from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import GetStatus, Status
from tools.harness.engine import DEVICE, ROOT
from tools.harness.process import ManagedProcess, ProcessError, wait_until

READY_SECONDS = 20.0


def agent_python() -> str:
    """The Python that the agent's packages are installed for: ORBITKV_AGENT_PYTHON, or the running one."""
    return os.environ.get("ORBITKV_AGENT_PYTHON") or sys.executable


def agent_environment(plugin: Path | None = None) -> dict[str, str]:
    """The running environment without settings of the agent, and with its packages on the path.

    `plugin` is a folder to take the protocol from, instead of this tree's.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORBITKV_AGENT_")}
    packages = [str(plugin or ROOT / "engine_plugins"), str(ROOT / "node_agent")]
    return {**kept, "PYTHONPATH": os.pathsep.join(packages)}


class AgentProcess(ManagedProcess):
    """`orbitkv-agent serve` on a socket in `folder`; `settings` are the agent's, as its flags name them.

    It is serving when the constructor returns. Raises ProcessError with its log if it does not start. With `plugin` its
    protocol is of another release (`releases.plugin_with`). `before` is a command that runs it, `unshare` for example.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "agent",
        *,
        plugin: Path | None = None,
        before: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.socket_path = folder / f"{name}.sock"
        chosen = {
            "socket_path": self.socket_path,
            "pool": "256Mi",
            "metrics_address": "off",
            "prefault": False,
            "mode": "cuda" if DEVICE == "cuda" else "host",
            **settings,
        }
        command = [*before, agent_python(), "-m", "orbitkv_agent", "serve"]
        for setting, value in chosen.items():
            command += [f"--{setting.replace('_', '-')}", str(value).lower() if isinstance(value, bool) else str(value)]
        super().__init__(name, command, folder / f"{name}.log", agent_environment(plugin))
        try:
            wait_until(self._serving, "the agent's socket answers", READY_SECONDS)
        except TimeoutError:
            self.kill9()
            raise self.failure(f"did not serve within {READY_SECONDS:g} s") from None

    def _serving(self) -> bool:
        if not self.running():
            raise self.failure("did not start")
        try:
            self.status()
        except OrbitKVError as error:
            return error.kind is ErrorKind.INCOMPATIBLE  # of another release: that it says so is an answer
        except ProcessError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """What `orbitkv-agent status --json` prints, asked over the socket. Raises OrbitKVError."""
        wait_ms = 20_000  # a busy machine may not let the agent run for seconds
        endpoint = Endpoint(
            str(self.socket_path), cache_namespace="", token=b"", name="status", timeout_ms=wait_ms, server_uid=None
        )
        session = Session(endpoint, on_late_reply=lambda reply: None)
        try:
            reply = session.connection.call(GetStatus(), wait_ms)
        finally:
            session.close()
        if not isinstance(reply, Status):
            raise ProcessError(f"the agent answered a question for its status with {type(reply).__name__}")
        status: dict[str, Any] = json.loads(reply.body)
        return status

    def wait(self, probe: Callable[[dict[str, Any]], object], what: str, timeout: float = 20) -> dict[str, Any]:
        """Waits until `probe` finds what it wants in the status, which is returned.
        Raises TimeoutError with the last status."""
        last: dict[str, Any] = {}

        def ask() -> bool:
            nonlocal last
            last = self.status()
            return bool(probe(last))

        try:
            wait_until(ask, what, timeout, interval=0.05)
        except TimeoutError as error:
            raise TimeoutError(f"{error}. The agent's status: {json.dumps(last)}") from None
        return last

    def wait_at_rest(self, timeout: float = 60) -> dict[str, Any]:
        """Waits until no query, lease, restore or save is open, and returns the status."""
        return self.wait(lambda status: not in_flight(status), "nothing is in flight in the agent", timeout)


def in_flight(status: dict[str, Any]) -> dict[str, int]:
    """What an agent at rest has none of, with the counts that are not zero."""
    counts = {
        "queries": status["query"]["outstanding"],
        "reserved bytes": sum(status["query"]["reserved_bytes_by_phase"].values()),
        "leases": status["leases"]["live"],
        "pinned pages": status["leases"]["pinned_pages"],
        "restores": status["transfer"]["restores_inflight"],
        "saves": status["transfer"]["saves_inflight"],
    }
    return {name: count for name, count in counts.items() if count}
