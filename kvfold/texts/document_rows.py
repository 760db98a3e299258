"""Rows of files and data sets, as `datasets` reads them, where a crash of its readers cannot end the run.

The readers of Parquet, of compressed files and of JSON are other people's native code, and some content makes
them crash. A process of its own reads such files, and everything from the Hub. JSON of moderate size that
proves harmless is read in this process, which saves the second that another one takes to start. So is plain
text, in parts and without `datasets`, which takes ten times its memory.
"""

import glob
import lzma
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from ..core.disk import disk_error, disk_sentence, is_full
from ..core.errors import InvalidInput
from ..core.untrusted import parse_json, printable
from .standard_library import stdlib_documents
from .text_files import builder_of, compression, find_files, is_plain_text
from .text_flaws import first_flaw
from .token_parts import PART

BATCH = 64  # documents read at once
SHUFFLE_BUFFER = 2000  # documents, from which the next one is drawn; all of the standard library's
# Errors of `datasets` for missing and unreachable sources, and of it and the decompressors for damaged ones.
UNREADABLE = (OSError, ValueError, EOFError, lzma.LZMAError, zlib.error, ImportError, NotImplementedError)
_CHECKED = 2**26  # bytes of a JSON file that is checked before it is read in this process
_PLAIN = "plain"  # instead of the name of a builder: whole files of text, not compressed


@dataclass(frozen=True)
class DocumentSource:
    """The name of documents, the field that holds them, and the words for both in errors.

    Attributes:
        place: a file, a directory or a glob of texts, `stdlib`, or a data set's `org/name`.
        field: the field that holds a document.
        config: the configuration of a data set.
        split: the split of a data set.
        option: the option or key that gave the place.
        field_option: the option or key that gave the field; empty if none can.
    """

    place: str
    field: str = "text"
    config: str | None = None
    split: str = "train"
    option: str = "data.source"
    field_option: str = "data.text_field"

    @property
    def called(self) -> str:
        """The option with the place, for errors."""
        return f"{self.option} {printable(self.place)}".strip()


@dataclass(frozen=True)
class RowsRequest:
    """Arguments of `datasets.load_dataset`, and how its rows are taken.

    Attributes:
        name: a builder of `datasets` for files, `plain` (rows are names of files of text), `stdlib`, or a
            data set's `org/name`.
        config: the configuration of a data set; for `stdlib` the name of the field.
        files: the files; none for a data set on the Hub.
        split: the split.
        seed: of the shuffle buffer; None for the order in which rows are stored.
        batch: rows of each dictionary.
        is_downloaded: whether a data set is read from the cache of `datasets`, after a download if that is
            needed; otherwise its rows are streamed.
    """

    name: str
    config: str | None
    files: tuple[str, ...]
    split: str
    seed: int | None
    batch: int
    is_downloaded: bool = False


class NoField(InvalidInput):
    """Rows lack the field that holds documents."""


class NoDocuments(InvalidInput):
    """A source without a single row."""


class LongText:
    """A plain text in parts, which are read from its file each time that they are asked for.

    Args:
        file: a file of UTF-8.
        source: gives the words for errors.
    """

    def __init__(self, file: Path, source: DocumentSource) -> None:
        self._file = file
        self._source = source

    def __iter__(self) -> Iterator[str]:
        try:
            with self._file.open(encoding="utf-8") as stream:
                while part := stream.read(PART):
                    yield part
        except UNREADABLE as error:
            raise explain(error, self._source) from None


def read_batches(source: DocumentSource, seed: int | None, batch: int = BATCH) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a source as dictionaries of columns.

    Args:
        source: names the rows.
        seed: of the shuffle buffer; None for the order in which they are stored.
        batch: rows of each dictionary.

    Returns:
        Columns by name. A file of plain text is one row, which is a string or, if it is long, a `LongText`.

    Raises:
        InvalidInput: the source cannot be read, or its rows lack the field.
    """
    request = _request(source, seed, batch)
    is_ours = request.name == "stdlib" or bool(request.files)
    if is_ours and all(_is_harmless(Path(file)) for file in request.files):
        batches = _read_here(request, source)
    else:
        batches = _read_apart(request, source)
    for columns in batches:
        if source.field not in columns:
            fields = ", ".join(columns)
            advice = f"it has {fields}; rename the field with the documents to {source.field!r}"
            if source.field_option:
                advice = f"{source.field_option} can be {fields}"
            raise NoField(f"{source.called} has no field {source.field!r}; {advice}")
        if request.name != _PLAIN:
            yield columns
            continue
        texts: list[str | LongText] = []
        for file in columns["text"]:
            text = LongText(Path(file), source)
            beginning = list(islice(text, 2))
            texts.append(text if len(beginning) > 1 else "".join(beginning))
        yield {"text": texts}


def read_downloaded(source: DocumentSource) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a data set on the Hub as dictionaries of columns, in their order.

    They are read from the cache of `datasets`, after a download if that is needed.

    Args:
        source: names a data set as `org/name`.

    Raises:
        InvalidInput: there is neither cache nor network, or the data set is damaged.
    """
    request = RowsRequest(source.place, source.config, (), source.split, None, BATCH, is_downloaded=True)
    return _read_apart(request, source)


def _request(source: DocumentSource, seed: int | None, batch: int) -> RowsRequest:
    if source.place == "stdlib":
        return RowsRequest("stdlib", source.field, (), "train", seed, batch)
    files = find_files(source.place, source.option)
    if not files:
        return RowsRequest(source.place, source.config, (), source.split, seed, batch)
    builder = builder_of(files[0]) or "text"
    if builder == "text" and not any(map(compression, files)):
        builder = _PLAIN
    return RowsRequest(builder, None, tuple(map(str, files)), "train", seed, batch)


def open_rows(request: RowsRequest) -> Iterator[Mapping[str, Any]]:
    """Yield batches of rows in this process; errors are those of `datasets`."""
    from datasets import Dataset, disable_progress_bars, load_dataset, logging

    logging.set_verbosity(logging.CRITICAL)  # it raises what it logs about a damaged file
    if request.name == "stdlib":
        data = Dataset.from_dict({request.config: stdlib_documents(held_out=False)}).to_iterable_dataset()
    elif request.files:
        whole = {"sample_by": "document"} if request.name == "text" else {}
        patterns = [glob.escape(file) for file in request.files]
        data = load_dataset(request.name, data_files=patterns, split="train", streaming=True, **whole)
    else:
        disable_progress_bars()
        streaming = not request.is_downloaded
        data = load_dataset(request.name, request.config, split=request.split, streaming=streaming)
    if not request.is_downloaded:
        data = _undecoded(data)
    if request.seed is not None:
        data = data.shuffle(seed=request.seed, buffer_size=SHUFFLE_BUFFER)
    yield from data.iter(batch_size=request.batch)


def _name_files(request: RowsRequest) -> Iterator[Mapping[str, Any]]:
    """Yield batches of rows that name the files of a request in the order in which `datasets` reads them."""
    files = list(request.files)
    if request.seed is not None and len(files) > 1:
        from datasets import IterableDataset

        rows = IterableDataset.from_generator(_rows_of, gen_kwargs={"files": files})
        yield from rows.shuffle(request.seed, buffer_size=SHUFFLE_BUFFER).iter(request.batch)
    else:
        for start in range(0, len(files), request.batch):
            yield {"text": files[start : start + request.batch]}


def _rows_of(files: list[str]) -> Iterator[dict[str, str]]:
    yield from ({"text": file} for file in files)


def _undecoded(data: Any) -> Any:
    """Return rows whose images, sounds and the like stay as they are stored; JSON is read.

    Where such a value is decoded, the file or the address that it names is opened.
    """
    from datasets import Features
    from datasets.features.features import require_decoding

    if not (data.features and require_decoding(data.features)):
        return data
    stored = data.decode(False)
    description = stored.features.to_dict()
    _decode_json(description)
    return stored.cast(Features.from_dict(description))


def _decode_json(description: Any) -> None:
    """Set in a description of features that JSON is decoded."""
    if isinstance(description, dict) and description.get("_type") == "Json":
        description["decode"] = True
    elif isinstance(description, dict | list):
        for part in description.values() if isinstance(description, dict) else description:
            _decode_json(part)


def explain(error: BaseException, source: DocumentSource) -> InvalidInput:
    """Return the sentence for an error of `UNREADABLE`, among which are those of a full temporary place."""
    of_disk = disk_error(error)
    if of_disk is not None and is_full(of_disk):
        return InvalidInput(f"{source.called} cannot be read: {disk_sentence(of_disk)}")
    if isinstance(error, MemoryError):
        return InvalidInput(
            f"{source.called} takes more memory than is free; write it with shorter documents and, as "
            "Parquet, with smaller row groups"
        )
    reason = printable(" ".join(str(error).split())) or type(error).__name__
    with suppress(OSError, RuntimeError, InvalidInput):  # what its owner can find
        files = find_files(source.place, source.option)
        reason = first_flaw(files, str(Path(source.place).expanduser())) or reason
    return InvalidInput(f"{source.called} cannot be read: {reason}")


def _read_here(request: RowsRequest, source: DocumentSource) -> Iterator[Mapping[str, Any]]:
    rows = _name_files(request) if request.name == _PLAIN else open_rows(request)
    while True:
        try:
            columns = next(rows, None)
        except UNREADABLE as error:
            raise explain(error, source) from None
        except RuntimeError as error:
            # `datasets` leaks StopIteration for a JSON file without a row, which a generator turns into this.
            if not isinstance(error.__cause__, StopIteration):
                raise
            raise NoDocuments(f"{source.called} holds no documents") from None
        if columns is None:
            return
        yield columns


Frame = tuple[Literal["rows", "refusal", "none", "end"], Any]


def _read_apart(request: RowsRequest, source: DocumentSource) -> Iterator[Mapping[str, Any]]:
    """Yield batches that a process of its own reads; a crash of it is a mistake of the file's."""
    # The child finds this kvfold and `datasets` where this process does.
    code = f"import sys; sys.path[:] = {sys.path!r}; from kvfold.texts.reader_process import main; main()"
    environment = {**os.environ, "USE_TORCH": "0"}  # rows are plain values; importing torch takes a second
    with TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
        )
        assert child.stdin
        assert child.stdout
        try:
            with child.stdin:
                pickle.dump((request, source), child.stdin)
            while True:
                try:
                    frame: Frame = pickle.load(child.stdout)
                except (EOFError, pickle.UnpicklingError):  # it ended before its last frame
                    ended = child.wait()
                    said.seek(0)
                    lines = said.read().decode("utf-8", "replace").strip().splitlines()
                    reason = printable(lines[-1]) if lines else f"exit code {ended}"
                    if ended < 0:
                        reason = (
                            f"its reader crashed on it (signal {-ended}); give one JSON object per line, or "
                            "a sound Parquet file"
                        )
                    raise InvalidInput(f"{source.called} cannot be read: {reason}") from None
                if frame[0] == "end":
                    return
                if frame[0] == "refusal":
                    raise InvalidInput(frame[1])
                if frame[0] == "none":
                    raise NoDocuments(f"{source.called} holds no documents")
                yield frame[1]
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


def _is_harmless(file: Path) -> bool:
    """Return True for a file that no reader crashes on: plain text, or JSON objects that nest little."""
    if compression(file):
        return False
    if is_plain_text(file):
        return True
    if builder_of(file) != "json" or file.stat().st_size > _CHECKED:
        return False
    content = file.read_bytes()
    try:
        if content.removeprefix(b"\xef\xbb\xbf").startswith(b"["):
            rows = parse_json(content, str(file), top=list)
        else:
            rows = [parse_json(line, str(file)) for line in content.splitlines() if line.strip()]
    except InvalidInput:
        return False
    return all(isinstance(row, dict) for row in rows) or all(isinstance(row, str) for row in rows)
