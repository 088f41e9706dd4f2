"""Users as they are seen from a user namespace, such as a pod's with `hostUsers: false`."""

from pathlib import Path
from typing import Final

EVERYBODY: Final = 0xFFFF_FFFF
"""How many users there are outside of any user namespace."""
_PROCESS: Final = Path("/proc/self")
_KERNEL: Final = Path("/proc/sys/kernel")


def user_without_number(process: Path = _PROCESS, kernel: Path = _KERNEL) -> int | None:
    """Return the user as which those appear here that have no number in this process's user namespace.

    Those are all of the node's own, root among them. None: every user has a number. In such a namespace somebody of the
    pod may have that number too, but cannot put a socket in a folder of the node.
    """
    try:
        ranges = [line.split() for line in (process / "uid_map").read_text().splitlines()]
        if sum(int(count) for _, _, count in ranges) >= EVERYBODY:
            return None
        return int((kernel / "overflowuid").read_text())
    except (OSError, ValueError):
        return None
