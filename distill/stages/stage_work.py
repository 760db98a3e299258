"""A run as a whole, a stage of it, and the interface between the training loop and the modes of a stage."""

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from ..data.batch import Batch
from ..data.order import TrainingWindows
from ..parallel.layer_units import LayerUnits
from ..recipe.recipe import Recipe, Stage
from . import state
from .teacher import Teacher


@dataclass(frozen=True)
class Run:
    """A run as a whole.

    Attributes:
        student, teacher: directories of the checkpoint to be trained and of the model to learn from.
        partial: working directory.
        signals: numbers of the signals received so far.
    """

    recipe: Recipe
    accelerator: Accelerator
    student: Path
    teacher: Path
    partial: Path
    signals: list[int]

    @property
    def start(self) -> Path:
        """The checkpoint that stages in memory start from: the last streamed stage's, or the student."""
        streamed = [stage.name for stage in self.recipe.stages if stage.how == "stream"]
        places = [self.partial / "stages" / name for name in reversed(streamed)]
        return next((place for place in places if place.exists()), self.student)

    def has_weights(self, found: Path) -> bool:
        """Return whether a saved state is of a stage in memory: a streamed stage leaves a checkpoint."""
        return self.recipe.stages[state.read_progress(found).stage].how != "stream"


@dataclass(frozen=True)
class StageContext:
    """The models and data that a stage works with.

    Attributes:
        student: the model with the weights that the stage starts from; trained in place.
        teacher: a constant.
        units: the source of the student's weights while it is sharded; None if it has them already.
    """

    run: Run
    stage: Stage
    student: Any
    teacher: Teacher
    windows: TrainingWindows
    units: LayerUnits | None = None

    def micro_batches(self, cursor: int) -> Iterator[tuple[Batch, bool]]:
        """Yield this process's micro-batches of a step, and whether each is its last."""
        accelerator, size = self.run.accelerator, self.stage.micro_batch
        count = self.run.recipe.step_windows(self.stage)
        mine = range(cursor + accelerator.process_index, cursor + count, accelerator.num_processes)
        for first in range(0, len(mine), size):
            batch = self.windows.batch(mine[first : first + size])
            yield batch.to(accelerator.device), first + size >= len(mine)


class StageWork(Protocol):
    """The part of training that differs between modes: forming a step's gradient, and taking the step.

    Attributes:
        optimizer: holds the weights that the stage trains.
    """

    optimizer: torch.optim.Optimizer

    def accumulate(self, cursor: int) -> tuple[dict[str, float], int]:
        """Add up the gradient of the step whose windows begin at `cursor`.

        Returns:
            Every loss over the whole step, and the number of a signal that some process received, or 0.
        """

    def step(self, rate: float) -> float:
        """Take one step at a learning rate; return the norm of the gradient before it was clipped."""

    def measure(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        """Return `evaluation.MEASURES` of the student, summed over a batch's scored tokens."""


def sum_over_processes(run: Run, totals: Mapping[str, Tensor]) -> tuple[dict[str, float], int]:
    """Return the totals summed over processes, and the number of a signal that one of them received, or 0.

    All processes must stop after the same step, whichever of them received the signal.
    """
    signum = torch.tensor(float(max(run.signals, default=0)), device=run.accelerator.device)
    *values, received = run.accelerator.reduce(torch.stack([*totals.values(), signum]), "sum").tolist()
    stopped = max(run.signals, default=int(signal.SIGTERM)) if received else 0
    return dict(zip(totals, values, strict=True)), stopped
