"""Documents to one stream of token ids, and the stream to windows in an order that depends on (seed, index) alone.

Every document starts with the tokenizer's BOS token; where there is none, with EOS, which is what separates documents in the
training data of such models; no other special token is added. A .txt file is one document. Documents are packed one after the
other without padding, attention is not cut between them, and the stream is cut into windows that overlap by one token, so that
every token but the first is predicted exactly once.

A source is read from its start, through a seeded shuffle buffer, until the stream is long enough for the whole run: of a
large file in sorted order only the first part is seen. A source that is shorter is read again, in a new order.
"""

import glob
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..convert.errors import InvalidInput
from .display import progress_bar
from .recipe import Data

_BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
_COMPRESSIONS = {".gz", ".xz", ".bz2", ".zst"}
_SHUFFLE_BUFFER = 2000  # documents; all of the standard library's
_BATCH = 64  # documents tokenised at once
# What `datasets` raises for missing and unreachable sources, and it and the decompressors for damaged ones.
_UNREADABLE = (OSError, ValueError, EOFError, lzma.LZMAError, zlib.error)


class Windows:
    """A stream of tokens as windows, addressed by a cursor that counts the windows of a run.

    Each pass over the data (an epoch) has its own permutation, a pure function of the seed and the epoch's number.

    Args:
        tokens: the stream, integers.
        seq_len: tokens in a window; one more is returned, the label of the last.
        seed: any integer from 0 on.
    """

    def __init__(self, tokens: NDArray[np.int32], seq_len: int, seed: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self._permutation = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(self)))

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def batch(self, cursors: Sequence[int]) -> Tensor:
        """The windows at these cursors, int64 (len(cursors), seq_len + 1)."""
        places = [divmod(cursor, len(self)) for cursor in cursors]
        starts = [self._permutation(epoch)[index] * self._seq_len for epoch, index in places]
        rows = [self._tokens[start : start + self._seq_len + 1] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def open_windows(file: Path, data: Data) -> Windows:
    """The windows of a stream written by `write_tokens`, memory-mapped."""
    return Windows(np.memmap(file, dtype=np.int32, mode="r"), data.seq_len, data.seed)


def write_tokens(file: Path, data: Data, tokenizer: Any, windows: int) -> None:
    """Tokenise the source into `file`, native int32, until there are enough tokens for `windows` windows.

    Raises:
        InvalidInput: the source cannot be read, has no such text field, or does not fill one window.
    """
    separator = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    start = [] if separator is None else [separator]
    wanted = windows * data.seq_len + 1
    written = documents = 0
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream, progress_bar("tokens", wanted) as show:
        for texts in _documents(data):
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                piece = np.asarray(start + ids, dtype=np.int32)[: wanted - written]
                stream.write(piece.tobytes())
                written += len(piece)
            documents += len(texts)
            show(written, "")
            if written == wanted:
                break
        stream.flush()
        os.fsync(stream.fileno())
    if written <= data.seq_len:
        raise InvalidInput(
            f"data.source {data.source} holds {written} tokens in {documents} documents; one window of data.seq_len "
            f"{data.seq_len} takes {data.seq_len + 1}"
        )
    partial.rename(file)


def _documents(data: Data) -> Iterator[list[str]]:
    """Documents in batches; empty ones are left out."""
    try:
        for batch in _open(data).shuffle(seed=data.seed, buffer_size=_SHUFFLE_BUFFER).iter(batch_size=_BATCH):
            if data.text_field not in batch:
                raise InvalidInput(
                    f"data.source {data.source} has no field {data.text_field!r}; data.text_field can be {', '.join(batch)}"
                )
            texts = [text for text in batch[data.text_field] if text]
            if not all(isinstance(text, str) for text in texts):
                raise InvalidInput(f"data.source {data.source}: the field {data.text_field!r} holds no text")
            if texts:
                yield texts
    except _UNREADABLE as error:
        raise InvalidInput(f"data.source {data.source} cannot be read: {' '.join(str(error).split())}") from None
    except StopIteration:  # what `datasets` raises for a JSON file without a single row
        raise InvalidInput(f"data.source {data.source} holds no documents") from None


def _open(data: Data) -> Any:
    from datasets import Dataset, load_dataset

    if data.source == "stdlib":
        from ..eval.corpus import stdlib_documents

        return Dataset.from_dict({data.text_field: stdlib_documents(held_out=False)}).to_iterable_dataset()
    files = _files(data.source)
    if not files:
        return load_dataset(data.source, data.name, split=data.split, streaming=True)
    builders = {_builder(file) for file in files}
    if len(builders) > 1:
        raise InvalidInput(f"data.source {data.source} holds files of several kinds; name one, e.g. {data.source}/*.jsonl")
    (builder,) = builders
    whole_files = {"sample_by": "document"} if builder == "text" else {}
    return load_dataset(builder, data_files=[str(file) for file in files], split="train", streaming=True, **whole_files)


def _files(source: str) -> list[Path]:
    """The files that a source names; none when it can only be a Hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and _builder(file))
    elif path.is_file():
        if not _builder(path):
            raise InvalidInput(f"data.source {source} is of no known kind; known: {', '.join(_BUILDERS)}, also compressed")
        found = [path]
    else:
        found = sorted(Path(file) for file in glob.glob(str(path), recursive=True) if _builder(Path(file)))
        if not found and source.count("/") == 1 and not source.startswith((".", "/", "~")) and not _builder(path):
            return []
    if not found:
        raise InvalidInput(f"data.source {source} names no {', '.join(_BUILDERS)} file here and is no org/name on the Hub")
    return found


def _builder(file: Path) -> str | None:
    suffix = Path(file.stem).suffix if file.suffix in _COMPRESSIONS else file.suffix
    return _BUILDERS.get(suffix)
