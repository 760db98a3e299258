"""The training loop.

One stage of AdamW over packed windows, resumable from every saved step (on a CPU to the same bits).
"""

import math
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...core.errors import InvalidInput
from ..data.batch import Batch
from ..data.order import Windows
from ..losses.objective import Objective, Seen
from ..parallel.sharing import (
    call_inside,
    gather_no_more,
    rework_layers,
    share,
    share_teacher,
    unsynced,
    whole,
)
from ..parallel.units import Units
from ..recipe.recipe import Recipe, Stage
from ..run import state
from ..run.signals import Interrupted as Interrupted
from ..run.signals import deferred
from ..run.state import Progress
from ..watch.evaluation import Evaluation
from ..watch.report import reporting
from .capture import Captured
from .schedule import learning_rate
from .student import check_model
from .teacher import Teacher
from .weights import set_trainable

_BETAS = (0.9, 0.95)  # as language models are usually trained: the second moment's half-life is 14 steps


@dataclass(frozen=True)
class Run:
    """What a stage is given.

    Attributes:
        recipe: what to do.
        accelerator: device, processes, precision.
        student: with the weights that the stage starts from; trained in place.
        teacher: a constant.
        windows: the data.
        partial: working directory.
        signals: those received so far.
        evaluation: on held-out text, if there is one.
        units: where the student gets its weights from while it is sharded; None: it has them.
    """

    recipe: Recipe
    accelerator: Accelerator
    student: Any
    teacher: Teacher
    windows: Windows
    partial: Path
    signals: list[int] = field(default_factory=list)
    evaluation: Evaluation | None = None
    units: Units | None = None


class Work(Protocol):
    """What differs between modes: how a step's gradient is formed, and how a step is taken.

    Attributes:
        optimizer: over what the stage trains.
    """

    optimizer: torch.optim.Optimizer

    def accumulate(self, cursor: int) -> tuple[dict[str, float], int]:
        """Add up the gradient of the step whose windows begin at `cursor`.

        Returns:
            Every loss over the whole step, and the number of a signal that some process received, or 0.
        """

    def step(self, rate: float) -> float:
        """One step of the optimizer at a learning rate.

        Returns the norm of the gradient before it was clipped.
        """

    def measure(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        """`evaluation.MEASURES` of the student, summed over a batch's scored tokens, without a graph."""


def train_stage(
    run: Run,
    progress: Progress,
    found: Path | None,
    start: Callable[[Run, Stage, Path | None], Work] | None = None,
) -> Progress:
    """Train one stage from `progress` to its end.

    Args:
        run: what the stage is given.
        progress: where in the stage to begin.
        found: the saved state that holds the optimizer and the adapters of a stage already begun.
        start: makes the stage's work; by default `EndToEnd`.

    Raises:
        InvalidInput: the training diverged, or the stage trains nothing.
        Interrupted: after the step in which a signal arrived.
    """
    stage = run.recipe.stages[progress.stage]
    steps = run.recipe.steps(stage)
    work = (start or EndToEnd)(run, stage, found)
    stopped = 0
    with reporting(run, stage, work, progress) as report, deferred(run.signals):
        while progress.step < steps and not stopped:
            rate = learning_rate(stage, progress.step, steps)
            sums, stopped = work.accumulate(progress.cursor)
            norm = work.step(rate)
            if not math.isfinite(norm):
                raise InvalidInput(
                    f"stage {stage.name} diverged: the gradient of step {progress.step + 1} is {norm}; "
                    f"use a lower lr"
                )
            progress = advance(run.recipe, stage, progress)
            report.tell(progress, {**sums, "lr": rate, "grad_norm": norm})
            ends = progress.step == steps
            if stopped or ends or progress.total_steps % run.recipe.save.every == 0:
                save_state(run, progress, None if ends else work.optimizer)
        # One that came when the sums of the last step were formed already.
        stopped = stopped or sum_over_processes(run, {})[1]
        if stopped:
            raise Interrupted(stopped, f"stopped after step {progress.step} of {steps} of stage {stage.name}")
    run.accelerator.free_memory()
    return progress


class EndToEnd:
    """The work of a stage whose losses are those of the student as a whole.

    A step's windows are dealt out to the processes in turn and every sum is divided by the scored tokens of
    the whole step, so neither the number of processes nor the size of a micro-batch changes the gradient.

    Args:
        run: what the stage is given.
        stage: the stage.
        found: a saved state to take optimizer and adapters from.
    """

    def __init__(self, run: Run, stage: Stage, found: Path | None) -> None:
        self._run, self._stage = run, stage
        set_trainable(run.student, stage)
        if found and stage.train == "lora" and run.units is None:
            state.restore_weights(found, run.student)  # once more: the adapters are there only now
        own = Objective(run.student, stage)
        compiling = (
            run.recipe.compile and not own.sees_layers
        )  # hooks come and go there, which would compile anew each time
        rework_layers(run.student, checkpointing=run.recipe.gradient_checkpointing, compiling=compiling)
        share_teacher(run.teacher)
        if "hidden_mse" in stage.learnt:
            own.calibrate(run.teacher, run.windows.batch([0]).to(run.accelerator.device))
        self._look = own.look
        self._objective = share(run.accelerator, own, run.student, run.units)
        if run.units:
            call_inside(self._objective, partial(check_model, run.units.loaded, run.recipe))
        self.optimizer = adamw(
            [parameter for parameter in run.student.parameters() if parameter.requires_grad], stage
        )
        if found:
            state.restore_optimizer(found, run.student, self.optimizer)

    def accumulate(self, cursor: int) -> tuple[dict[str, float], int]:
        """See `Work`; losses are in nats a token."""
        run, stage, accelerator = self._run, self._stage, self._run.accelerator
        count = run.recipe.step_windows(stage)
        mine = range(cursor + accelerator.process_index, cursor + count, accelerator.num_processes)
        tokens = max(1, run.windows.scored(range(cursor, cursor + count)))
        totals: dict[str, Tensor] = {}
        for first in range(0, len(mine), stage.micro_batch):
            batch = run.windows.batch(mine[first : first + stage.micro_batch]).to(accelerator.device)
            is_last = first + stage.micro_batch >= len(mine)
            with nullcontext() if is_last else unsynced(accelerator, self._objective):
                sums = self._objective(batch, self._look(run.teacher, batch))
                # Gradients are averaged over processes; this makes it their sum.
                accelerator.backward(sums.pop("loss") * (accelerator.num_processes / tokens))
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
        values, stopped = sum_over_processes(run, totals)
        return {name: value / tokens for name, value in values.items()}, stopped

    def step(self, rate: float) -> float:
        """See `Work`."""
        trainable = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = float(
            whole(self._run.accelerator.clip_grad_norm_(trainable, self._stage.grad_clip or math.inf))
        )
        return take_step(self.optimizer, rate, norm)

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        """See `Work`."""
        sums: dict[str, Tensor] = self._objective(
            batch, Seen(teacher.predictions(batch), Captured()), measuring=True
        )
        gather_no_more(self._objective)
        return sums


def take_step(optimizer: torch.optim.Optimizer, rate: float, norm: float) -> float:
    """Step at a learning rate, unless the gradient's norm, which is returned, is not finite."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


def sum_over_processes(run: Run, totals: Mapping[str, Tensor]) -> tuple[dict[str, float], int]:
    """Sums of every process added up, and the number of a signal that one of them received, or 0.

    All processes must stop after the same step, whichever of them got the signal.
    """
    signum = torch.tensor(float(max(run.signals, default=0)), device=run.accelerator.device)
    *values, received = run.accelerator.reduce(torch.stack([*totals.values(), signum]), "sum").tolist()
    stopped = max(run.signals, default=int(signal.SIGTERM)) if received else 0
    return dict(zip(totals, values, strict=True)), stopped


def adamw(trainable: list[nn.Parameter], stage: Stage) -> torch.optim.Optimizer:
    """A fresh optimizer; norms and biases do not decay."""
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    others = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": stage.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=stage.lr, betas=_BETAS)


def advance(recipe: Recipe, stage: Stage, progress: Progress) -> Progress:
    """One optimizer step further."""
    windows = recipe.step_windows(stage)
    return replace(
        progress,
        step=progress.step + 1,
        total_steps=progress.total_steps + 1,
        cursor=progress.cursor + windows,
        tokens=progress.tokens + windows * recipe.data.seq_len,
    )


def save_state(run: Run, progress: Progress, optimizer: torch.optim.Optimizer | None) -> None:
    """Save the state of a step; without an optimizer at a stage's end. All processes call it."""
    gathered = state.Gathered(run.student, optimizer)
    if run.accelerator.is_main_process:
        state.save(run.partial / "state", progress, gathered, run.recipe.save.keep)
    else:
        gathered.discard()
    run.accelerator.wait_for_everyone()
