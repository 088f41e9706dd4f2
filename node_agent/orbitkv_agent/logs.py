"""The agent's log: one line an entry on stderr, for people (`text`) or programs (`json`).

Modules use `logging.getLogger(__name__)`; what belongs to an entry goes in as `extra={"name": value}` and comes out as
a field. What must not be in a log cannot get there by its name: fields that are called after secrets or keys are
withheld, and of bytes only the length is shown.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Final, Literal, TextIO

WITHHELD: Final = frozenset(
    {"token", "tokens", "key", "keys", "hash", "hashes", "blob", "prompt", "password", "secret"}
)
"""Names of fields whose values are never written; also as the last word of a name, as in `session_token`."""
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest came as `extra`."""
_MOST_WAITING: Final = 10_000


def set_up_logging(level: str, style: Literal["json", "text"], stream: TextIO | None = None) -> None:
    """Log everything of `level` (its name, as in the settings) or above to `stream` (default: stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


@contextmanager
def written_by_a_thread() -> Iterator[None]:
    """While it lasts, entries are written by a thread of their own: a reader that stalls cannot stop who logs.

    What comes while 10,000 entries wait is dropped. On leaving, what waits is written.
    """
    root = logging.getLogger()
    handlers = list(root.handlers)
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_WAITING)
    listener = QueueListener(waiting, *handlers)
    root.handlers[:] = [_NeverWaiting(waiting)]
    listener.start()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        listener.stop()


class _NeverWaiting(QueueHandler):
    """Hands entries over within the process, as they are."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Fix the text now; its arguments may change before it is written."""
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue the entry, or drop it."""
        with suppress(queue.Full):
            self.queue.put_nowait(record)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of an entry, without what must not be written."""
    return {name: _safe(name, value) for name, value in vars(record).items() if name not in _STANDARD}


def _safe(name: str, value: Any) -> Any:
    if name.lower().rpartition("_")[2] in WITHHELD:
        return "(withheld)"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"({len(value)} bytes)"
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        return {str(inner): _safe(str(inner), item) for inner, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_safe("", item) for item in value]
    return str(value)


class _OneLineFormatter(logging.Formatter):
    """What both styles share."""

    def when(self, record: logging.LogRecord) -> str:
        """Return the time of the entry: UTC, to the millisecond."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def trace(self, record: logging.LogRecord) -> str:
        """Return the stack trace of an entry that reports a defect, or ""."""
        return self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


class JsonFormatter(_OneLineFormatter):
    """A JSON object a line: `ts`, `level`, `logger`, `event`, the entry's fields, `trace` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the entry as one line."""
        entry = fields_of(record) | {
            "ts": self.when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if trace := self.trace(record):
            entry["trace"] = trace
        first = ("ts", "level", "event")
        return json.dumps({name: entry[name] for name in first} | entry, ensure_ascii=False)


class TextFormatter(_OneLineFormatter):
    """Time, level, event, then the fields as `name=value`; a stack trace follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the entry as text."""
        event = record.getMessage().replace("\n", " | ")
        fields = "".join(f"  {name}={_plain(value)}" for name, value in fields_of(record).items())
        line = f"{self.when(record)} {record.levelname.lower():7} {event}{fields}"
        trace = self.trace(record)
        return f"{line}\n{trace}" if trace else line


def _plain(value: Any) -> str:
    """Return a value as it reads best: in quotation marks only where it would be torn apart."""
    if isinstance(value, str) and value and not any(mark in value for mark in ' "=\n\t'):
        return value
    return json.dumps(value, ensure_ascii=False)
