"""The training loop: one stage of AdamW over packed windows.

It can resume from every saved step; on a CPU to the same bits.
"""

import math
from dataclasses import replace
from pathlib import Path

from ...core.errors import InvalidInput
from ...core.signals import Interrupted, deferred
from ..display import progress_table
from ..recipe.recipe import Recipe, Stage
from ..stages import state
from ..stages.align import Alignment
from ..stages.end_to_end import EndToEnd
from ..stages.optimizer import learning_rate
from ..stages.stage_work import StageContext, StageWork, sum_over_processes
from ..stages.state import Progress
from ..watch.evaluation import TrainingEvaluation
from ..watch.report import StageReport


def train_stage(
    context: StageContext,
    progress: Progress,
    found: Path | None,
    evaluation: TrainingEvaluation | None,
) -> Progress:
    """Train one stage from `progress` to its end, and return the progress there.

    `found` is the saved state that holds the optimizer and the adapters of a stage already begun.

    Raises:
        InvalidInput: the training diverged, the stage trains nothing, or the layers of student and teacher do
            not correspond.
        Interrupted: after the step in which a signal arrived.
    """
    run, stage = context.run, context.stage
    recipe, accelerator = run.recipe, run.accelerator
    steps = recipe.steps(stage)
    work: StageWork = (Alignment if stage.how == "layerwise" else EndToEnd)(context, found)
    stopped = 0
    with progress_table(stage.name, steps) as show:
        report = StageReport(context, work, progress, show, evaluation)
        with deferred(run.signals):
            while progress.step < steps and not stopped:
                rate = learning_rate(stage, progress.step, steps)
                losses, stopped = work.accumulate(progress.cursor)
                norm = work.step(rate)
                if not math.isfinite(norm):
                    raise InvalidInput(
                        f"stage {stage.name} diverged: the gradient of step {progress.step + 1} is {norm}; "
                        "use a lower lr"
                    )
                progress = advance(recipe, stage, progress)
                report.record(progress, {**losses, "lr": rate, "grad_norm": norm})
                ends = progress.step == steps
                if stopped or ends or progress.total_steps % recipe.save.every == 0:
                    gathered = state.Gathered(context.student, None if ends else work.optimizer)
                    place, keep = run.partial / "state", recipe.save.keep
                    state.save(place, progress, gathered, keep, writes=accelerator.is_main_process)
                    accelerator.wait_for_everyone()
            # A signal may have arrived after the sums of the last step were formed.
            stopped = stopped or sum_over_processes(run, {})[1]
            if stopped:
                step = f"step {progress.step} of {steps} of stage {stage.name}"
                raise Interrupted(stopped, f"stopped after {step}")
    accelerator.free_memory()
    return progress


def advance(recipe: Recipe, stage: Stage, progress: Progress) -> Progress:
    """Return the progress after one more optimizer step."""
    windows = recipe.step_windows(stage)
    return replace(
        progress,
        step=progress.step + 1,
        total_steps=progress.total_steps + 1,
        cursor=progress.cursor + windows,
        tokens=progress.tokens + windows * recipe.data.seq_len,
    )
