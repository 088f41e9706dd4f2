"""Tests of `bench.processors`."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bench.processors import Moment, _program, between, now, others, total, used


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("/usr/bin/kube-apiserver --port=1", "kube-apiserver"),
        ("", "kernel"),
        ("/opt/python/bin/python /opt/orbitkv/bin/orbitkv-webhook --x", "orbitkv-webhook"),
        ("python3 -u -m orbitkv_operator.main --x", "orbitkv_operator"),
        ("python3 -c pass", "python3"),
        ("python3", "python3"),
    ],
)
def test_programs_go_by_their_own_name(line: str, name: str) -> None:
    assert _program([*line.split(" "), ""]) == name


def test_what_this_process_works_is_counted() -> None:
    before, until = used(), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert total(before, used(), 1) >= 80


def test_little_is_in_the_sum_and_not_named() -> None:
    assert between({"a": 1.0}, {"a": 2.0, "b": 0.5, "c": 0.001}, 10) == "150.1 (a 100.0, b 50.0)"


def test_own_work_and_that_of_programs_that_were_started_is_not_the_others() -> None:
    assert others(Moment(10, 500, 3), Moment(20, 515, 13)) == 0.5
    assert others(Moment(10, 500, 3), Moment(20, 509, 13)) == 0, "counted in whole ticks"
    before = now()
    subprocess.run([sys.executable, "-c", "sum(range(5_000_000))"], check=True)
    assert 0.05 < now().own - before.own < now().everybody - before.everybody + 0.1
