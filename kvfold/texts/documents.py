"""Text from outside that statistics can be taken on.

Files, directories and data sets, cut into windows of tokens.
"""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidInput

_BLOCK = 16  # characters of a plain text, for each token of a sequence, that are tokenised at once
_OPEN: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_PLAIN = {".txt", ".jsonl"}
_BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
_COMPRESSIONS = {*_OPEN, ".zst"}
_SHUFFLE_BUFFER = 2000  # documents of a data set, from which the next one is drawn
# What `datasets` raises for missing and unreachable sources, and it and the decompressors for damaged ones.
_UNREADABLE = (OSError, ValueError, EOFError, lzma.LZMAError, zlib.error)
KINDS = ".txt, .jsonl, .json or .parquet (also .gz, .xz, .bz2, .zst)"


def check_source(text: str) -> None:
    """Refuse early what names no text.

    Args:
        text: a file, a directory, or `org/name[:config[:split[:field]]]`.

    Raises:
        InvalidInput: there is no such file or directory, and it can be no data set's name.
    """
    path = Path(text)
    if path.is_file():
        if _builder(path) is None:
            raise InvalidInput(f"--calibration {text} is of no kind that can be read: {KINDS}")
    elif path.is_dir():
        _directory(path)
    elif not _is_dataset(text):
        raise InvalidInput(
            f"--calibration {text} is not none, self, a file or a directory of texts that exists, a "
            f".safetensors file of "
            "statistics, or a data set's org/name[:config[:split[:field]]]"
        )


def read_sequences(text: str | Path, tokenizer: Any, *, sequences: int, length: int, seed: int) -> Tensor:
    """Windows of a text as token ids (sequences, length), int64; the first token of each is BOS, or else EOS,
    if there is one.

    Args:
        text: as for `check_source`. Of a .txt or .jsonl file (also .gz, .xz, .bz2) blocks or documents are
            taken from anywhere; of anything else they are drawn from a buffer that moves on from the start.
            Documents are in the field `text`.
        tokenizer: of the source.
        sequences, length: how many, and tokens in each.
        seed: which part of the text is taken.

    Raises:
        InvalidInput: the text is missing, cannot be read, or is too short.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    wanted = sequences * length
    ids: list[int] = []
    for document in _documents(text, _BLOCK * length, seed):
        if len(ids) >= wanted:
            break
        ids += [] if start is None else [start]
        ids += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < wanted:
        raise InvalidInput(
            f"{text} holds {len(ids)} tokens, and {sequences} calibration sequences of {length} take "
            f"{wanted}; "
            "name a longer text or take fewer sequences"
        )
    windows = torch.tensor(ids[:wanted]).view(sequences, length)
    if start is not None:
        windows[:, 0] = start
    return windows


def _documents(text: str | Path, block: int, seed: int) -> Iterable[str]:
    """Documents in an order of the seed; a plain text is cut into blocks of so many characters."""
    file = Path(text)
    packed, kind = _suffixes(file)
    if not file.is_dir() and kind in _PLAIN and packed in _OPEN:
        documents = _in_memory(file, kind, packed, block)
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
        return (documents[index] for index in order)
    return _streamed(str(text), seed)


def _in_memory(file: Path, kind: str, packed: str, block: int) -> list[str]:
    try:
        with _OPEN[packed](file, "rt", encoding="utf-8") as stream:
            if kind == ".txt":
                text = stream.read()
                return [text[at : at + block] for at in range(0, len(text), block)]
            documents = [json.loads(line)["text"] for line in stream if line.strip()]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8 text (byte {error.start})") from None
    except (KeyError, TypeError, json.JSONDecodeError):
        raise InvalidInput(f'{file} has a line that is no JSON object with a field "text"') from None
    except _UNREADABLE as error:
        raise InvalidInput(f"{file} cannot be read: {error}") from None
    if not all(isinstance(document, str) for document in documents):
        raise InvalidInput(f'{file} has a line whose field "text" is no text')
    return documents


def _streamed(text: str, seed: int) -> Iterator[str]:
    """Documents of what `datasets` opens; empty ones are left out."""
    data, field = _open(text)
    try:
        for row in data.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER):
            if not isinstance(row.get(field), str | None) or field not in row:
                raise InvalidInput(
                    f"{text} has no text in a field {field!r}; its fields are {', '.join(row)}"
                )
            if row[field]:
                yield row[field]
    except _UNREADABLE as error:
        raise InvalidInput(f"{text} cannot be read: {' '.join(str(error).split())}") from None
    except StopIteration:  # what `datasets` raises for a JSON file without a single row
        raise InvalidInput(f"{text} holds no documents") from None


def _open(text: str) -> tuple[Any, str]:
    """A streaming data set and the field of its documents."""
    path = Path(text)
    if not path.exists() and not _is_dataset(text):
        raise InvalidInput(f"{text} cannot be read: there is no such file")
    from datasets import load_dataset

    try:
        if path.exists():
            files = [path] if path.is_file() else _directory(path)
            builder = _builder(files[0])
            if builder is None:
                raise InvalidInput(f"{text} is of no kind that calibration text can be: {KINDS}")
            whole = {"sample_by": "document"} if builder == "text" else {}
            return load_dataset(
                builder, data_files=[str(file) for file in files], split="train", streaming=True, **whole
            ), "text"
        name, config, split, field = [*text.split(":"), *[""] * 3][:4]
        return load_dataset(name, config or None, split=split or "train", streaming=True), field or "text"
    except (*_UNREADABLE, ImportError) as error:
        raise InvalidInput(f"{text} cannot be read: {' '.join(str(error).split())}") from None


def _directory(path: Path) -> list[Path]:
    """The texts in a directory, all of one kind."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and _builder(file))
    kinds = {_builder(file) for file in files}
    if len(kinds) != 1:
        found = "files of several kinds" if files else "no file"
        raise InvalidInput(
            f"the directory {path} holds {found} that calibration text can be, {KINDS}; name one file"
        )
    return files


def _is_dataset(text: str) -> bool:
    name, *rest = text.split(":")
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and _builder(Path(name)) is None
        and len(rest) < 4
    )


def _builder(file: Path) -> str | None:
    return _BUILDERS.get(_suffixes(file)[1])


def _suffixes(file: Path) -> tuple[str, str]:
    """Compression and kind, as the name says."""
    packed = file.suffix if file.suffix in _COMPRESSIONS else ""
    return packed, Path(file.name.removesuffix(packed)).suffix
