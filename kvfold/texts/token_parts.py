"""Texts of any length as token ids, in memory for a part of them.

A tokenizer takes 150 bytes and more for each character that it is given at once, so a file of 100 MB that is
one document would take 15 GB. One that does not tell where its tokens are (a slow one) still reads a text at
once.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

PART = 2**18  # characters that are tokenised at once
_OVERLAP = 2**12  # characters that two parts share
_AGREED = 8  # tokens before and behind a joint that both parts must have alike


class Tokens(NamedTuple):
    """Token ids in a row.

    Attributes:
        ids: the ids.
        ends: for each id, the characters of the text up to the end of its token; empty for a tokenizer that
            does not tell.
    """

    ids: list[int]
    ends: list[int]


class _Token(NamedTuple):
    id: int
    start: int
    end: int


def read_ids(tokenizer: Any, texts: Iterable[str | Iterable[str]]) -> Iterator[Iterator[list[int]]]:
    """Yield the token ids of each text, without special tokens, as lists that follow each other.

    Args:
        tokenizer: of transformers.
        texts: any number, each of any length; one that is in parts is read as far as its ids are.

    Example:
        >>> for parts in read_ids(tokenizer, texts):
        ...     ids = [token for part in parts for token in part]
    """
    group: list[str] = []
    held = 0  # characters of the group
    for text in texts:
        if not isinstance(text, str):
            yield from _together(tokenizer, group)
            group, held = [], 0
            yield (part.ids for part in token_parts(tokenizer, text))
            continue
        if group and held + len(text) > PART:
            yield from _together(tokenizer, group)
            group, held = [], 0
        if len(text) > PART:
            yield (part.ids for part in token_parts(tokenizer, text))
        else:
            group.append(text)
            held += len(text)
    yield from _together(tokenizer, group)


def _together(tokenizer: Any, texts: list[str]) -> Iterator[Iterator[list[int]]]:
    if not texts:
        return
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        yield iter([ids])


def token_parts(tokenizer: Any, text: str | Iterable[str]) -> Iterator[Tokens]:
    """Yield the tokens of a text, without special tokens, in parts that are as in the whole text.

    Parts of the text overlap by some characters. Two are joined where both have the same tokens on either
    side of the joint. Where they have none such, as in a long run of one character, the first becomes twice
    as long.

    Args:
        tokenizer: of transformers.
        text: of any length; if it is in parts of its own, as many of them are read as are needed.
    """
    if not tokenizer.is_fast:
        whole = text if isinstance(text, str) else "".join(text)
        yield Tokens(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"], [])
        return
    start = first = 0  # of the text's characters, and of the part's tokens that are still to be yielded
    size = PART
    held = _Held(text)
    part = _read(tokenizer, held, start, size)
    while held.reaches(start + size + 1):
        behind = start + size - _OVERLAP
        following = _read(tokenizer, held, behind, behind + PART)
        joint = _joint(part, following, behind, start + size)
        if joint is None:
            size *= 2
            part = _read(tokenizer, held, start, start + size)
            continue
        yield _tokens(part[first : joint[0]])
        held.drop(behind)
        start, size, first, part = behind, PART, joint[1], following
    yield _tokens(part[first:])


class _Held:
    """The part of a text that is in memory."""

    def __init__(self, text: str | Iterable[str]) -> None:
        if isinstance(text, str):
            self._parts = (text[at : at + PART] for at in range(0, len(text), PART))
        else:
            self._parts = (part for part in text)
        self._held = ""
        self._first = 0  # the place of its first character in the text

    def reaches(self, end: int) -> bool:
        """Return True if the text has so many characters, which are in memory then."""
        while self._first + len(self._held) < end:
            part = next(self._parts, None)
            if part is None:
                return False
            self._held += part
        return True

    def cut(self, start: int, end: int) -> str:
        """Return the characters from a place to another, or to the end of the text."""
        self.reaches(end)
        return self._held[start - self._first : end - self._first]

    def drop(self, start: int) -> None:
        """Forget the characters before a place."""
        self._held = self._held[start - self._first :]
        self._first = start


def _read(tokenizer: Any, text: _Held, start: int, end: int) -> list[_Token]:
    found = tokenizer(
        text.cut(start, end), add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    return [
        _Token(token, start + low, start + high)
        for token, (low, high) in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]


def _tokens(found: list[_Token]) -> Tokens:
    return Tokens([token.id for token in found], [token.end for token in found])


def _joint(part: list[_Token], following: list[_Token], low: int, high: int) -> tuple[int, int] | None:
    """Return where a part ends and the following one goes on, by their tokens; None if they do not agree.

    Args:
        part: ends at the character `high`.
        following: begins at the character `low`, before that.
        low: the first character that both have.
        high: the end of what both have.
    """
    places = {token.start: at for at, token in enumerate(following) if token.end <= high}
    shared = [at for at in range(len(part)) if part[at].start >= low]
    middle = (low + high) / 2  # far from either cut, where tokens are as in the whole text
    for at in sorted(shared, key=lambda at: abs(part[at].start - middle)):
        other = places.get(part[at].start, 0)
        if other < _AGREED or at < _AGREED:
            continue
        ours, theirs = (
            tokens[place - _AGREED : place + _AGREED] for tokens, place in ((part, at), (following, other))
        )
        if ours == theirs and len(ours) == 2 * _AGREED:
            return at, other
    return None
