"""Sizes as people write them, and how much memory there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv_agent.host_memory import memory_allowance
from orbitkv_agent.quantity import format_quantity, parse_quantity

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * GIB),
        ("4Gi", 4 * GIB),
        ("4 GiB", 4 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("512MiB", 512 << 20),
        ("3G", 3 * 10**9),
        ("3GB", 3 * 10**9),
        ("16k", 16_000),
        ("0", 0),
        ("123", 123),
        (123, 123),
        ("0.3B", 0),
    ],
)
def test_size_is_read(text: int | str, size: int) -> None:
    assert parse_quantity(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "4GIB", "4m", "-1", -1, True, None, 4.5, "1e9", "1,5GiB", "4GiB 2", [], "٣"]
)
def test_what_is_no_size_is_refused_with_the_rule(text: Any) -> None:
    with pytest.raises(ValueError, match=r"^must be a size such as 512MiB, 4GiB or a number of bytes$"):
        parse_quantity(text)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 62))
def test_size_is_shown_in_a_unit_that_can_be_read_again(size: int) -> None:
    shown = format_quantity(size)
    assert len(shown) <= 13
    assert abs(parse_quantity(shown) - size) <= size * 0.06


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree:        1 kB\n"}


def test_without_groups_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert memory_allowance(write(tmp_path, MEMINFO)) == (16 * GIB, "memory of this machine")


def test_limit_of_a_version_2_group_counts(tmp_path: Path) -> None:
    limits = {"proc/self/cgroup": "0::/pod/agent\n", "sys/fs/cgroup/pod/agent/memory.max": f"{4 * GIB}\n"}
    size, source = memory_allowance(write(tmp_path, MEMINFO | limits))

    assert size == 4 * GIB
    assert source.endswith("/pod/agent/memory.max")


def test_limit_of_a_group_above_counts_when_it_is_tighter(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "0::/pod/agent\n",
        "sys/fs/cgroup/pod/agent/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/pod/memory.max": f"{3 * GIB}\n",
    }
    assert memory_allowance(write(tmp_path, MEMINFO | limits)).size == 3 * GIB


def test_soft_limit_counts_too(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.high": f"{2 * GIB}\n",
    }
    assert memory_allowance(write(tmp_path, MEMINFO | limits)).size == 2 * GIB


def test_limit_of_a_version_1_group_counts(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": f"{5 * GIB}\n",
    }
    assert memory_allowance(write(tmp_path, MEMINFO | limits)).size == 5 * GIB


def test_container_that_sees_only_its_own_group_finds_the_limit_at_the_mount(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "4:memory:/docker/0123\n0::/docker/0123\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
    }
    assert memory_allowance(write(tmp_path, MEMINFO | limits)).size == 2 * GIB


def test_no_limit_is_no_limit_in_both_versions(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "4:memory:/\n0::/\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert memory_allowance(write(tmp_path, MEMINFO | limits)).size == 16 * GIB


def test_this_machine_has_memory() -> None:
    assert memory_allowance().size > GIB // 8
