"""Documents to train on: files, data sets, and the source text of Python's standard library.

A source is read from its start, through a seeded shuffle buffer, for as long as rows are asked for: of a
large file in sorted order only the first part is seen.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from ..core.untrusted import is_text, printable
from .document_rows import DocumentSource, LongText, NoDocuments, read_batches
from .text_files import compression, find_files, flaw_of_utf8, is_plain_text
from .text_flaws import line_without, utf8_flaw

MOST_EMPTY = 10**6  # rows without text, one after the other; a small compressed file may hold many more
_NO_FILES = ("stdlib", "self")  # the standard library, and text that the teacher writes


def read_field(source: DocumentSource, seed: int, *, complete: bool = False) -> Iterator[list[Any]]:
    """Yield the values of a source's field in batches, in an order of the seed, without empty ones.

    Args:
        source: anything but `self`.
        seed: of the shuffle buffer.
        complete: whether every row must have the field.

    Raises:
        InvalidInput: the source cannot be read, has no such field, or has a million rows without a value one
            after the other.
    """
    empty = 0
    for columns in read_batches(source, seed):
        found = columns[source.field]
        if complete and any(value is None for value in found):
            raise InvalidInput(
                f"{source.called}: {_row_without(source)} has no {source.field!r}; give "
                "every row one, or remove that row"
            )
        values = [value for value in found if value]
        empty = 0 if values else empty + len(found)
        check_empty(empty, source.called, source.place)
        if values:
            yield values


def _row_without(source: DocumentSource) -> str:
    return line_without(find_files(source.place, source.option), source.field)


def check_empty(rows: int, name: str, place: str | None = None) -> None:
    """Check the number of rows without text that were read one after the other.

    Args:
        rows: their number so far.
        name: of what is read, for the error.
        place: as of a `DocumentSource`, where it may be a data set on the Hub; None for a file.

    Raises:
        InvalidInput: there are more than a million.
    """
    if rows > MOST_EMPTY:
        remedy = "remove them" if place is None or local_files(place) else "name another source"
        raise InvalidInput(f"{name} has more than {MOST_EMPTY:,} empty rows one after the other; {remedy}")


def read_texts(source: DocumentSource, seed: int, *, complete: bool = False) -> Iterator[list[str]]:
    """Yield documents of plain text in batches, as `read_field` does, each a string.

    Raises:
        InvalidInput: as of `read_field`, and if the field is not text.
    """
    for texts in read_long_texts(source, seed, complete=complete):
        if any(isinstance(text, LongText) for text in texts):
            # Only one of the long ones is in memory.
            yield from ([text if isinstance(text, str) else "".join(text)] for text in texts)
        else:
            yield texts  # type: ignore[misc]


def read_long_texts(
    source: DocumentSource, seed: int, *, complete: bool = False
) -> Iterator[list[str | LongText]]:
    """Yield documents as `read_texts` does, but those of long plain files as iterables of their parts."""
    for texts in read_field(source, seed, complete=complete):
        check_text([text for text in texts if not isinstance(text, LongText)], source)
        yield texts


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


def check_text(values: Sequence[Any], source: DocumentSource) -> None:
    """Check that the values of a field are strings.

    Raises:
        InvalidInput: one of them is not.
    """
    if not all(map(is_text, values)):
        raise InvalidInput(f"{source.called}: the field {source.field!r} holds no text; name one that does")


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
