"""Conversations as token ids by the tokenizer's chat template; only what the assistant says is predicted.

A template that marks the assistant's words (`{% generation %}`) is taken at its word. Of any other the
conversation is rendered up to the assistant's turn, with the prompt for it, and up to that turn's end: what
the longer text has more is the turn, with the mark that ends it. Where the assistant speaks first there is
nothing to prompt after: its turn begins where the text changes when it says something else. Nothing is added
to what the template renders.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import numpy as np
from jinja2 import TemplateError

from ...core.console import notice
from ...core.errors import InvalidInput
from ...texts.sources import read_field
from ..recipe.data_section import Data, Source
from .token_documents import SCORED, START, Piece, Pieces

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_POOL = 64  # conversations among which the next one to fill a window is sought
_REFUSALS = 64  # conversations that a template may refuse before it has taken one


class Refused(InvalidInput):
    """The template does not render this conversation; it may render others."""


def chat_pieces(source: Source, data: Data, tokenizer: Any, vocabulary: int) -> Pieces:
    """Conversations of a source, in windows with `packing: documents`.

    One that is longer than a window is cut. One in which the assistant says nothing (any more) is left out,
    and one that the template refuses; when the generator is closed, a notice tells how many.

    Args:
        source: has a `messages_field`.
        data: how they are cut.
        tokenizer: the student's.
        vocabulary: how many token ids the student has an embedding for.

    Raises:
        InvalidInput: there is no chat template, the field holds no conversations, or the template renders
        none of it.
    """
    check_template(tokenizer)
    read = _Read()
    pieces = _conversations(source, data, tokenizer, read)
    # Nothing attends to padding or is learnt of it, so that any token does that the student has.
    known = (
        token
        for token in (tokenizer.pad_token_id, tokenizer.eos_token_id)
        if token is not None and token < vocabulary
    )
    try:
        yield from (
            fill_windows(pieces, data.seq_len, next(known, 0)) if data.packing == "documents" else pieces
        )
    finally:
        for number, what in (
            (read.cut, f"cut to data.seq_len {data.seq_len}"),
            (read.silent, "left out: no word of an assistant's"),
            (read.refused if read.spoken else 0, f"left out: {read.refusal}"),
        ):
            if number:
                notice(
                    f"{source.source}: conversations {what}: {number} of "
                    f"{read.spoken + read.silent + read.refused} read"
                )
    if read.refusal and not read.spoken:
        raise read.refusal
    if not read.spoken:
        raise InvalidInput(
            f"data.source {source.source}: none of its {read.silent} conversations has a word of an "
            f"assistant's"
        )


@dataclass
class _Read:
    """What became of the conversations of a source.

    Attributes:
        spoken: how many are learnt from.
        cut: how many were longer than a window.
        silent: how many are left out, since no word of an assistant's is in them.
        refused: how many are left out, since the template does not render them.
        refusal: of the first of these.
    """

    spoken: int = 0
    cut: int = 0
    silent: int = 0
    refused: int = 0
    refusal: Refused | None = None


def _conversations(source: Source, data: Data, tokenizer: Any, read: _Read) -> Iterator[Piece]:
    """Those that are learnt from; of the others `read` keeps count."""
    for batch in read_field(source.documents, data.seed):
        for value in batch:
            try:
                piece = conversation(messages_of(value, source), tokenizer, source.source)
            except Refused as refusal:
                read.refused, read.refusal = read.refused + 1, read.refusal or refusal
                if read.refused == _REFUSALS and not read.spoken:
                    raise
                continue
            if data.packing == "documents" and len(piece.ids) > data.seq_len:
                piece, read.cut = Piece(piece.ids[: data.seq_len], piece.marks[: data.seq_len]), read.cut + 1
            if (piece.marks & SCORED).any():
                read.spoken += 1
                yield piece
            else:
                read.silent += 1


def fill_windows(pieces: Iterator[Piece], length: int, padding: int) -> Pieces:
    """Pieces, none longer than a window, in an order in which none is split; the rest of a window is padding.

    A window begins with the piece that has waited longest; then come the longest that fit.
    """
    pool: list[Piece] = []
    room = length
    while True:
        while len(pool) < _POOL and (piece := next(pieces, None)) is not None:
            pool.append(piece)
        if not pool:
            break
        fitting = [index for index, piece in enumerate(pool) if len(piece.ids) <= room]
        if not fitting:
            yield _padding(room, padding)
            room = length
            continue
        best = 0 if room == length else max(fitting, key=lambda index: len(pool[index].ids))
        room -= len(pool[best].ids)
        yield pool.pop(best)
        room = room or length
    if room < length:
        yield _padding(room, padding)
    yield _padding(1, padding)  # the label of the last window's last token


def _padding(length: int, token: int) -> Piece:
    marks = np.zeros(length, dtype=np.uint8)
    marks[0] = START
    return Piece(np.full(length, token, dtype=np.int32), marks)


def messages_of(value: Any, source: Source) -> list[dict[str, Any]]:
    """A conversation as data sets keep them: a list of messages, or one mapping of lists.

    Raises:
        InvalidInput: it is neither.
    """
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and "role" in message for message in value
    ):
        raise InvalidInput(
            f"data.source {source.source}: the field {source.messages_field!r} holds no conversations, "
            "which are lists of {role, content}"
        )
    return [{key: content for key, content in message.items() if content is not None} for message in value]


def conversation(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> Piece:
    """One conversation as a piece.

    Args:
        messages: of `{role, content, ...}`; of none there is an empty piece.
        tokenizer: a fast one with a chat template.
        name: of the source, for mistakes.

    Raises:
        Refused: the template cannot render it; says which it is.
        InvalidInput: the template renders a turn differently once others follow; says which.
    """
    if not messages:
        return Piece(np.empty(0, np.int32), np.empty(0, np.uint8))
    try:
        if _MARKED.search(tokenizer.get_chat_template()):
            encoded = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            spoken = np.asarray(encoded["assistant_masks"], dtype=bool)
        else:
            whole, turns = _turns(messages, tokenizer, name)
            encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            is_spoken = np.zeros(len(whole) + 1, dtype=bool)
            for start, end in turns:
                is_spoken[start:end] = True
            spoken = is_spoken[[start for start, _ in encoded["offset_mapping"]]]
    except (TemplateError, TypeError, ValueError, IndexError) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise Refused(f"the chat template cannot render {_named(messages, name)}: {reason}") from None
    marks = np.where(spoken, SCORED, 0).astype(np.uint8)
    marks[:1] = START
    return Piece(np.asarray(encoded["input_ids"], dtype=np.int32), marks)


def _turns(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and where in it, in characters, the assistant's turns begin and end."""

    def render(some: list[dict[str, Any]], prompt: bool) -> str:
        text: str = tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)
        return text

    def opening(count: int) -> str:
        if count:
            return render(messages[:count], True)
        one, other = (render([{**messages[0], "content": word}, *messages[1:]], False) for word in ("a", "b"))
        return one[
            : next((at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), None)
        ]

    whole, turns = render(messages, False), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = opening(index), render(messages[: index + 1], False)
            if not (whole.startswith(before) and whole.startswith(after)):
                raise InvalidInput(
                    f"the chat template renders message {index + 1} of {_named(messages, name)} "
                    f"differently when others follow "
                    "or when it prompts for it, so the assistant's words cannot be told; use a template "
                    "that marks them with "
                    "{% generation %}"
                )
            turns.append((len(before), len(after)))
    return whole, turns


def _named(messages: list[dict[str, Any]], name: str) -> str:
    """A conversation by what its first speaker says, to be searched for.

    Rows are read in a shuffled order.
    """
    first = next((message for message in messages if message["role"] != "system"), messages[0])
    said = shorten(json.dumps(first, ensure_ascii=False, default=str), 120, placeholder=" ...")
    return f"the conversation of data.source {name} that begins with {said}"


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot write conversations, or not tell where in them a token is from.

    Raises:
        InvalidInput: says so.
    """
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise InvalidInput(
            f"data.messages_field: the tokenizer of {tokenizer.name_or_path} has no chat template, which "
            f"says how a "
            "conversation is written; put its chat_template.jinja there, or name a text_field"
        ) from None
    if not tokenizer.is_fast:
        raise InvalidInput(
            f"data.messages_field: the tokenizer of {tokenizer.name_or_path} does not tell which "
            f"characters a token stands "
            "for; it needs a tokenizer.json"
        )
