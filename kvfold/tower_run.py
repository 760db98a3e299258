"""Folds of multimodal checkpoints: the text tower is taken out, folded and put back, now or later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import path_of, public, text_of
from .core.console import is_first, listening, notice
from .core.errors import InvalidInput
from .core.processes import from_first, together
from .core.version import __version__
from .results import Folded

if TYPE_CHECKING:
    from .convert.request import FoldRequest
    from .convert.towers.tower import Tower, TowerClaim


def fold_tower(request: FoldRequest, tower: Tower, fold: Callable[[FoldRequest], Folded]) -> Folded:
    """Fold the text tower of a multimodal checkpoint.

    It is put back in its place in the whole checkpoint, unless the tower alone is asked for. The
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
    if request.text_only:
        return _alone(request, tower, fold)
    from .convert.towers.places import Places
    from .convert.towers.tower_targets import check_request, tower_request
    from .convert.towers.view import named_as_whole
    from .convert.towers.whole_checkpoint import put_back
    from .models.expected_weights import check_multimodal

    check_request(request, tower)
    out = _out(request)
    part, alone = (out.with_name(out.name + ending) for ending in (".text", ".tower"))
    claim = _claim(request, tower.directory)
    places = Places(out=out, part=part, alone=alone, tower=tower, claim=claim)
    asked = tower_request(request).model_copy(update={"model": str(alone), "out": part})
    with ExitStack() as held:
        with together():
            done = places.finished_output(request, held) if is_first() else None
        done = from_first(done)
        if done is not None:
            return _verified(_known(out, done, request))
        with together():
            check_multimodal(tower.directory)
            found = places.take(asked, held) if is_first() else None
        found = from_first(found)
        try:
            with named_as_whole(tower, alone):
                folded = fold(asked) if found is None else _known(part, found, asked)
        finally:
            # A half-written part is resumed by the same command, and a finished one is used.
            begun = any(place.exists() for place in (part, part.with_name(part.name + ".partial")))
            if is_first() and not begun:
                places.clear()
        with together():
            record = folded.record
            if is_first():
                record = put_back(tower, part, out, request)
        if is_first():
            places.clear()
    return _verified(replace(folded, directory=out, record=record, request=request))


@public
def assemble(
    tower: str | Path, whole: str | Path, *, out: str | Path | None = None, shard_size: int | str = "5GB"
) -> Path:
    """Put a text tower that was folded alone (`text_only`) back into its multimodal checkpoint.

    The tower may have been distilled since. Everything else keeps its bytes, and the class stays the same.

    Args:
        tower: the directory of the folded or distilled tower.
        whole: the multimodal checkpoint that it was taken from, a directory or a Hub id.
        out: the output directory, which must not exist; by default `./<name>-<target>`.
        shard_size: most bytes of a weight file: a number, or a text such as `5GB`.

    Returns:
        The output directory.

    Raises:
        InvalidInput: the tower is not one of this checkpoint, its class has no place there, or the output
            cannot be written.

    Example:
        >>> import kvfold
        >>> kvfold.assemble("tower-distilled", "llava", out="llava-gqa")  # doctest: +SKIP
        PosixPath('llava-gqa')
    """
    from .convert.towers.assemble import assemble_tower
    from .convert.towers.request import AssembleRequest

    given = {"tower": path_of(tower, "tower"), "whole": text_of(whole, "whole"), "out": out}
    asked = AssembleRequest.take({**given, "shard_size": shard_size})
    return assemble_tower(asked.tower, asked.whole, asked.out, asked.shard_size)


def _alone(request: FoldRequest, tower: Tower, fold: Callable[[FoldRequest], Folded]) -> Folded:
    """Fold a tower and write it alone; arguments and result are those of `fold_tower`."""
    from .checkpoints.directory import check_output
    from .checkpoints.own_files import remove_own_tree
    from .convert.towers.tower import is_copy, write_tower
    from .convert.towers.view import named_as_whole

    out = _out(request)
    alone = out.with_name(out.name + ".tower")
    # The tower is no multimodal checkpoint: the command that is recorded folds it as the model that it is.
    asked = request.model_copy(update={"model": str(alone), "revision": None, "out": out, "text_only": False})
    with together():
        check_output(out, tower.directory)
        is_there = is_first() and is_copy(tower, alone)
        if is_first() and not is_there:
            write_tower(tower, alone, request.shard_size)
    notice(f"the text tower as it was is in {alone}; evaluation and distillation compare with it")
    try:
        with named_as_whole(tower, alone):
            return fold(asked)
    except InvalidInput:
        if is_first() and not is_there:
            remove_own_tree(alone)
        raise


def _out(request: FoldRequest) -> Path:
    """Return the directory of the output."""
    return request.out or Path(f"{Path(request.model.partition('@')[0]).name}-{request.to}")


def _claim(request: FoldRequest, directory: Path) -> TowerClaim:
    """Return the claim of a request, by a digest of all that the output of a request depends on.

    Args:
        request: what the user asked for.
        directory: the source that it names.
    """
    from .checkpoints.directory import Checkpoint
    from .convert.towers.tower import TowerClaim

    text = Path(request.calibration or "")
    files = [text] if text.is_file() else []
    if request.calibration and text.is_dir():
        files = sorted(text.rglob("*"))
    read = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    asked = [__version__, request.essentials(), Checkpoint(directory, packed=True).identity(), read]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return TowerClaim(digest=digest, command=request.command)


def _known(directory: Path, record: dict[str, Any], request: FoldRequest) -> Folded:
    """Return a fold that an earlier run finished."""
    return Folded(directory=directory, record=record, request=request, notices=(), verification=None)


def _verified(folded: Folded) -> Folded:
    """Return a finished fold with the verification that its request asks for."""
    from .verification.verify import verify_fold

    if not is_first():
        return folded
    request = folded.request
    with listening() as heard:
        verification = verify_fold(folded.directory, request.engines, request.verify)
    return replace(folded, notices=(*folded.notices, *heard.notices), verification=verification)
