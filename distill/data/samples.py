"""A look at the first documents of a run's texts before it starts.

It shows that they can be read, and about how much there is. However large a source is, only a few of its
files are opened, and little of them is read.
"""

import json
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidInput
from ...core.units import counted
from ...models.causal_lm import Described
from ...texts.sources import check_text, first_rows, local_files
from ...texts.text_files import compression, is_plain_text
from ...texts.text_flaws import utf8_flaw
from ...texts.token_parts import read_ids
from ..recipe.data_section import Data, TextSource
from ..recipe.recipe import Recipe
from .chat import Refused, check_template, conversation, messages_of
from .order import windows_per_source
from .token_documents import check_ids, ends

_FILES = 4  # files of a source that are opened, the first and the last among them
_DOCUMENTS = 64  # per file
_BYTES = 2**20  # per file of plain text


class SourceSample(NamedTuple):
    """The beginning of a source: texts or conversations, and the proportion of the source that they are."""

    values: list[Any]
    share: float | None  # by size; None if it is unknown


def check_texts(recipe: Recipe, student: Described | None) -> tuple[list[str], list[NDArray[np.int32]]]:
    """Check every source of a recipe that is on this machine.

    Without a student, which gives the tokenizer, nothing can be counted.

    Returns:
        A sentence for every source that seems to hold less than the run reads of it, and the tokens of the
        samples.

    Raises:
        InvalidInput: a source cannot be read, lacks the field, holds nothing, holds less than one window, or
            has a token that the student has no embedding for.
    """
    data = recipe.data
    sentences: list[str] = []
    tokens: list[NDArray[np.int32]] = []
    weights = [source.weight for source in data.sources]
    for source, windows in zip(data.sources, windows_per_source(weights, recipe.windows), strict=True):
        sample = take_sample(source)
        if sample is None or student is None:
            continue
        refusals: list[Refused] = []
        parts = list(_tokenise(sample.values, source, data, student.tokenizer, refusals))
        ids = np.concatenate([*parts, np.empty(0, np.int32)])
        if refusals:
            if not parts and sample.share == 1:
                raise refusals[0]
            count = len(refusals) if parts else "all"
            sentences.append(
                f"data.source {source.source}: {count} of the first {len(sample.values)} conversations "
                f"cannot be trained on and are left out: {refusals[0]}"
            )
            if not parts:  # others may be read
                continue
        check_ids(ids, student.tokenizer, student.vocabulary, f"data.source {source.source}")
        tokens.append(ids)
        wanted = windows * data.seq_len
        held = None if sample.share is None else round(len(ids) / sample.share)
        if sample.share == 1 and len(ids) <= data.seq_len:
            raise InvalidInput(
                f"data.source {source.source} holds {counted(len(ids), 'token')} in "
                f"{counted(len(sample.values), 'document')}, but one window of "
                f"data.seq_len {data.seq_len} takes {data.seq_len + 1}; name a longer text"
            )
        if held is not None and held < wanted:
            sentences.append(
                f"data.source {source.source} holds about {held:,} tokens and the run reads {wanted:,}, so "
                "some are read again"
            )
    return sentences, tokens


def take_sample(source: TextSource) -> SourceSample | None:
    """Return the beginning of a source; None for a source on the Hub, or one that is still to be written.

    Raises:
        InvalidInput: as of `check_texts`.
    """
    if source.source == "stdlib":
        from ...texts.standard_library import stdlib_documents

        documents = stdlib_documents(held_out=False)
        values: list[Any] = [*documents[:_DOCUMENTS]]
        return SourceSample(values, sum(map(len, values)) / sum(map(len, documents)))
    files = local_files(source.source)
    if not files:
        return None
    chosen = sorted({round(at) for at in np.linspace(0, len(files) - 1, min(_FILES, len(files)))})
    begun = [_begin(files[at], source) for at in chosen]
    values = [value for some, _ in begun for value in some]
    if len(chosen) == len(files) and all(share == 1 for _, share in begun):
        if not values:
            raise InvalidInput(f"data.source {source.source} holds no documents")
        return SourceSample(values, 1.0)
    shares = [float("nan") if share is None else share for _, share in begun]
    read = sum(files[at].stat().st_size * share for at, share in zip(chosen, shares, strict=True))
    total = sum(file.stat().st_size for file in files)
    return SourceSample(values, min(0.999, read / total) if read > 0 else None)  # NaN is not above 0


def _begin(file: Path, source: TextSource) -> tuple[list[Any], float | None]:
    """Return the first values of a field in a file, and the proportion of the file that they are."""
    documents = replace(source.documents, place=str(file))
    if is_plain_text(file) and not compression(file):  # it is one document, however large
        if documents.field != "text":
            raise InvalidInput(
                f"data.source {file} has no field {documents.field!r}; {documents.field_option} can be text"
            )
        with file.open("rb") as stream:
            content = stream.read(_BYTES)
            is_whole = not stream.read(1)
        try:
            # The last character may be cut in two.
            text = getincrementaldecoder("utf-8")().decode(content, final=is_whole)
        except UnicodeDecodeError as error:
            raise InvalidInput(f"data.source {file} cannot be read: {utf8_flaw('it', error.start)}") from None
        return [text] if text else [], 1.0 if is_whole else len(content) / file.stat().st_size
    rows = first_rows(documents, _DOCUMENTS)
    values = [row[documents.field] for row in rows if row[documents.field]]
    if not source.messages_field:
        values = check_text(values, documents)
    if len(rows) < _DOCUMENTS:
        return values, 1.0
    if file.suffix == ".parquet":
        from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]

        return values, len(rows) / max(len(rows), int(read_metadata(file).num_rows))
    if file.suffix in (".jsonl", ".json"):
        lines = sum(len(json.dumps(row, ensure_ascii=False, default=str).encode()) + 1 for row in rows)
        return values, min(0.999, lines / file.stat().st_size)
    return values, None  # compressed


def _tokenise(
    values: list[Any], source: TextSource, data: Data, tokenizer: Any, refusals: list[Refused]
) -> Iterator[NDArray[np.int32]]:
    """Yield the token ids of each document, as a run would read it; refused conversations are appended."""
    if source.messages_field:
        check_template(tokenizer)
        for value in values:
            try:
                pieces = conversation(messages_of(value, source), tokenizer, source.source)
            except Refused as refusal:
                refusals.append(refusal)
            else:
                yield from (piece.ids for piece in pieces)
        return
    around = ends(tokenizer, data.packing)
    for parts in read_ids(tokenizer, values):
        yield np.asarray([*around.first, *chain.from_iterable(parts), *around.last], dtype=np.int32)
