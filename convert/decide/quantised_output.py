"""The part of a quantised source that stays quantised: which tensors keep their bytes, and what is listed.

Attention is dequantised, folded and written unquantised. Every other quantised tensor that a container
passes through keeps its stored parts. One that a container must change is written unquantised too.
"""

from collections.abc import Iterable, Mapping, Set

import torch

from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from ...checkpoints.quantised.packed_tensor import module_of
from ...checkpoints.quantised.schemes import SCHEMES
from ...checkpoints.quantised.unconverted import OutputModules
from ...checkpoints.shards import TensorSpec
from ..families.source import Source
from ..formats.container import Container, Copy


def output_modules(
    source: Source, attention: Iterable[Mapping[str, TensorSpec]], copies: Mapping[str, Copy]
) -> OutputModules | None:
    """Return the modules of an output with quantised weights; None where it has none.

    `attention` has the tensors that each layer's attention is written as, `copies` the others.
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


def quantised_notices(
    source: Source, copies: Mapping[str, Copy], dtype: torch.dtype, *, dequantize: bool
) -> list[str]:
    """Return sentences on the quantised tensors of a source whose attention is written in a dtype."""
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

    `attention` has the names of the source's tensors that are, `written` the dtype of each tensor in the
    output. With `keeps` quantised ones that the container does not change keep their stored parts.
    """
    checkpoint, copies = source.checkpoint, dict[str, Copy]()
    for name in checkpoint:
        if name in attention:
            continue
        made = container.copies(name, TensorSpec(written[name], checkpoint.spec(name).shape))
        is_packed = keeps and isinstance(checkpoint, QuantisedCheckpoint) and name in checkpoint.packed
        if not is_packed or any(copy.change is not None for copy in made.values()):
            copies |= made
            continue
        assert isinstance(checkpoint, QuantisedCheckpoint)
        for renamed in made:
            for part in checkpoint.packed[name].names:
                to = module_of(renamed) + part.removeprefix(module_of(name))
                copies[to] = Copy(source=name, spec=checkpoint.stored.spec(part), part=part)
    return copies


def read_specs(
    source: Source, copies: Mapping[str, Copy], specs: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Return shape and dtype of an output's tensors as they are read: quantised weights whole, not in parts.

    `specs` are those of all its tensors as they are stored.
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
