"""What a look at the first documents of a run's texts tells before it is started: whether they can be read,
and about how much there is. However large a source is, a few of its files are opened and little is read of
them.
"""

import json
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidInput
from ...models.causal_lm import Described
from ...texts.sources import check_text, first_rows, local_files
from ...texts.text_files import is_plain_text
from ..recipe.data_section import SELF, Data, Source
from ..recipe.recipe import Recipe
from .chat import Refused, check_template, conversation, messages_of
from .order import shares
from .token_documents import check_ids, ends

_FILES = 4  # of a source that are opened, the first and the last among them
_DOCUMENTS = 64  # of a file
_BYTES = 2**20  # of a file of plain text


@dataclass(frozen=True)
class Sample:
    """The beginning of a source.

    Attributes:
        values: texts, or conversations.
        share: of the source that they are, by size; None where that cannot be told.
    """

    values: list[Any]
    share: float | None


def check_texts(recipe: Recipe, student: Described | None) -> tuple[list[str], list[NDArray[np.int32]]]:
    """Look at every source of a recipe that is on this machine.

    Args:
        recipe: the run.
        student: gives the tokenizer; None where it is not here, so that nothing can be counted.

    Returns:
        A sentence for every source that seems to hold less than the run reads of it, and the tokens of what
        was looked at.

    Raises:
        InvalidInput: a source cannot be read, has no such field, holds nothing, less than one window, or a
        token that the
            student has no embedding for.
    """
    data, told, tokens = recipe.data, [], []
    weights = [source.weight for source in data.sources]
    for source, windows in zip(data.sources, shares(weights, recipe.windows), strict=True):
        sample = take_sample(source)
        if sample is None or student is None:
            continue
        try:
            ids = np.concatenate(
                [*_tokenise(sample.values, source, data, student.tokenizer), np.empty(0, np.int32)]
            )
        except Refused as refusal:  # each of them; a run reads others too, where there are some
            if sample.share == 1:
                raise
            told.append(
                f"data.source {source.source}: of the first {len(sample.values)} conversations none is "
                f"learnt from: {refusal}"
            )
            continue
        check_ids(ids, student.tokenizer, student.vocabulary, f"data.source {source.source}")
        tokens.append(ids)
        wanted, held = (
            windows * data.seq_len,
            None if sample.share is None else round(len(ids) / sample.share),
        )
        if sample.share == 1 and len(ids) <= data.seq_len:
            raise InvalidInput(
                f"data.source {source.source} holds {len(ids)} tokens in {len(sample.values)} documents; "
                f"one window of "
                f"data.seq_len {data.seq_len} takes {data.seq_len + 1}"
            )
        if held is not None and held < wanted:
            told.append(
                f"data.source {source.source} holds about {held:,} tokens and the run reads {wanted:,}: "
                f"some are seen again"
            )
    return told, tokens


def take_sample(source: Source) -> Sample | None:
    """The beginning of a source; None for what is on the Hub, or still to be written.

    Raises:
        InvalidInput: see `check_texts`.
    """
    key = "messages_field" if source.messages_field else "text_field"
    if source.source == "stdlib":
        from ...texts.corpus import stdlib_documents

        documents = list(stdlib_documents(held_out=False))
        values = documents[:_DOCUMENTS]
        return Sample(values, sum(map(len, values)) / sum(map(len, documents)))
    files = local_files(source.source)
    if source.source == SELF or not files:
        return None
    chosen = sorted({round(at) for at in np.linspace(0, len(files) - 1, min(_FILES, len(files)))})
    values, read, whole = [], 0.0, True
    for at in chosen:
        begun, share = _begin(files[at], source, key)
        values += begun
        read = read + files[at].stat().st_size * share if share is not None else float("nan")
        whole = whole and share == 1
    if not values and whole and len(chosen) == len(files):
        raise InvalidInput(f"data.source {source.source} holds no documents")
    if whole and len(chosen) == len(files):
        return Sample(values, 1.0)
    total = sum(file.stat().st_size for file in files)
    return Sample(values, min(0.999, read / total) if read > 0 else None)  # NaN is not above 0


def _begin(file: Path, source: Source, key: str) -> tuple[list[Any], float | None]:
    """The first values of a field in a file, and what share of the file they are."""
    if is_plain_text(file) and file.suffix == ".txt":  # which is one document, however large
        return _begin_text(file, source, key)
    documents = replace(source.documents, place=str(file))
    rows = first_rows(documents, _DOCUMENTS)
    values = [row[getattr(source, key)] for row in rows if row[getattr(source, key)]]
    if key == "text_field":
        check_text(values, documents)
    if len(rows) < _DOCUMENTS:
        return values, 1.0
    if file.suffix == ".parquet":
        from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]

        return values, len(rows) / max(len(rows), int(read_metadata(file).num_rows))
    if file.suffix in (".jsonl", ".json"):
        lines = sum(len(json.dumps(row, ensure_ascii=False, default=str).encode()) + 1 for row in rows)
        return values, min(0.999, lines / file.stat().st_size)
    return values, None  # compressed


def _begin_text(file: Path, source: Source, key: str) -> tuple[list[Any], float]:
    field = getattr(source, key)
    if field != "text":
        raise InvalidInput(f"data.source {file} has no field {field!r}; data.{key} can be text")
    with file.open("rb") as stream:
        content = stream.read(_BYTES)
        is_whole = not stream.read(1)
    try:
        text = getincrementaldecoder("utf-8")().decode(
            content, final=is_whole
        )  # the last character may be cut in two
    except UnicodeDecodeError as error:
        raise InvalidInput(f"data.source {file} cannot be read: {error}") from None
    return [text] if text else [], 1.0 if is_whole else len(content) / file.stat().st_size


def _tokenise(values: list[Any], source: Source, data: Data, tokenizer: Any) -> Iterator[NDArray[np.int32]]:
    """As a run would, document by document."""
    if source.messages_field:
        check_template(tokenizer)
        refusals = []
        for value in values:
            try:
                yield conversation(messages_of(value, source), tokenizer, source.source).ids
            except Refused as refusal:
                refusals.append(refusal)
        if refusals and len(refusals) == len(values):
            raise refusals[0]
        return
    around = ends(tokenizer, data.packing)
    for ids in tokenizer(values, add_special_tokens=False, verbose=False)["input_ids"] if values else ():
        yield np.asarray(around.first + ids + around.last, dtype=np.int32)
