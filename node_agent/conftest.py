"""What most tests of the agent begin with; whoever needs another agent or engine has a fixture of that name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from orbitkv_agent.tests.harness import Engine, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """An agent in host mode, in the test's own thread and time; at the end nothing may be left over."""
    from orbitkv_agent.tests.harness import World  # here: tests of parts do without the whole agent

    with World(tmp_path) as world:
        yield world


@pytest.fixture
def engine(world: World) -> Engine:
    """An engine that can hit, in the cache namespace without a name; nothing is saved yet."""
    return world.engine()
