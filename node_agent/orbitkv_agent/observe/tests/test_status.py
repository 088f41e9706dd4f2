"""The table of `orbitkv-agent status`."""

from __future__ import annotations

from orbitkv_agent.observe.status import render_status
from orbitkv_agent.observe.tests.examples import example_snapshot


def test_table_tells_everything_a_person_asks_for() -> None:
    assert render_status(example_snapshot()).splitlines() == [
        "agent     serving, host mode, release 0.1.0",
        "boot      b00t, process 4711, up 1 h 2 min",
        "socket    /tmp/orbitkv-50055.sock",
        "pool      1 GiB of 4 GiB (25 %), 2 GiB free in one piece",
        "stored    450 blocks, 900 MiB",
        "hit rate  75.0 % of 400 blocks asked for since the start",
        "sessions  6",
        "queries   5 open (2 wait for admission), 96 MiB of 3 GiB (3 %) of the budget reserved",
        "leases    3 live, 32 pages, 64 MiB",
        "restores  2 in flight, 32 MiB",
        "saves     1 in flight, 16 MiB",
        "",
        "NAMESPACE    USED     QUOTA                      GUARANTEED  NEW PAGES     RESET",
        "(unnamed)    100 MiB  no limit                   0 B         probationary  0",
        "team-a/qwen  800 MiB  800 MiB of 1.6 GiB (50 %)  256 MiB     retained      3",
        "",
        "INSTANCE    NAMESPACE    STATE                            PAGE    LEASES  RESTORES  SAVES  MODEL",
        "vllm-1/abc  team-a/qwen  serving                          2 MiB   3       2         1      Qwen3-8B bf16",
        "vllm-2/def  (unnamed)    not yet: workers [1] of 2        -       0       0         0      Qwen3-8B bf16",
        "vllm-3/ghi  (unnamed)    off: layout mismatch in layer 0  64 KiB  0       0         0      Gemma 3",
    ]


def test_what_engines_call_themselves_is_no_command_for_the_terminal() -> None:
    snapshot = example_snapshot()
    snapshot["instances"][0]["engine"] = "\x1b[2Jvllm\n/1"
    snapshot["instances"][0]["model"] = "modèle\r"
    line = next(line for line in render_status(snapshot).splitlines() if "vllm" in line)

    assert line.startswith("?[2Jvllm?/1  ")
    assert line.endswith("modèle?")


def test_agent_without_engines_says_none_and_divides_by_nothing() -> None:
    snapshot = example_snapshot()
    snapshot["instances"] = []
    snapshot["cache"]["block_hits"] = snapshot["cache"]["block_misses"] = 0
    text = render_status(snapshot)

    assert "hit rate  no block was asked for yet" in text
    assert text.endswith("INSTANCE  none")


def test_draining_and_stalled_copies_are_visible() -> None:
    snapshot = example_snapshot()
    snapshot["agent"]["draining"] = True
    snapshot["sessions"]["publish_stalled"] = 1
    text = render_status(snapshot)

    assert text.startswith("agent     draining")
    assert "stalled   1 copy in flight for too long" in text


def test_uptime_is_told_in_its_two_largest_units() -> None:
    snapshot = example_snapshot()
    for seconds, words in ((0.2, "0 s"), (59.9, "59 s"), (60, "1 min"), (90_000, "1 d 1 h"), (86_401, "1 d 1 s")):
        snapshot["agent"]["uptime_seconds"] = seconds
        assert f", up {words}" in render_status(snapshot)
