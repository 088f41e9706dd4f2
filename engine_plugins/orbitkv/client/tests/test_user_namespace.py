"""Engines in a user namespace, where the agent's user has no number."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orbitkv.client.user_namespace import user_without_number

FIRST, COUNT = 100_000, 65_536

ENGINE = """
import ctypes, os, socket, sys

from orbitkv.client import OrbitKVError
from orbitkv.client.connection import _check_server

CLONE_NEWUSER = 0x10000000
if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER):
    print("no user namespaces", flush=True)
    sys.exit()
print("in one", flush=True)
sys.stdin.readline()  # the users are mapped now
os.setresuid(0, 0, 0)
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
for server_uid in (None, 0):
    try:
        _check_server(connection, sys.argv[1], server_uid)
        print("trusted", flush=True)
    except OrbitKVError as error:
        print(error.kind, flush=True)
"""


def machine(folder: Path, uid_map: str) -> tuple[Path, Path]:
    """Files as the kernel shows them to a process."""
    (folder / "uid_map").write_text(uid_map)
    (folder / "overflowuid").write_text("65534\n")
    return folder, folder


def test_outside_of_a_user_namespace_everybody_has_a_number(tmp_path: Path) -> None:
    assert user_without_number(*machine(tmp_path, "         0          0 4294967295\n")) is None


def test_in_a_user_namespace_the_nodes_users_have_one_number_together(tmp_path: Path) -> None:
    assert user_without_number(*machine(tmp_path, "         0     100000      65536\n")) == 65534


def test_where_the_kernel_does_not_say_nobody_is_trusted_for_it(tmp_path: Path) -> None:
    assert user_without_number(tmp_path / "none", tmp_path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may map another user's numbers")
def test_engine_of_a_pod_without_host_users_trusts_the_agent_of_the_node() -> None:
    """But not where it was told which user the agent is: that one cannot be told from others."""
    name = f"orbitkv-test-{os.getpid()}"  # no file: the other user could not read its folder
    single_threaded = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as the kernel wants it of who makes a namespace
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(f"\0{name}")
        agent.listen()
        command = [sys.executable, "-c", ENGINE, name]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=single_threaded) as engine:
            assert engine.stdin is not None and engine.stdout is not None
            if engine.stdout.readline() != "in one\n":
                pytest.skip("this machine has no user namespaces")
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{engine.pid}/{kind}").write_text(f"0 {FIRST} {COUNT}\n")
            said, _ = engine.communicate("\n", timeout=30)
    assert said.split() == ["trusted", "denied"]
