"""One line an entry, and what never gets into one."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from orbitkv_agent.logs import set_up_logging, written_by_a_thread

logger = logging.getLogger("orbitkv_agent.example")


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def log_as_json() -> io.StringIO:
    stream = io.StringIO()
    set_up_logging("info", "json", stream)
    return stream


def test_json_entry_has_time_level_event_and_fields() -> None:
    stream = log_as_json()
    logger.info("session %d opened", 7, extra={"peer_pid": 12, "cache_namespace": "team-a"})
    entry = json.loads(stream.getvalue())

    assert entry.pop("ts").endswith("Z")
    assert entry == {
        "level": "info",
        "event": "session 7 opened",
        "peer_pid": 12,
        "cache_namespace": "team-a",
        "logger": "orbitkv_agent.example",
    }


def test_entry_stays_one_line_whatever_is_in_it() -> None:
    for style in ("json", "text"):
        stream = io.StringIO()
        set_up_logging("info", style, stream)
        logger.warning("a\nb", extra={"detail": "c\nd"})
        assert stream.getvalue().count("\n") == 1


def test_text_entry_reads_from_left_to_right() -> None:
    stream = io.StringIO()
    set_up_logging("info", "text", stream)
    logger.warning("save stalled", extra={"engine": "vllm-1/abc", "seconds": 30, "why": "no answer", "empty": ""})

    assert stream.getvalue().endswith(
        'Z warning save stalled  engine=vllm-1/abc  seconds=30  why="no answer"  empty=""\n'
    )


@pytest.mark.parametrize("style", ["json", "text"])
@pytest.mark.parametrize("field", ["token", "session_token", "key", "hash", "hashes", "PROMPT"])
def test_secrets_and_keys_are_withheld(style: str, field: str) -> None:
    stream = io.StringIO()
    set_up_logging("debug", style, stream)  # type: ignore[arg-type]
    logger.info("hello", extra={field: "s3cret", "nested": {field: "s3cret"}, "list": [{field: ["s3cret"]}]})

    assert "s3cret" not in stream.getvalue()
    assert "(withheld)" in stream.getvalue()


def test_of_bytes_only_the_length_is_logged() -> None:
    stream = log_as_json()
    logger.info("frame", extra={"body": b"s3cret"})

    assert json.loads(stream.getvalue())["body"] == "(6 bytes)"


def test_fields_cannot_take_the_place_of_the_entry_itself() -> None:
    stream = log_as_json()
    logger.info("real", extra={"event": "forged", "level": "forged", "ts": "forged"})
    entry = json.loads(stream.getvalue())

    assert (entry["event"], entry["level"]) == ("real", "info")
    assert entry["ts"] != "forged"


def test_defect_comes_with_its_trace() -> None:
    stream = log_as_json()
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("defect")

    assert json.loads(stream.getvalue())["trace"].endswith("ValueError: broken")


def test_entries_below_the_level_are_left_out_and_setting_up_again_replaces() -> None:
    first = log_as_json()
    second = log_as_json()
    logger.debug("no")
    logger.info("yes")

    assert first.getvalue() == ""
    assert json.loads(second.getvalue())["event"] == "yes"


def test_a_reader_that_stalls_does_not_stop_who_logs() -> None:
    """The stream below blocks until the entries were all handed over."""
    released = threading.Event()

    class Stalled(io.StringIO):
        def write(self, text: str) -> int:
            assert released.wait(30), "logging waited for the reader"
            return super().write(text)

    stream = Stalled()
    set_up_logging("info", "text", stream)
    with written_by_a_thread():
        for number in range(100):
            logging.getLogger("test").info("entry %d", number)
        released.set()
    lines = stream.getvalue().splitlines()
    assert [line.split()[-1] for line in lines] == [str(number) for number in range(100)]
