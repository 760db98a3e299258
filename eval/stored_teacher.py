"""A teacher whose last hidden states are on disk, as a source of logits for an evaluation.

Legend: B windows of a batch, W ids of a window, T = W - 1 positions that may be scored, D hidden size, C any
number of tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.console import progress
from ..core.errors import InvalidInput
from ..models import teacher_cache
from ..models.causal_lm import Described, Loaded
from ..models.finite import refuse
from ..models.head import last_hidden
from ..models.teacher_cache import TeacherCache, window_keys

OPTION = "--teacher-cache"


class StoredTeacher:
    """Logits from stored hidden states.

    Args:
        cache: the states.
        teacher: the model that they are of.
        device: where logits are wanted.
    """

    def __init__(self, cache: TeacherCache, teacher: Described, device: str) -> None:
        self.path = teacher.path
        self.vocabulary = teacher.vocabulary
        self._cache = cache
        self._device = torch.device(device)

    def hidden(self, first: int, ids_BW: Tensor) -> Tensor:
        """Return the hidden states (B, T, D); the last id of a window is only predicted."""
        return self._cache.hidden(window_keys(ids_BW[:, :-1])).to(self._device)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return logits (C, V), in the teacher's dtype."""
        return self._cache.logits(hidden_CD)

    def refusal(self, role: str, ids_1W: Tensor, window: int) -> InvalidInput:
        """Return the error for logits that are not finite, though the hidden states are."""
        return InvalidInput(
            f"the {role}, {self.path}, gives logits that are not finite in window {window}; its head "
            "overflows"
        )


@torch.no_grad()
def fill(
    cache: TeacherCache,
    ids_NW: Tensor,
    starts: Sequence[int],
    batch_size: int,
    load: Callable[[], Loaded],
) -> None:
    """Run the teacher on the windows that a cache lacks.

    A batch runs whole where one of its windows is missing, so that the numbers are those of a pass without a
    cache.

    Args:
        cache: is extended.
        ids_NW: all windows.
        starts: first windows of this process's batches.
        batch_size: windows of a batch.
        load: returns the teacher in memory; called only where a window is missing.

    Raises:
        InvalidInput: a hidden state is not finite, or the disk is too small.
    """
    batches = {start: window_keys(ids_NW[start : start + batch_size, :-1]) for start in starts}
    missing = cache.missing(key for keys in batches.values() for key in keys)
    if not missing:
        return
    loaded = load()
    weight_VD = loaded.model.get_output_embeddings().weight
    needed = weight_VD.element_size() * weight_VD.shape[1] * (ids_NW.shape[1] - 1) * len(missing)
    cache.check_space(needed, "read fewer windows with --max-windows")
    cache.begin(loaded.model, loaded.device.type)
    wanted = [start for start, keys in batches.items() if not set(missing).isdisjoint(keys)]
    found: dict[bytes, Tensor] = {}
    for start in progress(wanted, "Teacher", total=len(wanted)):
        ids_BT = ids_NW[start : start + batch_size, :-1]
        for row, hidden_TD in enumerate(last_hidden(loaded, ids_BT)):
            if not bool(hidden_TD.isfinite().all()):
                raise refuse("teacher", loaded, ids_BT[row][None], start + row)
            found[batches[start][row]] = hidden_TD.cpu()
        if start == wanted[-1] or sum(state.nbytes for state in found.values()) >= teacher_cache.FILE_BYTES:
            kept = [key for key in found if cache.missing([key])]
            if kept:  # none is, if the directory had lost only its head
                cache.write(kept, torch.stack([found[key] for key in kept]))
                cache.refresh()
            found.clear()
