"""`kvfold assemble`: a folded or distilled text tower, put back into its multimodal checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...checkpoints.directory import Checkpoint, check_output, read_config
from ...checkpoints.quantised.packed_checkpoint import is_quantised
from ...checkpoints.record import describe, directory_at, read_record
from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.hub import commit_of, resolve
from ...models.expected_weights import check_multimodal
from ...models.remote_code import is_remote
from ..families.recognition import is_multimodal
from ..request import fold_request
from .text_class import STOCK, holds_other_classes
from .tower import Tower, find_tower, holds_weights
from .whole_checkpoint import write_around

_TARGETS = ("gqa", "mqa", "mla")
# Fields that decide the shapes of a tower's other tensors.
_SHAPES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def assemble_tower(folded: Path, whole: str, out: Path | None, shard_size: int) -> Path:
    """Carry out `kvfold.assemble` with arguments that were checked; it describes them, and the errors."""
    folded = folded.expanduser()
    if not folded.is_dir():
        raise InvalidInput(f"{folded} is not a directory; name that of the folded text tower")
    record = read_record(folded)
    if record is None or record.get("target", {}).get("name") not in _TARGETS or not record.get("cache"):
        raise InvalidInput(
            f"{folded} is no fold of kvfold; name the output of kvfold convert --text-only, or what was "
            "distilled from it"
        )
    directory = resolve(whole)
    tower = find_tower(directory)
    if tower is None:
        raise InvalidInput(
            f"{directory} is not a multimodal checkpoint; name the one that the tower was taken from"
        )
    given = Path(whole).expanduser()
    name = None if given.is_dir() else whole.partition("@")[0]
    place = out or Path(f"{given.name if name is None else Path(name).name}-{record['target']['name']}")
    for read in (directory, folded, directory_at(record["source"]["path"])):
        if read is not None:
            check_output(place, read)
    _check(tower, folded, record)
    check_multimodal(directory)
    made: dict[str, Any] = {
        "parents": [*record["parents"], {"stage": record["stage"], "path": str(folded.resolve())}],
        "assemble": {"command": shlex.join(["kvfold", "assemble", str(folded), whole])},
        "source": describe(directory, name, commit_of(directory)),
    }
    if isinstance(record.get("request"), dict):  # it names the tower as its source, and this is the user's
        asked = {**record["request"], "model": whole, "text_only": True}
        request = fold_request(asked, f"{folded.name}/kvfold.json")
        made |= {"command": request.command, "request": request.essentials()}
    write_around(tower, folded, place, made, shard_size=shard_size)
    return place


def _check(tower: Tower, folded: Path, record: dict[str, Any]) -> None:
    """Check that a folded tower was made of a checkpoint's tower, and that its class has a place there."""
    config, whole = read_config(folded), tower.directory
    if is_multimodal(config):
        raise InvalidInput(f"{folded} is a whole multimodal checkpoint already; name its text tower alone")
    if is_remote(folded):
        raise InvalidInput(
            f"{folded} has code of its own, and a multimodal class takes no text model with that; fold "
            "the tower to GQA or MQA, or with --container stock"
        )
    if is_quantised(folded) and record["stage"] == "quantize":
        raise InvalidInput(f"{folded} has quantised weights; name the tower as it was before kvfold quantize")
    if is_quantised(folded) and tower.names == tower.stored:
        raise InvalidInput(
            f"{folded} has quantised weights, and {whole} has none; name the quantised checkpoint that the "
            "tower was taken from"
        )
    kind = config.get("model_type")
    if kind != tower.model_type and not (kind == STOCK and holds_other_classes(whole, STOCK)):
        raise InvalidInput(
            f"{folded} is of model_type {kind}, which has no place in {whole}: its text tower is of "
            f"model_type {tower.model_type}"
        )
    for field in _SHAPES:
        ours, theirs = config.get(field), tower.config.get(field)
        if ours != theirs:
            raise InvalidInput(f"{folded} has {field} {ours}, but the text tower of {whole} has {theirs}")
    ours, theirs = _norm_dtypes(folded), _norm_dtypes(whole, tower.stored)
    if ours != theirs:
        raise InvalidInput(
            f"{folded} is in {ours}, but the text tower of {whole} is in {theirs}; fold it in that dtype"
        )
    path = record["source"]["path"]
    source = directory_at(path)
    if source is None:
        notice(
            f"{path}, which {folded} was made of, is gone: whether that was the text tower of {whole} is not "
            "checked"
        )
    elif not (source / "config.json").is_file() or not holds_weights(tower, source):
        raise InvalidInput(f"{folded} was made of {source}, which is not the text tower of {whole}")


def _norm_dtypes(directory: Path, names: Iterable[str] | None = None) -> str:
    """Return the dtypes of a checkpoint's norms in words, by default of all; no format quantises norms."""
    checkpoint = Checkpoint(directory, packed=True)
    norms = [name for name in (checkpoint if names is None else names) if name.endswith("norm.weight")]
    kinds = {str(checkpoint.spec(name).dtype).removeprefix("torch.") for name in norms}
    return ", ".join(sorted(kinds))
