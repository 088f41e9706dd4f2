"""What was found: for people as text, for programs as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

WIDTH: Final = 110


class Level(Enum):
    """How bad something is."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what it is about: a kind and a name, or a part of OrbitKV.
        message: how it is, as a sentence.
        fix: what to do; "" where nothing is to be done.
    """

    level: Level
    about: str
    message: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """Return it as JSON has it."""
        return {"level": self.level.value, "about": self.about, "message": self.message, "fix": self.fix}


def ok(about: str, message: str) -> Finding:
    """Say that something is as it should be."""
    return Finding(Level.OK, about, message)


def info(about: str, message: str, fix: str = "") -> Finding:
    """Say something that is worth knowing and wrong in no way."""
    return Finding(Level.INFO, about, message, fix)


def warning(about: str, message: str, fix: str) -> Finding:
    """Say that something does less than it could."""
    return Finding(Level.WARNING, about, message, fix)


def problem(about: str, message: str, fix: str) -> Finding:
    """Say that something does not work."""
    return Finding(Level.PROBLEM, about, message, fix)


def count(findings: Iterable[Finding]) -> dict[Level, int]:
    """Return how many findings there are of each level."""
    found = [finding.level for finding in findings]
    return {level: found.count(level) for level in Level}


def render(findings: Sequence[Finding]) -> str:
    """Return findings as text, each with its level in front and what to do below it.

    What others wrote (annotations, events) could hold signs that a terminal obeys: those are shown as "?".
    """
    lines = []
    for finding in findings:
        head = f"{finding.level.value:<8} "
        lines += textwrap.wrap(
            _printable(f"{finding.about}: {finding.message}"),
            WIDTH,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if finding.fix:
            indent = " " * len(head)
            lines += textwrap.wrap(
                _printable(finding.fix),
                WIDTH,
                initial_indent=f"{indent}-> ",
                subsequent_indent=f"{indent}   ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _printable(words: str) -> str:
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in words)


def as_json(findings: Sequence[Finding], **more: Any) -> dict[str, Any]:
    """Return findings, their counts and `more` as one object."""
    counts = {level.value: number for level, number in count(findings).items()}
    return {**more, "counts": counts, "findings": [finding.to_json() for finding in findings]}


def sentence(words: str) -> str:
    """Return words that others wrote as one line that ends with a full stop."""
    line = " ".join(words.split())
    return line if not line or line.endswith((".", "!", "?")) else f"{line}."
