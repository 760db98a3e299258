"""Prompts for the suite `ruler`: tasks of RULER (arXiv 2404.06654) that are generated and need no download.

The names are RULER's. The wording is of prompts that a base model continues, and the filler is that of the
suite `retrieval`, so scores are not those of the published benchmark. `qa_1` and `qa_2` need data sets and
are left out.
"""

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ...core.errors import InvalidInput
from .haystack import NAMES, Prompter, draw_filler, hide, prose

KEYS, VALUES, HOPS = 4, 4, 4
COMMON, FREQUENT = 10, 3  # words that are asked for
LONG = 4096  # tokens from which on common words are repeated as often as in RULER's long texts
# times that a common and an uncommon word stand in a text, in shorter and in longer prompts
REPEATS = ((6, 1), (30, 3))
SLACK = 8  # tokens of an answer beyond twice what a right one takes


class NoRoom(InvalidInput):
    """Tasks that have no room in a length."""


def no_room(
    path: Path,
    tasks: Mapping[int, Sequence[str]],
    *,
    is_default: bool = False,
    positions: int | None = None,
) -> NoRoom:
    """Return the error about tasks that have no room."""
    refused = [name for names in tasks.values() for name in names]
    plural = "" if len(refused) == 1 else "s"
    (length, first), *more = [(length, ", ".join(names)) for length, names in sorted(tasks.items())]
    others = "".join(f", and {length} for {names}" for length, names in more)
    is_longest = max(tasks) == positions
    ways = {
        "use longer prompts": not is_longest,
        "name other tasks with --ruler-tasks": len(refused) < len(TASKS),
    }
    remedy = ", or ".join(way for way, is_left in ways.items() if is_left) or "leave out --suite ruler"
    return NoRoom(
        f"--ruler-lengths {length}{', the default,' if is_default else ''} leaves no room for the "
        f"task{plural} {first}{others} in the tokens of {path}"
        f"{', and the models have no more positions' if is_longest else ''}; {remedy}"
    )


@dataclass(frozen=True)
class RulerPrompt:
    """A prompt.

    Attributes:
        ids: its tokens, BOS included.
        answers: texts that a right answer contains.
        steps: tokens that are generated after it.
    """

    ids: tuple[int, ...]
    answers: tuple[str, ...]
    steps: int


@dataclass(frozen=True)
class _Parts:
    """A prompt before it is filled up to its length.

    Attributes:
        needles: texts to hide in the filler.
        question: the text at the end.
        answers: of `RulerPrompt`.
        separator: between the answers, as a right answer writes them.
        start: the text at the head, before the filler.
        dense: makes a text of a given size, which stands between filler and question; None where the filler
            alone grows.
    """

    needles: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    separator: str = ", "
    start: str = ""
    dense: Callable[[int], str] | None = None


class RulerTasks(Prompter):
    """A generator of prompts for one tokenizer."""

    def sample(self, task: str, length: int, seed: str) -> RulerPrompt:
        """Draw a prompt that has, with its answer, exactly `length` tokens.

        Raises:
            NoRoom: the task has no room in that many tokens.
        """
        draw = random.Random(f"{seed} {task} {length}")
        parts = TASKS[task](draw, length)
        steps = 2 * len(self._tokens(" " + parts.separator.join(parts.answers))) + SLACK
        start, question = [*self._head, *self._tokens(parts.start)], self._tokens(parts.question)
        needles = [self._tokens(needle) for needle in parts.needles]
        room = length - steps - len(start) - len(question) - sum(map(len, needles))
        dense: list[int] = []
        if parts.dense is not None and room >= 0:
            dense = self._largest(parts.dense, room)
            room -= len(dense)
        if room < 0 or (parts.dense is not None and not dense):
            raise no_room(self._path, {length: [task]})
        # Depths in ascending order keep the order of the needles, which a chain of variables needs.
        depths = sorted(draw.random() for _ in needles)
        filler = draw_filler(self._sentences, draw, room)
        body = hide(filler, list(zip(depths, needles, strict=True)), room)
        return RulerPrompt((*start, *body, *dense, *question), parts.answers, steps)

    def _largest(self, dense: Callable[[int], str], room: int) -> list[int]:
        """Return the tokens of the longest text that fits; empty where none does."""
        low, high = 0, 1
        while len(self._tokens(dense(high))) <= room:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if len(self._tokens(dense(middle))) <= room else (low, middle)
        return self._tokens(dense(low)) if low else []


def score(text: str, answers: tuple[str, ...]) -> float:
    """Return the proportion of the answers that a text contains, case ignored, as RULER counts it."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10_000, 100_000))


def _needle(name: str, number: str) -> str:
    return f" The secret number of the {name} is {number}."


def _one_of(draw: random.Random, keys: int) -> _Parts:
    names, numbers = draw.sample(NAMES, keys), [_number(draw) for _ in range(keys)]
    asked = draw.randrange(keys)
    return _Parts(
        needles=tuple(map(_needle, names, numbers)),
        question=f"\nThe secret number of the {names[asked]} is",
        answers=(numbers[asked],),
    )


def _multivalue(draw: random.Random, _: int) -> _Parts:
    name, numbers = draw.choice(NAMES), tuple(_number(draw) for _ in range(VALUES))
    return _Parts(
        needles=tuple(_needle(name, number) for number in numbers),
        question=f"\nAll {VALUES} secret numbers of the {name} are",
        answers=numbers,
    )


def _multiquery(draw: random.Random, _: int) -> _Parts:
    names, numbers = draw.sample(NAMES, KEYS), tuple(_number(draw) for _ in range(KEYS))
    order = draw.sample(range(KEYS), KEYS)
    listed = ", ".join(names[number] for number in order)
    return _Parts(
        needles=tuple(map(_needle, names, numbers)),
        question=f"\nThe secret numbers of these things, in this order: {listed}, are",
        answers=tuple(numbers[number] for number in order),
    )


def _chain(names: list[str], number: str) -> list[str]:
    links = (f" VAR {after} = VAR {before}." for before, after in pairwise(names))
    return [f" VAR {names[0]} = {number}.", *links]


def _asks_for(number: str, count: int) -> str:
    return f"\nThe {count} variables that are assigned the value {number} are"


def _variables(draw: random.Random, _: int) -> _Parts:
    names = _codes(draw, 2 * (HOPS + 1), 5, string.ascii_uppercase)
    shown, names = names[: HOPS + 1], names[HOPS + 1 :]
    example, number = _number(draw), _number(draw)
    start = f"{''.join(_chain(shown, example))}{_asks_for(example, HOPS + 1)} {', '.join(shown)}.\n"
    return _Parts(
        start=start,
        needles=tuple(_chain(names, number)),
        question=_asks_for(number, HOPS + 1),
        answers=tuple(names),
    )


def _common(draw: random.Random, length: int) -> _Parts:
    often, seldom = REPEATS[length >= LONG]
    words = draw.sample(_vocabulary(), len(_vocabulary()))
    common, others = tuple(words[:COMMON]), words[COMMON:]
    seed = draw.random()

    def text(uncommon: int) -> str:
        taken = [others[number % len(others)] for number in range(uncommon)]
        # A text that takes the other words again repeats the common ones more often in proportion.
        times = max(often, -(-often * uncommon // len(others)))
        listed = list(common) * times + taken * seldom
        random.Random(seed).shuffle(listed)
        return "\n" + " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))

    question = f"\nThe {COMMON} most common words in this list are"
    return _Parts(needles=(), question=question, answers=common, dense=text)


def _frequent(draw: random.Random, _: int) -> _Parts:
    words = _codes(draw, 50, 6, string.ascii_lowercase)
    weights = [1 / rank**2 for rank in range(1, len(words) + 1)]
    seed = draw.random()

    def text(size: int) -> str:
        # Counts by Zipf's law, not draws from it, so that the most frequent words are certain.
        counts = [max(1, round(size * weight)) for weight in weights[: 2 + size]]
        listed = [word for word, count in zip(words, counts, strict=False) for _ in range(count)]
        random.Random(seed).shuffle(listed)
        return "\n" + " ".join(listed)

    question = f"\nThe {FREQUENT} most frequent words in this coded text are"
    return _Parts(
        needles=(), question=question, answers=tuple(words[:FREQUENT]), dense=lambda n: text(9 + 9 * n)
    )


def _codes(draw: random.Random, count: int, letters: int, alphabet: str) -> list[str]:
    """Return different random words, none part of another."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(alphabet, k=letters))] = None
    return list(found)


def _vocabulary() -> list[str]:
    """Return the lower-case words of 5 to 9 letters of the filler, none part of another."""
    words = sorted(set(re.findall(r"\b[a-z]{5,9}\b", " ".join(prose()))))
    joined = " ".join(words)
    return [word for word in words if joined.count(word) == 1]


# The prompts of each task: its needles, question and answers from a generator and the length of the prompt.
TASKS: dict[str, Callable[[random.Random, int], _Parts]] = {
    "niah_single": lambda draw, _: _one_of(draw, 1),
    "niah_multikey": lambda draw, _: _one_of(draw, KEYS),
    "niah_multivalue": _multivalue,
    "niah_multiquery": _multiquery,
    "vt": _variables,
    "cwe": _common,
    "fwe": _frequent,
}
