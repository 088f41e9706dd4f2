"""Control groups of version 2, on a folder that stands for /sys/fs/cgroup: this project's machines have version 1."""

from pathlib import Path

import pytest

from e2e.cluster.cgroups import ControlGroups


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """What a machine with version 2 shows, as far as the code looks at it."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    (tmp_path / "cgroup.procs").write_text("")
    return tmp_path


def test_version_2_passes_every_controller_on_to_a_nodes_pods(unified: Path) -> None:
    top = unified / "orbitkv-cluster"
    node = top / "node-a"
    node.mkdir(parents=True)
    for group in (top, node):  # the kernel makes these files
        (group / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
        (group / "cgroup.subtree_control").write_text("")
    assert ControlGroups(unified).add_node("node-a") == "/orbitkv-cluster/node-a"
    assert (unified / "cgroup.subtree_control").read_text() == "+cpu +cpuset"
    assert (top / "cgroup.subtree_control").read_text() == "+cpu +cpuset +memory +pids"
    assert (node / "cgroup.subtree_control").read_text() == "+cpu +cpuset +memory +pids"


def test_version_2_has_one_group_for_the_clusters_own_processes(unified: Path) -> None:
    assert ControlGroups(unified).system("control") == unified / "orbitkv-cluster" / "system" / "control"


def test_version_1_makes_a_nodes_group_in_every_tree_and_gives_it_processors(tmp_path: Path) -> None:
    for tree in ("cpuset", "memory", "pids"):
        (tmp_path / tree).mkdir()
        (tmp_path / tree / "cgroup.procs").write_text("")
    (tmp_path / "cpuset" / "cpuset.cpus").write_text("0-1\n")
    for group in ("orbitkv-cluster", "orbitkv-cluster/node-a"):
        (tmp_path / "cpuset" / group).mkdir()
        (tmp_path / "cpuset" / group / "cpuset.cpus").write_text("\n")
    ControlGroups(tmp_path).add_node("node-a")
    assert (tmp_path / "memory" / "orbitkv-cluster" / "node-a").is_dir()
    assert (tmp_path / "cpuset" / "orbitkv-cluster" / "node-a" / "cpuset.cpus").read_text() == "0-1\n"


def test_processes_in_groups_below_groups_are_found(unified: Path) -> None:
    pod = unified / "orbitkv-cluster" / "node-a" / "kubepods" / "pod1"
    pod.mkdir(parents=True)
    (pod / "cgroup.procs").write_text("71\n72\n")
    system = ControlGroups(unified).system("node-a")
    (system / "cgroup.procs").write_text("5\n")
    (unified / "cgroup.procs").write_text("1\n2\n")
    assert ControlGroups(unified).processes() == {5, 71, 72}


def test_a_machine_without_control_groups_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="control groups of this machine"):
        ControlGroups(tmp_path).system("control")
