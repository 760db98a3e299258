"""Documents to train on: files, data sets, and the source text of Python's standard library.

A source is read from its start, through a seeded shuffle buffer, for as long as rows are asked for: of a
large file in sorted order only the first part is seen.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.console import notice
from ..core.errors import InvalidInput
from ..core.untrusted import is_text, printable
from .document_rows import DocumentSource, LongText, NoDocuments, read_batches
from .text_files import compression, find_files, flaw_of_utf8, is_plain_text
from .text_flaws import utf8_flaw

_NO_FILES = ("stdlib", "self")  # the standard library, and text that the teacher writes


def read_field(source: DocumentSource, seed: int) -> Iterator[list[Any]]:
    """Yield the values of a source's field in batches, in an order of the seed, without empty ones.

    Rows without a value are left out; a notice reports how many.

    Args:
        source: anything but `self`.
        seed: of the shuffle buffer.

    Raises:
        InvalidInput: the source cannot be read, or has no such field.
    """
    absent = read = 0
    try:
        for columns in read_batches(source, seed):
            found = columns[source.field]
            absent += sum(value is None for value in found)
            read += len(found)
            if values := [value for value in found if value]:
                yield values
    finally:
        if absent:
            notice(f"{source.called}: {absent} of {read} rows have no {source.field!r} and were left out")


def read_texts(source: DocumentSource, seed: int) -> Iterator[list[str]]:
    """Yield documents of plain text in batches, as `read_field` does, each a string.

    Rows whose value is no text are left out, too.

    Raises:
        InvalidInput: as of `read_field`, and if the field is not text.
    """
    for texts in read_long_texts(source, seed):
        if any(isinstance(text, LongText) for text in texts):
            # Only one of the long ones is in memory.
            yield from ([text if isinstance(text, str) else "".join(text)] for text in texts)
        else:
            yield texts  # type: ignore[misc]


def read_long_texts(source: DocumentSource, seed: int) -> Iterator[list[str | LongText]]:
    """Yield documents as `read_texts` does, but those of long plain files as iterables of their parts."""
    others = read = 0
    try:
        for values in read_field(source, seed):
            texts = [value for value in values if isinstance(value, LongText) or is_text(value)]
            if not texts and others == read:
                check_text(values, source)
            read += len(values)
            others += len(values) - len(texts)
            if texts:
                yield texts
    finally:
        if others:
            notice(
                f"{source.called}: {others} of {read} rows hold no text in {source.field!r} and were left out"
            )


def first_rows(source: DocumentSource, count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows with all their fields, or all rows if there are fewer.

    Raises:
        InvalidInput: as of `read_field`.
    """
    try:
        columns = next(read_batches(source, None, batch=count), None)
    except NoDocuments:
        return []
    if columns is None:
        return []
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def check_text(values: Sequence[Any], source: DocumentSource) -> list[str]:
    """Return the strings among the values of a field.

    Raises:
        InvalidInput: there are values, and none of them is a string.
    """
    texts = [value for value in values if is_text(value)]
    if values and not texts:
        raise InvalidInput(f"{source.called}: the field {source.field!r} holds no text; name one that does")
    return texts


def local_files(place: str) -> list[Path]:
    """Return the files on this machine that a source names; an empty list if there are none."""
    try:
        return [] if place in _NO_FILES else find_files(place, "data.source")
    except InvalidInput:
        return []


def check_source(place: str) -> None:
    """Check that the files that a source names are here; data sets on the Hub are not looked up.

    Raises:
        InvalidInput: they are missing, of several kinds, or of a kind that cannot be read.
    """
    if place not in _NO_FILES:
        find_files(place, "data.source")


def check_encoding(place: str) -> None:
    """Check that plain texts that a source names are UTF-8 throughout, before the long work that reads them.

    This takes about a second for 500 MB. Compressed files are not checked.

    Raises:
        InvalidInput: one of them is not.
    """
    for file in local_files(place):
        byte = flaw_of_utf8(file) if is_plain_text(file) and not compression(file) else None
        if byte is not None:
            raise InvalidInput(f"data.source {printable(file)} cannot be read: {utf8_flaw('it', byte)}")
