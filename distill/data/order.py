"""Windows of tokens, in an order that depends only on (seed, index).

Every source is a stream of tokens. It is cut into windows that overlap by one token, so that every token but
the first is predicted exactly once. The sources of a mixture take turns by weight, one window at a time.

Shapes: B windows, S tokens of a window.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..recipe.data_section import Data
from .batch import IGNORED, Batch
from .token_documents import SCORED, START


class Stream(NamedTuple):
    """The tokens of a source.

    Attributes:
        tokens: ids, int32.
        marks: `token_documents.START` and `SCORED` of each token, uint8.
    """

    tokens: NDArray[np.int32]
    marks: NDArray[np.uint8]


class TrainingWindows:
    """The windows of a run, addressed by a cursor that counts them from 0.

    Each pass over a source (an epoch) has its own permutation: a pure function of the seed, the source and
    the number of the epoch. Each stream has more tokens than one window.
    """

    def __init__(self, streams: Sequence[Stream], data: Data) -> None:
        self._streams = streams
        self._data = data
        self._held = [(len(stream.tokens) - 1) // data.seq_len for stream in streams]
        self._weights = tuple(source.weight for source in data.sources)
        self._permutation = lru_cache(maxsize=2 * len(streams))(self._permute)
        self._schedule = lru_cache(maxsize=1)(schedule)

    def __len__(self) -> int:
        """Return the number of windows over all sources."""
        return sum(self._held)

    def batch(self, cursors: Sequence[int]) -> Batch:
        """Return the windows at these cursors."""
        size = self._data.seq_len + 1
        rows = [
            (stream.tokens[at : at + size], stream.marks[at : at + size])
            for stream, at in self._find(cursors)
        ]
        tokens_BS, marks_BS = (np.stack(parts) for parts in zip(*rows, strict=True))
        place_S = np.arange(self._data.seq_len)
        start_BS = np.maximum.accumulate(np.where(marks_BS[:, :-1] & START, place_S, 0), axis=1)
        labels_BS = np.where(marks_BS[:, 1:] & SCORED, tokens_BS[:, 1:], IGNORED)
        arrays = (tokens_BS[:, :-1], labels_BS, place_S - start_BS)
        return Batch(*(torch.from_numpy(array.astype(np.int64)) for array in arrays))

    def scored(self, cursors: Sequence[int]) -> int:
        """Return the number of scored labels at these cursors, without building their batch."""
        length = self._data.seq_len
        found = self._find(cursors)
        return sum(
            int(np.count_nonzero(stream.marks[at + 1 : at + length + 1] & SCORED)) for stream, at in found
        )

    def repeated(self, windows: int) -> list[str]:
        """Return a sentence for each source that a run of so many windows reads more than once."""
        reads = windows_per_source(self._weights, windows)
        return [
            f"{source.source} holds {held} windows and the run reads {read}, so some are read again"
            for source, held, read in zip(self._data.sources, self._held, reads, strict=True)
            if read > held
        ]

    @property
    def tokens(self) -> list[NDArray[np.int32]]:
        """All token ids, by source."""
        return [stream.tokens for stream in self._streams]

    def _find(self, cursors: Sequence[int]) -> Iterator[tuple[Stream, int]]:
        """Yield the stream of each cursor's window, and the place of its first token there."""
        for cursor in cursors:
            source = 0
            index = cursor
            if len(self._streams) > 1:
                # Computed for powers of two, so that it is computed seldom. Entries of a cursor never change.
                source_W, index_W = self._schedule(self._weights, 1 << max(10, cursor.bit_length()))
                source = int(source_W[cursor])
                index = int(index_W[cursor])
            epoch, place = divmod(index, self._held[source])
            yield self._streams[source], int(self._permutation(source, epoch)[place]) * self._data.seq_len

    def _permute(self, source: int, epoch: int) -> NDArray[np.int64]:
        entropy = [self._data.seed, epoch, *([source] if source else [])]
        return np.random.default_rng(entropy).permutation(self._held[source])


def schedule(weights: Sequence[float], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each of the first `count` windows, and how many windows of it came before.

    Window j of a source with proportion w is due at (j + 1/2) / w, and windows come in the order in which
    they are due. So a source is never ahead of its proportion, or behind it, by more than a window or two,
    and a longer schedule begins with the shorter one.
    """
    share_K = np.asarray(weights) / np.sum(weights)
    numbers = [np.arange(int((count + len(weights)) * share) + 2) for share in share_K]
    due = np.concatenate([(number + 0.5) / share for number, share in zip(numbers, share_K, strict=True)])
    order = np.argsort(due, kind="stable")[:count]
    source = np.repeat(np.arange(len(weights)), [len(number) for number in numbers])
    return source[order], np.concatenate(numbers)[order]


def windows_per_source(weights: Sequence[float], windows: int) -> list[int]:
    """Return the number of a run's windows that are from each source."""
    if len(weights) == 1:
        return [windows]
    counts: list[int] = np.bincount(schedule(weights, windows)[0], minlength=len(weights)).tolist()
    return counts
