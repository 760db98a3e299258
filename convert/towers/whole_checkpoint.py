"""A folded text tower, put back in its place in the whole multimodal checkpoint.

All other tensors keep their bytes.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...checkpoints.directory import (
    Checkpoint,
    check_output,
    copy_side_files,
    read_config,
    without_code,
)
from ...checkpoints.quantised.packed_checkpoint import (
    QuantisedCheckpoint,
    as_stored,
    open_checkpoint,
    stored_specs,
    unquantised,
    unquantised_dtype,
)
from ...checkpoints.quantised.packed_tensor import module_of
from ...checkpoints.quantised.schemes import MODELOPT_FILE
from ...checkpoints.record import describe, write_record
from ...checkpoints.shards import ShardWriter, TensorSpec
from ...core.files import write_json
from ...core.hub import commit_of
from ...core.work import whole_directory
from ..families.layers.layer_shapes import with_fewer_heads
from ..families.rows import FAMILIES
from ..request import FoldRequest
from ..write.model_card import write_card
from .quantised_tower import whole_modules
from .text_class import decoder_place
from .tower import Tower

# Fields of config.json that a fold may write otherwise although it did not change the model.
_KEPT = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings",
    "quantization_config",
}  # fmt: skip


# A tensor of an output: the checkpoint that it is read from, its name there, and its spec in the output.
Kept = tuple[Checkpoint, str, TensorSpec]


def put_back(tower: Tower, folded: Path, out: Path, request: FoldRequest) -> dict[str, Any]:
    """Write the whole checkpoint with a folded tower, in a class that it holds, and return its record."""
    made: dict[str, Any] = {
        "command": request.command,
        "request": request.essentials(),
        "parents": [{"stage": "source", "path": str(tower.directory.resolve())}],
        "source": describe(tower.directory, request.source_name, commit_of(tower.directory)),
    }
    return write_around(tower, folded, out, made, shard_size=request.shard_size)


def write_around(
    tower: Tower, folded: Path, out: Path, made: dict[str, Any], *, shard_size: int
) -> dict[str, Any]:
    """Write a whole checkpoint around another tower than its own, all or nothing, and return its record.

    Args:
        tower: its own tower.
        folded: the other one, whose record becomes the output's.
        out: the new directory.
        made: fields of the record that say of what and how the output was made.
        shard_size: most bytes of a weight file.

    Raises:
        InvalidInput: the directory exists or cannot be written, or the tower does not fit.
    """
    check_output(out, tower.directory)
    part = Checkpoint(folded, packed=True)
    dequantize = bool(made.get("request", {}).get("dequantize"))
    kept = _others(tower, dequantize=dequantize)
    kept |= {each: (part, name, part.spec(name)) for each, name in names_in_place(tower, part).items()}
    order = dict.fromkeys(
        [*(each for each in as_stored(tower.whole) if each in kept), *kept]
    )  # new ones last
    specs = {each: kept[each][2] for each in order}
    with whole_directory(out, "multimodal checkpoint") as partial:
        with ShardWriter(partial, specs, shard_size) as writer:
            for each in specs:
                checkpoint, name, _ = kept[each]
                for first, piece in checkpoint.stream(name):
                    writer.write(each, piece, first)
        copy_side_files(tower.directory, partial)
        config = whole_config(tower, read_config(folded))
        if dequantize:
            config = _in_dtype(config, read_config(folded))
        config |= _quantised_fields(tower, folded, partial, is_dequantised=dequantize)
        write_json(partial / "config.json", config)
        record: dict[str, Any] = json.loads((folded / "kvfold.json").read_text(encoding="utf-8"))
        record |= {
            "container": (config.get("architectures") or [config["model_type"]])[0],
            **made,
        }
        record = write_record(partial, record)
        write_card(partial, record)
    return record


def _others(tower: Tower, *, dequantize: bool) -> dict[str, Kept]:
    """Return the tensors of a whole checkpoint that are not its tower's, by name.

    Scales of the tower's cache are left out: they were those of the source's keys and values. Dequantised
    tensors take the dtype that the tower's do.
    """
    whole = tower.whole
    kept = [name for name in whole if name not in tower.names]
    found: dict[str, Kept] = {}
    stored = as_stored(whole)
    parts = [part for name in kept for part in stored_specs(whole, [name])]
    if isinstance(whole, QuantisedCheckpoint):
        layers = {_layer_of(name) for name in tower.names} - {None}
        parts += [name for name in whole.cache_scales() if _layer_of(name) not in layers]
        if dequantize:
            dtype = unquantised_dtype(whole, tower.names)
            packed = [name for name in kept if name in whole.packed]
            gone = {part for name in packed for part in whole.parts(name)}
            parts = [part for part in parts if part not in gone]
            found |= {name: (whole, name, TensorSpec(dtype, whole.spec(name).shape)) for name in packed}
    return found | {part: (stored, part, stored.spec(part)) for part in parts}


def _layer_of(name: str) -> str | None:
    """Return the place of the layer that a tensor is in; None outside of layers."""
    match = re.match(r".*?\.\d+\.", name)
    return None if match is None else match[0]


def other_specs(tower: Tower, *, dequantize: bool = False) -> dict[str, TensorSpec]:
    """Return shape and dtype of the tensors of an output that are not its tower's, by name."""
    return {name: spec for name, (_, _, spec) in _others(tower, dequantize=dequantize).items()}


def _quantised_fields(tower: Tower, folded: Path, out: Path, *, is_dequantised: bool) -> dict[str, Any]:
    """Return the quantization_config of a whole output, as a field of config.json; nothing without any.

    A file of ModelOpt's is written next to it, where the source has one.
    """
    whole = tower.whole
    if not isinstance(whole, QuantisedCheckpoint) or is_dequantised:
        return {}
    part = open_checkpoint(folded)
    named = names_in_place(tower, part)
    place = decoder_place(tower.directory)
    prefix = FAMILIES[tower.model_type].prefix
    in_class = {
        module: f"{place}.{module.removeprefix(prefix)}" if module.startswith(prefix) else module
        for module in map(module_of, part)
    }
    modules = whole_modules(whole, part, named, in_class, tower.names)
    if modules is None:
        return {}
    content = whole.modelopt_file_for(modules)
    if content is not None:
        write_json(out / MODELOPT_FILE, content)
    return {"quantization_config": whole.quantization_for(modules)} if whole.is_named_in_config else {}


def names_in_place(tower: Tower, part: Iterable[str]) -> dict[str, str]:
    """Return the tensors of a folded tower by their names in the whole checkpoint.

    Tensors that the tower did not have, such as those of latent attention, are named as their neighbours.
    """
    stored = {ours: name for names in (tower.names, tower.stored) for name, ours in names.items()}
    family = FAMILIES[tower.model_type]
    place = stored[family.prefix + family.embedding].removesuffix(family.embedding)
    return {stored.get(name) or place + name.removeprefix(family.prefix): name for name in part}


def whole_config(tower: Tower, folded: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the whole checkpoint, with what the fold changed in the tower's.

    A tower in another class brings its own. A quantization_config is left out. The dtype is the source's,
    unless the tower has small numbers that its float16 cannot hold. `folded` is config.json of the tower.
    """
    changed = {
        key: value for key, value in folded.items() if key not in _KEPT and value != tower.config.get(key)
    }
    # The whole checkpoint may say these in another way.
    for field in ("per_layer_config", "rope_theta", "rope_scaling", "partial_rotary_factor"):
        changed.pop(field, None)
    share = folded.get("num_key_value_heads", 1), tower.config.get("num_key_value_heads", 1)
    config: dict[str, Any] = without_code(tower.whole.config)
    if (tower.config.get("dtype"), folded.get("dtype")) == ("float16", "bfloat16"):
        config = _in_dtype(config, folded)
    if folded["model_type"] != tower.model_type:
        return {**config, "text_config": unquantised(folded)}
    text = config.get("text_config")
    if not isinstance(text, dict):
        return {**config, **changed}
    text = {**text, **changed}
    unlike = FAMILIES[tower.model_type].unlike
    return {**config, "text_config": with_fewer_heads(text, share) if unlike else text}


def _in_dtype(config: dict[str, Any], folded: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a whole checkpoint with its folded tower's dtype, where it names one."""

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        return part | {key: folded["dtype"] for key in ("dtype", "torch_dtype") if part.get(key)}

    text = config.get("text_config")
    return changed(config) | ({"text_config": changed(text)} if isinstance(text, dict) else {})
