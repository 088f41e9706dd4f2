"""What the demo found, for people and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class Turn:
    """One turn as it was served. Token counts by source are vLLM's; they add up to `prompt_tokens`."""

    session: int
    turn: int
    engine: Literal["first", "restarted"]
    prompt_tokens: int
    hbm_tokens: int
    orbitkv_tokens: int
    recomputed_tokens: int
    ttft_ms: float


@dataclass(frozen=True)
class Report:
    """The whole run. `differing` are the (session, turn) whose answers were others without the cache; `restart` says in
    words what happened between the first engine and the restarted one."""

    turns: list[Turn]
    differing: list[tuple[int, int]]
    restart: str = "the engine is killed and started again"

    @property
    def identical(self) -> bool:
        """Whether all answers with the cache were those without it."""
        return not self.differing

    @property
    def restored_after_restart(self) -> int:
        """Tokens that came from OrbitKV after the engine was killed and started again."""
        return totals(turn for turn in self.turns if turn.engine == "restarted")["orbitkv_tokens"]

    @property
    def passed(self) -> bool:
        """Whether the demo shows what it is there to show."""
        return self.identical and self.restored_after_restart > 0

    def as_object(self) -> dict[str, Any]:
        """The object that `make demo JSON=1` ends with."""
        return {
            "identical": self.identical,
            "turns": [asdict(turn) for turn in self.turns],
            "totals": totals(self.turns),
        }

    def as_text(self) -> str:
        """The table, the totals, and what it all shows."""
        return "\n".join([*self._table(), "", LEGEND, *self._conclusion()])

    def _table(self) -> Iterable[str]:
        head = [
            "session",
            "turn",
            "engine",
            "prompt tokens",
            "from HBM",
            "from OrbitKV",
            "recomputed",
            "first token (ms)",
        ]
        rows = [
            [
                str(turn.session),
                str(turn.turn),
                turn.engine,
                *(str(count) for count in sources(turn)),
                f"{turn.ttft_ms:.1f}",
            ]
            for turn in self.turns
        ]
        sums = [
            [title, "", "", *(str(counts[name]) for name in SOURCES), ""]
            for title, counts in (
                ("first", totals(turn for turn in self.turns if turn.engine == "first")),
                ("restarted", totals(turn for turn in self.turns if turn.engine == "restarted")),
                ("total", totals(self.turns)),
            )
        ]
        widths = [max(len(row[column]) for row in [head, *rows, *sums]) for column in range(len(head))]
        rule = "  ".join("-" * width for width in widths)
        yield line(head, widths)
        yield rule
        for row, after in zip(rows, [*self.turns[1:], None], strict=True):
            yield line(row, widths)
            if after is not None and row[2] != after.engine:
                yield f" {self.restart} ".center(len(rule), "-")
        yield rule
        for row in sums:
            yield line(row, widths)

    def _conclusion(self) -> Iterable[str]:
        counts = totals(turn for turn in self.turns if turn.engine == "restarted")
        if counts["prompt_tokens"]:
            share = 100 * counts["orbitkv_tokens"] / counts["prompt_tokens"]
            yield (
                f"After the restart the engine's own memory was empty: {share:.0f} % of the prompt tokens "
                f"({counts['orbitkv_tokens']} of {counts['prompt_tokens']}) came from OrbitKV."
            )
        if not self.restored_after_restart:
            yield "FAILED: nothing came from OrbitKV after the restart."
        if self.identical:
            yield f"Outputs with and without the cache are identical: all {len(self.turns)} answers, token for token."
        else:
            names = ", ".join(f"session {session} turn {turn}" for session, turn in self.differing)
            yield (
                f"FAILED: the outputs with and without the cache differ in {len(self.differing)} of {len(self.turns)} "
                f"answers: {names}."
            )


LEGEND = (
    "HBM is the engine's own KV cache, on a GPU its high-bandwidth memory; here a small part of the machine's memory."
)
SOURCES = ("prompt_tokens", "hbm_tokens", "orbitkv_tokens", "recomputed_tokens")
assert set(SOURCES) <= {field.name for field in fields(Turn)}


def sources(turn: Turn) -> list[int]:
    """The turn's counts in the order of SOURCES."""
    return [turn.prompt_tokens, turn.hbm_tokens, turn.orbitkv_tokens, turn.recomputed_tokens]


def totals(turns: Iterable[Turn]) -> dict[str, int]:
    """The sum of each count."""
    counts = [sources(turn) for turn in turns]
    return {name: sum(row[index] for row in counts) for index, name in enumerate(SOURCES)}


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One line of the table: words to the left, numbers to the right."""
    return "  ".join(
        cell.ljust(width) if column in (0, 2) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
