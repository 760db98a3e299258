"""Prompts for the suite `retrieval`: texts of exact length with a key of digits at a given depth.

The filler is sentences from docstrings of Python's standard library, all without digits; it repeats where it
is too short. The right key and all distractors have the same number of tokens, so that none is likelier for
being shorter.

Legend: a candidate is the right key (always number 0) or a distractor.
"""

import ast
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from ...core.errors import InvalidInput
from ...texts.standard_library import stdlib_documents

KINDS = ("passkey", "multikey")
CANDIDATES = 10
DIGITS = 5
# Decoding steps of an answer: a blank, one token per digit, and one more to see that the key ends there.
STEPS = DIGITS + 2
# The names of the keys of `multikey`, each of one token or several.
NAMES = (
    "anchor", "basket", "candle", "dragon", "engine", "forest", "garden", "hammer", "island", "jacket",
    "kettle", "ladder",
    "market", "needle", "orchard", "pencil", "ribbon", "saddle", "temple", "window",
)  # fmt: skip
_NAMED = " of the {}"
_QUESTION = "\nThe secret number{} is"
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,'()-]{20,200}[a-z)]\.")


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt.

    Attributes:
        ids: its tokens, BOS included.
        question: the tokens of the question alone, BOS included.
        key: the digits that it asks for.
        candidates: the tokens of `key` and of each distractor after the question; all of one length.
    """

    ids: tuple[int, ...]
    question: tuple[int, ...]
    key: str
    candidates: tuple[tuple[int, ...], ...]


@cache
def prose() -> tuple[str, ...]:
    """Return sentences without digits from docstrings of the held-out modules of the standard library."""
    strings = []
    for document in stdlib_documents(held_out=True):
        for node in ast.walk(ast.parse(document)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                strings.append(ast.get_docstring(node) or "")
    return tuple(
        dict.fromkeys(found for text in strings for found in _SENTENCE.findall(" ".join(text.split())))
    )


class Prompter:
    """The prose in the tokens of one tokenizer.

    Args:
        path: the checkpoint, for messages.
        tokenizer: its tokenizer.
    """

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._sentences = [self._tokens(" " + sentence) for sentence in prose()]
        self._head = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


class Haystack(Prompter):
    """A generator of prompts for one tokenizer, with `keys` keys in those of the kind `multikey`."""

    def __init__(self, path: Path, tokenizer: Any, keys: int) -> None:
        super().__init__(path, tokenizer)
        self._keys = keys

    def sample(self, kind: str, length: int, depth: float, seed: str) -> NeedlePrompt:
        """Draw a prompt of `length` - `STEPS` tokens.

        Args:
            kind: one of `KINDS`: one key, or several with a question about one.
            length: tokens of prompt and answer together.
            depth: where the key stands: 0 at the head of the text, 1 at its end.
            seed: equal seeds draw equal prompts.

        Raises:
            InvalidInput: the keys take more tokens than that, or the tokenizer does not distinguish numbers.
        """
        draw = random.Random(f"{seed} {kind} {length} {depth}")
        names = (
            [""] if kind == "passkey" else [_NAMED.format(name) for name in draw.sample(NAMES, self._keys)]
        )
        keys, stem, candidates = self._draw_keys(draw, _QUESTION.format(names[0]))
        needles = [self._needle(name, key) for name, key in zip(names, keys, strict=False)]
        room = length - STEPS - len(self._head) - len(stem) - sum(map(len, needles))
        if room < 0:
            raise InvalidInput(
                f"--retrieval-lengths {length} leaves no room for the keys of {kind} and the question, which "
                f"take {length - room} tokens in {self._path}; use {length - room} or more"
            )
        depths = [depth, *(draw.random() for _ in needles[1:])]
        filler = draw_filler(self._sentences, draw, room)
        body = hide(filler, sorted(zip(depths, needles, strict=True)), room)
        return NeedlePrompt((*self._head, *body, *stem), (*self._head, *stem), keys[0], candidates)

    def least(self) -> int:
        """Return a length that has room for any prompt of either kind."""
        key = "9" * DIGITS
        needles = [
            self._keys * max(len(self._needle(name, key)) for name in map(_NAMED.format, NAMES)),
            len(self._needle("", key)),
        ]
        question = max(len(self._tokens(_QUESTION.format(_NAMED.format(name)))) for name in NAMES)
        return STEPS + len(self._head) + question + max(needles)

    def _draw_keys(
        self, draw: random.Random, question: str
    ) -> tuple[list[str], list[int], tuple[tuple[int, ...], ...]]:
        """Return keys, the tokens of the question before any of them, and the tokens of each key after it."""
        pool = [str(number) for number in draw.sample(range(10 ** (DIGITS - 1), 10**DIGITS), 20 * CANDIDATES)]
        asked = self._tokens(question)
        wholes = [self._tokens(f"{question} {key}") for key in pool]
        # A tokenizer may join the blank, or even the last word, to a number; the question ends before that.
        same = (len(set(column)) == 1 for column in zip(asked, *wholes, strict=False))
        stem = asked[: sum(takewhile(bool, same))]
        usual = Counter(map(len, wholes)).most_common(1)[0][0]
        chosen: dict[tuple[int, ...], str] = {}
        for key, whole in zip(pool, wholes, strict=True):
            if len(whole) == usual:
                chosen.setdefault(tuple(whole[len(stem) :]), key)
        if len(chosen) < CANDIDATES:
            raise InvalidInput(
                f"the tokenizer of {self._path} does not distinguish numbers, so no key can be asked for; "
                "leave out the suite retrieval"
            )
        tokens = tuple(chosen)[:CANDIDATES]
        return [chosen[ids] for ids in tokens], stem, tokens

    def _needle(self, name: str, key: str) -> list[int]:
        again = "" if name else f" Remember: the secret number is {key}."
        return self._tokens(f" The secret number{name} is {key}.{again}")


def draw_filler(sentences: Sequence[list[int]], draw: random.Random, room: int) -> list[list[int]]:
    """Return neighbouring sentences of `room` tokens in total; the head of the first one is cut off."""
    end = draw.randrange(len(sentences))
    found: list[list[int]] = []
    while room > 0:
        sentence = sentences[(end - len(found)) % len(sentences)][-room:]
        found.append(sentence)
        room -= len(sentence)
    return found[::-1]


def hide(sentences: Sequence[list[int]], needles: Sequence[tuple[float, list[int]]], room: int) -> list[int]:
    """Return `room` tokens of sentences with each needle at the boundary nearest to its depth, 0 to 1."""
    ends = [0, *accumulate(map(len, sentences))]
    at = [min(range(len(ends)), key=lambda number: abs(ends[number] - depth * room)) for depth, _ in needles]
    body: list[int] = []
    for number in range(len(ends)):
        if number:
            body += sentences[number - 1]
        for place, (_, needle) in zip(at, needles, strict=True):
            if place == number:
                body += needle
    return body
