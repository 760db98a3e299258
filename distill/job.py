"""A whole distillation: from a recipe to a checkpoint. While it runs everything lies beside the output, in

<output>.partial/  tokens.bin  metrics.jsonl  evaluations.jsonl  state/step-N/  best/step-N/  stages/NAME/  trackers/  final/
                   final becomes <output>, the rest goes

Every stage begins with models loaded anew and the weights last saved, whether a run goes on or is just at its next stage: what
a stage made of its models (shards, adapters, frozen weights) does not reach the next, and a resumed run goes the same way.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..convert.card import distilled_record, source_directory, write_record
from ..convert.checkpoint import check_output, finish
from ..convert.console import notice
from ..convert.errors import InvalidInput
from ..convert.hub import resolve
from ..convert.model_card import write_card
from . import state
from .align import align_stage
from .cached import cache_for, cached_teacher
from .claim import claimed
from .curve import write_curve
from .data import Windows
from .evaluation import Evaluation, best_state, held_out_teacher, place_in, summary
from .held_out import check_unseen, open_held_out
from .isolation import isolate_documents
from .loop import Run, advance, collect_signals, train_stage
from .metrics import Metrics, read_lines, summarise, trim_metrics
from .parallel import first_place, make_accelerator
from .recipe import SHARED, Mode, Recipe, Stage, differences
from .recipe_data import SELF
from .state import Progress
from .store import open_windows, write_tokens
from .stream import Streaming, stream_stage, tokenizer_for
from .student import load_student, publish
from .teacher import open_teacher
from .trackers import directory_of, tracking

# How a stage is trained, by its mode.
STAGES: dict[Mode, Callable[[Run, Progress, Path | None], Progress]] = {"end_to_end": train_stage, "layerwise": align_stage}


def distill(recipe: Recipe) -> dict[str, Any]:
    """Train `recipe.student` and write `recipe.output`; a run that was stopped goes on where its state was last saved.

    Returns:
        Plain values: `output`, `student`, `teacher`, `steps`, `tokens`, and for every stage its losses at both ends.

    Raises:
        InvalidInput: something in the recipe cannot be used, the training diverged, or the disk is full.
        Interrupted: a signal stopped the training.
    """
    output = Path(recipe.output).expanduser()
    student, teacher = _places(recipe, output)
    accelerator = make_accelerator(recipe)
    partial = output.with_name(output.name + ".partial")
    with claimed(partial) if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        progress, found = _last_progress(recipe, partial)
        if accelerator.is_main_process:
            for name in ("metrics.jsonl", "evaluations.jsonl"):
                trim_metrics(partial / name, progress.total_steps)
            if found:
                notice(f"going on after step {progress.total_steps}, saved in {found}")
        job = Job(recipe, accelerator, student, teacher, partial)
        with collect_signals(job.signals), tracking(accelerator, recipe, progress.total_steps):
            progress = _run_stages(job, progress, found)
        result = {"student": str(student), "teacher": str(teacher), **summarise(partial / "metrics.jsonl", recipe)}
        if recipe.evaluate and (history := read_lines(partial / "evaluations.jsonl")):
            result["evaluation"] = summary(history, recipe.evaluate.keep)
        accelerator.wait_for_everyone()  # all have read the metrics before they are moved
        if accelerator.is_main_process:
            _write(job, result, output)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return {"output": str(output), **result}


@dataclass(frozen=True)
class Job:
    """A run as a whole.

    Attributes:
        recipe: what to do.
        accelerator: device, processes, precision.
        student: where the checkpoint to be trained lies.
        teacher: where the model to learn from lies.
        partial: working directory.
        signals: those received so far.
    """

    recipe: Recipe
    accelerator: Accelerator
    student: Path
    teacher: Path
    partial: Path
    signals: list[int] = field(default_factory=list)

    @property
    def start(self) -> Path:
        """The checkpoint that stages in memory start from: the student, or what the streamed stages before them have left."""
        streamed = [self.partial / "stages" / stage.name for stage in self.recipe.stages if stage.how == "stream"]
        return next((place for place in reversed(streamed) if place.exists()), self.student)

    def has_weights(self, found: Path) -> bool:
        """Whether a saved state is of a stage in memory: a streamed one leaves a checkpoint."""
        return self.recipe.stages[state.read_progress(found).stage].how != "stream"


def _places(recipe: Recipe, output: Path) -> tuple[Path, Path]:
    """Where student and teacher lie; and the output can be written."""
    named = recipe.teacher not in (None, SHARED)
    with _as_settings():
        check_output(output)
        student = resolve(recipe.student)
        teacher = resolve(str(recipe.teacher)) if named else source_directory(student)
    if teacher is None:
        raise InvalidInput(f"{student} has no kvfold.json that names its source; name the teacher with --set teacher=DIR")
    for directory in (student, teacher):
        if output.resolve().is_relative_to(directory.resolve()):
            raise InvalidInput(
                f"output {output} lies inside {directory}, which is never written; name another with --set output=DIR"
            )
    return student, teacher


@contextmanager
def _as_settings() -> Iterator[None]:
    """Advice of the other parts to use an option of their commands becomes advice to set a key of the recipe."""
    try:
        yield
    except InvalidInput as mistake:
        what, mark, advice = str(mistake).rpartition("; ")
        for option, key in (("--out", "output"), ("--teacher", "teacher")):
            advice = advice.replace(option, f"--set {key}=DIR") if mark else advice
        raise InvalidInput(what + mark + advice) from None


def _last_progress(recipe: Recipe, partial: Path) -> tuple[Progress, Path | None]:
    """Where an earlier run of the recipe stopped, and the state saved there; the beginning and None when there was none."""
    found = state.newest(partial / "state")
    if found is None:
        return Progress(recipe=recipe.resolved()), None
    progress = state.read_progress(found)
    changed = differences(progress.recipe, recipe.resolved())
    if changed:
        raise InvalidInput(
            f"the recipe differs from the one that {partial} was started with in {', '.join(changed)}; "
            "change it back to go on, or name another output to start anew"
        )
    return replace(progress, recipe=recipe.resolved()), found


def _run_stages(job: Job, progress: Progress, found: Path | None) -> Progress:
    """All stages from `progress` on, which was read from the state `found`."""
    for index in range(progress.stage, len(job.recipe.stages)):
        stage = job.recipe.stages[index]
        if index > progress.stage:
            progress = replace(progress, stage=index, step=0)
        if progress.step < job.recipe.steps(stage) and stage.how == "stream":
            progress, found = _stream(job, stage, progress), None
        elif progress.step < job.recipe.steps(stage):
            latest = found or (state.newest(job.partial / "state") if progress.total_steps else None)
            run = _open(job, stage, latest)
            progress, found = STAGES[stage.how](run, progress, latest if progress.step else None), None
            del run
        if job.recipe.save.keep_stages and index + 1 < len(job.recipe.stages):
            _write_stage(job, stage)
    return progress


def _open(job: Job, stage: Stage, latest: Path | None) -> Run:
    """What a stage works with: the models, the student with the weights of the newest state, and the data."""
    recipe, accelerator = job.recipe, job.accelerator
    student = load_student(job.start, recipe.data.seq_len, first_place(accelerator, stage))
    if latest and job.has_weights(latest):
        state.restore_weights(latest, student.model)
    if recipe.data.packing == "documents":
        isolate_documents(student.model, str(job.student))
    cache = cache_for(stage, recipe)
    held_out = open_held_out(recipe, student)
    is_cached = cache is not None and cache.exists() and (held_out is None or place_in(cache, held_out).exists())
    writes_text = any(source.source == SELF for source in recipe.data.sources) and not (job.partial / "tokens.bin").exists()
    accelerator.wait_for_everyone()  # all have looked before one writes
    online = None if is_cached and not writes_text else open_teacher(job.teacher, stage, recipe, accelerator, student)
    windows = _windows(job, student.tokenizer, online.model if online else None)
    teacher = cached_teacher(cache, online, windows, recipe, job.teacher, accelerator) if cache else online
    assert teacher
    evaluation = None
    if held_out and recipe.evaluate:
        check_unseen(held_out, recipe.evaluate.source, windows.tokens)
        place = place_in(cache, held_out) if cache else None
        judge = held_out_teacher(place, online, held_out, recipe, job.teacher, accelerator) if place else teacher
        evaluation = Evaluation(held_out, judge, accelerator, recipe.evaluate, job.partial)
    return Run(
        recipe, accelerator, student.model, teacher, windows, job.partial, len(student.tokenizer), job.signals, evaluation
    )


def _windows(job: Job, tokenizer: Any, teacher: Any) -> Windows:
    """The data, which the first stage of a run writes; `teacher` is a model, where that is what writes."""
    tokens = job.partial / "tokens.bin"
    is_missing = not tokens.exists()
    job.accelerator.wait_for_everyone()  # all have looked before one writes
    if is_missing:
        write_tokens(tokens, job.recipe.data, tokenizer, job.recipe.windows, teacher)
    job.accelerator.wait_for_everyone()
    windows = open_windows(tokens, job.recipe.data)
    for sentence in windows.repeated(job.recipe.windows) if is_missing else ():
        notice(sentence)
    return windows


def _stream(job: Job, stage: Stage, progress: Progress) -> Progress:
    """A stage that has one layer in memory at a time; what it leaves is a checkpoint in stages/NAME, not a state."""
    if job.accelerator.num_processes > 1:
        raise InvalidInput(f"stage {stage.name}: mode: stream runs in one process; use --profile single, or mode: layerwise")
    place = job.partial / "stages" / stage.name
    work = place.with_name(f"{stage.name}.stream")
    windows = _windows(job, tokenizer_for(job.start, job.teacher, job.recipe.data.seq_len), None)
    given = Streaming(job.recipe, stage, job.start, job.teacher, windows, progress.cursor, work, job.signals)
    metrics = Metrics(job.partial / "metrics.jsonl", stage.name, progress.tokens)

    def save() -> None:
        state.save(job.partial / "state", progress, state.Gathered({}, {}), job.recipe.save.keep)

    for losses in stream_stage(given, place, save):
        progress = advance(job.recipe, stage, progress)
        metrics.record(progress, losses)
    save()
    shutil.rmtree(work)
    return progress


def _write(job: Job, result: dict[str, Any], output: Path) -> None:
    """The distilled checkpoint, all or nothing."""
    final = _checkpoint(job, job.partial / "final", is_last=True)
    shutil.copyfile(job.partial / "metrics.jsonl", final / "metrics.jsonl")
    if history := read_lines(job.partial / "evaluations.jsonl"):
        write_curve(final, history)
    if job.recipe.trackers:
        shutil.copytree(directory_of(job.recipe), final / "trackers", ignore_dangling_symlinks=True)
    if job.recipe.save.keep_stages:
        shutil.copytree(job.partial / "stages", final / "stages", copy_function=os.link, dirs_exist_ok=True)
    record = distilled_record(job.student, job.recipe.resolved(), result)
    write_record(final, record)
    write_card(final, record)
    with _as_settings():
        finish(final, output)


def _write_stage(job: Job, stage: Stage) -> None:
    """The student as a stage has left it, beside the final checkpoint; all or nothing, and only once."""
    place = job.partial / "stages" / stage.name
    if job.accelerator.is_main_process and not place.exists():
        place.parent.mkdir(exist_ok=True)
        finish(_checkpoint(job, place.with_name(stage.name + ".partial")), place)
    job.accelerator.wait_for_everyone()


def _checkpoint(job: Job, directory: Path, is_last: bool = False) -> Path:
    """Write a state as a checkpoint like the student's: the newest, or at last the best if so wanted; returns the directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    latest = state.newest(job.partial / "state")
    assert latest, "a stage ends with a saved state"
    if is_last and job.recipe.evaluate and job.recipe.evaluate.keep == "best":
        latest = best_state(job.partial) or latest
    if not job.has_weights(latest):
        return Path(shutil.copytree(job.start, directory, copy_function=os.link, dirs_exist_ok=True))
    student = load_student(job.start, job.recipe.data.seq_len, torch.device("cpu"))
    state.restore_weights(latest, student.model)
    publish(student.model, job.start, directory)
    return directory
