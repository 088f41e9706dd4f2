"""What `make demo` says about what it found. That it finds it is for the demo itself."""

import json

import pytest

from tools.demo.conversation import QUESTIONS, TURNS, Step, Transcript, round_of
from tools.demo.report import Report, Turn


def turn(session: int, number: int, engine: str, hbm: int, orbitkv: int, recomputed: int) -> Turn:
    total = hbm + orbitkv + recomputed
    return Turn(session, number, "first" if engine == "first" else "restarted", total, hbm, orbitkv, recomputed, 12.345)


TURNS_SERVED = [
    turn(1, 1, "first", 0, 0, 500),
    turn(2, 1, "first", 416, 0, 84),
    turn(1, 2, "restarted", 0, 608, 40),
    turn(2, 2, "restarted", 416, 192, 30),
]


def test_report_passes_when_outputs_are_equal_and_something_was_restored() -> None:
    report = Report(TURNS_SERVED, differing=[])
    assert report.passed and report.identical
    text = report.as_text()
    assert "Outputs with and without the cache are identical" in text
    assert "FAILED" not in text


def test_report_names_the_answers_that_differ() -> None:
    report = Report(TURNS_SERVED, differing=[(2, 2)])
    assert not report.passed
    assert "differ in 1 of 4 answers: session 2 turn 2" in report.as_text()


def test_report_fails_when_nothing_came_from_orbitkv_after_the_restart() -> None:
    report = Report([*TURNS_SERVED[:2], turn(1, 2, "restarted", 0, 0, 648)], differing=[])
    assert report.identical and not report.passed
    assert "FAILED: nothing came from OrbitKV" in report.as_text()


def test_report_as_object_has_what_programs_read() -> None:
    found = json.loads(json.dumps(Report(TURNS_SERVED, differing=[]).as_object()))
    assert found["identical"] is True
    assert found["turns"][2] == {
        "session": 1,
        "turn": 2,
        "engine": "restarted",
        "prompt_tokens": 648,
        "hbm_tokens": 0,
        "orbitkv_tokens": 608,
        "recomputed_tokens": 40,
        "ttft_ms": 12.345,
    }
    assert found["totals"] == {
        "prompt_tokens": 500 + 500 + 648 + 638,
        "hbm_tokens": 832,
        "orbitkv_tokens": 800,
        "recomputed_tokens": 654,
    }


def test_table_has_a_line_a_turn_and_says_where_the_engine_was_killed() -> None:
    lines = Report(TURNS_SERVED, differing=[]).as_text().splitlines()
    killed = next(number for number, text in enumerate(lines) if "killed" in text)
    assert lines[killed - 1].split() == ["2", "1", "first", "500", "416", "0", "84", "12.3"]
    assert lines[killed + 1].split() == ["1", "2", "restarted", "648", "0", "608", "40", "12.3"]


@pytest.mark.parametrize("session", range(1, len(QUESTIONS) + 1))
def test_each_prompt_is_the_conversation_so_far(session: int) -> None:
    transcript = Transcript([1, 2], [[[10 * s + t] for t in range(TURNS)] for s in range(len(QUESTIONS))])
    steps = [next(step for step in round_of(number) if step.session == session) for number in (1, 2)]
    first = transcript.prompt(steps[0])
    transcript.heard(steps[0], [99])
    assert transcript.prompt(steps[1]) == [*first, 99, 10 * (session - 1) + 1]
    assert steps == [Step(session, 1), Step(session, 2)]
