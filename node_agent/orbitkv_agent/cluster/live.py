"""The pool's settings that change while the agent runs: read again when their file changes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from orbitkv_agent.loop import Loop, Timer
from orbitkv_crds.live import LiveSettings

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
_LARGEST: Final = 1 << 20


class LiveFile:
    """Looks at the file every few seconds. Used by the owner thread only.

    The kubelet swaps a symbolic link two levels above the file, which inotify does not see; the file is small and in
    memory, so looking costs microseconds.

    Args:
        apply: called with settings that differ from those in force.

    Attributes:
        settings: those in force.
        digest: sha256 of the file's bytes that are in force, hexadecimal; "" before the first.
        problem: why the newest file is not in force, for people; "" when it is.
    """

    def __init__(self, path: str, loop: Loop, apply: Callable[[LiveSettings], None]) -> None:
        self.settings = LiveSettings()
        self.digest = ""
        self.problem = ""
        self._path = Path(path)
        self._loop = loop
        self._apply = apply
        self._seen: bytes | None = None
        self._timer: Timer | None = None

    def start(self) -> None:
        """Read the file now, and look at it from now on."""
        self.look()
        self._timer = self._loop.call_later(LOOK_S, self.start)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Take the file over if it changed. One that cannot be used leaves the settings as they are."""
        try:
            with self._path.open("rb") as file:
                content = file.read(_LARGEST)
        except OSError as error:
            self._complain(f"{self._path} cannot be read: {error.strerror}")
            self._seen = None
            return
        if content == self._seen:
            return
        self._seen = content
        try:
            settings = LiveSettings.read(content.decode())
        except ValueError as error:  # also what is not UTF-8
            self._complain(f"{self._path}: {error}")
            return
        self.problem = ""
        self.digest = hashlib.sha256(content).hexdigest()
        if settings != self.settings:
            self.settings = settings
            logger.info(
                "the pool's settings changed", extra={"live": settings.model_dump(mode="json", exclude_none=True)}
            )
            self._apply(settings)

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("%s; the settings before stay in force", problem)
        self.problem = problem
