"""The quantised weights of a student that training left as they were: they keep their bytes.

A quantised student is trained with its dequantised weights, float32. What a stage does not train is then
still exactly what its stored parts stand for.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints.directory import Checkpoint, read_config
from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, is_quantised, stored_specs
from ...checkpoints.quantised.packed_tensor import module_of
from ...checkpoints.quantised.schemes import MODELOPT_FILE
from ...checkpoints.quantised.unconverted import OutputModules
from ...checkpoints.shards import TensorSpec
from ...core.files import write_json


def unrounded(student: Path) -> list[str]:
    """Return a sentence for the user of a student whose weights are quantised; none for others."""
    if not is_quantised(student):
        return []
    return [f"{student} has quantised weights; those that are trained are written in bfloat16"]


def unchanged(stored: Checkpoint, trained: Collection[str], read: Callable[[str], Tensor]) -> set[str]:
    """Return the quantised tensors of a student that a training state has as they were.

    Args:
        stored: the student.
        trained: names of the state's tensors.
        read: returns one of them.
    """
    if not isinstance(stored, QuantisedCheckpoint):
        return set()
    return {
        name
        for name in stored.packed
        if name in trained and torch.equal(read(name).to(torch.float32), stored[name])
    }


def written_specs(
    stored: Checkpoint, shapes: Mapping[str, tuple[int, ...]], kept: Collection[str]
) -> dict[str, TensorSpec]:
    """Return shapes and dtypes of what is written for a student; quantised tensors that changed are bfloat16.

    Args:
        stored: the student as it was.
        shapes: of its tensors, by name.
        kept: those that keep their bytes.
    """
    packed = stored.packed if isinstance(stored, QuantisedCheckpoint) else {}
    dtypes = {name: torch.bfloat16 if name in packed else stored.spec(name).dtype for name in stored}
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes.items():
        specs |= (
            stored_specs(stored, [name])
            if name in kept
            else {name: TensorSpec(dtypes.get(name, usual), shape)}
        )
    return specs


def correct_config(stored: Checkpoint, kept: Set[str], directory: Path) -> None:
    """Correct the quantization_config of a written student, which has its start's.

    Args:
        stored: the checkpoint that the student started from.
        kept: its tensors that keep their bytes.
        directory: that was written.
    """
    if not isinstance(stored, QuantisedCheckpoint):
        return
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
