"""A folded text tower, put back in its place in the whole multimodal checkpoint.

All other tensors keep their bytes.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...checkpoints.directory import (
    Checkpoint,
    check_output,
    copy_side_files,
    read_config,
    without_code,
)
from ...checkpoints.record import describe, write_record
from ...checkpoints.shards import ShardWriter
from ...core.files import whole_directory
from ...core.hub import commit_of
from ..families.layers.layer_shapes import with_fewer_heads
from ..families.recognition import FAMILIES
from ..request import FoldRequest
from ..write.model_card import write_card
from .tower import Tower

# Fields of config.json that a fold may write otherwise although it did not change the model.
_KEPT = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings"}


def put_back(tower: Tower, folded: Path, out: Path, request: FoldRequest) -> dict[str, Any]:
    """Write the whole checkpoint with a folded tower, and return its record.

    Args:
        tower: where the tower's tensors are in the whole checkpoint.
        folded: the folded tower, in a class that the whole one holds.
        out: the new directory.
        request: what the user asked for.

    Raises:
        InvalidInput: the directory exists or cannot be written.
    """
    made = {
        "command": request.command,
        "request": request.essentials(),
        "parents": [{"stage": "source", "path": str(tower.directory.resolve())}],
    }
    return write_whole(tower, folded, out, request.shard_size, request.source_name, made)


def write_whole(
    tower: Tower, folded: Path, out: Path, shard_size: int, name: str | None, made: dict[str, Any]
) -> dict[str, Any]:
    """Write a whole checkpoint around another tower than its own, all or nothing, and return its record.

    Args:
        tower: where its own tower's tensors are.
        folded: the other tower; its record becomes the output's.
        out: the new directory.
        shard_size: most bytes of a weight file.
        name: of the whole checkpoint; None: the name of its directory.
        made: fields of the record that say how the output was made.

    Raises:
        InvalidInput: the directory exists or cannot be written, or the tower does not fit.
    """
    check_output(out, tower.directory)
    out.parent.mkdir(parents=True, exist_ok=True)
    whole, part = Checkpoint(tower.directory), Checkpoint(folded)
    named = names_in_place(tower, part)
    kept = [name for name in whole if name in named or name not in tower.names]
    order = dict.fromkeys([*kept, *named])  # tensors that are new come last
    specs = {name: part.spec(named[name]) if name in named else whole.spec(name) for name in order}
    with whole_directory(out) as partial:
        with ShardWriter(partial, specs, shard_size) as writer:
            for stored in specs:
                place = part.stream(named[stored]) if stored in named else whole.stream(stored)
                for first, piece in place:
                    writer.write(stored, piece, first)
        copy_side_files(tower.directory, partial)
        config = whole_config(tower, read_config(folded))
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        record: dict[str, Any] = json.loads((folded / "kvfold.json").read_text(encoding="utf-8"))
        record |= {
            "source": describe(tower.directory, name, commit_of(tower.directory)),
            "container": (config.get("architectures") or [config["model_type"]])[0],
            **made,
        }
        write_record(partial, record)
        write_card(partial, record)
    return record


def names_in_place(tower: Tower, part: Iterable[str]) -> dict[str, str]:
    """Return the tensors of a folded tower by their names in the whole checkpoint.

    Tensors that the tower did not have, such as those of latent attention, are named as their neighbours.

    Args:
        tower: where the tower is in the whole checkpoint.
        part: names of the folded tower's tensors.
    """
    stored = {ours: name for name, ours in tower.names.items()}
    family = FAMILIES[tower.model_type]
    place = stored[family.prefix + family.embedding].removesuffix(family.embedding)
    return {stored.get(name) or place + name.removeprefix(family.prefix): name for name in part}


def whole_config(tower: Tower, folded: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the whole checkpoint, with what the fold changed in the tower's.

    A tower in another class brings its own.

    Args:
        tower: where the tower is in the whole checkpoint.
        folded: config.json of the folded tower.
    """
    changed = {
        key: value for key, value in folded.items() if key not in _KEPT and value != tower.config.get(key)
    }
    changed.pop("per_layer_config", None)  # which the whole checkpoint may say in another way
    share = folded.get("num_key_value_heads", 1), tower.config.get("num_key_value_heads", 1)
    config: dict[str, Any] = without_code(read_config(tower.directory))
    if folded["model_type"] != tower.model_type:
        return {**config, "text_config": folded}
    if isinstance(config.get("text_config"), dict) and FAMILIES[tower.model_type].unlike:
        return {**config, "text_config": with_fewer_heads({**config["text_config"], **changed}, share)}
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": {**config["text_config"], **changed}}
    return {**config, **changed}
