"""The weights that the class of a checkpoint expects, held against those that its files have.

transformers builds the model on the meta device and is given tensors without content, so that it renames,
joins and compares them as in a real load. No weight is read.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..checkpoints.directory import Checkpoint, weight_files
from ..checkpoints.quantised.packed_checkpoint import is_quantised, open_checkpoint
from ..core.console import notice
from ..core.errors import InvalidInput
from ..core.untrusted import printable, read_json
from .dequantised import without_quantisation
from .load_failures import loading_failures, no_progress_bars, no_warnings


@dataclass(frozen=True)
class RotaryTable:
    """The rotary frequencies that a class of transformers computes from its configuration.

    Attributes:
        frequencies_F: radians per token of each pair.
        factor: on their cosines and sines.
    """

    frequencies_F: Tensor
    factor: float


_TABLES = 2**32  # bytes; 131,072 positions of GPT-J's largest model take 1 GB
_loadable: dict[Path, list[tuple[Path, int, int]]] = {}  # what was checked, by directory
_checked: dict[Path, tuple[Any, dict[str, RotaryTable]]] = {}  # rotary tables by directory, with its identity


def check_weights(checkpoint: Checkpoint, layers: str) -> dict[str, RotaryTable]:
    """Check that a checkpoint has every weight of its class in the class's shape, without reading one.

    A second call for the same files costs nothing.

    Returns:
        The class's rotary frequencies by kind of layer, under an empty name where all layers are alike;
        nothing for a class that keeps none.

    Raises:
        InvalidInput: transformers refuses the configuration, a weight is missing or has another shape, or a
            layer has one that the class ignores. A notice names ignored weights elsewhere.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    directory = checkpoint.directory
    if (directory / "generation_config.json").is_file():  # the identity is of the weights and config.json
        read_json(directory / "generation_config.json")
        with loading_failures(directory, "generation_config.json"), no_warnings():
            GenerationConfig.from_pretrained(directory, local_files_only=True)
    identity = checkpoint.identity()
    known = _checked.get(directory)
    if known is not None and known[0] == identity:
        return known[1]
    config = _stock_config(directory)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput(f"{directory} is no causal language model of transformers; name one")
    with loading_failures(directory, "model"), no_progress_bars(), no_warnings():
        specs = {name: checkpoint.spec(name) for name in checkpoint}
        tensors = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()
        }
        model, found = _load_on_meta(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, directory, tensors)
        tables = _rotary_tables(model)
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise InvalidInput(
            f"{printable(name)} of {directory} has shape {tuple(stored)}, but config.json implies "
            f"{tuple(expected)}; correct config.json, or save the checkpoint again"
        )
    for name in sorted(found["missing_keys"]):
        raise checkpoint.absence(name, f"a {type(model).__name__}")
    place = re.compile(rf"(^|\.){re.escape(layers.rpartition('.')[2])}\.\d+\.")
    ignored = sorted(found["unexpected_keys"])
    outside = [name for name in ignored if not place.search(name)]
    for name in filter(place.search, ignored):
        raise InvalidInput(
            f"{directory} has {printable(name)}, which a {type(model).__name__} with this config.json "
            "ignores; correct config.json, or remove the weight"
        )
    if outside:
        notice(
            f"{directory} has {len(outside)} weights outside its layers that a {type(model).__name__} "
            f"ignores, e.g. {printable(outside[0])}; the output keeps them as they are"
        )
    _checked[directory] = identity, tables
    return tables


def _stock_config(directory: Path) -> Any:
    from transformers import AutoConfig

    with loading_failures(directory, "model"), no_warnings():
        return without_quantisation(
            AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        )


def _load_on_meta(
    kind: Any, config: Any, directory: Path, tensors: dict[str, Tensor]
) -> tuple[Any, dict[str, Any]]:
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    if "sliding_attention" in kinds and getattr(text, "sliding_window", None) is None:
        raise InvalidInput(
            f"config.json of {directory} has layers of the kind sliding_attention and no sliding_window; "
            "give its number of tokens, or correct layer_types"
        )
    _check_tables(kind, config, directory, sum(tensor.nbytes for tensor in tensors.values()))
    model, found = kind.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model, found


def check_loadable(directory: Path, config: Any, kind: Any) -> None:
    """Check that a model can be loaded without memory for more than its files hold.

    transformers fills weights that are missing or misshapen with random numbers, of whatever size config.json
    names; and it computes tables of positions.

    Args:
        directory: the checkpoint; weights of any dtype.
        config: of transformers, for the unquantised model.
        kind: the model's class.

    Raises:
        InvalidInput: a weight is missing or misshapen, or a table is larger than the weights.
    """
    files = weight_files(directory)
    state = [
        (file, file.stat().st_size, file.stat().st_mtime_ns) for file in (directory / "config.json", *files)
    ]
    if _loadable.get(directory) == state:
        return
    with loading_failures(directory, "model"), no_progress_bars(), no_warnings():
        if is_quantised(directory):
            checkpoint = open_checkpoint(directory)
            shapes = {name: checkpoint.spec(name).shape for name in checkpoint}
        else:
            shapes = {}
            for file in files:
                with safe_open(file, "pt") as stored:
                    shapes |= {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        _, found = _load_on_meta(kind, config, directory, tensors)
    check_found(directory, found)
    _loadable[directory] = state


def check_multimodal(directory: Path) -> None:
    """Check that a multimodal checkpoint has every weight of its class, without reading one.

    Args:
        directory: the checkpoint; nothing is checked where transformers has no class of it that writes text.

    Raises:
        InvalidInput: transformers refuses the configuration, or a weight is missing or misshapen.
    """
    config = _stock_config(directory)
    kind = multimodal_class(config)
    if kind is not None:
        check_loadable(directory, config, kind)


def multimodal_class(config: Any) -> Any | None:
    """Return the class that writes text from images or other inputs, for a configuration of transformers.

    Returns:
        The class; None where transformers has none.

    Example:
        >>> from transformers import LlavaConfig
        >>> multimodal_class(LlavaConfig()).__name__
        'LlavaForConditionalGeneration'
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    for classes in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in classes:
            return classes[type(config)]
    return None


def check_found(directory: Path, found: dict[str, Any]) -> None:
    """Check transformers' report of a load.

    Raises:
        InvalidInput: a weight is missing or misshapen.
    """
    # transformers fills a weight that it does not find with random numbers and only warns.
    misshapen = {key: shapes for key, *shapes in found["mismatched_keys"]}
    absent = sorted({*found["missing_keys"], *misshapen})
    if absent:
        count = "1 weight is" if len(absent) == 1 else f"{len(absent)} weights are"
        first = printable(absent[0])
        if absent[0] in misshapen:
            stored, expected = map(tuple, misshapen[absent[0]])
            first += f", which has shape {stored} where config.json implies {expected}"
        raise InvalidInput(
            f"{directory} cannot be loaded: {count} missing or misshapen, e.g. {first}; correct config.json, "
            "or save the whole model again"
        )


def _check_tables(kind: Any, config: Any, directory: Path, stored: int) -> None:
    """Check that the tables that a class computes from a configuration, such as sinusoids, are not huge.

    Raises:
        InvalidInput: they take more than `_TABLES` bytes, and more than the weights.
    """
    with torch.device("meta"):
        model = kind._from_config(config)
    _check_rotary(model, config)
    needed = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if needed > max(_TABLES, stored):
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        raise InvalidInput(
            f"a {kind.__name__} of config.json in {directory} computes tables of {needed / 1e9:,.0f} GB for "
            f"max_position_embeddings {positions}; correct config.json"
        )


def _check_rotary(model: Any, config: Any) -> None:
    """Compute rotary tables that depend on positions once, whose parameters transformers reads only then.

    Whatever transformers raises comes through.
    """
    last = max(1, int(getattr(config.get_text_config(), "max_position_embeddings", None) or 1) - 1)
    for module in model.modules():
        if any(kind in str(getattr(module, "rope_type", "")) for kind in ("longrope", "dynamic")):
            made = type(module)(module.config)
            kinds = module.rope_type if isinstance(module.rope_type, dict) else (None,)
            for kind in kinds:
                for positions in ([0, 1], [0, last]):
                    made(torch.zeros(1, 2, 1), torch.tensor([positions]), *([kind] if kind else []))


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
