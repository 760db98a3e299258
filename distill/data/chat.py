"""Conversations as token ids by the tokenizer's chat template. Only the assistant's words are predicted.

A turn begins behind the prompt for it, or where the text changes when the assistant says something else, and
ends with the mark that ends it. A template that marks the assistant's words (`{% generation %}`) is trusted.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from textwrap import shorten
from typing import Any

import numpy as np

from ...core.console import notice
from ...core.errors import InvalidInput
from ...models.load_failures import TEMPLATE_FAILURES
from ...texts.sources import read_field
from ..recipe.data_section import Data, TextSource
from .token_documents import SCORED, START, Piece, Pieces
from .turns import Rendered, Unrendered, rendered_turns

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
                pieces = conversation(messages_of(value, source), tokenizer, source.source)
            except Refused as refusal:
                read["refused"] += 1
                if not refusals:
                    refusals.append(refusal)
                if read["refused"] == _REFUSALS and not read["spoken"]:
                    raise
                continue
            if data.packing == "documents" and any(len(piece.ids) > data.seq_len for piece in pieces):
                pieces = [Piece(piece.ids[: data.seq_len], piece.marks[: data.seq_len]) for piece in pieces]
                read["cut"] += 1
            pieces = [piece for piece in pieces if (piece.marks & SCORED).any()]
            read["spoken" if pieces else "silent"] += 1
            yield from pieces


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


def conversation(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> list[Piece]:
    """Return the pieces in which every turn of a conversation of `{role, content, ...}` is learnt once.

    That is one, unless the template renders a turn otherwise once others follow. `name` is the source's, for
    errors.

    Raises:
        Refused: the template cannot render the conversation, or leaves out what the assistant says; names it.
    """
    is_marked = _MARKED.search(tokenizer.get_chat_template()) is not None
    special = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    try:
        found = rendered_turns(
            messages,
            lambda some, prompt: _render(some, tokenizer, name, prompt),
            tuple(filter(None, {*tokenizer.all_special_tokens, *special})),
            verbatim=not is_marked,
        )
        return [_piece(messages, each, tokenizer, is_marked=is_marked) for each in found]
    except Refused:
        raise
    except Unrendered as left_out:
        raise Refused(
            f"the chat template leaves out what message {left_out.number} of {_named(messages, name)} says, "
            "so there is nothing to learn; use a template that renders it"
        ) from None
    except TEMPLATE_FAILURES as error:
        reason = shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        raise Refused(f"the chat template cannot render {_named(messages, name)}: {reason}") from None


def _piece(messages: list[dict[str, Any]], found: Rendered, tokenizer: Any, *, is_marked: bool) -> Piece:
    about: dict[str, Any] = {"return_offsets_mapping": True}
    if is_marked:
        encoded = tokenizer.apply_chat_template(
            messages[: found.count],
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs=about,
        )
    else:
        encoded = tokenizer(found.text, add_special_tokens=False, verbose=False, **about)
    is_learnt = np.zeros(len(found.text) + 1, dtype=bool)
    for start, end in found.turns:
        is_learnt[start:end] = True
    learnt = is_learnt[[start for start, _ in encoded["offset_mapping"]]]
    if is_marked:
        learnt &= np.asarray(encoded["assistant_masks"], dtype=bool)
    marks = np.where(learnt, SCORED, 0).astype(np.uint8)
    marks[:1] = START
    return Piece(np.asarray(encoded["input_ids"], dtype=np.int32), marks)


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
