"""The command `orbitkv-operator`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orbitkv_operator.program import run_program
from orbitkv_operator.settings import Settings, load_settings

if TYPE_CHECKING:
    from orbitkv_operator.operator import Operator


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; return the exit code."""
    return run_program("orbitkv-operator", arguments, load_settings, _make)


def _make(settings: Settings, client: Any) -> Operator:
    from orbitkv_operator.operator import Operator

    return Operator(settings, client)


if __name__ == "__main__":
    sys.exit(main())
