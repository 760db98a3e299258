"""A teacher whose last hidden states are on disk, so that later runs on the same windows do not load it.

KL to it is exact but for the rounding of the dtype in which states are stored. A teacher that computes in
bfloat16 loses nothing when it is stored in bfloat16.

Shapes: B windows of a batch, S tokens of a window, T = B S, D hidden size, N windows of a file.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...checkpoints.identity import check_signature, hashes_of, signature
from ...core.console import progress
from ...core.errors import InvalidInput
from ...core.processes import from_first
from ...models import teacher_cache
from ...models.teacher_cache import TeacherCache, parts, window_keys
from ..data.batch import Batch, Batches
from ..losses.predictions import Predictions
from ..recipe.recipe import Recipe, Stage
from .teacher import Online

OPTION = "teacher_cache"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BATCH = 8  # windows that the teacher reads at once
Needed = Sequence[tuple[Batches, int]]  # windows, and how many of them from the start


class CachedTeacher:
    """A teacher whose last hidden states are stored; it predicts on `device`."""

    def __init__(self, cache: TeacherCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._weight_VD, self._bias_V, self._form = cache.head(device)

    def predictions(self, batch: Batch) -> Predictions:
        """Return predictions for all tokens; see `Teacher`.

        Raises:
            InvalidInput: a window is not in the cache.
        """
        hidden_TD = self._cache.hidden(keys(batch)).flatten(0, 1).to(self._device, self._weight_VD.dtype)
        return Predictions(hidden_TD, self._weight_VD, self._bias_V, self._form)


def cache_for(stage: Stage, recipe: Recipe) -> Path | None:
    """Return the directory of the cache that a stage can learn from.

    None where the recipe names none, or the stage compares layers.
    """
    if recipe.teacher_cache is None or stage.of_layers:
        return None
    return Path(recipe.teacher_cache).expanduser()


def cached_teacher(
    directory: Path,
    needed: Needed,
    recipe: Recipe,
    teacher: Path,
    accelerator: Accelerator,
    open_online: Callable[[], Online],
) -> CachedTeacher:
    """Open the cache of a recipe; windows that it lacks are computed first. All processes call it.

    `open_online` returns the teacher in memory; it is called only where a window is missing.

    Raises:
        InvalidInput: the directory is for something else, or cannot be written.
    """
    bf16 = accelerator.mixed_precision == "bf16"
    before = signature(teacher)
    identity = identify(teacher, recipe.teacher_cache_dtype, bf16)
    cache = TeacherCache(directory, OPTION, identity)
    is_complete = not any(cache.missing(_cursors(batches, count)) for batches, count in needed)
    if not from_first(is_complete):  # another run may be extending the cache: all do the same
        online = open_online()
        check_signature(teacher, before)
        online.model.to(accelerator.device)  # where a student is sharded, its teacher is loaded elsewhere
        write_cache(cache, online, needed, DTYPES[identity["dtype"]], accelerator)
    cache.refresh()
    for batches, count in needed:
        cache.check_holds(_cursors(batches, count))
    return CachedTeacher(cache, accelerator.device)


def identify(teacher: Path, dtype: str, bf16: bool) -> dict[str, Any]:
    """Return the identity of hidden states; the teacher's files are read for their hashes.

    `dtype` is the one in which states are stored, or `auto` for the one in which they are computed.
    """
    computed = "bfloat16" if bf16 else "float32"
    return teacher_cache.identify(hashes_of(teacher), computed, computed if dtype == "auto" else dtype)


def write_cache(
    cache: TeacherCache, teacher: Online, needed: Needed, dtype: torch.dtype, accelerator: Accelerator
) -> None:
    """Run the teacher over the windows that a cache lacks, each once; the processes share the work.

    Files that a killed run has written stay. The windows of a file do not depend on which are missing, so
    that a resumed run writes the same bits.

    Raises:
        InvalidInput: a state is not finite, or the disk is too small.
    """
    width = teacher.model.config.get_text_config().hidden_size
    for batches, count in needed:
        cursors = _cursors(batches, count)
        missing = set(cache.missing(cursors))
        accelerator.wait_for_everyone()  # all have looked before one writes
        if not missing:
            continue
        bytes_each = batches.batch([0]).input_ids_BS.shape[1] * width * dtype.itemsize
        cache.check_space(bytes_each * len(missing), "train on fewer tokens, or leave teacher_cache out")
        cache.begin(teacher.model, accelerator.device.type)
        files = list(parts(list(cursors), max(1, teacher_cache.FILE_BYTES // bytes_each)))
        mine = [
            [key for key in file if key in missing]
            for file in files[accelerator.process_index :: accelerator.num_processes]
        ]
        for file in filter(None, progress(mine, "teacher", len(mine))):
            cache.write(file, _hidden(teacher, batches, [cursors[key] for key in file], dtype))
    accelerator.wait_for_everyone()


def keys(batch: Batch) -> list[bytes]:
    """Return the key of each window of a batch."""
    return window_keys(batch.input_ids_BS, batch.position_ids_BS)


def _cursors(batches: Batches, count: int) -> Mapping[bytes, int]:
    """Return the first `count` windows by their keys."""
    return {key: cursor for cursor in range(count) for key in keys(batches.batch([cursor]))}


def _hidden(teacher: Online, batches: Batches, cursors: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the hidden states (N, S, D) of some windows, on the CPU."""
    found = []
    for cursors_B in parts(cursors, _BATCH):
        batch = batches.batch(cursors_B)
        hidden_TD = teacher.predictions(batch.to(teacher.model.device)).hidden_TD
        found.append(hidden_TD.unflatten(0, batch.input_ids_BS.shape).to("cpu", dtype))
    hidden_NSD = torch.cat(found)
    if not hidden_NSD.isfinite().all():
        raise InvalidInput(
            f"the teacher gives hidden states that are not finite in {dtype}; use teacher_cache_dtype: "
            "bfloat16"
        )
    return hidden_NSD
