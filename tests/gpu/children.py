"""Engines in processes of their own, for tests that stop and kill them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from orbitkv_agent.devices.cuda.nvml import used_bytes
from tools.harness.engine import ROOT

PAGES = 400
MIB = 1 << 20
APART = ["unshare", "--pid", "--kill-child", "--mount-proc", "--ipc", "--net", "--uts", "--mount"]
"""Runs a command in namespaces of its own, all but the user's; what is left in common are files, the socket's too."""

AS_ANOTHER = [*APART, "sh", "-c", '/bin/true; /bin/true; "$0" "$@"; exit $?']
"""The same, under another process number than 1."""


def environment() -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "engine_plugins"), str(ROOT / "node_agent"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def child(socket: Path, what: str, *before: str, stderr: int | None = None) -> subprocess.Popen[str]:
    """An engine of `plain_engine`; it has begun when it says `go`."""
    command = [*before, sys.executable, "-m", "tests.gpu.plain_engine", str(socket), what, "--pages", str(PAGES)]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=stderr, text=True)


def begun(engine: subprocess.Popen[str]) -> None:
    assert engine.stdout is not None and engine.stdout.readline().strip() == "go"


def checked(socket: Path, *before: str) -> str:
    """Have a fresh engine restore every page that the agent has; what it says."""
    process = child(socket, "check", *before)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    assert "WRONG" not in out, out
    return out


def gpu_used() -> int:
    from orbitkv.cuda import LibCuda

    used = used_bytes(LibCuda().gpus()[0].uuid)
    assert used is not None
    return used
