"""Calibration text: files, directories and data sets, cut into windows of tokens."""

import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.console import notice
from ..core.errors import InvalidInput
from ..core.untrusted import is_text, parse_json, printable
from .calibration_name import parts
from .document_rows import DocumentSource
from .sources import read_texts
from .text_files import (
    compression,
    exists,
    find_files,
    flaw_of_utf8,
    is_data_set,
    is_plain_text,
    kind,
    open_text,
)
from .text_flaws import utf8_flaw
from .token_parts import token_parts

_BLOCK = 16  # characters of a plain text, for each token of a sequence, that are tokenised at once
_LARGEST = 2**32  # bytes of a file that is read to its end
_HELD = 2**25  # characters of blocks that are held at once
_OPTION = "--calibration"
_DATA_SET_PARTS = 4  # org/name, configuration, split, field


def check_calibration(calibration: str) -> None:
    """Check that a name can be that of a calibration text; data sets on the Hub are not looked up.

    Args:
        calibration: `stdlib` (the training modules of the running interpreter), a file, a directory, a glob,
            or `org/name[:config[:split[:field]]]`; behind `self+`, too.

    Raises:
        InvalidInput: there is no such file, its kind cannot be read, and it can be no data set's name.
    """
    own, text = parts(calibration)
    if text is None or text == "stdlib":
        return
    if text and (exists(text) or any(character in text for character in "*?[")):
        find_files(text, _OPTION)
    elif not _names_data_set(text):
        named = printable(calibration)
        texts = "stdlib, a file or a directory of texts that exists"
        data_set = "a data set's org/name[:config[:split[:field]]]"
        if own:
            raise InvalidInput(f"{_OPTION} {named}: behind self+ should be {texts}, or {data_set}")
        raise InvalidInput(
            f"{_OPTION} {named} is not none, self, {texts}, a .safetensors file of statistics, or {data_set}"
        )


def read_sequences(text: str | Path, tokenizer: Any, *, sequences: int, length: int, seed: int) -> Tensor:
    """Read windows of a text as token ids.

    Args:
        text: as for `check_calibration`. Of a plain text or a .jsonl file (also .gz, .xz, .bz2) blocks or
            documents are taken from anywhere. Of anything else they are drawn from a buffer that starts at
            the beginning. Documents are in the field `text`.
        tokenizer: that of the source.
        sequences: the number of windows.
        length: tokens per window.
        seed: selects the part of the text.

    Returns:
        Token ids (sequences, length), int64. The first token of each window is BOS, or else EOS, if the
        tokenizer has one.

    Raises:
        InvalidInput: the text is missing, cannot be read, or is too short.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    wanted = sequences * length
    ids: list[int] = []
    for document in _documents(str(text), _BLOCK * length, seed):
        if len(ids) >= wanted:
            break
        if start is not None:
            ids.append(start)
        for part in token_parts(tokenizer, document):
            ids += part.ids
            if len(ids) >= wanted:
                break
    if len(ids) < wanted:
        held = len(ids) // length
        fewer = f"read at most {held} sequences from it" if held else "take a shorter length"
        raise InvalidInput(
            f"{printable(text)} holds {len(ids)} tokens, and {sequences} calibration sequences of {length} "
            f"take {wanted}; name a longer text, or {fewer}"
        )
    windows = torch.tensor(ids[:wanted]).view(sequences, length)
    if start is not None:
        windows[:, 0] = start
    return windows


def _documents(text: str, block: int, seed: int) -> Iterable[str]:
    """Return documents in an order of the seed; a plain text is cut into blocks of so many characters."""
    check_calibration(text)
    file = Path(text)
    is_read_whole = (is_plain_text(file) or kind(file) == ".jsonl") and compression(file) != ".zst"
    if text != "stdlib" and file.is_file() and is_read_whole:
        generator = torch.Generator().manual_seed(seed)
        return _read_blocks(file, block, generator) if is_plain_text(file) else _read_lines(file, generator)
    return _read_stream(text, seed)


def _read_blocks(file: Path, block: int, generator: torch.Generator) -> Iterator[str]:
    """Yield all blocks of a plain text in a random order; each pass over the file reads some of them."""
    with _errors_of(file):
        count = sum(1 for _ in _cut(file, block))
    order = torch.randperm(count, generator=generator)
    for chosen in order.split(max(1, _HELD // block)):
        places = {index: at for at, index in enumerate(chosen.tolist())}
        found = [""] * len(places)
        with _errors_of(file):
            for index, text in enumerate(_cut(file, block)):
                if index in places:
                    found[places[index]] = text
        yield from found


def _cut(file: Path, block: int) -> Iterator[str]:
    with open_text(file) as stream:
        while text := stream.read(block):
            yield text


def _read_lines(file: Path, generator: torch.Generator) -> Iterator[str]:
    """Yield all documents of a .jsonl file in a random order; rows without a text are counted."""
    name = printable(file)
    rows: list[Any] = []
    with _errors_of(file), open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                rows.append(parse_json(line, f"{name} line {number}", len(line)).get("text"))
    others = sum(not is_text(row) for row in rows)
    if rows and others == len(rows):
        raise InvalidInput(f'{name} has no text in a field "text"; give objects that hold a document in it')
    if others:
        notice(f'{name}: {others} of {len(rows)} rows have no text in the field "text" and were left out')
    for index in torch.randperm(len(rows), generator=generator).tolist():
        if rows[index] and is_text(rows[index]):
            yield rows[index]


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Refuse a file that is too large, and one that proves unreadable, in one sentence."""
    name = printable(file)
    if not compression(file) and file.stat().st_size > _LARGEST:
        raise InvalidInput(
            f"{name} has {file.stat().st_size:,} bytes; a calibration reads the file whole and takes at most "
            f"{_LARGEST:,}, so name a part of it"
        )
    try:
        yield
    except InvalidInput:
        raise
    except UnicodeDecodeError as error:
        byte = flaw_of_utf8(file)
        raise InvalidInput(utf8_flaw(name, error.start if byte is None else byte)) from None
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise InvalidInput(f"{name} cannot be read: {printable(str(error))}") from None


def _read_stream(text: str, seed: int) -> Iterator[str]:
    """Yield the documents that `datasets` opens, without empty ones."""
    source = DocumentSource(text, option=_OPTION, field_option="")
    if not exists(text) and _names_data_set(text):
        name, config, split, field = [*text.split(":"), "", "", ""][:_DATA_SET_PARTS]
        source = replace(
            source,
            place=name,
            config=config or None,
            split=split or "train",
            field=field or "text",
            field_option=f"FIELD of {name}:{config}:{split or 'train'}:FIELD",
        )
    yield from chain.from_iterable(read_texts(source, seed))


def _names_data_set(text: str) -> bool:
    name, *rest = text.split(":")
    return is_data_set(name) and len(rest) < _DATA_SET_PARTS
