from __future__ import annotations

import re
from pathlib import Path

from orbitkv_agent.guards import NAMES

PACKAGE = Path(__file__).parents[1]


def _names(pattern: str, *, in_tests: bool) -> set[str]:
    files = [file for file in PACKAGE.rglob("*.py") if ("tests" in file.parts) == in_tests]
    return {name for file in files for name in re.findall(pattern, file.read_text())}


def test_every_guard_is_named_used_and_pinned_by_a_test() -> None:
    assert _names(r'(?<!\.)guard\(\s*"([\w-]+)"', in_tests=False) == NAMES
    assert _names(r'mark\.guard\("([\w-]+)"\)', in_tests=True) >= NAMES  # they also pin guards of the client
