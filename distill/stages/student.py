"""The model that is trained: from a checkpoint to trainable float32 weights."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ...convert.formats import to_trainable
from ...core.cache_dtypes import cache_dtype
from ...core.errors import InvalidInput
from ...models.causal_lm import Described, Loaded, load
from ...models.head import check_head
from ...models.load_options import LoadOptions
from ...models.stored_cache import StoredCache
from ..parallel.accelerator import first_place, shards_models
from ..parallel.layer_units import LayerUnits, open_in_units
from ..recipe.recipe import Recipe, Stage
from .isolation import isolate_documents
from .state import WEIGHTS, restore_weights


def open_student(
    directory: Path, latest: Path | None, stage: Stage, recipe: Recipe, accelerator: Accelerator
) -> tuple[Loaded, LayerUnits | None]:
    """Return the student that a stage begins with, its weights from the checkpoint or the state `latest`.

    Returns:
        The student, and the source of its weights. The source is None if the student has them. Otherwise
        whoever shards the student gives them, and then checks it.

    Raises:
        InvalidInput: as of `load_student` and `check_model`.
    """
    found = open_in_units(directory, torch.float32, opened=True) if shards_models(stage) else None
    if found:
        check_positions(found.loaded, recipe.data.seq_len)
        found.saved_weights = latest / WEIGHTS if latest else None
        return found.loaded, found
    student = load_student(directory, recipe.data.seq_len, first_place(accelerator, stage))
    if latest:
        restore_weights(latest, student.model)
    check_model(student, recipe)
    return student, None


def rounding(model: Any, stage: Stage) -> StoredCache:
    """Let a student read its cache rounded to the `cache_dtype` of a stage; return the removable rounding.

    Raises:
        InvalidInput: a layer does not write its keys and values to a cache.
    """
    assert stage.cache_dtype is not None
    return StoredCache(model, cache_dtype(stage.cache_dtype), option="cache_dtype")


def check_model(loaded: Loaded, recipe: Recipe) -> None:
    """Check, once a model has weights, that its losses will be right; it keeps documents apart from now on.

    Raises:
        InvalidInput: its logits are not a linear function of its last hidden states, or it cannot keep packed
            documents apart.
    """
    check_head(loaded, torch.arange(4)[None])
    if recipe.data.packing == "documents":
        isolate_documents(loaded.model, str(loaded.path))


def load_student(directory: Path, seq_len: int, device: torch.device) -> Loaded:
    """Return the student with float32 weights, in evaluation mode.

    Without dropout, nothing in training draws random numbers.

    Raises:
        InvalidInput: it cannot be loaded whole, or has fewer positions than a window.
    """
    student = load(directory, LoadOptions(device="cuda" if device.type == "cuda" else "cpu", dtype="float32"))
    check_positions(student, seq_len)
    student.model.to(device)
    to_trainable(student.model)
    return student


def check_positions(student: Loaded | Described, seq_len: int) -> None:
    """Refuse windows that are longer than a student takes.

    Raises:
        InvalidInput: names both lengths.
    """
    if student.positions is not None and seq_len > student.positions:
        raise InvalidInput(
            f"data.seq_len {seq_len} exceeds the {student.positions} positions of the student "
            f"{student.path}; use at most {student.positions}"
        )
