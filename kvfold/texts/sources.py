"""Documents of a source: files, data sets, and the source text of Python's standard library.

A source is read from its start, through a seeded shuffle buffer, for as long as somebody asks: of a large
file in sorted order only the first part is seen.
"""

import glob
import lzma
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from ..distill.recipe.data_section import SELF, Source

BATCH = 64  # documents read at once
_BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
_COMPRESSIONS = {".gz", ".xz", ".bz2", ".zst"}
_SHUFFLE_BUFFER = 2000  # documents; all of the standard library's
# What `datasets` raises for missing and unreachable sources, and it and the decompressors for damaged ones.
_UNREADABLE = (OSError, ValueError, EOFError, lzma.LZMAError, zlib.error)


def read_field(source: Source, key: str, seed: int) -> Iterator[list[Any]]:
    """Values of one field in batches, in an order of the seed; empty ones are left out.

    Args:
        source: not `self`.
        key: which of the source's keys names the field: `text_field` or `messages_field`.
        seed: of the shuffle buffer.

    Raises:
        InvalidInput: the source cannot be read or has no such field.
    """
    field = getattr(source, key)
    with _reading(source):
        for batch in _open(source).shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER).iter(batch_size=BATCH):
            _check_field(source, key, batch)
            values = [value for value in batch[field] if value]
            if values:
                yield values


def first_rows(source: Source, key: str, count: int) -> list[dict[str, Any]]:
    """The first documents as they lie there, with all their fields; fewer than `count` where there are no
    more.

    Raises:
        InvalidInput: as of `read_field`.
    """
    try:
        with _reading(source):
            batch = next(_open(source).iter(batch_size=count), None)
    except _Empty:
        return []
    if batch is None:
        return []
    _check_field(source, key, batch)
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def read_texts(source: Source, seed: int) -> Iterator[list[str]]:
    """Documents of plain text in batches, as `read_field`.

    Raises:
        InvalidInput: also when the field is no text.
    """
    for texts in read_field(source, "text_field", seed):
        check_text(texts, source)
        yield texts


def check_text(values: list[Any], source: Source) -> None:
    """Refuse a field of something else.

    Raises:
        InvalidInput: says so.
    """
    if not all(isinstance(value, str) for value in values):
        raise InvalidInput(f"data.source {source.source}: the field {source.text_field!r} holds no text")


class _Empty(InvalidInput):
    """There is not a single row."""


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    """What goes wrong while a source is read as a mistake of the user's."""
    try:
        yield
    except _UNREADABLE as error:
        raise InvalidInput(
            f"data.source {source.source} cannot be read: {' '.join(str(error).split())}"
        ) from None
    except StopIteration:  # what `datasets` raises for a JSON file without a single row
        raise _Empty(f"data.source {source.source} holds no documents") from None


def _check_field(source: Source, key: str, batch: Mapping[str, Any]) -> None:
    field = getattr(source, key)
    if field not in batch:
        raise InvalidInput(
            f"data.source {source.source} has no field {field!r}; data.{key} can be {', '.join(batch)}"
        )


def local_files(source: str) -> list[Path]:
    """The files on this machine that a source names.

    None for what is no name of files, or of none that can be found.
    """
    try:
        return [] if source in ("stdlib", SELF) else _files(source)
    except InvalidInput:
        return []


def check_source(source: str) -> None:
    """Refuse a source that names files which are not here; data sets on the Hub are not looked up.

    Raises:
        InvalidInput: says so.
    """
    if source not in ("stdlib", SELF):
        _files(source)


def is_plain_text(file: Path) -> bool:
    """Whether a file is read whole, as one document, and not for its fields."""
    return _builder(file) in (None, "text")


def _open(source: Source) -> Any:
    from datasets import Dataset, load_dataset, logging

    logging.set_verbosity(logging.CRITICAL)  # what it has to say of a damaged file it raises as well
    if source.source == "stdlib":
        from .corpus import stdlib_documents

        return Dataset.from_dict({source.text_field: stdlib_documents(held_out=False)}).to_iterable_dataset()
    files = _files(source.source)
    if not files:
        return load_dataset(source.source, source.name, split=source.split, streaming=True)
    builders = {_builder(file) for file in files}
    if len(builders) > 1:
        raise InvalidInput(
            f"data.source {source.source} holds files of several kinds; name one, e.g. "
            f"{source.source}/*.jsonl"
        )
    (builder,) = builders
    whole_files = {"sample_by": "document"} if builder == "text" else {}
    return load_dataset(
        builder, data_files=[str(file) for file in files], split="train", streaming=True, **whole_files
    )


def _files(source: str) -> list[Path]:
    """The files that a source names; none when it can only be a Hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and _builder(file))
    elif path.is_file():
        if not _builder(path):
            raise InvalidInput(
                f"data.source {source} is of no known kind; known: {', '.join(_BUILDERS)}, also compressed"
            )
        found = [path]
    else:
        found = sorted(Path(file) for file in glob.glob(str(path), recursive=True) if _builder(Path(file)))
        if (
            not found
            and source.count("/") == 1
            and not source.startswith((".", "/", "~"))
            and not _builder(path)
        ):
            return []
    if not found:
        raise InvalidInput(
            f"data.source {source} names no {', '.join(_BUILDERS)} file here and is no org/name on the Hub"
        )
    return found


def _builder(file: Path) -> str | None:
    suffix = Path(file.stem).suffix if file.suffix in _COMPRESSIONS else file.suffix
    return _BUILDERS.get(suffix)
