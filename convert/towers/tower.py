"""The text tower of a multimodal checkpoint, taken out as a causal language model.

A tower is a decoder of a family that has a row. Its tensors keep their bytes; only their names change.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.directory import Checkpoint, check_output, copy_side_files, read_config
from ...checkpoints.quantised.packed_checkpoint import as_stored, open_checkpoint
from ...checkpoints.quantised.schemes import MODELOPT_FILE
from ...checkpoints.record import check_unfolded
from ...checkpoints.shards import ShardWriter
from ...core.errors import InvalidInput
from ...core.files import write_json
from ...core.untrusted import read_json
from ...core.work import whole_directory
from ...models.load_failures import loading_failures
from ..families.family import Family
from ..families.recognition import as_causal, attending, complete, is_multimodal
from ..families.rows import FAMILIES
from ..families.unfolded import verdict
from .quantised_tower import stored_names, tower_modelopt_file, tower_quantization

_OTHERS = ("vision", "visual", "audio")  # parts of the names of modules that are no text tower
_NOT_OF_TEXT = {"model_type", "architectures", "quantization_config"}
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The text tower of a multimodal checkpoint.

    Attributes:
        directory: the whole checkpoint.
        model_type: of the causal language model that the tower is.
        config: its config.json, as that model's.
        names: for each tensor of the tower its name in the causal language model.
        stored: the same for the tensors as they are stored; a quantised one is stored in parts.
        whole: the whole checkpoint as it was opened to find the tower.
    """

    directory: Path
    model_type: str
    config: dict[str, Any]
    names: dict[str, str]
    stored: dict[str, str]
    whole: Checkpoint = field(repr=False, compare=False)


def find_tower(directory: Path) -> Tower | None:
    """Return the text tower of a checkpoint; None where it is no multimodal one.

    Raises:
        InvalidInput: a multimodal checkpoint without a text tower, one of a family without a row, or one that
            is folded already.
    """
    config = read_config(directory)
    if not is_multimodal(config):
        return None
    check_unfolded(directory)
    kind = str(config.get("model_type"))
    if config.get("is_encoder_decoder"):
        raise InvalidInput(f"model_type {kind} is an encoder-decoder model, which kvfold cannot fold")
    text = _text_config(directory, kind, config)
    named = str(text.get("model_type"))
    model_type = as_causal(named)
    if model_type not in FAMILIES:
        raise InvalidInput(
            f"the text tower of {kind} is of model_type {named}, which kvfold cannot fold: "
            f"{verdict(named, FAMILIES)}; `kvfold families --all` shows the others"
        )
    family = FAMILIES[model_type]
    whole = open_checkpoint(directory)
    names = _names(directory, list(whole), family, text)
    tied = "lm_head.weight" not in names.values()
    with loading_failures(directory, "config.json"):
        tower_config = _causal_config(model_type, {**text, "tie_word_embeddings": tied}, config)
    tower_config |= tower_quantization(whole, names)
    return Tower(
        directory=directory,
        model_type=model_type,
        config=tower_config,
        names=names,
        stored=stored_names(whole, names),
        whole=whole,
    )


def tower_of(directory: Path, model: str, *, text_only: bool) -> Tower | None:
    """Return the text tower of the source that a request names; None where it is no multimodal checkpoint."""
    tower = find_tower(directory)
    if tower is None and text_only:
        raise InvalidInput(f"--text-only does not apply to {model}, which is not a multimodal model")
    return tower


def text_config(directory: Path) -> dict[str, Any]:
    """Return the configuration of a multimodal checkpoint's text model, with all defaults of its own class.

    The checkpoint may be folded or not. The model_type is that of the causal language model which computes
    the same on text.
    """
    config = read_config(directory)
    text = _text_config(directory, str(config.get("model_type")), config)
    return {**text, "model_type": as_causal(str(text.get("model_type")))}


def is_copy(tower: Tower, out: Path) -> bool:
    """Return whether a directory, which may be anything, holds a tower as `write_tower` writes it now."""
    file, kept = out / MODELOPT_FILE, tower_modelopt_file(tower.whole, tower.names)
    if not (out / "config.json").is_file() or (read_json(file) if file.is_file() else None) != kept:
        return False
    written, wanted = (
        {key: value for key, value in config.items() if key != "transformers_version"}
        for config in (read_config(out), json.loads(json.dumps(tower.config)))
    )
    return written == wanted and holds_weights(tower, out)


def holds_weights(tower: Tower, directory: Path) -> bool:
    """Return whether a checkpoint has the weights of a tower and no others, byte for byte."""
    whole, there = as_stored(tower.whole), Checkpoint(directory, packed=True)
    if set(there) != set(tower.stored.values()):
        return False
    return all(there.spec(name) == whole.spec(stored) for stored, name in tower.stored.items()) and all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for stored, name in tower.stored.items()
        for (_, one), (_, other) in zip(whole.stream(stored), there.stream(name), strict=True)
    )


def write_tower(tower: Tower, out: Path, shard_size: int) -> None:
    """Write a tower alone, as a checkpoint of a causal language model with weight files of some size."""
    check_output(out, tower.directory)
    whole = as_stored(tower.whole)
    specs = {name: whole.spec(stored) for stored, name in tower.stored.items()}
    with whole_directory(out, "text tower") as partial:
        with ShardWriter(partial, specs, shard_size) as writer:
            for stored, name in tower.stored.items():
                for first, piece in whole.stream(stored):
                    writer.write(name, piece, first)
        write_side_files(tower, partial)


def write_side_files(tower: Tower, out: Path) -> None:
    """Write what stands next to the weights of a tower alone: config.json, tokenizer, ModelOpt's file."""
    copy_side_files(tower.directory, out)
    write_json(out / "config.json", tower.config)
    content = tower_modelopt_file(tower.whole, tower.names)
    if content is not None:
        write_json(out / MODELOPT_FILE, content)


def _text_config(directory: Path, kind: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text tower, with all defaults of its own class."""
    from transformers import AutoConfig

    with loading_failures(directory, "config.json"):
        whole = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        text = whole.get_text_config(decoder=True)
        found: dict[str, Any] = text.to_dict()
    # Its class would take defaults. transformers 4 wrote some with the fields of text next to vision_config.
    is_default = text is getattr(whole, "text_config", None) and stored.get("text_config") is None
    if is_default and "num_hidden_layers" not in stored:
        raise InvalidInput(
            f"config.json of {directory} has no text_config, which describes the text tower of a {kind}; "
            "take config.json from where the checkpoint came from"
        )
    if text is whole or "num_hidden_layers" not in found:
        raise InvalidInput(
            f"model_type {kind} has no text tower: its config.json has no text_config with "
            "num_hidden_layers; kvfold folds the decoder of text"
        )
    return found


def _names(directory: Path, stored: Iterable[str], family: Family, text: Mapping[str, Any]) -> dict[str, str]:
    names = list(stored)
    first = attending(family, complete(family, text))
    ending = f"{family.o.format(layer=first[0] if first else 0)}.weight"
    found = {
        name.removesuffix(ending)
        for name in names
        if name.endswith(ending) and not any(other in name for other in _OTHERS)
    }
    if len(found) != 1:
        raise InvalidInput(
            f"{directory} has {len(found)} text towers, where one is needed: tensors whose names end in "
            f"{ending}"
        )
    prefix = found.pop()
    inside = {name: family.prefix + name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    inside = {name: ours for name, ours in inside.items() if not any(other in ours for other in _OTHERS)}
    return inside | {name: family.head for name in names if name in _HEADS}


def _causal_config(model_type: str, text: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    rope = text.get("rope_parameters")
    kept = {key: value for key, value in text.items() if key not in _NOT_OF_TEXT}
    if isinstance(rope, dict):
        plain = {key: value for key, value in rope.items() if not key.startswith("mrope")}
        if plain.get("rope_type") == "mrope":
            plain["rope_type"] = "default"
        kept["rope_parameters"] = plain
    dtype = kept.get("dtype") or whole.get("dtype") or whole.get("torch_dtype")
    made: dict[str, Any] = CONFIG_MAPPING[model_type](**kept).to_dict()
    made |= {"architectures": [FAMILIES[model_type].architecture], "model_type": model_type}
    return made | ({"dtype": str(dtype)} if dtype else {})
