"""Folds of multimodal checkpoints: the text tower is taken out, folded and put back, now or later."""

from __future__ import annotations

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
from .core.work import fingerprint, remove_own, working_directory
from .results import Folded

if TYPE_CHECKING:
    from .convert.decide.fold_cost import FoldCost
    from .convert.request import FoldRequest
    from .convert.towers.tower import Tower
    from .core.work import WorkDir


def fold_tower(request: FoldRequest, tower: Tower, fold: Callable[[FoldRequest], Folded]) -> Folded:
    """Fold the text tower of a multimodal checkpoint.

    It is put back in its place in the whole checkpoint, unless the tower alone is asked for. Then the tower
    as it was stays in `OUT.tower`, because it is the source that evaluation and distillation compare with.
    Otherwise the tower as it was and the folded one are in the working directory, and a killed run is
    resumed by the same request.

    Raises:
        InvalidInput: the tower cannot be folded like this, or a value is unusable.
    """
    if request.text_only:
        return _alone(request, tower, fold)
    from .checkpoints.directory import check_output
    from .convert.towers.tower_targets import check_request, tower_request
    from .convert.towers.view import named_as_whole
    from .convert.towers.whole_checkpoint import put_back
    from .core.work import claimed
    from .engines.verify import verify_fold
    from .models.expected_weights import check_multimodal

    check_request(request, tower)
    out = _out(request)
    path = working_directory(out)
    alone, part = path / "tower", path / "text"
    asked = tower_request(request).model_copy(update={"model": str(alone), "out": part})

    def keeps(work: WorkDir) -> bool:
        return part.exists() or working_directory(part).exists()

    with ExitStack() as held:
        work, found = None, None
        with together():
            check_multimodal(tower.directory)
            if is_first():
                check_output(out, tower.directory)
                work = held.enter_context(claimed(path, "fold of a text tower", keeps=keeps))
                found = _begin(work, request, tower, alone, part)
        found = from_first(found)
        with named_as_whole(tower, alone):
            if found is None:
                folded = fold(asked)
            else:  # an earlier run has finished it
                folded = Folded(directory=part, record=found, request=asked, notices=(), verification=None)
        with together():
            record = folded.record
            if work is not None:
                whole = path / "whole" / out.name
                remove_own(whole)
                record = put_back(tower, part, whole, request)
                work.finish(whole, out)
    folded = replace(folded, directory=out, record=record, request=request)
    if not is_first():
        return folded
    with listening() as heard:
        verification = verify_fold(out, request.engines, request.verify)
    return replace(folded, notices=(*folded.notices, *heard.notices), verification=verification)


def plan_tower(request: FoldRequest, tower: Tower) -> tuple[dict[str, Any], FoldCost] | None:
    """Return the plan of a fold of a text tower, as plain values, and its predicted cost.

    The tower is read in its place, and nothing is written. Of several processes only the first gets a result.

    Raises:
        InvalidInput: the tower cannot be folded like this, or a value is unusable.
    """
    from .convert.decide.fold_cost import cost_of
    from .convert.settle.preparation import prepare
    from .convert.towers.tower_targets import check_request, tower_report, tower_request
    from .convert.towers.view import tower_source
    from .convert.towers.whole_checkpoint import names_in_place, whole_config

    check_request(request, tower)
    asked = request.model_copy(update={"text_only": False}) if request.text_only else tower_request(request)
    with tower_source(tower) as source:
        plan = prepare(asked, dry_run=True, source=source)
        if not is_first():
            return None
        cost, found = cost_of(plan), {**plan.to_dict(), "source": str(tower.directory)}
        report = tower_report(tower, in_place=not request.text_only, dequantize=request.dequantize)
        found["tower"] = report
        report["work_bytes"] = report["bytes"]
        if not request.text_only:  # the other fields are those of the whole output
            config = whole_config(tower, plan.config)
            stored = {ours: name for name, ours in names_in_place(tower, plan.specs).items()}
            shapes = found["attention_of_layer_0"]
            report["work_bytes"] += found["output_bytes"]
            found["output_bytes"] += report["other_bytes"]
            found["container"] = (config.get("architectures") or [config["model_type"]])[0]
            found["attention_of_layer_0"] = {stored[name]: shape for name, shape in shapes.items()}
        return found, cost


def _begin(
    work: WorkDir, request: FoldRequest, tower: Tower, alone: Path, part: Path
) -> dict[str, Any] | None:
    """Take up the fold of a tower, or write the tower as it was into `alone`.

    Returns:
        The record of the folded tower in `part`, if a killed run has finished it.
    """
    from .checkpoints.identity import hashes_of
    from .checkpoints.record import other_weights, read_record
    from .convert.towers.tower import write_tower
    from .convert.write.rewrite import options_of

    work.begin(options_of(request), _state(request, tower.directory))
    if "tower" not in work.units or work.units["tower"] != hashes_of(alone):
        for place in (alone, part, working_directory(part)):
            remove_own(place)
        write_tower(tower, alone, request.shard_size)
        work.add({"tower": hashes_of(alone)})
    if part.exists() and other_weights(part):
        remove_own(part)
    return read_record(part)


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
    asked = AssembleRequest.read({**given, "shard_size": shard_size})
    return assemble_tower(asked.tower, asked.whole, asked.out, asked.shard_size)


def _alone(request: FoldRequest, tower: Tower, fold: Callable[[FoldRequest], Folded]) -> Folded:
    """Fold a tower and write it alone; arguments and result are those of `fold_tower`."""
    from .checkpoints.directory import check_output
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
            remove_own(alone)
        raise


def _out(request: FoldRequest) -> Path:
    return request.out or Path(f"{Path(request.model.partition('@')[0]).name}-{request.to}")


def _state(request: FoldRequest, directory: Path) -> str:
    """Return a digest of what the output of a request depends on next to the request."""
    from .checkpoints.directory import Checkpoint

    text = Path(request.calibration or "")
    files = [text] if text.is_file() else []
    if request.calibration and text.is_dir():
        files = sorted(text.rglob("*"))
    read = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return fingerprint(__version__, Checkpoint(directory, packed=True).identity(), read)
