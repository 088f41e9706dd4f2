"""The workload: several people talk to the same assistant, in turns. Each prompt is the whole conversation so far."""

from collections.abc import Iterator
from dataclasses import dataclass, field

SYSTEM = (
    "You are the assistant of a small library in a harbour town. You know its shelves, its hours and its people. "
    "Answer in one or two sentences, name the shelf when you name a book, and say so when you do not know something. "
    "The library opens at nine, closes at six, and on Saturdays it closes at one. Loans run for three weeks and can be "
    "renewed twice, by telephone or at the desk. Maps and sea charts may be read here but not taken home.\n"
)

QUESTIONS = (
    (
        "User: Good morning! I am looking for a book about the tides for my daughter, who is nine.\n",
        "User: She has read that one already, twice I believe. Is there another with more pictures?\n",
        "User: Lovely. Until when could we keep both of them, if we came by on Saturday at noon?\n",
        "User: And if she does not finish in time, what would I have to do to keep them longer?\n",
    ),
    (
        "User: I found a chart of the bay from 1911 in my attic. Would the library want to have it?\n",
        "User: It is torn along one fold, and someone has drawn a course on it in blue pencil.\n",
        "User: Whom should I ask for at the desk, and may I see the other charts while I am there?\n",
        "User: Thank you. I shall bring my reading glasses, then. Is the reading room heated?\n",
    ),
    (
        "User: My card says that I owe you a fine, yet I brought everything back in March.\n",
        "User: The title was 'Knots and Splices', and I put it through the slot after closing time.\n",
        "User: That is kind of you. Could you also tell me whether the sequel has come in?\n",
        "User: Then please set it aside for me. I can be there ten minutes before you close.\n",
    ),
)
"""For each session, what its user says in each turn."""

TURNS = len(QUESTIONS[0])
ANSWER_TOKENS = 40


@dataclass(frozen=True)
class Step:
    """One turn of one session, both counted from 1."""

    session: int
    turn: int


def round_of(turn: int) -> Iterator[Step]:
    """One turn of every session."""
    for session in range(1, len(QUESTIONS) + 1):
        yield Step(session, turn)


@dataclass
class Transcript:
    """What each session has said and heard, as token ids."""

    system: list[int]
    questions: list[list[list[int]]]
    said: dict[int, list[int]] = field(default_factory=dict)

    def prompt(self, step: Step) -> list[int]:
        """The conversation up to and with this turn's question."""
        return [*self.said.get(step.session, self.system), *self.questions[step.session - 1][step.turn - 1]]

    def heard(self, step: Step, answer: list[int]) -> None:
        """Adds the question and its answer to the conversation."""
        self.said[step.session] = [*self.prompt(step), *answer]
