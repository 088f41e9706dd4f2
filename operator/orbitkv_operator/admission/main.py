"""The command `orbitkv-webhook`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orbitkv_operator.admission.settings import Settings, load_settings
from orbitkv_operator.program import run_program

if TYPE_CHECKING:
    from orbitkv_operator.admission.webhook import Webhook


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the webhook until SIGTERM or SIGINT; return the exit code."""
    return run_program("orbitkv-webhook", arguments, load_settings, _make)


def _make(settings: Settings, client: Any) -> Webhook:
    from orbitkv_operator.admission.webhook import Webhook

    return Webhook(settings, client)


if __name__ == "__main__":
    sys.exit(main())
