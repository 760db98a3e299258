"""Held-out text for evaluating a run while it trains, and the proof that the run does not train on it.

Shapes: N windows, B windows of a batch, S tokens of a window that a model reads, W = S + 1 ids of a window, P
probed ids.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.errors import InvalidInput, naming, renamed
from ...eval.options import Options
from ...eval.windows import TextWindows, cut
from ...models.causal_lm import Described, Loaded
from ...texts.corpus import Text, read_text
from ...texts.sources import local_files
from ..data.batch import IGNORED, Batch
from ..recipe.data_section import Data
from ..recipe.recipe import Evaluate, Recipe

# Tokens in a row that two texts do not have in common by chance. Most licence headers are shorter.
_PROBE = 64
_AT_ONCE = 2**22  # training tokens searched at once
_ELSEWHERE = ("lm-eval:wikitext",)
_LARGEST = 2**25  # bytes; a larger text is not read before the run, only by it
# Proportion of windows that may hold something of the training text, such as a licence or a quotation.
_ALLOWED = 0.1


class HeldOut:
    """Windows of held-out text, addressed like those of a run; the protocol is that of `kvfold eval`."""

    def __init__(self, windows: TextWindows, text: Text) -> None:
        self.ids_NW, self._scored_NS = windows.ids_NW, windows.scored_NT
        self.described = {"text": windows.name, "text_sha256": text.sha256}

    def __len__(self) -> int:
        return len(self.ids_NW)

    @property
    def counts(self) -> list[int]:
        """The number of scored tokens of each window."""
        return [int(count) for count in self._scored_NS.sum(1)]

    def batch(self, cursors: Sequence[int]) -> Batch:
        """Return the windows of these numbers, each a document of its own."""
        chosen = list(cursors)
        ids_BW = self.ids_NW[chosen]
        labels_BS = ids_BW[:, 1:].masked_fill(~self._scored_NS[chosen], IGNORED)
        positions_BS = torch.arange(ids_BW.shape[1] - 1).expand(len(chosen), -1)
        return Batch(ids_BW[:, :-1], labels_BS, positions_BS)


def open_held_out(recipe: Recipe, student: Loaded | Described) -> HeldOut | None:
    """Return the text of `recipe.evaluate` in windows; None if the recipe has no such section.

    Raises:
        InvalidInput: it cannot be read, is a source of the run's data, does not fill two windows, or its
            windows are longer than the student takes.
    """
    settings = recipe.evaluate
    if settings is None:
        return None
    check_apart(settings, recipe.data)
    with naming({"--text": "evaluate.source"}):
        text = read_text(settings.source, field=settings.text_field, field_option="evaluate.text_field")
    length = settings.seq_len or text.window or recipe.data.seq_len
    if text.window not in (None, length):
        raise InvalidInput(
            f"evaluate.source {settings.source} has windows of {text.window} tokens; leave out "
            f"evaluate.seq_len {length}"
        )
    if student.positions is not None and length > student.positions:
        raise InvalidInput(
            f"evaluate.seq_len {length} exceeds the {student.positions} positions of the student "
            f"{student.path}; use at most {student.positions}"
        )
    try:
        windows = cut(text, student, length, Options(max_windows=settings.windows))
    except InvalidInput as mistake:
        sentence = renamed(str(mistake), {"--window": "evaluate.seq_len"})
        raise InvalidInput(f"evaluate.source {sentence}") from None
    if len(windows.ids_NW) < 2:
        raise InvalidInput(
            f"evaluate.source {settings.source} fills one window of {length} tokens, but a standard error "
            "needs two; give a longer text, or a lower evaluate.seq_len"
        )
    return HeldOut(windows, text)


def check_held_out(recipe: Recipe, student: Described | None, tokens: Sequence[NDArray[np.int32]]) -> None:
    """Check everything that can be known of a recipe's held-out text before a run. The Hub is not looked up.

    Without a student on this machine, which gives the tokenizer, no text is read. `tokens` are those of the
    data, as far as they are known.

    Raises:
        InvalidInput: as of `open_held_out` and `check_unseen`.
    """
    settings = recipe.evaluate
    assert settings
    check_apart(settings, recipe.data)
    if settings.source in _ELSEWHERE or settings.source.startswith("wikitext2-gptq-"):
        return
    file = Path(settings.source.removeprefix("text:")).expanduser()
    if settings.source != "stdlib" and not file.is_file():
        raise InvalidInput(f"evaluate.source {settings.source} is not a file; name a text, or stdlib")
    if student is None or (file.is_file() and file.stat().st_size > _LARGEST):
        return
    held_out = open_held_out(recipe, student)
    assert held_out
    check_unseen(held_out, settings.source, tokens)


def check_apart(settings: Evaluate, data: Data) -> None:
    """Refuse to evaluate on a file that is trained on, under whatever name.

    Raises:
        InvalidInput: names both.
    """
    file = Path(settings.source.removeprefix("text:")).expanduser()
    if not file.is_file():
        return
    for source in data.sources:
        for other in local_files(source.source):
            is_copy = other.stat().st_size == file.stat().st_size and other.read_bytes() == file.read_bytes()
            if other.samefile(file) or is_copy:
                raise InvalidInput(
                    f"evaluate.source {settings.source} is trained on: it is {other} of data.source "
                    f"{source.source}; name a text that the run does not read"
                )


def check_unseen(held_out: HeldOut, source: str, tokens: Sequence[NDArray[np.int32]]) -> None:
    """Refuse held-out windows that occur in the training text word for word.

    `source` is their name in the error; `tokens` is everything that the run reads, by source.

    Raises:
        InvalidInput: more than a tenth of the windows occur there.
    """
    ids_NW = held_out.ids_NW.numpy()
    # From the middle of each window: one of the data rarely begins where one of these does.
    size = min(_PROBE, max(1, ids_NW.shape[1] // 2))
    start = (ids_NW.shape[1] - size + 1) // 2
    seen = sum(_are_seen(ids_NW[:, start : start + size], tokens))
    if seen > _ALLOWED * len(held_out):
        raise InvalidInput(
            f"evaluate.source {source} is trained on: {seen} of its {len(held_out)} windows occur in the "
            "run's data word for word; name a text that does not"
        )


def _are_seen(probe_NP: NDArray[np.int64], tokens: Sequence[NDArray[np.int32]]) -> list[bool]:
    size = probe_NP.shape[1]
    found = set()
    for stream in tokens:
        for first in range(0, max(0, len(stream) - size + 1), _AT_ONCE):
            part = np.asarray(stream[first : first + _AT_ONCE + size - 1])
            kept = np.arange(len(part) - size + 1)
            for at in range(min(4, size)):  # few places have the first ids of some probe
                kept = kept[np.isin(part[kept + at], probe_NP[:, at])]
            found |= {part[place : place + size].tobytes() for place in kept}
    return [probe_P.tobytes() in found for probe_P in probe_NP.astype(np.int32)]
