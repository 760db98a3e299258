"""What a run leaves.

The student of a stage, and at the end the distilled checkpoint with all that was told of the run.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.directory import Checkpoint, copy_side_files, finish, link_or_copy
from ...checkpoints.record import distilled_record, write_record
from ...convert.write.model_card import write_card
from ...models.code_files import copy_config
from ...models.remote_code import ship
from ..recipe.recipe import Stage
from ..stages.student import publish
from ..watch.evaluation import Kept
from ..watch.metrics import read_lines
from ..watch.perplexity_curve import write_curve
from ..watch.trackers import directory_of
from . import state
from .resume import as_settings

if TYPE_CHECKING:
    from .job import Job


def write_output(job: "Job", result: dict[str, Any], kept: Kept | None, output: Path) -> None:
    """The distilled checkpoint, all or nothing.

    Args:
        job: the run.
        result: what it says of itself.
        kept: the evaluation whose weights become the output; None: the last weights do.
        output: must not exist.
    """
    final = _checkpoint(job, job.partial / "final", kept)
    shutil.copyfile(job.partial / "metrics.jsonl", final / "metrics.jsonl")
    if history := read_lines(job.partial / "evaluations.jsonl"):
        write_curve(final, history)
    if job.recipe.trackers:
        shutil.copytree(directory_of(job.recipe), final / "trackers", ignore_dangling_symlinks=True)
    if job.recipe.save.keep_stages:
        for stage in job.recipe.stages[:-1]:
            place = Path("stages") / stage.name
            shutil.copytree(job.partial / place, final / place, copy_function=link_or_copy)
    record = distilled_record(job.student, job.recipe.resolved(), result)
    write_record(final, record)
    write_card(final, record)
    with as_settings():
        finish(final, output)


def write_stage(job: "Job", stage: Stage) -> None:
    """The student as a stage has left it, beside the final checkpoint; all or nothing, and only once."""
    place = job.partial / "stages" / stage.name
    if job.accelerator.is_main_process and not place.exists():
        place.parent.mkdir(exist_ok=True)
        finish(_checkpoint(job, place.with_name(stage.name + ".partial"), None), place)
    job.accelerator.wait_for_everyone()


def _checkpoint(job: "Job", directory: Path, kept: Kept | None) -> Path:
    """Write weights as a checkpoint like the student's: the newest, or those of an evaluation.

    Returns the directory.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    chosen = state.newest(job.partial / "state") if kept is None else kept.state
    if chosen is None or not job.has_weights(chosen):
        _copy(job.start, directory)
        return directory
    publish(chosen, job.start, directory)
    return directory


def _copy(start: Path, directory: Path) -> None:
    """The weights that stages in memory started from, byte by byte."""
    for file in (*Checkpoint(start).files, *start.glob("*.safetensors.index.json")):
        shutil.copyfile(file, directory / file.name)
    copy_config(start, directory)
    copy_side_files(start, directory)
    ship(start, directory)
