"""A whole distillation: from a recipe to a checkpoint. While it runs everything lies beside the output, in

<output>.partial/  tokens.bin  metrics.jsonl  evaluations.jsonl  state/step-N/  best/step-N/  stages/NAME/
trackers/  final/
                   final becomes <output>, the rest goes

Every stage begins with models loaded anew and the weights last saved, whether a run goes on or is just at its
next stage: what a stage made of its models (shards, adapters, frozen weights) does not reach the next, and a
resumed run goes the same way.
"""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ...core.console import notice
from ...core.errors import InvalidInput
from ...models.causal_lm import Described, Loaded
from ..data.order import Windows
from ..data.token_store import open_windows, write_tokens
from ..parallel.sharing import is_sharded, make_accelerator
from ..recipe.data_section import SELF
from ..recipe.recipe import Mode, Recipe, Stage
from ..stages.align import align_stage
from ..stages.cached_teacher import Needed, cache_for, cached_teacher
from ..stages.loop import Run, advance, train_stage
from ..stages.stream import Streaming, describe_student, stream_stage
from ..stages.student import open_student
from ..stages.teacher import Online, Teacher, open_teacher
from ..watch.evaluation import Evaluation, best_kept, summary
from ..watch.held_out import check_held_out, check_unseen, open_held_out
from ..watch.metrics import Metrics, read_lines, summarise, trim_metrics
from ..watch.trackers import tracking
from . import state
from .claim import claimed, tidy
from .export import write_output, write_stage
from .preflight import check_stages
from .resume import find_models, find_result, last_progress
from .signals import interruptible
from .state import Progress

# How a stage is trained, by its mode.
STAGES: dict[Mode, Callable[[Run, Progress, Path | None], Progress]] = {
    "end_to_end": train_stage,
    "layerwise": align_stage,
}


def distill(recipe: Recipe) -> dict[str, Any]:
    """Train `recipe.student` and write `recipe.output`; a run that was stopped goes on where its state was
    last saved.

    Returns:
        Plain values: `output`, `student`, `teacher`, `steps`, `tokens`, and for every stage its losses at
        both ends.

    Raises:
        InvalidInput: something in the recipe cannot be used, the training diverged, or the disk is full.
        Interrupted: a signal stopped the training.
    """
    signals: list[int] = []
    with interruptible(signals):
        output = Path(recipe.output).expanduser()
        partial = output.with_name(output.name + ".partial")
        result = find_result(recipe, output, partial)
        if result is None:
            student, teacher = find_models(recipe, output)
            result = _distill(
                Job(recipe, make_accelerator(recipe), student, teacher, partial, signals), output
            )
        else:
            _tidy_up(make_accelerator(recipe), output, partial)
    return {"output": str(output), **result}


def _tidy_up(accelerator: Accelerator, output: Path, partial: Path) -> None:
    accelerator.wait_for_everyone()  # all have looked before one removes
    if accelerator.is_main_process:
        notice(f"{output} is whole already, by this recipe; to train anew remove it, or name another output")
        if partial.exists():
            tidy(partial)
    accelerator.end_training()


def _distill(job: "Job", output: Path) -> dict[str, Any]:
    """All stages, and the output; what is told of them."""
    recipe, accelerator, partial = job.recipe, job.accelerator, job.partial
    check_stages(recipe, job.student, job.teacher, sharded=is_sharded())
    with claimed(partial) if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        progress, found = last_progress(recipe, partial, job.student, job.teacher)
        if accelerator.is_main_process:
            for name in ("metrics.jsonl", "evaluations.jsonl"):
                trim_metrics(partial / name, progress.total_steps)
            if found:
                notice(f"going on after step {progress.total_steps}, saved in {found}")
        with tracking(accelerator, recipe, progress.total_steps):
            _run_stages(job, progress, found)
        result = {"student": str(job.student), "teacher": str(job.teacher), "models": progress.models}
        result |= summarise(partial / "metrics.jsonl", recipe)
        kept = best_kept(partial, recipe.evaluate)
        if recipe.evaluate and (history := read_lines(partial / "evaluations.jsonl")):
            result["evaluation"] = summary(history, kept)
        accelerator.wait_for_everyone()  # all have read the metrics before they are moved
        if accelerator.is_main_process:
            write_output(job, result, kept, output)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return result


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
    signals: list[int]

    @property
    def start(self) -> Path:
        """The checkpoint that stages in memory start from.

        The student, or what the streamed stages before them have left.
        """
        streamed = [
            self.partial / "stages" / stage.name for stage in self.recipe.stages if stage.how == "stream"
        ]
        return next((place for place in reversed(streamed) if place.exists()), self.student)

    def has_weights(self, found: Path) -> bool:
        """Whether a saved state is of a stage in memory: a streamed one leaves a checkpoint."""
        return self.recipe.stages[state.read_progress(found).stage].how != "stream"


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
            write_stage(job, stage)
    return progress


def _open(job: Job, stage: Stage, latest: Path | None) -> Run:
    """What a stage works with: the models, the student with the weights of the newest state, and the data."""
    recipe, accelerator = job.recipe, job.accelerator
    latest = latest if latest and job.has_weights(latest) else None
    student, units = open_student(job.start, latest, stage, recipe, accelerator)
    cache = cache_for(stage, recipe)
    held_out = open_held_out(recipe, student)
    writes_text = (
        any(source.source == SELF for source in recipe.data.sources)
        and not (job.partial / "tokens.bin").exists()
    )
    accelerator.wait_for_everyone()  # all have looked before one writes

    def load_teacher() -> Online:
        alone = writes_text or cache is not None
        return open_teacher(job.teacher, stage, recipe, accelerator, student, alone=alone)

    online = load_teacher() if writes_text or cache is None else None
    windows = _windows(job, student, online.model if online else None)
    if held_out and recipe.evaluate:
        check_unseen(held_out, recipe.evaluate.source, windows.tokens)
    teacher: Teacher | None = online
    if cache is not None:
        needed: Needed = [(windows, recipe.windows)]
        if held_out:
            needed = [*needed, (held_out, len(held_out))]
        teacher = cached_teacher(
            cache, needed, recipe, job.teacher, accelerator, lambda: online or load_teacher()
        )
    assert teacher
    evaluation = None
    if held_out and recipe.evaluate:
        evaluation = Evaluation(held_out, teacher, accelerator, recipe.evaluate, job.partial)
    return Run(
        recipe,
        accelerator,
        student.model,
        teacher,
        windows,
        job.partial,
        job.signals,
        evaluation,
        units,
    )


def _windows(job: Job, student: Loaded | Described, teacher: Any) -> Windows:
    """The data, which the first stage of a run writes; `teacher` is a model, where that is what writes."""
    tokens = job.partial / "tokens.bin"
    is_missing = not tokens.exists()
    job.accelerator.wait_for_everyone()  # all have looked before one writes
    if is_missing:
        known = student.vocabulary
        write_tokens(
            tokens, job.recipe.data, student.tokenizer, job.recipe.windows, teacher, vocabulary=known
        )
    job.accelerator.wait_for_everyone()
    windows = open_windows(tokens, job.recipe.data)
    for sentence in windows.repeated(job.recipe.windows) if is_missing else ():
        notice(sentence)
    return windows


def _stream(job: Job, stage: Stage, progress: Progress) -> Progress:
    """A stage that has one layer in memory at a time.

    What it leaves is a checkpoint in stages/NAME, not a state.
    """
    if job.accelerator.num_processes > 1:
        raise InvalidInput(
            f"stage {stage.name}: mode: stream runs in one process; use --profile single, or mode: layerwise"
        )
    place = job.partial / "stages" / stage.name
    work = place.with_name(f"{stage.name}.stream")
    student = describe_student(job.start, job.teacher, job.recipe.data.seq_len)
    windows = _windows(job, student, None)
    if job.recipe.evaluate:  # opened by the first stage in memory, which would be late to find it wrong
        check_held_out(job.recipe, student, windows.tokens)
    given = Streaming(job.recipe, stage, job.start, job.teacher, windows, progress.cursor, work, job.signals)
    metrics = Metrics(job.partial / "metrics.jsonl", stage.name, progress.tokens)

    def save() -> None:
        state.save(job.partial / "state", progress, state.Gathered(), job.recipe.save.keep)

    def begin() -> None:
        if (
            state.newest(job.partial / "state") is None
        ):  # else there is something to go on from, which nothing may endanger
            save()

    for losses in stream_stage(given, place, begin):
        progress = advance(job.recipe, stage, progress)
        metrics.record(progress, losses)
    save()
    shutil.rmtree(work)
    return progress
