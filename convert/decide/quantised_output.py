"""The part of a quantised source that stays quantised: which tensors keep their bytes, and what is listed.

Attention is dequantised, folded and written unquantised. Every other quantised tensor that a container
passes through keeps its stored parts. One that a container must change is written unquantised too.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch

from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from ...checkpoints.quantised.packed_tensor import module_of
from ...checkpoints.quantised.schemes import SCHEMES
from ...checkpoints.quantised.unconverted import OutputModules
from ...checkpoints.shards import TensorSpec
from ..families.source import Source
from ..formats.container import Container, Copy


def with_stored_parts(source: Source, name: str, copies: Mapping[str, Copy]) -> dict[str, Copy]:
    """Return the output tensors made of one of the source's, stored as in the source where that can be.

    Args:
        source: the checkpoint.
        name: of its tensor.
        copies: the output tensors that a container makes of it, unquantised.
    """
    checkpoint = source.checkpoint
    if not isinstance(checkpoint, QuantisedCheckpoint) or name not in checkpoint.packed:
        return dict(copies)
    if any(copy.change is not None for copy in copies.values()):
        return dict(copies)
    stored = checkpoint.stored
    parts: dict[str, Copy] = {}
    for renamed in copies:
        for part in checkpoint.packed[name].names:
            to = module_of(renamed) + part.removeprefix(module_of(name))
            parts[to] = Copy(source=name, spec=stored.spec(part), part=part)
    return parts


def output_modules(
    source: Source, attention: Iterable[Mapping[str, TensorSpec]], copies: Mapping[str, Copy]
) -> OutputModules | None:
    """Return the modules of an output with quantised weights; None where it has none.

    Args:
        source: the checkpoint.
        attention: the tensors that each layer's attention is written as.
        copies: the other output tensors.
    """
    checkpoint = source.checkpoint
    kept = {copy.source: copy.part for copy in copies.values() if copy.part is not None}
    if not isinstance(checkpoint, QuantisedCheckpoint) or not kept:
        return None
    matrices = {name: spec for specs in attention for name, spec in specs.items()}
    matrices |= {name: copy.spec for name, copy in copies.items() if copy.part is None}
    embedding = module_of(source.family.embedding)
    plain = {
        module_of(name): None
        for name, spec in matrices.items()
        if name.endswith(".weight") and len(spec.shape) > 1 and not module_of(name).endswith(embedding)
    }
    packed = []
    for name, copy in copies.items():
        if copy.part is not None and copy.part == checkpoint.packed[copy.source].names[0]:
            ending = copy.part.removeprefix(module_of(copy.source))
            packed.append(name.removesuffix(ending))
    there = {*plain, *packed, *(module_of(name) for name in copies)}
    gone = {module_of(name) for layer in source.folded for name in source.reads(layer)} - there
    return OutputModules(plain=tuple(plain), packed=tuple(packed), gone=gone)


def quantised_fields(source: Source, modules: OutputModules | None) -> dict[str, Any]:
    """Return the quantization_config of an output's config.json, where it has one."""
    checkpoint = source.checkpoint
    if modules is None or not isinstance(checkpoint, QuantisedCheckpoint):
        return {}
    if not checkpoint.stored.config.get("quantization_config"):
        return {}  # it stands in a file of its own
    return {"quantization_config": checkpoint.quantization_for(modules)}


def output_scheme(source: Source, modules: OutputModules | None) -> str:
    """Return the method by which an output is quantised, a key of `SCHEMES`; empty where it is not."""
    checkpoint = source.checkpoint
    if modules is None or not isinstance(checkpoint, QuantisedCheckpoint):
        return ""
    return checkpoint.method


def quantised_notices(
    source: Source, copies: Mapping[str, Copy], dtype: torch.dtype, *, dequantize: bool
) -> list[str]:
    """Return what became of the quantised tensors of a source, in sentences.

    Args:
        source: the checkpoint.
        copies: of the tensors that are not folded.
        dtype: that attention is written in.
        dequantize: whether the user asked for an unquantised output.
    """
    checkpoint = source.checkpoint
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return ["the source is not quantised, so --dequantize changes nothing"] if dequantize else []
    written = str(dtype).removeprefix("torch.")
    attention = {name for layer in source.folded for name in source.reads(layer)}
    kept = {copy.source for copy in copies.values() if copy.part is not None}
    changed = [name for name in checkpoint.packed if name not in attention and name not in kept]
    if not kept:
        return [
            f"the source is quantised ({checkpoint.method}); the output is not: attention and what was "
            f"quantised is written in {written}"
        ]
    what = "is" if attention & checkpoint.packed.keys() else "was not quantised and is"
    notices = [
        f"the source is quantised ({checkpoint.method}): folded attention {what} written in {written}, and "
        f"{len(kept)} other weights keep their bytes"
    ]
    note = SCHEMES[checkpoint.method].note
    notices += [note] if note else []
    if changed:
        notices.append(
            f"{len(changed)} weights apart from attention, such as {changed[0]}, change in the output's "
            f"class, so they are written in {written}"
        )
    return notices


def planned_copies(
    source: Source,
    container: Container,
    attention: Set[str],
    written: Mapping[str, torch.dtype],
    *,
    keeps: bool,
) -> dict[str, Copy]:
    """Return the output tensors that are not attention, which no method makes.

    Args:
        source: the checkpoint.
        container: the output format.
        attention: names of the source's tensors that are attention.
        written: dtype of every tensor of the source in the output.
        keeps: quantised ones keep their stored parts.
    """
    copies: dict[str, Copy] = {}
    for name in source.checkpoint:
        if name not in attention:
            spec = TensorSpec(written[name], source.checkpoint.spec(name).shape)
            made = container.copies(name, spec)
            copies |= with_stored_parts(source, name, made) if keeps else made
    return copies


def read_specs(
    source: Source, copies: Mapping[str, Copy], specs: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Return shape and dtype of an output's tensors as they are read: quantised weights whole, not in parts.

    Args:
        source: the checkpoint.
        copies: the output tensors that are not folded.
        specs: of all tensors of the output as they are stored, by name.
    """
    read: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        copy = copies.get(name)
        if copy is None or copy.part is None:
            read[name] = spec
            continue
        ending = copy.part.removeprefix(module_of(copy.source))
        whole = name.removesuffix(ending) + copy.source.removeprefix(module_of(copy.source))
        read[whole] = source.checkpoint.spec(copy.source)
    return read
