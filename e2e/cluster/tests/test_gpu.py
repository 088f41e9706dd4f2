"""The stand-ins for NVIDIA's runtime and libraries."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster.gpu import libraries, runtime
from orbitkv.cuda import driver


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder with GPUs, and beside it a runc that does nothing."""
    (tmp_path / "gpus").mkdir()
    wanted = {"devices": {"all": 2}, "handlers": ["nvidia"]}
    (tmp_path / "gpus" / "gpus.json").write_text(json.dumps(wanted))
    runc = tmp_path / "runc"
    runc.write_text('#!/bin/sh\necho "$@"\n')
    runc.chmod(0o755)
    return tmp_path


def mounts(node: Path, handler: str, visible: str) -> set[str]:
    """Where a container gets something from the runtime, if its variable says `visible`."""
    bundle = node / "bundle"
    bundle.mkdir()
    config = {"process": {"env": ["A=b", f"NVIDIA_VISIBLE_DEVICES={visible}"]}, "mounts": []}
    (bundle / "config.json").write_text(json.dumps(config))
    arguments = ["--root", "/run/x", "create", "--bundle", str(bundle), "name"]
    command = [sys.executable, "-I", runtime.__file__, str(node / "gpus"), handler, *arguments]
    path = {"PATH": f"{node}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == arguments
    return {mount["destination"] for mount in json.loads((bundle / "config.json").read_text())["mounts"]}


def test_container_that_asks_for_gpus_gets_libraries_and_devices(node: Path) -> None:
    found = mounts(node, "nvidia", "all")
    assert {"/dev/nvidia0", "/dev/nvidia1"} <= found
    assert {path.rpartition("/")[2] for path in found} >= set(runtime.NAMES)


@pytest.mark.parametrize(("handler", "visible"), [("nvidia", "void"), ("nvidia", "other.com/gpu=all"), ("runc", "all")])
def test_others_get_nothing(node: Path, handler: str, visible: str) -> None:
    assert mounts(node, handler, visible) == set()


@pytest.mark.skipif(shutil.which("tcc") is None, reason="the compiler comes with the cluster's packages")
def test_library_passes_for_the_drivers(tmp_path: Path) -> None:
    libraries.write(tmp_path / "libcuda.so.1")
    program = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); [getattr(library, name) for name in sys.argv[2:]]"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "libcuda.so.1"), *driver.FUNCTION_NAMES]
    subprocess.run([*command, "nvmlDeviceGetCount_v2"], check=True)
