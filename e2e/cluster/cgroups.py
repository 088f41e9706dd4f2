"""The control groups of the cluster: all of its processes and pods are below one, so that all can be found and ended.

Of version 1, as on the machine that OrbitKV is developed on, each controller has a tree of its own; the cluster's own
processes are counted in that of `pids` only. Version 2 has one tree, in which a group passes its controllers on to the
groups below. What version 2 needs is tested on a folder that stands for it, not on a machine that has it.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NAME = "orbitkv-cluster"
END_SECONDS = 30.0


class ControlGroups:
    """The groups of one cluster: those below `system` for its own processes, and one for each node's pods."""

    def __init__(self, root: Path = ROOT, name: str = NAME) -> None:
        self._root = root
        self._name = name
        self._unified = (root / "cgroup.controllers").exists()

    def _tops(self) -> list[Path]:
        """The cluster's own group, in each tree."""
        if self._unified:
            return [self._root / self._name]
        trees = [tree for tree in sorted(self._root.iterdir()) if (tree / "cgroup.procs").exists()]
        # links such as cpu -> cpu,cpuacct would name a tree twice
        return [tree / self._name for tree in trees if not tree.is_symlink()]

    def system(self, name: str) -> Path:
        """Makes and returns the group that processes of one part of the cluster join: a node's name, or `control`.

        Raises OSError where this machine's groups cannot be used.
        """
        tree = self._root if self._unified else self._root / "pids"
        if not (tree / "cgroup.procs").exists():
            raise OSError(f"the control groups of this machine are not at hand: there is no {tree}/cgroup.procs")
        group = tree / self._name / "system" / name
        group.mkdir(parents=True, exist_ok=True)
        return group

    def add_node(self, name: str) -> str:
        """Makes the group that a node's pods are below and returns its path, as a kubelet wants it (cgroupRoot)."""
        for top in self._tops():
            group = top / name
            group.mkdir(parents=True, exist_ok=True)
            if self._unified:
                for parent in (self._root, top, group):
                    pass_on_controllers(parent)
            else:
                for each in (top, group):
                    inherit_cpuset(each)
        return f"/{self._name}/{name}"

    def processes(self) -> set[int]:
        """The numbers of all processes of the cluster."""
        return processes_below(self._tops())

    def end_node(self, name: str) -> None:
        """Kills every process of a node, its pods included, and removes its groups. Raises TimeoutError as end_all."""
        end([path for top in self._tops() for path in (top / name, top / "system" / name)])

    def end_all(self) -> None:
        """Kills every process of the cluster and removes its groups.

        Raises TimeoutError with the numbers of those that are still there after half a minute.
        """
        end(self._tops())


def end(tops: list[Path]) -> None:
    """Kills the processes of groups and of all groups below them, and removes the groups."""
    deadline = time.monotonic() + END_SECONDS
    while remaining := processes_below(tops):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of the cluster cannot be killed: {sorted(remaining)}")
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for top in tops:
        for group in reversed(list(groups_below(top))):
            group.rmdir()


def processes_below(tops: list[Path]) -> set[int]:
    """The numbers of all processes in groups and in all groups below them."""
    return {
        int(line)
        for top in tops
        for group in groups_below(top)
        for line in read_lines(group / "cgroup.procs")
        if line != "0"
    }


def groups_below(top: Path) -> Iterator[Path]:
    """A group and all groups below it, each after the one it is in; none if it does not exist."""
    if not top.is_dir():
        return
    yield top
    for child in sorted(top.iterdir()):
        if child.is_dir():
            yield from groups_below(child)


def read_lines(path: Path) -> list[str]:
    """The lines of a file; none if it has gone, as that of a group does."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def pass_on_controllers(group: Path) -> None:
    """Version 2: what a group has, the groups below it get."""
    has = set(read_lines(group / "cgroup.controllers"))
    missing = sorted(has - set(read_lines(group / "cgroup.subtree_control")))
    if missing:
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in missing))


def inherit_cpuset(group: Path) -> None:
    """Version 1: a new group has no processors and no memory nodes, and takes no process, until it is given some."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        path = group / name
        if path.exists() and not path.read_text().strip():
            path.write_text((group.parent / name).read_text())
