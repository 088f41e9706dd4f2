"""Stamps on pods."""

from __future__ import annotations

import pytest

from orbitkv_crds.stamps import (
    ANNOTATION_FROM,
    ANNOTATION_INJECTED,
    ANNOTATION_SKIP_REASON,
    Injected,
    Note,
    asked,
    read_injected,
    read_skip,
    skip_reason,
)

INJECTED = Injected("0.1.0", "team/chat", "engine", "vllm", "init", (Note("pool-not-ready", "The pool is new."),))


def test_what_is_written_is_read() -> None:
    assert read_injected({ANNOTATION_INJECTED: INJECTED.write()}) == INJECTED
    note = Note("args-unreadable", "The command is a shell: leave inject-via out.")
    assert read_skip({ANNOTATION_SKIP_REASON: skip_reason(note)}) == note


def test_what_is_written_is_compact_and_always_the_same() -> None:
    assert INJECTED.write() == (
        '{"version":"0.1.0","namespace":"team/chat","container":"engine","engine":"vllm","payload":"init",'
        '"info":[{"reason":"pool-not-ready","message":"The pool is new."}]}'
    )


@pytest.mark.parametrize("text", ["", "true", "{}", "[]", "null", "{", '{"version":1}', "[" * 100_000])
def test_forged_stamp_is_no_stamp(text: str) -> None:
    assert read_injected({ANNOTATION_INJECTED: text}) is None


@pytest.mark.parametrize("text", ["", "because", "nonsense: because", ":"])
def test_forged_reason_is_no_reason(text: str) -> None:
    assert read_skip({ANNOTATION_SKIP_REASON: text}) is None
    assert read_skip({}) is None


def test_stamps_and_marks_ask_for_nothing() -> None:
    annotations = {ANNOTATION_INJECTED: "x", ANNOTATION_FROM: "owner", "orbitkv.io/mode": "a", "example.com/a": "b"}
    assert asked(annotations) == ["orbitkv.io/mode"]
