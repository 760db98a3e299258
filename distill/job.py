"""A whole distillation: from a recipe to a checkpoint. While it runs everything lies beside the output, in

<output>.partial/  tokens.bin  metrics.jsonl  state/step-N/  final/      final becomes <output>, the rest is removed
"""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from ..convert.card import distilled_record, source_directory, write_record
from ..convert.checkpoint import check_output, finish
from ..convert.console import notice
from ..convert.errors import InvalidInput
from ..convert.hub import resolve
from . import state
from .claim import claimed
from .data import open_windows, write_tokens
from .loop import Run, collect_signals, train_stage
from .metrics import summarise, trim_metrics
from .recipe import Recipe, differences
from .state import Progress
from .student import load_student, publish
from .teacher import load_teacher


def distill(recipe: Recipe) -> dict[str, Any]:
    """Train `recipe.student` and write `recipe.output`; a run that was stopped goes on where its state was last saved.

    Returns:
        Plain values: `output`, `student`, `teacher`, `steps`, `tokens`, and for every stage its losses at both ends.

    Raises:
        InvalidInput: something in the recipe cannot be used, the training diverged, or the disk is full.
        Interrupted: a signal stopped the training.
    """
    output = Path(recipe.output).expanduser()
    with _as_settings():
        check_output(output)
        student = resolve(recipe.student)
        teacher = resolve(recipe.teacher) if recipe.teacher else source_directory(student)
    if teacher is None:
        raise InvalidInput(f"{student} has no kvfold.json that names its source; name the teacher with --set teacher=DIR")
    for directory in (student, teacher):
        if output.resolve().is_relative_to(directory.resolve()):
            raise InvalidInput(
                f"output {output} lies inside {directory}, which is never written; name another with --set output=DIR"
            )
    accelerator = _accelerator(recipe)
    partial = output.with_name(output.name + ".partial")
    with claimed(partial) if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        progress, found = _last_progress(recipe, partial)
        if accelerator.is_main_process:
            trim_metrics(partial / "metrics.jsonl", progress.total_steps)
            if found:
                notice(f"going on after step {progress.total_steps}, saved in {found}")
        run = _load(recipe, accelerator, student, teacher, partial, found)
        with collect_signals(run.signals):
            for index in range(progress.stage, len(recipe.stages)):
                if index > progress.stage:
                    progress, found = replace(progress, stage=index, step=0), None
                progress = train_stage(run, progress, found)
        result = {"student": str(student), "teacher": str(teacher), **summarise(partial / "metrics.jsonl", recipe)}
        accelerator.wait_for_everyone()  # all have read the metrics before they are moved
        if accelerator.is_main_process:
            _write(run, student, result, output)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return {"output": str(output), **result}


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


def _accelerator(recipe: Recipe) -> Accelerator:
    has_bf16 = recipe.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    bf16 = recipe.precision == "bf16" or (recipe.precision == "auto" and has_bf16)
    # All wait while one tokenises and writes, which may take far longer than the usual limit of ten minutes.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))
    accelerator = Accelerator(cpu=recipe.device == "cpu", mixed_precision="bf16" if bf16 else "no", kwargs_handlers=[patience])
    # A launcher's configuration may set it, and accelerate would divide the loss by it; the loop divides by tokens.
    accelerator.gradient_accumulation_steps = 1
    processes = accelerator.num_processes
    for stage in recipe.stages:
        windows = recipe.step_windows(stage)
        if windows % processes:
            enough = math.ceil(windows / processes) * processes * recipe.data.seq_len
            raise InvalidInput(
                f"batch_tokens {stage.batch_tokens} of stage {stage.name} is {windows} windows, which do not divide among "
                f"{processes} processes; {enough} would"
            )
    return accelerator


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


def _load(
    recipe: Recipe,
    accelerator: Accelerator,
    student_directory: Path,
    teacher_directory: Path,
    partial: Path,
    found: Path | None,
) -> Run:
    """Models, with the weights of the state to go on from, and data."""
    student = load_student(student_directory, recipe.data.seq_len, accelerator.device)
    dtype = "bfloat16" if accelerator.mixed_precision == "bf16" else "float32"
    teacher = load_teacher(teacher_directory, dtype, accelerator.device, student)
    if found:
        state.restore_weights(found, student.model)
    tokens = partial / "tokens.bin"
    if accelerator.is_main_process and not tokens.exists():
        write_tokens(tokens, recipe.data, student.tokenizer, recipe.windows)
    accelerator.wait_for_everyone()
    windows = open_windows(tokens, recipe.data)
    if accelerator.is_main_process and len(windows) < recipe.windows:
        notice(f"{recipe.data.source} holds {len(windows)} windows and the run reads {recipe.windows}: some are seen again")
    return Run(recipe, accelerator, student.model, teacher.model, windows, partial)


def _write(run: Run, student: Path, result: dict[str, Any], output: Path) -> None:
    """The distilled checkpoint, all or nothing."""
    final = run.partial / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    publish(run.student, student, final)
    shutil.copyfile(run.partial / "metrics.jsonl", final / "metrics.jsonl")
    write_record(final, distilled_record(student, run.recipe.resolved(), result))
    with _as_settings():
        finish(final, output)
