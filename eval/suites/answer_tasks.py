"""Short tasks with answers that can be checked, for the suite `generation`.

A prompt is four solved examples and a fifth question, as a base model continues it; the answer is the rest of
that line. Of a sum the last number decides, so a model may leave steps out.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

SHOTS = 4
_WORDS = (
    "apple", "river", "stone", "cloud", "bread", "horse", "light", "green", "house", "water",
    "music", "paper", "chair", "plant", "sugar", "train",
)  # fmt: skip
Drawn = tuple[str, str]  # a question, and its answer as an example shows it


@dataclass(frozen=True)
class Task:
    """A kind of question.

    Attributes:
        says: what the prompt says first.
        draw: draws a question and its answer, with the steps of it.
        last: words at the end of a right answer; None: all of it.
    """

    says: str
    draw: Callable[[random.Random], Drawn]
    last: int | None = None


def _arithmetic(draw: random.Random) -> Drawn:
    one, two, three, four = (draw.randint(2, 9) for _ in range(4))
    steps = [
        f"{one * two} + {three} + {four}",
        f"{one * two + three} + {four}",
        str(one * two + three + four),
    ]
    return f"{one} * {two} + {three} + {four} =", " = ".join(steps)


def _sorting(draw: random.Random) -> Drawn:
    numbers = draw.sample(range(10, 100), 5)
    return f"{' '.join(map(str, numbers))} ->", " ".join(map(str, sorted(numbers)))


def _copying(draw: random.Random) -> Drawn:
    words = draw.sample(_WORDS, 6)
    old, new = draw.choice(words), draw.choice(_WORDS)
    return f"{old} becomes {new}: {' '.join(words)} ->", " ".join(
        new if word == old else word for word in words
    )


def _looking_up(draw: random.Random) -> Drawn:
    names = draw.sample(_WORDS, 5)
    numbers = draw.sample(range(100, 1000), 5)
    asked = draw.randrange(5)
    pairs = ", ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))
    return f"{pairs}. {names[asked]} ->", str(numbers[asked])


TASKS = {
    "arithmetic": Task("Work the sums out step by step.", _arithmetic, last=1),
    "sorting": Task("Sort the numbers.", _sorting),
    "copying": Task("Copy the words and replace one.", _copying),
    "looking up": Task("Find the number of a word.", _looking_up),
}


@dataclass(frozen=True)
class Question:
    """A prompt and its right answer."""

    task: str
    prompt: str
    answer: str

    def is_right(self, line: str) -> bool:
        """Return whether an answer, up to the end of its line, is right."""
        last = TASKS[self.task].last
        given, wanted = line.split(), self.answer.split()
        return given == wanted if last is None else given[-last:] == wanted[-last:]


def question(task: str, seed: str) -> Question:
    """Draw a question of a task; the same seed gives the same one."""
    draw, kind = random.Random(f"{task}/{seed}"), TASKS[task]
    shots = [kind.draw(draw) for _ in range(SHOTS + 1)]
    solved = [f"{asked} {answer}" for asked, answer in shots[:-1]]
    asked, answer = shots[-1]
    return Question(task, "\n".join([kind.says, *solved, asked]), answer)
