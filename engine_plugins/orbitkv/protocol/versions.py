"""Versions of what crosses the process boundary, and how two sides settle on one.

Every version is a range: a side speaks its newest version and the one of the release before. The two sides use the
highest version that both speak; where there is none, the refusal names both ranges.
"""

from __future__ import annotations

from typing import NamedTuple


class VersionRange(NamedTuple):
    """Inclusive range of versions that one side speaks."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"[{self.lowest}, {self.highest}]"


RELEASE = "0.1.0"
"""Version of this distribution, for people; the ranges below decide."""

MESSAGES = VersionRange(1, 2)
"""Layout and meaning of the messages of `messages.py`. From version 2 on a registration of GPU memory is answered with
a `Challenge` first."""

RECORDS = VersionRange(1, 2)
"""What a session shares: the completion records (`records.py`), and from version 2 on the shortcut (`shortcut.py`) and
the permit (`permit.py`), with the words of chunks that belong to it."""

PAGE_IMAGE = VersionRange(1, 1)
"""Layout of a page in host memory: the layers' parts one after another, padded to `geometry.PAGE_ALIGNMENT`."""


def settle(ours: VersionRange, theirs: VersionRange) -> int | None:
    """Return the highest version in both ranges, or None when they do not meet."""
    version = min(ours.highest, theirs.highest)
    return version if version >= max(ours.lowest, theirs.lowest) else None
