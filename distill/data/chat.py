"""Conversations as token ids by the tokenizer's chat template. Only the assistant's words are predicted.

A template that marks the assistant's words (`{% generation %}`) is trusted. With any other template, the
conversation is rendered up to the assistant's turn, with the prompt for it, and up to the end of that turn;
the difference is the turn, including the mark that ends it. Where the assistant speaks first there is no
prompt: its turn begins where the text changes when the assistant says something else. Nothing is added to
what the template renders.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from textwrap import shorten
from typing import Any

import numpy as np
from jinja2 import TemplateError

from ...core.console import notice
from ...core.errors import InvalidInput
from ...texts.sources import read_field
from ..recipe.data_section import Data, TextSource
from .token_documents import SCORED, START, Piece, Pieces

# A template is a program: it may divide by zero, or call itself without an end (a RuntimeError).
_FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError,
)  # fmt: skip
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_POOL = 64  # conversations from which the next one to fill a window is chosen
# Characters of a rendered conversation, for each of which a tokenizer takes 20 bytes of memory. Few have more
# than a million; a template that repeats a text may render any number.
_LONGEST = 2**24
_REFUSALS = 64  # conversations that a template may refuse before it has taken one


class Refused(InvalidInput):
    """A row that cannot be trained on: no conversation, or one that the template does not render."""


def chat_pieces(source: TextSource, data: Data, tokenizer: Any, vocabulary: int) -> Pieces:
    """Yield the conversations of a source with a `messages_field`, in windows with `packing: documents`.

    A conversation that is longer than a window is cut. Conversations without a word of the assistant's, and
    rows that are `Refused`, are left out; when the generator is closed, a notice reports how many.
    `vocabulary` is the number of token ids that the student has an embedding for.

    Raises:
        InvalidInput: there is no chat template, or every row is refused.
    """
    check_template(tokenizer)
    read, refusals = Counter[str](), list[Refused]()  # the latter the first of them alone
    pieces = _conversations(source, data, tokenizer, read, refusals)
    # Nothing attends to padding or is trained on it, so any token of the student will do.
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    padding = next((token for token in tokens if token is not None and token < vocabulary), 0)
    try:
        yield from fill_windows(pieces, data.seq_len, padding) if data.packing == "documents" else pieces
    finally:
        for number, what in (
            (read["cut"], f"cut to data.seq_len {data.seq_len}"),
            (read["silent"], "left out, without a word of the assistant's"),
            (read["refused"] if read["spoken"] else 0, f"left out: {refusals[0] if refusals else ''}"),
        ):
            if number:
                count = read["spoken"] + read["silent"] + read["refused"]
                notice(f"{source.source}: conversations {what}: {number} of {count} read")
    if refusals and not read["spoken"]:
        raise refusals[0]
    if not read["spoken"]:
        raise InvalidInput(
            f"data.source {source.source}: none of its {read['silent']} conversations has a word of the "
            "assistant's; name a text with turns of the role assistant"
        )


def _conversations(
    source: TextSource, data: Data, tokenizer: Any, read: Counter[str], refusals: list[Refused]
) -> Iterator[Piece]:
    """Yield the conversations that are trained on (`spoken`), and count those that are `cut` or `silent`."""
    for batch in read_field(source.documents, data.seed):
        for value in batch:
            try:
                piece = conversation(messages_of(value, source), tokenizer, source.source)
            except Refused as refusal:
                read["refused"] += 1
                if not refusals:
                    refusals.append(refusal)
                if read["refused"] == _REFUSALS and not read["spoken"]:
                    raise
                continue
            if data.packing == "documents" and len(piece.ids) > data.seq_len:
                piece = Piece(piece.ids[: data.seq_len], piece.marks[: data.seq_len])
                read["cut"] += 1
            if (piece.marks & SCORED).any():
                read["spoken"] += 1
                yield piece
            else:
                read["silent"] += 1


def fill_windows(pieces: Iterator[Piece], length: int, padding: int) -> Pieces:
    """Yield pieces, none longer than a window, in an order that splits none; the rest of a window is padding.

    A window begins with the piece that has waited longest. The longest pieces that fit follow.
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


def messages_of(value: Any, source: TextSource) -> list[dict[str, Any]]:
    """Return a conversation from either form of data sets: a list of messages, or one mapping of lists.

    Raises:
        Refused: it is neither.
    """
    given = value
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        is_even = len({len(column) for column in value.values()}) == 1
        rows = zip(*value.values(), strict=True) if is_even else ()
        value = [dict(zip(value, row, strict=True)) for row in rows] if is_even else None
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    ):
        raise Refused(
            f"data.source {source.source}: a row's {source.messages_field!r} is "
            f"{shorten(repr(given), 120, placeholder=' ...')}; it should be a list of {{role, content}}"
        )
    return [{key: content for key, content in message.items() if content is not None} for message in value]


def conversation(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> Piece:
    """Return a conversation of `{role, content, ...}` as a piece; `name` is its source's, for errors.

    Raises:
        Refused: the template cannot render the conversation, or renders a turn differently once others
            follow; names it.
    """
    if not messages:
        return Piece(np.empty(0, np.int32), np.empty(0, np.uint8))
    try:
        if _MARKED.search(tokenizer.get_chat_template()):
            _render(messages, tokenizer, name)
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
    except Refused:
        raise
    except _FAILURES as error:
        reason = shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        raise Refused(f"the chat template cannot render {_named(messages, name)}: {reason}") from None
    marks = np.where(spoken, SCORED, 0).astype(np.uint8)
    marks[:1] = START
    return Piece(np.asarray(encoded["input_ids"], dtype=np.int32), marks)


def _turns(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered conversation, and begin and end of each of the assistant's turns in characters."""

    def render(some: list[dict[str, Any]], prompt: bool) -> str:
        return _render(some, tokenizer, name, prompt)

    def opening(count: int) -> str:
        if count:
            return render(messages[:count], True)
        one, other = (render([{**messages[0], "content": word}, *messages[1:]], False) for word in ("a", "b"))
        pairs = enumerate(zip(one, other, strict=False))
        changed = next((at for at, (mine, its) in pairs if mine != its), None)
        return one[:changed]

    whole, turns = render(messages, False), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = opening(index), render(messages[: index + 1], False)
            if not (whole.startswith(before) and whole.startswith(after)):
                raise Refused(
                    f"the chat template renders message {index + 1} of {_named(messages, name)} "
                    "differently when others follow or when it prompts for it, so the assistant's words "
                    "cannot be found; use a template that marks them with {% generation %}"
                )
            turns.append((len(before), len(after)))
    return whole, turns


def _render(messages: list[dict[str, Any]], tokenizer: Any, name: str, prompt: bool = False) -> str:
    """Return a conversation as text, with the prompt for the assistant's turn if `prompt` is set."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    if len(text) > _LONGEST:
        raise Refused(
            f"the chat template makes {len(text):,} characters of {_named(messages, name)}, and at most "
            f"{_LONGEST:,} are tokenised; use another template, or shorten the conversation"
        )
    return text


def _named(messages: list[dict[str, Any]], name: str) -> str:
    """Return a description of a conversation by the words of its first speaker, which can be searched for.

    Row numbers would not help, since rows are read in a shuffled order.
    """
    first = next((message for message in messages if message["role"] != "system"), messages[0])
    said = shorten(json.dumps(first, ensure_ascii=False, default=str), 120, placeholder=" ...")
    return f"the conversation of data.source {name} that begins with {said}"


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot write conversations, or cannot report the characters of a token.

    Raises:
        InvalidInput: names the tokenizer.
    """
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise InvalidInput(
            f"data.messages_field: the tokenizer of {tokenizer.name_or_path} has no chat template, which "
            "defines how a conversation is written; put its chat_template.jinja there, or name a text_field"
        ) from None
    if not tokenizer.is_fast:
        raise InvalidInput(
            f"data.messages_field: the tokenizer of {tokenizer.name_or_path} does not report the characters "
            "of a token; it needs a tokenizer.json"
        )
