"""The execution of a fold of a multimodal checkpoint: its text tower is taken out, folded and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    alone is folded, because it is the source that evaluation and distillation compare with.

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
    from .convert.towers.tower import is_written, write_tower
    from .models.expected_weights import check_multimodal

    _check(request)
    out = request.out or Path(f"{Path(request.model.partition('@')[0]).name}-{request.to}")
    alone = out.with_name(out.name + ".tower")
    part = out if request.text_only else out.with_name(out.name + ".text")
    with together():
        for place in (out, part):
            check_output(place, tower.directory)
        if not request.text_only:
            check_multimodal(tower.directory)
        was_there = is_written(tower, alone)
        if is_first() and not was_there:
            write_tower(tower, alone, request.shard_size)
    if request.text_only:
        notice(f"the text tower as it was is in {alone}; evaluation and distillation compare with it")
    try:
        folded = fold(request.model_copy(update={"model": str(alone), "revision": None, "out": part}))
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
