"""How the programs of this package start and stop. Exit codes: 0 stopped; 1 it failed and is to be started again; 2 a
wrong setting."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from orbitkv_operator.logs import set_up_logging
from orbitkv_operator.settings import SettingsError

logger = logging.getLogger(__name__)


class Settings(Protocol):
    """What every program's settings have."""

    @property
    def log_level(self) -> str:
        """What is logged."""


class Program(Protocol):
    """Runs until it is stopped."""

    def run(self) -> bool:
        """Run; return whether it was stopped rather than failed."""

    def stop(self) -> None:
        """Have `run` return. For signal handlers."""

    def about(self) -> dict[str, Any]:
        """What the log is to say of it at its start."""


S = TypeVar("S", bound=Settings)


def run_program(
    name: str,
    arguments: Sequence[str] | None,
    load: Callable[[Sequence[str]], S],
    make: Callable[[S, Any], Program],
) -> int:
    """Run a program until SIGTERM or SIGINT; return the exit code.

    Args:
        name: the command.
        arguments: of the command; None: those of this process.
        load: reads its settings; raises SettingsError.
        make: makes the program; raises OSError, say for a port that is taken.
    """
    try:
        settings = load(sys.argv[1:] if arguments is None else arguments)
    except SettingsError as error:
        for problem in error.problems:
            print(f"{name}: {problem}", file=sys.stderr)
        return 2
    set_up_logging(settings.log_level)

    from kubernetes.config.config_exception import ConfigException

    from orbitkv_operator.cluster.api import load_client

    try:
        program = make(settings, load_client())
    except (ConfigException, OSError) as error:  # no cluster, or a port that is taken; the message says which
        logger.error("%s cannot start", name, extra={"error": str(error)})
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: program.stop())
    logger.info("starting", extra=program.about())
    return 0 if program.run() else 1
