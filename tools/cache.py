"""Where things are kept that take minutes to make and serve every tree of a user, and the lock they are made under.

Needs nothing but the standard library.
"""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SetUpError(Exception):
    """Something that OrbitKV's tests need could not be made; the message says what to do."""


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """The folder of everything kept: ${ORBITKV_CACHE:-${XDG_CACHE_HOME:-~/.cache}/orbitkv}."""
    cache = os.environ.get("ORBITKV_CACHE")
    if cache:
        return Path(cache).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "orbitkv"


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds the lock file `path`: one process at a time works on `what`. The kernel frees it if that one dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is at work on {what}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
