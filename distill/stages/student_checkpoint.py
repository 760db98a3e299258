"""A trained student as a checkpoint like the one that it started from.

A weight of a bfloat16 checkpoint lies on a grid with steps of 2⁻⁸ to 2⁻⁷ of it. Few steps at a low rate move
most weights by less than half of that, and rounding to the nearest number would take them back to where they
were (docs/notes/distillation.md). Here a weight is rounded up with a probability that is its distance from
the lower number, as a share of the step (stochastic rounding; Gupta et al. 2015). The mean of many weights is
then that of the trained ones, and numbers on the grid stay.

A quantised student is trained with its dequantised weights, float32. A weight that a stage does not train is
then still exactly what its stored parts stand for, and keeps their bytes.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...checkpoints.directory import Checkpoint, copy_side_files, read_config
from ...checkpoints.quantised.packed_checkpoint import (
    QuantisedCheckpoint,
    copy_stored,
    is_quantised,
    open_checkpoint,
    stored_specs,
)
from ...checkpoints.quantised.packed_tensor import module_of
from ...checkpoints.quantised.schemes import MODELOPT_FILE
from ...checkpoints.quantised.unconverted import OutputModules
from ...checkpoints.shards import SHARD_SIZE, ShardWriter, TensorSpec
from ...convert.formats import to_published, to_trainable
from ...core.errors import InvalidInput
from ...core.files import write_json
from ...models.causal_lm import load
from ...models.code_files import copy_config
from ...models.decoder import decoder_layers
from ...models.load_options import LoadOptions
from ...models.remote_code import ship
from ..parallel.layer_units import skeleton
from .state import WEIGHTS

_AT_ONCE = 2**24  # weights, which bounds the memory of the intermediate results
# Share of a step that a weight may be off the grid and is still taken for a number on it: what was scaled for
# training and back was rounded twice in float32, whose own steps are 2⁻¹³ of those of float16.
_SCALED_BACK = 2.0**-11


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
    # Each tensor once, under the first of its names.
    first = {name for name, _ in model.named_parameters()}
    ties = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ties}
    named = to_published(model, {name: tensor.to("meta") for name, tensor in state.items()})
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    with safe_open(saved / WEIGHTS, framework="pt") as file:
        trained = set(file.keys())
        kept = unchanged(stored, trained & named.keys(), file.get_tensor)

        def value(name: str) -> Tensor:
            if name in trained:
                tensor: Tensor = file.get_tensor(name)
                return tensor
            return stored[name] if name in stored else state[name]  # a buffer

        with writing(stored, shapes, kept, directory) as write:
            for prefix, part in parts.items():
                names = [
                    name
                    for name in state
                    if next(place for place in parts if name.startswith(place)) == prefix
                ]
                whole = {name.removeprefix(prefix): value(name) for name in names}
                for name, tensor in to_published(part, whole).items():
                    if prefix + name not in kept:
                        write(prefix + name, tensor)


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


@contextmanager
def writing(
    stored: Checkpoint, shapes: Mapping[str, tuple[int, ...]], kept: Collection[str], directory: Path
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a checkpoint like a student's: kept and given tensors, and, at the end, config and side files.

    Args:
        stored: the student as it was.
        shapes: of all tensors, by name.
        kept: names of those that keep their bytes.
        directory: must exist.

    Yields:
        A function that writes one of the other tensors, rounded fairly. Those of a quantised student are
        written in bfloat16.
    """
    packed = stored.packed if isinstance(stored, QuantisedCheckpoint) else {}
    dtypes = {name: torch.bfloat16 if name in packed else stored.spec(name).dtype for name in stored}
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes.items():
        own = {name: TensorSpec(dtypes.get(name, usual), shape)}
        specs |= stored_specs(stored, [name]) if name in kept else own
    with ShardWriter(directory, specs, SHARD_SIZE) as writer:
        copy_stored(stored, [name for name in stored if name in kept], writer)
        yield lambda name, tensor: writer.write(name, round_fairly(tensor, specs[name].dtype, name))
    copy_config(stored.directory, directory)
    if isinstance(stored, QuantisedCheckpoint):
        still = [name for name in stored.packed if name in kept]
        changed = [module_of(name) for name in stored.packed if name not in kept]
        modules = OutputModules(plain=tuple(changed), packed=tuple(map(module_of, still)), gone=())
        config = read_config(directory)
        config.pop("quantization_config", None)
        if still and stored.stored.config.get("quantization_config"):
            config["quantization_config"] = stored.quantization_for(modules)
        write_json(directory / "config.json", config)
        content = stored.modelopt_file_for(modules)
        if still and content is not None:
            write_json(directory / MODELOPT_FILE, content)
    copy_side_files(stored.directory, directory)
    ship(stored.directory, directory)


def unrounded(student: Path) -> list[str]:
    """Return a sentence for the user of a student whose weights are quantised; none for others."""
    if not is_quantised(student):
        return []
    return [f"{student} has quantised weights; those that are trained are written in bfloat16"]


def unchanged(stored: Checkpoint, trained: Collection[str], read: Callable[[str], Tensor]) -> set[str]:
    """Return the quantised tensors of a student that are as they were among those named by `trained`.

    `read` returns one of them.
    """
    if not isinstance(stored, QuantisedCheckpoint):
        return set()
    return {
        name
        for name in stored.packed
        if name in trained and torch.equal(read(name).to(torch.float32), stored[name])
    }


def round_fairly(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a weight in another dtype, on the CPU; each number is one of the two next to the weight's.

    The random numbers depend on the name alone, so the same weights give the same bits.

    Args:
        weight: float32, of any shape and on any device.
        dtype: of the result; all but bfloat16 and float16 are rounded to the nearest number.
        name: of the weight.

    Returns:
        The rounded weight. A number beyond the dtype becomes infinite.
    """
    if dtype not in {torch.bfloat16, torch.float16}:
        return weight.detach().to("cpu", dtype)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    generator = torch.Generator().manual_seed(seed)
    parts = weight.detach().to("cpu", torch.float32).flatten().split(_AT_ONCE)
    return torch.cat([_rounded(part, dtype, generator) for part in parts]).view(weight.shape)


def _rounded(weight_X: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    nearest_X = weight_X.to(dtype)
    # Read as integers, numbers of one sign count up by one from each to the next one away from zero.
    beyond_X = nearest_X.float().abs() > weight_X.abs()
    inner_X = nearest_X.view(torch.int16) - beyond_X.short()
    outer_X = (inner_X + 1).view(dtype)
    inner_X = inner_X.view(dtype)
    share_X = (weight_X - inner_X.float()) / (outer_X.float() - inner_X.float())
    share_X = torch.where((share_X - share_X.round()).abs() < _SCALED_BACK, share_X.round(), share_X)
    chance_X = torch.rand(weight_X.shape, generator=generator)
    return torch.where(nearest_X.isfinite(), torch.where(chance_X < share_X, outer_X, inner_X), nearest_X)
