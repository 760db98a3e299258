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
        draw: draws a question of a size, and its answer with the steps of it.
        sizes: one of them is drawn for a prompt and its examples; small models solve the smallest.
        last: words at the end of a right answer; None: all of it.
    """

    says: str
    draw: Callable[[random.Random, int], Drawn]
    sizes: tuple[int, ...]
    last: int | None = None


def _arithmetic(draw: random.Random, size: int) -> Drawn:
    """Add numbers from the left; of four or more the first two are multiplied."""
    numbers = [draw.randint(2, 9) for _ in range(size)]
    is_product = size > 3
    first = f"{numbers[0]} {'*' if is_product else '+'} {numbers[1]}"
    found, rest = numbers[0] * numbers[1] if is_product else sum(numbers[:2]), numbers[2:]
    steps = [[found, *rest]]
    while len(steps[-1]) > 1:
        one, two, *left = steps[-1]
        steps.append([one + two, *left])
    asked = " + ".join([first, *map(str, rest)])
    return f"{asked} =", " = ".join(" + ".join(map(str, step)) for step in steps)


def _sorting(draw: random.Random, size: int) -> Drawn:
    numbers = draw.sample(range(10, 100), size)
    return f"{' '.join(map(str, numbers))} ->", " ".join(map(str, sorted(numbers)))


def _copying(draw: random.Random, size: int) -> Drawn:
    words = draw.sample(_WORDS, size)
    old, new = draw.choice(words), draw.choice(_WORDS)
    copied = " ".join(new if word == old else word for word in words)
    return f"{old} becomes {new}: {' '.join(words)} ->", copied


def _looking_up(draw: random.Random, size: int) -> Drawn:
    names = draw.sample(_WORDS, size)
    numbers = draw.sample(range(100, 1000), size)
    asked = draw.randrange(size)
    pairs = ", ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))
    return f"{pairs}. {names[asked]} ->", str(numbers[asked])


TASKS = {
    "arithmetic": Task("Work the sums out step by step.", _arithmetic, (2, 3, 4, 5), last=1),
    "sorting": Task("Sort the numbers.", _sorting, (2, 3, 5, 8)),
    "copying": Task("Copy the words and replace one.", _copying, (2, 3, 5, 8)),
    "looking up": Task("Find the number of a word.", _looking_up, (2, 4, 8, 12)),
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
    size = draw.choice(kind.sizes)
    shots = [kind.draw(draw, size) for _ in range(SHOTS + 1)]
    solved = [f"{asked} {answer}" for asked, answer in shots[:-1]]
    asked, answer = shots[-1]
    return Question(task, "\n".join([kind.says, *solved, asked]), answer)
