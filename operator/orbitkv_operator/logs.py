"""The operator's log: one JSON object a line on stderr.

Modules use `logging.getLogger(__name__)`; what belongs to an entry goes in as `extra={"name": value}` and comes out as
a field. Fields that are called after secrets are withheld.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any, Final, TextIO

WITHHELD: Final = frozenset({"token", "tokens", "key", "keys", "password", "secret", "authorization"})
"""Names of fields whose values are never written; also as the last word of a name, as in `session_token`."""
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest came as `extra`."""
_QUIET: Final = {
    "kopf": logging.WARNING,
    "kopf._core.reactor.running": logging.ERROR,  # warns that signals are ours to handle
    "urllib3": logging.ERROR,
    "kubernetes": logging.WARNING,
    "aiohttp": logging.WARNING,
}
"""Libraries that report on themselves, and what of it is worth a line."""
REPEAT_SECONDS: Final = 60.0


def set_up_logging(level: str, stream: TextIO | None = None) -> None:
    """Log everything of `level` (`debug`, `info`, `warning`, `error`) or above to `stream` (default: stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(FewRepeats("kopf"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(least, root.level))


class FewRepeats(logging.Filter):
    """Lets the same words of one library pass once a minute: it retries every few seconds, and says so each time."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library = library
        self._lock = threading.Lock()  # guards _last; log records come from several threads
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the entry is written."""
        if record.name.partition(".")[0] != self._library:
            return True
        # "Request attempt #3 failed": the number is what differs between repeats
        words = "".join(letter for letter in record.getMessage() if not letter.isdigit())[:300]
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(words, -REPEAT_SECONDS) < REPEAT_SECONDS:
                return False
            if len(self._last) > 200:
                self._last.clear()
            self._last[words] = now
        return True


class JsonFormatter(logging.Formatter):
    """A JSON object a line: `ts`, `level`, `event`, `logger`, the entry's fields, `trace` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the entry as one line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry: dict[str, Any] = {"ts": when, "level": record.levelname.lower(), "event": record.getMessage()}
        entry["logger"] = record.name
        entry |= {name: _safe(name, value) for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info and record.exc_info[0]:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _safe(name: str, value: Any) -> Any:
    if name.lower().rpartition("_")[2] in WITHHELD:
        return "(withheld)"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        return {str(inner): _safe(str(inner), item) for inner, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_safe("", item) for item in value]
    return str(value)
