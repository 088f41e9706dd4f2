"""Other releases of OrbitKV, for tests of two sides that are not of the same one.

A release speaks the newest version of the messages and the one before. A release before this one does not know the
messages of ADDED; what a release after it has beside other versions cannot be known here. That each message keeps its
bytes is tested on the messages.
"""

import re
import shutil
from pathlib import Path

from orbitkv.protocol.versions import MESSAGES, RECORDS, VersionRange
from tools.harness.engine import ROOT

BEFORE = VersionRange(MESSAGES.highest - 2, MESSAGES.highest - 1)
NEXT = VersionRange(MESSAGES.highest, MESSAGES.highest + 1)
LONG_BEFORE = VersionRange(MESSAGES.lowest - 2, MESSAGES.lowest - 1)
LONG_AFTER = VersionRange(MESSAGES.highest + 1, MESSAGES.highest + 2)

ADDED = ("JoinSession",)
"""Requests that this release has and the one before has not."""

_MESSAGES = re.compile(r"^MESSAGES = VersionRange\(.*\)$", re.MULTILINE)
_RECORDS = re.compile(r"^RECORDS = VersionRange\(.*\)$", re.MULTILINE)


def plugin_with(messages: VersionRange, folder: Path) -> Path:
    """Makes a copy of the plugin's files that speaks other versions of the messages.

    Returns the folder to put on PYTHONPATH, for an engine or an agent.
    """
    made = folder / f"plugin-{messages.lowest}-{messages.highest}"
    if not made.exists():
        left_out = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(ROOT / "engine_plugins", made, ignore=left_out)
        file = made / "orbitkv" / "protocol" / "versions.py"
        text, count = _MESSAGES.subn(f"MESSAGES = {messages!r}", file.read_text())
        if messages.highest < MESSAGES.highest:
            text, more = _RECORDS.subn(f"RECORDS = {VersionRange(RECORDS.lowest, RECORDS.highest - 1)!r}", text)
            count *= more
        assert count == 1, f"{file} does not say its versions as it used to"
        file.write_text(text)
        if messages.highest < MESSAGES.highest:
            for name in ADDED:
                _forget_request(made / "orbitkv" / "protocol" / "messages.py", name)
    return made


def _forget_request(file: Path, name: str) -> None:
    text, count = re.subn(rf"\b{name} \| |\| {name}\b", "", file.read_text())
    assert count == 1, f"{file} does not list its requests as it used to"
    file.write_text(text)
