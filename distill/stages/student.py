"""The model that is trained: from a checkpoint to trainable float32 weights, and back to a checkpoint."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn

from ...checkpoints.directory import Checkpoint, copy_side_files
from ...checkpoints.quantised.packed_checkpoint import copy_stored, open_checkpoint
from ...checkpoints.shards import SHARD_SIZE, ShardWriter
from ...convert.formats import to_published, to_trainable
from ...core.cache_dtypes import cache_dtype
from ...core.errors import InvalidInput
from ...models.causal_lm import Described, Loaded, load
from ...models.code_files import copy_config
from ...models.decoder import decoder_layers
from ...models.head import check_head
from ...models.load_options import LoadOptions
from ...models.remote_code import ship
from ...models.stored_cache import StoredCache
from ..parallel.accelerator import first_place, shards_models
from ..parallel.layer_units import LayerUnits, open_in_units, skeleton
from ..recipe.recipe import Recipe, Stage
from .fair_rounding import round_fairly
from .isolation import isolate_documents
from .kept_quantisation import correct_config, unchanged, written_specs
from .state import WEIGHTS, restore_weights


def open_student(
    directory: Path, latest: Path | None, stage: Stage, recipe: Recipe, accelerator: Accelerator
) -> tuple[Loaded, LayerUnits | None]:
    """Return the student that a stage begins with.

    Args:
        directory: its checkpoint.
        latest: a training state with its weights; None for those of the checkpoint.
        stage: the stage that trains it.
        recipe: the length of windows, and how documents are packed.
        accelerator: device.

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
    if recipe.data.packing == "documents":
        isolate_documents(student.model, str(directory))
    return student, None


def rounding(model: Any, stage: Stage) -> StoredCache:
    """Let a student read its cache rounded to the format of a stage that names one.

    Args:
        model: the student; its attention modules get hooks.
        stage: with `cache_dtype`.

    Returns:
        The rounding, which can be removed.

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
        InvalidInput: it cannot be loaded whole, has fewer positions than a window, or its logits are not a
            linear function of its last hidden states.
    """
    student = load(directory, LoadOptions(device="cuda" if device.type == "cuda" else "cpu", dtype="float32"))
    check_positions(student, seq_len)
    check_head(student, torch.arange(4)[None])
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


def publish(saved: Path, student: Path, directory: Path) -> None:
    """Write saved weights as a checkpoint with the names, dtypes, config and side files of its student.

    If the student is made of decoder layers, one is in memory at a time.

    Args:
        saved: a training state; its adapters, if it has any, are left out.
        student: the checkpoint that it started from.
        directory: for the new one; must exist.

    Raises:
        InvalidInput: a weight is not finite, or too large for its dtype.
    """
    stored = open_checkpoint(student)
    model, parts = _in_parts(stored)
    state = _without_ties(model)
    named = to_published(model, {name: tensor.to("meta") for name, tensor in state.items()})
    with ExitStack() as stack:
        file = stack.enter_context(safe_open(saved / WEIGHTS, framework="pt"))
        trained = set(file.keys())
        kept = unchanged(stored, trained & named.keys(), file.get_tensor)
        specs = written_specs(stored, {name: tuple(tensor.shape) for name, tensor in named.items()}, kept)
        writer = stack.enter_context(ShardWriter(directory, specs, SHARD_SIZE))
        copy_stored(stored, kept, writer)
        for prefix, part in parts.items():
            names = [
                name for name in state if next(place for place in parts if name.startswith(place)) == prefix
            ]
            # Buffers are not trained.
            whole = {
                name: file.get_tensor(name) if name in trained else _buffer(name, state, stored)
                for name in names
            }
            found = to_published(part, {name.removeprefix(prefix): tensor for name, tensor in whole.items()})
            for name, tensor in found.items():
                if prefix + name not in kept:
                    whole_name = prefix + name
                    writer.write(whole_name, round_fairly(tensor, specs[whole_name].dtype, whole_name))
    copy_config(student, directory)
    correct_config(stored, kept, directory)
    copy_side_files(student, directory)
    ship(student, directory)


def _in_parts(stored: Checkpoint) -> tuple[Any, dict[str, nn.Module]]:
    """Return a student without its weights, opened, and its layers by the prefix of their weights' names.

    All other names have the empty prefix, and nothing of them is opened. A model without layers is one part.
    """
    try:
        model = skeleton(stored, torch.float32, opened=True)
        buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
        if buffers - set(stored):
            raise InvalidInput(f"{min(buffers - set(stored))} has another name in the checkpoint")
    except InvalidInput:
        model = load(stored.directory, LoadOptions(device="cpu", dtype="float32")).model
        to_trainable(model)
        return model, {"": model}
    layers = {id(layer) for layer in decoder_layers(model)}
    parts = {f"{name}.": module for name, module in model.named_modules() if id(module) in layers}
    return model, {**parts, "": nn.Module()}


def _buffer(name: str, state: Mapping[str, Tensor], stored: Checkpoint) -> Tensor:
    return stored[name] if name in stored else state[name]


def _without_ties(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with each tensor once, under the first of its names."""
    twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in twice}
