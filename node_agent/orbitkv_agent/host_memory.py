"""How much memory this process may use: the smallest of the machine's memory and the limits of its control groups."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class MemoryAllowance(NamedTuple):
    """What the process may use, in bytes, and who says so."""

    size: int
    source: str


def memory_allowance(root: Path = Path("/")) -> MemoryAllowance:
    """Return the tightest limit that applies; `root` is where `proc` and `sys` are found.

    Raises:
        OSError: the machine's memory cannot be read (`/proc` is not mounted).
    """
    allowance = MemoryAllowance(_machine_memory(root), "memory of this machine")
    for path in _limit_files(root):
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # the root group has no such file, and a container does not see the groups above its own
        # cgroup v2 writes "max" for no limit, v1 a number larger than any machine's memory
        if text.isdigit() and int(text) < allowance.size:
            allowance = MemoryAllowance(int(text), f"control group limit in {path}")
    return allowance


def _machine_memory(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    raise OSError(f"no MemTotal in {root / 'proc/meminfo'}")


def _limit_files(root: Path) -> list[Path]:
    """The limit files of the process's groups and of every group above them, v1 and v2.

    `/proc/self/cgroup` has lines `hierarchy:controllers:path`; version 2 is the one without controllers. Inside a
    container the path may be the host's while only the own group is mounted, so the mount point is looked at too.
    """
    files: list[Path] = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in groups:
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ["memory.limit_in_bytes"]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            files += [mount.joinpath(*parts[:depth], name) for name in names]
    return files
