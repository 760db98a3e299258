"""The training loop: one stage of AdamW over packed windows, resumable from every saved step (on a CPU to the same bits)."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..convert.errors import InvalidInput
from . import state
from .data import Windows
from .display import progress_bar
from .head import predict
from .metrics import Metrics
from .recipe import Recipe, Stage
from .schedule import learning_rate
from .state import Progress
from .student import Objective, set_trainable

_BETAS = (0.9, 0.95)  # as language models are usually trained: the second moment's half-life is 14 steps


class Interrupted(Exception):
    """SIGTERM or SIGINT arrived; the state is saved and the same recipe goes on from there.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@dataclass(frozen=True)
class Run:
    """What all stages share.

    Attributes:
        recipe: what to do.
        accelerator: device, processes, precision.
        student: trained in place.
        teacher: frozen.
        windows: the data.
        partial: working directory.
        signals: those received so far.
    """

    recipe: Recipe
    accelerator: Accelerator
    student: Any
    teacher: Any
    windows: Windows
    partial: Path
    signals: list[int] = field(default_factory=list)


def train_stage(run: Run, progress: Progress, found: Path | None) -> Progress:
    """Train one stage from `progress` to its end.

    Args:
        run: what all stages share.
        progress: where in the stage to begin.
        found: the saved state that holds the optimizer of a stage already begun.

    Raises:
        InvalidInput: the training diverged, or the stage trains nothing.
        Interrupted: after the step in which a signal arrived.
    """
    stage = run.recipe.stages[progress.stage]
    steps = run.recipe.steps(stage)
    trainable = set_trainable(run.student, stage.train)
    optimizer = _adamw(trainable, stage)
    if found:
        state.restore_optimizer(found, run.student, optimizer)
    objective, optimizer = run.accelerator.prepare(Objective(run.student, stage.losses), optimizer)
    metrics = Metrics(run.partial / "metrics.jsonl", stage.name, progress.tokens)
    with progress_bar(stage.name, steps, progress.step) as show:
        while progress.step < steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(stage, progress.step, steps)
            losses, stopped = _accumulate(run, objective, stage, progress.cursor)
            norm = float(run.accelerator.clip_grad_norm_(trainable, stage.grad_clip or math.inf))
            if not math.isfinite(norm):
                raise InvalidInput(
                    f"stage {stage.name} diverged: the gradient of step {progress.step + 1} is {norm}; use a lower lr"
                )
            optimizer.step()
            optimizer.zero_grad()
            progress = _advance(run.recipe, stage, progress)
            ends = progress.step == steps
            logs = progress.step == 1 or progress.total_steps % run.recipe.log_every == 0 or ends
            if logs and run.accelerator.is_main_process:
                metrics.append(progress, {**losses, "lr": optimizer.param_groups[0]["lr"], "grad_norm": norm})
            show(progress.step, "  ".join(f"{name} {value:.4f}" for name, value in losses.items()))
            if stopped or ends or progress.total_steps % run.recipe.save.every == 0:
                _save(run, progress, optimizer)
            if stopped:
                raise Interrupted(stopped, f"stopped after step {progress.step} of {steps} of stage {stage.name}")
    objective, optimizer = run.accelerator.free_memory(objective, optimizer)  # the next stage wraps the model anew
    return progress


def _accumulate(run: Run, objective: nn.Module, stage: Stage, cursor: int) -> tuple[dict[str, float], int]:
    """Add up the gradient of one optimizer step.

    The step's windows are dealt out to the processes in turn and every sum is divided by the tokens of the whole step, so
    neither the number of processes nor the size of a micro-batch changes the gradient.

    Returns:
        Every loss in nats a token over the whole step, and the number of a signal that some process received, or 0.
    """
    accelerator, count = run.accelerator, run.recipe.step_windows(stage)
    mine = range(cursor + accelerator.process_index, cursor + count, accelerator.num_processes)
    tokens = count * run.recipe.data.seq_len
    totals: dict[str, Tensor] = {}
    for first in range(0, len(mine), stage.micro_batch):
        batch_BS = run.windows.batch(mine[first : first + stage.micro_batch]).to(accelerator.device)
        is_last = first + stage.micro_batch >= len(mine)
        with nullcontext() if is_last else accelerator.no_sync(objective):
            with torch.no_grad():
                teacher = predict(run.teacher, batch_BS[:, :-1])
            sums = objective(batch_BS[:, :-1], batch_BS[:, 1:], teacher)
            # Data parallelism averages gradients over processes; this makes it their sum.
            accelerator.backward(sums.pop("loss") * (accelerator.num_processes / tokens))
        totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
    # All processes must stop after the same step, whichever of them got the signal.
    signum = torch.tensor(float(max(run.signals, default=0)), device=accelerator.device)
    *values, received = accelerator.reduce(torch.stack([*totals.values(), signum]), "sum").tolist()
    stopped = max(run.signals, default=int(signal.SIGTERM)) if received else 0
    return {name: value / tokens for name, value in zip(totals, values, strict=True)}, stopped


def _adamw(trainable: list[nn.Parameter], stage: Stage) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    others = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": stage.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=stage.lr, betas=_BETAS)


def _advance(recipe: Recipe, stage: Stage, progress: Progress) -> Progress:
    windows = recipe.step_windows(stage)
    return replace(
        progress,
        step=progress.step + 1,
        total_steps=progress.total_steps + 1,
        cursor=progress.cursor + windows,
        tokens=progress.tokens + windows * recipe.data.seq_len,
    )


def _save(run: Run, progress: Progress, optimizer: torch.optim.Optimizer) -> None:
    if run.accelerator.is_main_process:
        state.save(run.partial / "state", progress, run.student, optimizer, run.recipe.save.keep)
    run.accelerator.wait_for_everyone()


@contextmanager
def collect_signals(received: list[int]) -> Iterator[None]:
    """Append SIGTERM and SIGINT to `received` instead of dying from them; a second one acts as usual."""

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, previous[signum])

    previous: dict[int, Any] = {signum: signal.signal(signum, receive) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
