"""The execution of a fold of a multimodal checkpoint: its text tower is taken out, folded and put back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .core.console import is_first, notice
from .core.errors import InvalidInput
from .core.processes import together
from .results import Folded

if TYPE_CHECKING:
    from .convert.request import FoldRequest
    from .convert.towers.tower import Tower


def fold_tower(request: FoldRequest, tower: Tower, fold: Callable[[FoldRequest], Folded]) -> Folded:
    """Fold the text tower of a multimodal checkpoint.

    GQA and MQA are put back in their place in the whole checkpoint, unless the tower alone is asked for. The
    tower as it was is written to `OUT.tower`, unless an earlier run wrote it. It stays there where the tower
    alone is folded, because it is the source that evaluation and distillation compare with. A killed run is
    resumed by the same request: the tower, its fold's journal and a finished fold in `OUT.text` are used.

    Args:
        request: what the user asked for.
        tower: the tower of the source that it names.
        fold: folds a causal language model.

    Raises:
        InvalidInput: the tower cannot be folded like this, or a value is unusable.
    """
    from .checkpoints.directory import check_output
    from .checkpoints.own_files import remove_own_tree
    from .convert.towers.assembly import put_back
    from .convert.towers.tower import claimed, is_written, write_tower
    from .models.expected_weights import check_multimodal

    _check(request)
    out = request.out or Path(f"{Path(request.model.partition('@')[0]).name}-{request.to}")
    alone = out.with_name(out.name + ".tower")
    part = out if request.text_only else out.with_name(out.name + ".text")
    claim = None if request.text_only else _claim(request, tower.directory)
    asked = request.model_copy(update={"model": str(alone), "revision": None, "out": part})
    with together():
        check_output(out, tower.directory)
        if not request.text_only:
            check_multimodal(tower.directory)
        is_there = is_written(tower, alone)
        is_ours = is_there and claim is not None and claimed(alone) == claim
        was_there = is_there and not is_ours
        folded = _finished(asked, alone) if is_ours else None
        if folded is None:
            check_output(part, tower.directory)
        if is_first() and not is_there:
            write_tower(tower, alone, request.shard_size, claim)
    if request.text_only:
        notice(f"the text tower as it was is in {alone}; evaluation and distillation compare with it")
    try:
        folded = fold(asked) if folded is None else _verified(folded)
        if request.text_only:
            return folded
        with together():
            record = folded.record
            if is_first():
                record = put_back(tower, part, out, request)
    except InvalidInput:
        if is_first() and request.text_only and not was_there:
            remove_own_tree(alone)
        raise
    finally:
        if is_first() and not request.text_only:
            for place in (part,) if was_there else (part, alone):
                remove_own_tree(place)
    return replace(folded, directory=out, record=record, request=request)


def _claim(request: FoldRequest, directory: Path) -> str:
    """Return a digest of all that the output of a request depends on.

    Args:
        request: what the user asked for.
        directory: the source that it names.
    """
    from .checkpoints.directory import Checkpoint

    text = Path(request.calibration or "")
    files = (
        [text] if text.is_file() else sorted(text.rglob("*")) if request.calibration and text.is_dir() else []
    )
    read = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    asked = [__version__, request.essentials(), Checkpoint(directory, packed=True).identity(), read]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _finished(asked: FoldRequest, alone: Path) -> Folded | None:
    """Return the fold of a tower that a killed run of the same claim finished; None where there is none.

    Args:
        asked: the request of the fold, whose output may be there.
        alone: the tower as it was.
    """
    from .checkpoints.record import describe, read_record

    assert asked.out is not None
    record = read_record(asked.out)
    if record is None or record["source"] != describe(alone, asked.source_name):
        return None
    return Folded(directory=asked.out, record=record, request=asked, notices=(), verification=None)


def _verified(folded: Folded) -> Folded:
    """Return a finished fold with the verification that its request asks for."""
    from .convert.decide.engines import ENGINES
    from .verification.verify import verify

    request = folded.request
    if not is_first() or request.verify == "none":
        return folded
    engines = request.engines or ENGINES[:1]
    return replace(folded, verification=verify(folded.directory, engines, run=request.verify == "full"))


def _check(request: FoldRequest) -> None:
    """Refuse what has no place in the whole checkpoint.

    Raises:
        InvalidInput: says what, and what would be right.
    """
    if request.text_only:
        return
    if request.to == "mla":
        raise InvalidInput(
            "--to mla has no place in a multimodal class; use --to gqa or --to mqa, or write the text tower "
            "alone with --text-only"
        )
    if request.dtype != "auto":
        raise InvalidInput(
            f"--dtype {request.dtype} does not apply to a whole multimodal checkpoint, whose other tensors "
            "keep their bytes; leave it out, or add --text-only"
        )
