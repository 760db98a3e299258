"""The protocol of a measurement: how a text becomes windows of tokens.

The text is tokenised once, without special tokens, and cut into windows that do not overlap; what is left at the end and
fills no window is dropped. A window of W tokens is W tokens of text, or BOS and W - 1 tokens of text. Every position but the
first is scored: with BOS that is every token of the text, without it all but the first of each window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..convert.errors import InvalidInput
from .corpus import Text
from .models import Loaded
from .options import Options

LONGEST_DEFAULT = 2048  # the window of the GPTQ line of work (arXiv 2210.17323), far below what today's models take


@dataclass(frozen=True)
class Windows:
    """A text cut for scoring.

    Attributes:
        name: the full name of the protocol, e.g. `text:novel.txt window=256 bos=each`.
        ids_NW: token ids, int64, N windows of W tokens.
    """

    name: str
    ids_NW: Tensor


def window_length(window: int | None, models: Sequence[Loaded]) -> int:
    """The window to use: what the user asked for, else as much as every model takes up to `LONGEST_DEFAULT`.

    Raises:
        InvalidInput: a model takes fewer positions than asked for.
    """
    limits = [(loaded.positions, loaded.path) for loaded in models if loaded.positions is not None]
    if window is None:
        return min([LONGEST_DEFAULT, *(positions for positions, _ in limits)])
    for positions, path in limits:
        if window > positions:
            raise InvalidInput(f"--window {window} is more than the {positions} positions of {path}; use {positions} or fewer")
    return window


def cut(text: Text, loaded: Loaded, window: int, options: Options) -> Windows:
    """Tokenise a text with a model's tokenizer and cut it into windows of `window` tokens, as `options` says.

    Raises:
        InvalidInput: the text fills no window, or the tokenizer has no BOS though one was asked for.
    """
    start = loaded.tokenizer.bos_token_id
    if options.bos and start is None:
        raise InvalidInput(f"--bos: the tokenizer of {loaded.path} has no BOS token; use --no-bos")
    with_bos = start is not None if options.bos is None else options.bos
    ids = loaded.tokenizer(text.joined, add_special_tokens=False, verbose=False).input_ids
    body = window - with_bos
    found = len(ids) // body
    if not found:
        fitting = len(ids) + with_bos
        advice = f"--window {fitting} would fit" if fitting >= 2 else "give a longer text"
        raise InvalidInput(f"{text.name} has {len(ids)} tokens, a window of {window} takes {body} of them; {advice}")
    kept = min(found, options.max_windows or found)
    ids_NW = torch.tensor(ids[: kept * body]).view(kept, body)
    if with_bos:
        ids_NW = torch.nn.functional.pad(ids_NW, (1, 0), value=start)
    if int(ids_NW.max()) >= loaded.vocabulary:
        raise InvalidInput(f"the tokenizer of {loaded.path} gives id {int(ids_NW.max())}, its model has {loaded.vocabulary}")
    name = f"{text.name} window={window} bos={'each' if with_bos else 'none'}"
    return Windows(name if kept == found else f"{name} max-windows={kept}", ids_NW)
