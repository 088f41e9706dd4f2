"""The command `orbitkv-operator`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from orbitkv_operator.program import run_program
from orbitkv_operator.settings import Settings, load_settings

if TYPE_CHECKING:
    from orbitkv_operator.operator import Operator


SWITCH_SECONDS: Final = 0.0005
"""How long a thread keeps Python's lock while others want it. Taking a report passes the lock several times: with the
usual 5 ms, looks at a pool of a thousand nodes would hold up a thousand agents that begin at one time until they give
up."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; return the exit code."""
    sys.setswitchinterval(SWITCH_SECONDS)
    return run_program("orbitkv-operator", arguments, load_settings, _make)


def _make(settings: Settings, client: Any) -> Operator:
    from orbitkv_operator.operator import Operator

    return Operator(settings, client)


if __name__ == "__main__":
    sys.exit(main())
