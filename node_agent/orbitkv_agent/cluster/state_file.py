"""What the agent knows of the cluster, on disk: it runs on with it when the apiserver is away, also after a restart."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

_FORMAT: Final = 1


class StateFile:
    """One file of objects, replaced as a whole, for root alone (folder mode 0700). Used by one thread.

    Args:
        folder: made if it is missing.
        name: of the file.
        about: what the objects are of (the pool); a file about something else is not read.

    Attributes:
        problem: why the last `save` failed, for people; "" when it did not.
    """

    def __init__(self, folder: str, name: str, about: str) -> None:
        self._folder = Path(folder)
        self._path = self._folder / name
        self._about = about
        self.problem = ""

    def load(self) -> list[dict[str, Any]] | None:
        """Return the objects that were saved last, or None when there is no file that can be used."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT or content["about"] != self._about:
                logger.info("not used: it is another release's or another pool's", extra={"path": str(self._path)})
                return None
            objects: list[dict[str, Any]] = content["objects"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s); going on without it", self._path, error)
            return None
        return objects

    def save(self, objects: list[dict[str, Any]]) -> None:
        """Replace the file; after a crash it is the old or the new one. A failure is logged and kept in `problem`."""
        body = json.dumps({"format": _FORMAT, "about": self._about, "objects": objects})
        fresh = self._path.with_suffix(".new")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(self._folder, 0o700)  # the kubelet makes it 0755
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.rename(fresh, self._path)
            directory = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            problem = (
                f"{self._path} cannot be written ({error.strerror}): a restart without the apiserver would not know it"
            )
            if problem != self.problem:
                logger.warning("%s", problem)
            self.problem = problem
        else:
            self.problem = ""
