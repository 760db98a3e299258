"""The tokens of a run on disk: written once, whole or not at all, and read from memory-mapped files.

`tokens.bin` holds token ids (int32), `marks.bin` their marks (`token_documents.START` and `SCORED`; uint8),
`tokens.json` the number of tokens of each source and the CRC-32 of both. tokens.bin appears last: if it is
there, all are.
"""

import json
import os
import zlib
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...convert.calibration.written_batches import WrittenBatches
from ...core.console import is_first
from ...core.errors import InvalidInput
from ...core.units import counted
from ...core.untrusted import read_json
from ..display import progress_table
from ..recipe.data_section import SELF, Data, TextSource
from .chat import chat_pieces
from .order import Stream, TrainingWindows, windows_per_source
from .token_documents import SCORED, Pieces, check_ids, text_pieces, written_pieces

_PART = 2**24  # tokens that are looked at together
_Author = Callable[[int], Pieces]  # writes at least so many tokens


def open_windows(file: Path, data: Data, vocabulary: int | None = None) -> TrainingWindows:
    """Return the windows of tokens that `write_tokens` wrote, memory-mapped.

    `vocabulary` is the number of token ids that the student has an embedding for, against which all tokens
    are held; None for those that were just written.

    Raises:
        InvalidInput: the files are not what `write_tokens` writes for these sources.
    """
    remedy = f"remove {file.parent} to start over"
    marked = file.with_name("marks.bin")
    lengths = _read_lengths(file.with_name("tokens.json"))
    if len(lengths) != len(data.sources) or min(lengths) <= data.seq_len:
        raise InvalidInput(f"{file.with_name('tokens.json')} is not of this recipe's texts; {remedy}")
    for place, size in ((file, np.dtype(np.int32).itemsize), (marked, 1)):
        if not place.is_file() or place.stat().st_size != sum(lengths) * size:
            raise InvalidInput(f"{place} does not have the {sum(lengths)} tokens of tokens.json; {remedy}")
    tokens = np.memmap(file, dtype=np.int32, mode="r")
    marks = np.memmap(marked, dtype=np.uint8, mode="r")
    if vocabulary is not None:
        known = read_json(file.with_name("tokens.json")).get("checksums")
        if known != [_checksum(file), _checksum(marked)]:
            raise InvalidInput(f"{file} or {marked.name} has changed since it was written; {remedy}")
        for start in range(0, len(tokens), _PART):
            part = tokens[start : start + _PART]
            if part.min() < 0 or part.max() >= vocabulary:
                raise InvalidInput(f"{file} holds a token that the student has no embedding for; {remedy}")
    ends = np.cumsum(lengths).tolist()
    places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return TrainingWindows([Stream(tokens[place], marks[place]) for place in places], data)


def write_tokens(
    file: Path,
    data: Data,
    tokenizer: Any,
    windows: int,
    teacher: Any = None,
    *,
    vocabulary: int,
    kept: WrittenBatches | None = None,
) -> None:
    """Tokenise the sources into `file`, which must not exist, and the two files next to it.

    Every source is read until it has its part of `windows` windows. A shorter source is left short: its
    windows are read again, in a new order. Every process calls this, and rank 0 writes; the others have work
    only if the teacher, a transformers model, writes the text. `vocabulary` is the number of token ids that
    the student has an embedding for, `kept` has finished batches of the teacher's text.

    Raises:
        InvalidInput: a source cannot be read, lacks the field, does not fill one window, or holds a token
            that the student has no embedding for.
    """
    wanted = _wanted(data, windows)
    author = partial(written_pieces, data, tokenizer, teacher, kept=kept)
    if is_first():
        _write(file, data, tokenizer, wanted, author, vocabulary)
        return
    for source, tokens in zip(data.sources, wanted, strict=True):
        if source.source == SELF:
            for _ in author(tokens):
                pass


def holds_same(file: Path, data: Data, before: int, after: int) -> bool:
    """Return whether `write_tokens` for `after` windows would write what it wrote for `before`.

    Only then does a run of `after` windows begin with the same windows, since their order depends on the
    number of windows of each source.
    """
    if before == after:
        return True
    lengths = file.with_name("tokens.json")
    if not file.exists() or any(source.source == SELF for source in data.sources):
        return False
    held = _read_lengths(lengths)
    # The same number is wanted, or everything that there is was wanted, and still is.
    return all(
        old == new or (length < old and length <= new)
        for length, old, new in zip(held, _wanted(data, before), _wanted(data, after), strict=True)
    )


def _read_lengths(file: Path) -> list[int]:
    lengths = read_json(file).get("tokens")
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise InvalidInput(f"{file} is damaged; remove {file.parent} to start over")
    return lengths


def _checksum(file: Path) -> int:
    found = 0
    with file.open("rb") as stream:
        while part := stream.read(_PART):
            found = zlib.crc32(part, found)
    return found


def _wanted(data: Data, windows: int) -> list[int]:
    """Return the number of tokens to take of each source."""
    weights = [source.weight for source in data.sources]
    return [max(share, 1) * data.seq_len + 1 for share in windows_per_source(weights, windows)]


def _write(
    file: Path, data: Data, tokenizer: Any, wanted: list[int], author: _Author, vocabulary: int
) -> None:
    partials = {name: file.with_name(name + ".partial") for name in ("tokens.json", "marks.bin", file.name)}
    lengths = []
    with partials[file.name].open("wb") as tokens, partials["marks.bin"].open("wb") as marks:
        for source, most in zip(data.sources, wanted, strict=True):
            if source.source == SELF:
                pieces = author(most)
            elif source.messages_field:
                pieces = chat_pieces(source, data, tokenizer, vocabulary)
            else:
                pieces = text_pieces(source, data, tokenizer)
            with closing(pieces):
                known = partial(check_ids, tokenizer=tokenizer, vocabulary=vocabulary)
                lengths.append(_fill(tokens, marks, pieces, known, source, data, most))
        for stream in (tokens, marks):
            stream.flush()
            os.fsync(stream.fileno())
    checksums = [_checksum(partials[file.name]), _checksum(partials["marks.bin"])]
    content = {"tokens": lengths, "checksums": checksums}
    partials["tokens.json"].write_text(json.dumps(content) + "\n", encoding="utf-8")
    for name, unfinished in partials.items():
        unfinished.rename(file.with_name(name))


def _fill(
    tokens: BinaryIO,
    marks: BinaryIO,
    pieces: Pieces,
    check: Callable[..., None],
    source: TextSource,
    data: Data,
    most: int,
) -> int:
    """Append up to `most` tokens of a source, all of which the student knows; return their number."""
    written = documents = 0
    # In a stream, positions and attention continue across documents.
    kept = 0xFF if data.packing == "documents" else SCORED
    written_by_teacher = source.source == SELF  # shows its own progress
    silent = nullcontext(lambda done, values: None)
    with silent if written_by_teacher else progress_table("tokens", most) as show:
        for piece in pieces:
            check(piece.ids, what=f"data.source {source.source}")
            ids = piece.ids[: most - written]
            tokens.write(ids.tobytes())
            marks.write((piece.marks[: len(ids)] & kept).tobytes())
            written += len(ids)
            documents += 1
            show(written, {})
            # The text that all processes write together is read to its end.
            if written == most and not written_by_teacher:
                break
    if written <= data.seq_len:
        raise InvalidInput(
            f"data.source {source.source} holds {counted(written, 'token')} in "
            f"{counted(documents, 'document')}, but one window of "
            f"data.seq_len {data.seq_len} takes {data.seq_len + 1}; name a longer text"
        )
    return written
