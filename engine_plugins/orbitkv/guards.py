"""Switches for tests: leave out one named check, to show that the tests of that check can fail.

A check that keeps something from happening that must never happen asks `guard("its-name")` first. That is true always,
except in a process that was started with ORBITKV_TEST_GUARD_OFF=its-name, which is for tests only.
"""

from __future__ import annotations

import os

_OFF = os.environ.get("ORBITKV_TEST_GUARD_OFF", "")


def guard(name: str) -> bool:
    """Whether the check called `name` is made."""
    return name != _OFF
