"""The checkpoints that a run writes: the student after a stage, and the output."""

import shutil
from pathlib import Path
from typing import Any

from ...checkpoints.directory import copy_side_files, finish
from ...checkpoints.quantised.packed_checkpoint import open_checkpoint
from ...checkpoints.quantised.schemes import MODELOPT_FILE
from ...checkpoints.record import next_record, write_record
from ...convert.write.model_card import write_card
from ...core.files import link_or_copy
from ...models.code_files import copy_config
from ...models.remote_code import ship
from ..recipe.recipe import Stage
from ..stages import state
from ..stages.stage_work import Run
from ..stages.student_checkpoint import publish
from ..watch.evaluation import Chosen, read_evaluations, write_curve
from ..watch.trackers import directory_of


def write_output(run: Run, record: dict[str, Any], chosen: Chosen | None) -> Path:
    """Write the distilled checkpoint into the working directory, and return where.

    `record` has the run's results, for kvfold.json and the model card; `chosen` is the evaluation whose
    weights become the output, None for the last ones.
    """
    final = _checkpoint(run, run.partial / "final", chosen)
    metrics = run.partial / "metrics.jsonl"
    if metrics.exists():  # a power failure may have taken it
        shutil.copyfile(metrics, final / metrics.name)
    history = read_evaluations(run.partial / "evaluations.jsonl")
    if history:
        write_curve(final, history)
    if run.recipe.trackers:
        shutil.copytree(directory_of(run.recipe), final / "trackers", ignore_dangling_symlinks=True)
    if run.recipe.save.keep_stages:
        for stage in run.recipe.stages[:-1]:
            place = Path("stages") / stage.name
            shutil.copytree(run.partial / place, final / place, copy_function=link_or_copy)
    distilled = {"recipe": run.recipe.resolved(), **record}
    whole = write_record(final, {**next_record(run.student, "distill"), "distill": distilled})
    write_card(final, whole)
    return final


def write_stage(run: Run, stage: Stage) -> None:
    """Write the student after a stage, next to the final checkpoint; all or nothing, and only once."""
    place = run.partial / "stages" / stage.name
    if run.accelerator.is_main_process and not place.exists():
        place.parent.mkdir(exist_ok=True)
        finish(_checkpoint(run, place.with_name(stage.name + ".partial"), None), place)
    run.accelerator.wait_for_everyone()


def _checkpoint(run: Run, directory: Path, chosen: Chosen | None) -> Path:
    """Write the newest weights, or those of an evaluation, as a checkpoint; return its directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    start = run.start
    weights = state.newest(run.partial / "state") if chosen is None else chosen[1]
    if weights is not None and run.has_weights(weights):
        publish(weights, start, directory)
        return directory
    # The weights that stages in memory started from, byte for byte.
    others = [*start.glob("*.safetensors.index.json"), *start.glob(MODELOPT_FILE)]
    for file in (*open_checkpoint(start).files, *others):
        shutil.copyfile(file, directory / file.name)
    copy_config(start, directory)
    copy_side_files(start, directory)
    ship(start, directory)
    return directory
