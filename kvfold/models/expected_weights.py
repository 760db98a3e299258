"""The weights that the class of a checkpoint expects, held against those that its files have.

transformers builds the model on the meta device and is given tensors without content, so that it renames,
joins and compares them as in a real load. No weight is read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.directory import Checkpoint
from ..core.errors import InvalidInput
from ..core.untrusted import printable, read_json
from .load_failures import loading_failures, no_progress_bars, no_warnings

# Buffers that older versions of transformers saved, and that no class reads any more.
_BUFFERS = re.compile(r"(^|\.)(inv_freq|masked_bias|(attn|attention)\.bias|rotary_emb\.(cos|sin)_cached)$")


@dataclass(frozen=True)
class RotaryTable:
    """The rotary frequencies that a class of transformers computes from its configuration.

    Attributes:
        frequencies_F: radians per token of each pair.
        factor: on their cosines and sines.
    """

    frequencies_F: Tensor
    factor: float


_checked: dict[Path, tuple[Any, dict[str, RotaryTable]]] = {}  # rotary tables by directory, with its identity


def check_weights(checkpoint: Checkpoint, layers: str) -> dict[str, RotaryTable]:
    """Check that a checkpoint has every weight of its class in the class's shape, without reading one.

    A second call for the same files costs nothing.

    Args:
        checkpoint: of a class that transformers has.
        layers: the name of the list of decoder layers, such as `model.layers`.

    Returns:
        The class's rotary frequencies by kind of layer, under an empty name where all layers are alike;
        nothing for a class that keeps none.

    Raises:
        InvalidInput: transformers refuses the configuration, a weight is missing or has another shape, or a
            layer has one that the class ignores.
    """
    identity = checkpoint.identity()
    known = _checked.get(checkpoint.directory)
    if known is not None and known[0] == identity:
        return known[1]
    directory = checkpoint.directory
    with loading_failures(directory, "model"), no_progress_bars(), no_warnings():
        model, found = _load_shapes(checkpoint)
        tables = _rotary_tables(model)
    _check_generation(directory)
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise InvalidInput(
            f"{printable(name)} of {directory} has shape {tuple(stored)}, but config.json implies "
            f"{tuple(expected)}; correct config.json, or save the checkpoint again"
        )
    for name in sorted(found["missing_keys"]):
        raise InvalidInput(
            f"{directory} has no {name}, which a {type(model).__name__} has; download or save it again"
        )
    for name in _ignored(found["unexpected_keys"], layers):
        raise InvalidInput(
            f"{directory} has {printable(name)}, which a {type(model).__name__} with this config.json "
            "ignores; correct config.json, or remove the weight"
        )
    _checked[directory] = identity, tables
    return tables


def _load_shapes(checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    """Load a checkpoint onto the meta device; return the model and transformers' report."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput(f"{checkpoint.directory} is no causal language model of transformers; name one")
    specs = {name: checkpoint.spec(name) for name in checkpoint}
    model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict={
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()
        },
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model, found


def _rotary_tables(model: Any) -> dict[str, RotaryTable]:
    """Return the rotary frequencies of a model on the meta device, computed anew."""
    tables: dict[str, RotaryTable] = {}
    for module in model.modules():
        for name, _ in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                kind = name.removesuffix("inv_freq")
                made = type(module)(model.config)
                factor = float(getattr(made, f"{kind}attention_scaling"))
                tables[kind.rstrip("_")] = RotaryTable(getattr(made, name), factor)
    return tables


def _check_generation(directory: Path) -> None:
    """Check that transformers reads generation_config.json, where there is one."""
    from transformers import GenerationConfig

    file = directory / "generation_config.json"
    if file.is_file():
        read_json(file)
        with loading_failures(directory, "generation_config.json"), no_warnings():
            GenerationConfig.from_pretrained(directory, local_files_only=True)


def _ignored(names: Iterable[str], layers: str) -> list[str]:
    """Return those of a checkpoint's unexpected weights that are in a decoder layer, sorted."""
    inside = re.compile(rf"(^|\.){re.escape(layers.rpartition('.')[2])}\.\d+\.")
    return sorted(name for name in names if inside.search(name) and not _BUFFERS.search(name))
