"""A whole distillation: from a recipe to a checkpoint.

While it runs, everything is stored next to the output:

    <output>.partial/  written/  tokens.bin  metrics.jsonl  evaluations.jsonl  state/step-N/  best/step-N/
                       stages/NAME/  trackers/  final/

At the end final/ becomes <output>, and the rest is removed.

Every stage begins with freshly loaded models and the weights saved last, whether a run resumes or just
reaches its next stage. A stage's changes to its models (shards, adapters, frozen weights) therefore never
reach the next stage, and a resumed run takes the same path.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...checkpoints.identity import fingerprint
from ...convert.calibration.written_batches import WrittenBatches
from ...core.console import listening, notice
from ...core.errors import InvalidInput
from ...core.memory import enough_memory, remedy_of
from ...core.signals import interruptible
from ...core.work import WRITTEN, WorkDir, claimed, discard_finished, remove_own
from ...models.causal_lm import Described, Loaded
from ...texts.sources import check_encoding
from ..data.order import TrainingWindows
from ..data.token_store import open_windows, write_tokens
from ..parallel.accelerator import is_sharded, make_accelerator
from ..recipe.data_section import SELF
from ..recipe.recipe import SHARED, Recipe, Stage
from ..stages import state
from ..stages.cached_teacher import Needed, cache_for, cached_teacher
from ..stages.stage_work import Run, StageContext
from ..stages.state import Progress
from ..stages.stream import Streaming, describe_student, stream_stage
from ..stages.student import open_student, rounding
from ..stages.student_checkpoint import unrounded
from ..stages.teacher import Online, Teacher, open_teacher
from ..watch.evaluation import TrainingEvaluation, best_kept, read_evaluations, summary
from ..watch.held_out import check_held_out, check_unseen, open_held_out
from ..watch.metrics import append_step, read_lines, summarise, trim_metrics
from ..watch.trackers import check_trackers, directory_of, tracking
from .export import write_output, write_stage
from .loop import advance, train_stage
from .preflight import check_stages
from .resume import check_models, complete, find_models, find_result, last_progress


@dataclass(frozen=True)
class TrainingResult:
    """A finished distillation.

    Attributes:
        output: directory of the distilled checkpoint.
        student: directory of the checkpoint that was trained.
        teacher: directory of the model that it learned from.
        steps: optimizer steps of all stages.
        tokens: tokens trained on.
        stages: for every stage its `name`, `steps`, and its losses at its `first` step and over its `last`
            tenth, in nats per token for the losses that compare distributions; None where a power failure
            took them.
        evaluation: perplexities of teacher, start and output on held-out text, and the share recovered; None
            if the recipe evaluates nothing.
        notices: sentences on what may surprise the reader, given while this process ran.
        record: everything above as it is stored in the output's kvfold.json.
        is_new: whether this process trained; False where the output was complete already.
    """

    output: Path
    student: Path
    teacher: Path
    steps: int
    tokens: int
    stages: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    notices: tuple[str, ...]
    record: dict[str, Any]
    is_new: bool = True

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the output's metrics.jsonl: one for every logged step."""
        return read_lines(self.output / "metrics.jsonl")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `kvfold distill --json` prints them."""
        return {"output": str(self.output), **self.record}


def distill(recipe: Recipe) -> TrainingResult:
    """Train `recipe.student` and write `recipe.output`.

    A run that was stopped resumes where its state was last saved. Where the output of the same run exists
    already, nothing is trained and its result is returned.

    Args:
        recipe: the run. `as_recipe` makes one of a YAML file, `Recipe.model_validate` of a mapping.

    Returns:
        The result of the run.

    Raises:
        InvalidInput: something in the recipe cannot be used, the training diverged, or the disk or memory is
            full.
        Interrupted: a signal stopped the run; the same recipe resumes it.

    Example:
        >>> from pathlib import Path
        >>> from kvfold.distill.recipe.recipe_file import as_recipe
        >>> result = distill(as_recipe(Path("recipe.yaml")))  # doctest: +SKIP
        >>> result.output, result.steps  # doctest: +SKIP
    """
    signals: list[int] = []
    output, partial = recipe.output_directory, recipe.working_directory
    with enough_memory(_less(recipe)), interruptible(signals), listening() as heard:
        record = find_result(recipe, output)
        is_new = record is None
        models = find_models(recipe, output) if is_new else None
        check_trackers(recipe.trackers)
        accelerator = make_accelerator(recipe, directory_of(recipe))
        if models:
            record = _distill(Run(recipe, accelerator, *models, partial, signals), output)
        else:
            accelerator.wait_for_everyone()  # before rank 0 removes what the others still read
            if accelerator.is_main_process:
                notice(complete(output))
                discard_finished(output)
            accelerator.end_training()
    assert record is not None
    return TrainingResult(
        output=output,
        student=Path(record["student"]),
        teacher=Path(record["teacher"]),
        steps=record["steps"],
        tokens=record["tokens"],
        stages=record["stages"],
        evaluation=record.get("evaluation"),
        notices=tuple(heard.notices),
        record=record,
        is_new=is_new,
    )


def _less(recipe: Recipe) -> str:
    """Return what takes less memory than a recipe does."""
    stages = recipe.stages
    has_whole = any(stage.how == "end_to_end" for stage in stages)
    may_share = (
        recipe.teacher is None  # another one shares nothing
        and not (has_whole and is_sharded())
        and all(stage.train != "all" for stage in stages)
        and any(stage.how != "stream" for stage in stages)
    )
    ways = {
        "micro_batch: 1 in each stage": any(recipe.pass_windows(stage) > 1 for stage in stages),
        "gradient_checkpointing: true": has_whole and not recipe.gradient_checkpointing,
        f"teacher: {SHARED}": may_share,
        "train: attention": any(stage.train == "all" for stage in stages),
    }
    found = remedy_of(ways, "a smaller data.seq_len")
    return f"{found}; kvfold distill explain predicts the memory of each stage"


def _distill(run: Run, output: Path) -> dict[str, Any]:
    """Run all stages and write the output; return its record."""
    recipe, accelerator, partial = run.recipe, run.accelerator, run.partial
    check_stages(recipe, run.student, run.teacher, sharded=is_sharded())
    with _claimed(partial) if accelerator.is_main_process else nullcontext() as work:
        accelerator.wait_for_everyone()
        progress, found = last_progress(recipe, partial, run.student, run.teacher)
        if accelerator.is_main_process:
            for name in ("metrics.jsonl", "evaluations.jsonl"):
                trim_metrics(partial / name, progress.total_steps)
            if found:
                notice(f"resuming after step {progress.total_steps}, saved in {found}")
            for sentence in (*recipe.rounded_batches(), *recipe.few_steps(), *unrounded(run.student)):
                notice(sentence)
        with tracking(accelerator, recipe, progress.total_steps):
            progress = _run_stages(run, progress, found)
        record: dict[str, Any] = {
            "student": str(run.student),
            "teacher": str(run.teacher),
            "models": progress.models,
            "steps": progress.total_steps,
            "tokens": progress.tokens,
            "stages": summarise(partial / "metrics.jsonl", recipe),
        }
        chosen = best_kept(partial, recipe.evaluate)
        history = read_evaluations(partial / "evaluations.jsonl")
        if recipe.evaluate and history:
            record["evaluation"] = summary(history, chosen)
        accelerator.wait_for_everyone()  # before rank 0 moves the metrics that the others still read
        if work is not None:
            work.finish(write_output(run, record, chosen), output)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return record


@contextmanager
def _claimed(partial: Path) -> Iterator[WorkDir]:
    """Claim the working directory of a run.

    What an earlier run left is only of use with a saved state, apart from text that the teacher has written.
    A state or text is kept after an error.
    """

    def keeps(work: WorkDir) -> bool:
        return bool(state.saved(partial / "state") or [*(partial / WRITTEN).glob("batch-*.safetensors")])

    option = "output with --set output=DIR"
    with claimed(partial, "distillation", option=option, keeps=keeps, reads_earlier=True) as work:
        work.begin({})
        if state.saved(partial / "state"):
            remove_own(partial / WRITTEN)  # the text is in tokens.bin
        else:
            work.clear(keep=WRITTEN)
        yield work


def _run_stages(run: Run, progress: Progress, found: Path | None) -> Progress:
    """Run all stages from `progress` on, which was read from the state `found`."""
    for index in range(progress.stage, len(run.recipe.stages)):
        stage = run.recipe.stages[index]
        if index > progress.stage:
            progress = replace(progress, stage=index, step=0)
        if progress.step < run.recipe.steps(stage):
            if stage.how == "stream":
                progress = _stream(run, stage, progress)
            else:
                latest = found
                if latest is None and progress.total_steps:
                    latest = state.newest(run.partial / "state")
                context, evaluation = _open(run, stage, latest)
                check_models(progress.models, run.partial, run.student, run.teacher)
                progress = train_stage(context, progress, latest if progress.step else None, evaluation)
            found = None
        if run.recipe.save.keep_stages and index + 1 < len(run.recipe.stages):
            write_stage(run, stage)
    return progress


def _open(run: Run, stage: Stage, latest: Path | None) -> tuple[StageContext, TrainingEvaluation | None]:
    """Return what a stage works with: the models, with the weights of a state, and the data."""
    recipe, accelerator = run.recipe, run.accelerator
    if latest and not run.has_weights(latest):
        latest = None
    student, units = open_student(run.start, latest, stage, recipe, accelerator)
    if stage.cache_dtype:
        rounding(student.model, stage)
    cache = cache_for(stage, recipe)
    held_out = open_held_out(recipe, student)
    writes_text = _writes_text(run)
    accelerator.wait_for_everyone()  # before one writes what the others look for

    def load_teacher() -> Online:
        alone = writes_text or cache is not None
        return open_teacher(run.teacher, stage, recipe, accelerator, student, alone=alone)

    online = load_teacher() if writes_text or cache is None else None
    windows = _windows(run, student, online.model if online else None)
    if held_out and recipe.evaluate:
        check_unseen(held_out, recipe.evaluate.source, windows.tokens)
    teacher: Teacher | None = online
    if cache is not None:
        needed: Needed = [(windows, recipe.windows)]
        if held_out:
            needed = [*needed, (held_out, len(held_out))]
        teacher = cached_teacher(
            cache, needed, recipe, run.teacher, accelerator, lambda: online or load_teacher()
        )
    assert teacher
    evaluation = None
    if held_out and recipe.evaluate:
        evaluation = TrainingEvaluation(run, recipe.evaluate, held_out, teacher)
    return StageContext(run, stage, student.model, teacher, windows, units), evaluation


def _writes_text(run: Run) -> bool:
    has_own_text = any(source.source == SELF for source in run.recipe.data.sources)
    return has_own_text and not (run.partial / "tokens.bin").exists()


def _windows(run: Run, student: Loaded | Described, teacher: Any) -> TrainingWindows:
    """Return the data, which the first stage of a run writes; `teacher` is the model that writes text."""
    tokens = run.partial / "tokens.bin"
    is_missing = not tokens.exists()
    run.accelerator.wait_for_everyone()  # before one writes what the others look for
    data, count = run.recipe.data, run.recipe.windows
    if is_missing:
        for source in data.sources:  # the teacher may write text for hours before a flaw is read
            check_encoding(source.source)
        kept = None
        if teacher is not None and _writes_text(run):
            # The same weights write another text where they are rounded otherwise.
            model = f"{fingerprint(run.teacher)} {teacher.dtype} {teacher.device.type}"
            kept = WrittenBatches(run.partial / WRITTEN, model)
        write_tokens(
            tokens, data, student.tokenizer, count, teacher, vocabulary=student.vocabulary, kept=kept
        )
    run.accelerator.wait_for_everyone()
    windows = open_windows(tokens, data, None if is_missing else student.vocabulary)
    if is_missing:
        for sentence in windows.repeated(count):
            notice(sentence)
    return windows


def _stream(run: Run, stage: Stage, progress: Progress) -> Progress:
    """Run a stage that has one layer in memory at a time.

    Its result is a checkpoint in stages/NAME, not a state.
    """
    recipe = run.recipe
    if run.accelerator.num_processes > 1:
        raise InvalidInput(
            f"stage {stage.name}: mode: stream runs in one process; use --profile single, or mode: layerwise"
        )
    student = describe_student(run.start, run.teacher, recipe.data.seq_len)
    windows = _windows(run, student, None)
    if recipe.evaluate:  # the first stage in memory opens it, which would be late to find it wrong
        check_held_out(recipe, student, windows.tokens)
    given = Streaming(run, stage, run.start, windows, progress.cursor)

    def save() -> None:
        state.save(run.partial / "state", progress, state.Gathered(), recipe.save.keep)

    def begin() -> None:
        if state.newest(run.partial / "state") is None:  # a state to resume from must not be put at risk
            save()

    for losses in stream_stage(given, begin):
        progress = advance(recipe, stage, progress)
        append_step(run.partial / "metrics.jsonl", stage.name, progress, losses)
    save()
    shutil.rmtree(given.work)
    return progress
