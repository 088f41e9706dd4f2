"""Compiles the stand-in of NVIDIA's libraries: one file, under both of their names."""

import subprocess
from pathlib import Path
from typing import Final

from e2e.cluster.gpu.runtime import COUNT_FILE
from e2e.cluster.processes import ClusterError
from orbitkv.cuda import driver

SOURCE: Final = Path(__file__).with_name("stub.c")


def write(target: Path) -> None:
    """Compiles the library. Raises ClusterError."""
    text = SOURCE.read_text()
    others = [name for name in driver.FUNCTION_NAMES if f"int {name}(" not in text]
    text += "".join(f"int {name}(void) {{ return 0; }}\n" for name in others)
    command = ["tcc", "-nostdlib", "-shared", f'-DCOUNT_FILE="{COUNT_FILE}"', "-o", str(target), "-xc", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"the stand-in of NVIDIA's libraries could not be compiled: {done.stderr.strip()}")
