"""Protocols that cut a text into windows of tokens and select the tokens to score.

- `windows`, for a file or the standard library: the text is tokenised once, without special tokens, and cut
  into windows that do not overlap; the incomplete window at the end is dropped. A window of W
  tokens is W tokens of text, or BOS and W - 1 tokens of text.
- `gptq`, for `wikitext2-gptq-W` (arXiv 2210.17323, and the line of work after it): the text is tokenised once
  with the special tokens that the tokenizer adds by itself, which is BOS before the first window at most, and
  cut into windows of W tokens.
- `rolling`, for `lm-eval:wikitext` (lm-evaluation-harness's loglikelihood_rolling): each document is
  tokenised as by default; its first window is scored from a prefix token (BOS, or EOS where there is none),
  the last one is filled with earlier tokens as context, so that every token is scored once. The model reads W
  tokens at once.

Every position except the first of a window is scored, unless it is context or padding.

Legend: N windows, W ids of a window (rolling: one more than the model reads), T = W - 1 positions that may be
scored.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import InvalidInput
from ..models.causal_lm import Described, Loaded
from ..texts.corpus import Size, Text
from ..texts.token_parts import token_parts
from .options import Options

# The window of the GPTQ line of work (arXiv 2210.17323), far below the positions of today's models.
LONGEST_DEFAULT = 2048


@dataclass(frozen=True)
class TextWindows:
    """A text cut for scoring.

    Attributes:
        name: the full name of the protocol, e.g. `text:novel.txt window=256 bos=each`.
        bos: where BOS stands: at the head of `each` window, `first` window or `document`, or `none`.
        length: tokens that a model reads at once.
        ids_NW: token ids, int64; the padding of a shorter window is never scored.
        scored_NT: True where one of the ids 1 to W - 1 is scored, bool.
        bytes_N: UTF-8 bytes that the scored tokens of each window stand for.
        original: size of the text to divide by, where the protocol does not divide by the tokens' size.
    """

    name: str
    bos: str
    length: int
    ids_NW: Tensor
    scored_NT: Tensor
    bytes_N: Tensor
    original: Size | None = None

    @property
    def bytes(self) -> int:
        """The bytes of text that the total loss is divided by."""
        return int(self.bytes_N.sum()) if self.original is None else self.original.bytes


class Limit(NamedTuple):
    """The positions that every model has; None where none of them has a limit.

    Attributes:
        positions: of the model that has fewest.
        path: its directory.
    """

    positions: int | None
    path: Path | None

    def check(self, asked: str, tokens: int) -> None:
        """Refuse more tokens than the model has positions.

        Args:
            asked: the option and its value, for the error.
            tokens: that a model would read.

        Raises:
            InvalidInput: they are more.
        """
        if self.positions is not None and tokens > self.positions:
            raise InvalidInput(
                f"{asked} exceeds the {self.positions} positions of {self.path}; "
                f"use {self.positions} or fewer"
            )


def limit_of(models: Iterable[Loaded | Described]) -> Limit:
    """Return the positions that every model has."""
    limits = [Limit(model.positions, model.path) for model in models if model.positions]
    return min(limits, default=Limit(None, None), key=lambda limit: limit.positions or 0)


def window_length(window: int | None, models: Sequence[Loaded | Described], text: Text | None = None) -> int:
    """Return the window of the protocol or of the user, or else the longest that fits every model.

    The default is at most `LONGEST_DEFAULT`, except for protocols that read as much as possible at once.

    Raises:
        InvalidInput: a model has fewer positions than asked for, or protocol and user disagree.
    """
    asked = f"--window {window}"
    if text is not None and text.window is not None:
        if window not in (None, text.window):
            raise InvalidInput(
                f"{asked}: --text {text.name} has windows of {text.window}; leave out one of them"
            )
        window, asked = text.window, f"--text {text.name}: {text.window}"
    limit = limit_of(models)
    if window is None:
        shortest = limit.positions or LONGEST_DEFAULT
        return shortest if text is not None and text.cut == "rolling" else min(LONGEST_DEFAULT, shortest)
    limit.check(asked, window)
    return window


def cut(text: Text, loaded: Loaded | Described, window: int, options: Options) -> TextWindows:
    """Tokenise a text with a model's tokenizer and cut it into windows.

    Args:
        text: the text and its protocol.
        loaded: the model.
        window: tokens that a model reads at once.
        options: gives BOS and the number of windows.

    Raises:
        InvalidInput: the text fills no window, the tokenizer lacks the BOS that was asked for, or the
            protocol itself decides on BOS.
    """
    if text.cut != "windows" and options.bos is not None:
        option = "--bos" if options.bos else "--no-bos"
        raise InvalidInput(
            f"{option}: --text {text.name} itself decides where BOS stands; leave the option out"
        )
    windows = _CUTS[text.cut](text, loaded, window, options)
    largest, found = int(windows.ids_NW.max()), len(windows.ids_NW)
    if largest >= loaded.vocabulary:
        raise InvalidInput(
            f"{text.name}: the tokenizer of {loaded.path} gives id {largest}, but its model "
            f"has {loaded.vocabulary} ids; use the tokenizer that the model was trained with"
        )
    kept = min(found, options.max_windows or found)
    if kept == found:
        return windows
    tensors = {name: getattr(windows, name)[:kept] for name in ("ids_NW", "scored_NT", "bytes_N")}
    return replace(windows, name=f"{windows.name} max-windows={kept}", original=None, **tensors)


def _plain(text: Text, loaded: Loaded | Described, window: int, options: Options) -> TextWindows:
    start, bos = loaded.tokenizer.bos_token_id, options.bos
    if bos and start is None:
        raise InvalidInput(f"--bos: the tokenizer of {loaded.path} has no BOS token; use --no-bos")
    with_bos = start is not None if bos is None else bos
    body = window - with_bos
    # One more window than is read shows that the text continues.
    needed = (options.max_windows + 1) * body if options.max_windows else None
    ids, sizes = _first_tokens(loaded.tokenizer, text.joined, needed)
    ids_NW, size_NW = _fill(text, ids, sizes, body, with_bos)
    if with_bos:
        ids_NW, size_NW = (
            functional.pad(rows, (1, 0), value=value) for rows, value in ((ids_NW, start), (size_NW, 0))
        )
    where = "each" if with_bos else "none"
    return _whole(f"{text.name} window={window} bos={where}", where, ids_NW, size_NW)


def _gptq(text: Text, loaded: Loaded | Described, window: int, options: Options) -> TextWindows:
    ids, sizes = _tokens(loaded.tokenizer, text.joined)
    start = loaded.tokenizer.bos_token_id
    where = "first" if start is not None and ids[:1] == [start] else "none"
    return _whole(f"{text.name} bos={where}", where, *_fill(text, ids, sizes, window, False))


def _rolling(text: Text, loaded: Loaded | Described, window: int, options: Options) -> TextWindows:
    tokenizer = loaded.tokenizer
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if prefix is None:
        raise InvalidInput(
            f"--text {text.name} starts documents with BOS or EOS; the tokenizer of {loaded.path} has neither"
        )
    rows = [
        row for document in text.documents for row in _roll(*_tokens(tokenizer, document), prefix, window)
    ]
    if not rows:
        raise InvalidInput(f"{text.name} holds no text; give the rows of WikiText-2 with --rows")
    width = max(len(ids) for ids, _, _ in rows)
    ids_NW, size_NW = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    scored_NW = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (ids, sizes, scored) in enumerate(rows):
        ids_NW[row, : len(ids)] = torch.tensor(ids)
        scored_NW[row, len(ids) - scored : len(ids)] = True
        size_NW[row, len(ids) - scored : len(ids)] = torch.tensor(sizes[len(sizes) - scored :])
    where = "none" if tokenizer.bos_token_id is None else "document"
    name = f"{text.name} window={window} bos={where}"
    return TextWindows(name, where, window, ids_NW, scored_NW[:, 1:], size_NW.sum(1), text.original)


_CUTS = {"windows": _plain, "gptq": _gptq, "rolling": _rolling}


def _roll(
    ids: list[int], sizes: list[int], prefix: int, window: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield a document's windows: at most `window` + 1 ids, their sizes, and the number scored at the end."""
    for start in range(0, len(ids), window):
        end = min(start + window, len(ids))
        first = max(0, end - window - 1)  # the last window is filled from before
        if start == 0:
            yield [prefix, *ids[:end]], [0, *sizes[:end]], end
        else:
            yield ids[first:end], sizes[first:end], end - start


def _fill(text: Text, ids: list[int], sizes: list[int], body: int, with_bos: bool) -> tuple[Tensor, Tensor]:
    """Return ids and their sizes as full rows of `body`."""
    found = len(ids) // body
    if not found:
        fitting = len(ids) + with_bos
        way = f"--window {fitting}"
        if text.window is not None:
            way = f"--text {text.name.rpartition('-')[0]}-{fitting}"
        advice = f"{way} would fit" if fitting >= 2 else "give a longer text"
        raise InvalidInput(
            f"{text.name} has {len(ids)} tokens, but a window of {body + with_bos} takes {body} of them; "
            f"{advice}"
        )
    ids_NW, size_NW = (torch.tensor(values[: found * body]).view(found, body) for values in (ids, sizes))
    return ids_NW, size_NW


def _whole(name: str, bos: str, ids_NW: Tensor, size_NW: Tensor) -> TextWindows:
    """Return windows in which every id except the first is scored."""
    scored_NT = torch.ones_like(ids_NW[:, 1:], dtype=torch.bool)
    return TextWindows(name, bos, ids_NW.shape[1], ids_NW, scored_NT, size_NW[:, 1:].sum(1))


def _first_tokens(tokenizer: Any, text: str, needed: int | None) -> tuple[list[int], list[int]]:
    """Return ids and sizes of a text's first tokens, `needed` or more (None: all), as in the whole text."""
    ids: list[int] = []
    ends: list[int] = []
    for part in token_parts(tokenizer, text):
        ids += part.ids
        ends += part.ends
        if needed and len(ids) >= needed:
            break
    return ids, _sizes(text, ids, ends)


def _tokens(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return ids and sizes of a text's tokens, with the special tokens that the tokenizer adds by itself."""
    if not tokenizer.is_fast:
        ids = tokenizer(text, verbose=False).input_ids
        return ids, _sizes(text, ids, [])
    encoded = tokenizer(text, verbose=False, return_offsets_mapping=True)
    return encoded.input_ids, _sizes(text, encoded.input_ids, [end for _, end in encoded.offset_mapping])


def _sizes(text: str, ids: list[int], ends: list[int]) -> list[int]:
    """Return the UTF-8 bytes that each token stands for; these sum to the bytes of the text up to the last.

    A character belongs to the first token that ends after it, so that a character of several tokens is
    counted once. A slow tokenizer gives no ends; all its tokens then get the average size.
    """
    if not ends:
        bytes_ = [len(text.encode()) * (number + 1) // len(ids) for number in range(len(ids))]
        return [after - before for before, after in pairwise([0, *bytes_])]
    points = numpy.frombuffer(text[: max(ends)].encode("utf-32-le"), numpy.uint32)
    each = 1 + sum((points > last).astype(numpy.int8) for last in (0x7F, 0x7FF, 0xFFFF))
    upto = numpy.concatenate([[0], numpy.cumsum(each)])[numpy.maximum.accumulate(ends)]
    sizes: list[int] = numpy.diff(upto, prepend=0).tolist()
    return sizes
