"""The tokens of a run on disk: written once, whole or not at all, and read from memory-mapped files.

`tokens.bin` holds token ids (int32), `marks.bin` their marks (`token_documents.START` and `SCORED`; uint8),
`tokens.json` the number of tokens of each source and the CRC-32 of both. tokens.bin appears last: if it is
there, all are.
"""

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import closing, nullcontext
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
from .token_documents import SCORED, Piece, Pieces, check_ids, text_pieces, written_pieces

_PART = 2**24  # tokens that are looked at together


def open_windows(file: Path, data: Data, vocabulary: int | None = None) -> TrainingWindows:
    """Return the windows of tokens that `write_tokens` wrote, memory-mapped.

    `vocabulary` is the number of token ids that the student has an embedding for, against which all tokens
    are held; None for those that were just written.

    Raises:
        InvalidInput: the files are not what `write_tokens` writes for these sources.
    """
    remedy = f"remove {file.parent} to start over"
    marked = file.with_name("marks.bin")
    content = read_json(file.with_name("tokens.json"))
    lengths = content.get("tokens")
    if not isinstance(lengths, list) or len(lengths) != len(data.sources) or min(lengths) <= data.seq_len:
        raise InvalidInput(f"{file.with_name('tokens.json')} is not of this recipe's texts; {remedy}")
    for place, size in ((file, np.dtype(np.int32).itemsize), (marked, 1)):
        if not place.is_file() or place.stat().st_size != sum(lengths) * size:
            raise InvalidInput(f"{place} does not have the {sum(lengths)} tokens of tokens.json; {remedy}")
    tokens = np.memmap(file, dtype=np.int32, mode="r")
    marks = np.memmap(marked, dtype=np.uint8, mode="r")
    if vocabulary is not None:
        if content.get("checksums") != [_checksum(file), _checksum(marked)]:
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
    weights = [source.weight for source in data.sources]
    needed = [max(share, 1) * data.seq_len + 1 for share in windows_per_source(weights, windows)]
    wanted = list(zip(data.sources, needed, strict=True))

    def pieces_of(source: TextSource, most: int) -> Pieces:
        if source.source == SELF:
            return written_pieces(data, tokenizer, teacher, most, kept=kept)
        if source.messages_field:
            return chat_pieces(source, data, tokenizer, vocabulary)
        return text_pieces(source, data, tokenizer)

    if not is_first():
        for source, most in wanted:
            if source.source == SELF:
                for _ in pieces_of(source, most):
                    pass
        return
    partials = {name: file.with_name(name + ".partial") for name in ("tokens.json", "marks.bin", file.name)}
    lengths = []
    with partials[file.name].open("wb") as tokens, partials["marks.bin"].open("wb") as marks:
        for source, most in wanted:
            with closing(pieces_of(source, most)) as pieces:
                known = _known(pieces, source, tokenizer, vocabulary)
                lengths.append(_fill(tokens, marks, known, source, data, most))
        for stream in (tokens, marks):
            stream.flush()
            os.fsync(stream.fileno())
    checksums = [_checksum(partials[file.name]), _checksum(partials["marks.bin"])]
    content = {"tokens": lengths, "checksums": checksums}
    partials["tokens.json"].write_text(json.dumps(content) + "\n", encoding="utf-8")
    for name, unfinished in partials.items():
        unfinished.rename(file.with_name(name))


def _checksum(file: Path) -> int:
    found = 0
    with file.open("rb") as stream:
        while part := stream.read(_PART):
            found = zlib.crc32(part, found)
    return found


def _known(pieces: Pieces, source: TextSource, tokenizer: Any, vocabulary: int) -> Iterator[Piece]:
    """Yield pieces, of which the student knows all tokens."""
    for piece in pieces:
        check_ids(piece.ids, tokenizer, vocabulary, f"data.source {source.source}")
        yield piece


def _fill(
    tokens: BinaryIO, marks: BinaryIO, pieces: Iterator[Piece], source: TextSource, data: Data, most: int
) -> int:
    """Append up to `most` tokens of a source; return their number."""
    written = documents = 0
    # In a stream, positions and attention continue across documents.
    kept = 0xFF if data.packing == "documents" else SCORED
    written_by_teacher = source.source == SELF  # shows its own progress
    silent = nullcontext(lambda done, values: None)
    with silent if written_by_teacher else progress_table("tokens", most) as show:
        for piece in pieces:
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
