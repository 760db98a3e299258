"""Training of the student as a whole, on losses of its predictions and layers (mode: end_to_end)."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...models.decoder import decoder_layers
from ..data.batch import Batch
from ..parallel.sharding import call_inside, distribute, reshard, shard_teacher, without_sync
from ..parallel.tensors import full_tensor
from . import state
from .capture import Captured
from .objective import Objective, TeacherView
from .optimizer import adamw, take_step
from .stage_work import StageContext, sum_over_processes
from .student import check_model
from .teacher import Teacher
from .weights import set_trainable


class EndToEnd:
    """The work of a stage with mode: end_to_end; the optimizer and adapters may be those of a saved state.

    A step's windows are dealt to the processes in turn. Every sum is divided by the number of scored tokens
    of the whole step. So neither the number of processes nor the size of a micro-batch changes the gradient.
    """

    def __init__(self, context: StageContext, found: Path | None) -> None:
        self._context, stage, recipe = context, context.stage, context.run.recipe
        set_trainable(context.student, stage)
        if found and stage.train == "lora" and context.units is None:
            state.restore_weights(found, context.student)  # again, since the adapters exist only now
        objective = Objective(context.student, stage)
        # Hooks come and go where layers are compared, and each change would compile again.
        compiling = recipe.compile and not stage.of_layers
        if compiling or recipe.gradient_checkpointing:
            for layer in decoder_layers(context.student):
                if recipe.gradient_checkpointing:
                    layer.forward = _recomputed(layer.forward)
                if compiling:
                    layer.compile()
        shard_teacher(context.teacher)
        accelerator = context.run.accelerator
        if "hidden_mse" in stage.learnt:
            objective.calibrate(context.teacher, context.windows.batch([0]).to(accelerator.device))
        self._view = objective.view
        self._objective = distribute(accelerator, objective, context.student, context.units)
        if context.units:
            call_inside(self._objective, partial(check_model, context.units.loaded, recipe))
        trainable = [parameter for parameter in context.student.parameters() if parameter.requires_grad]
        self.optimizer = adamw(trainable, stage)
        if found:
            state.restore_optimizer(found, context.student, self.optimizer)

    def accumulate(self, cursor: int) -> tuple[dict[str, float], int]:
        """Form the gradient as `StageWork` says; losses are in nats per token."""
        context, accelerator = self._context, self._context.run.accelerator
        count = context.run.recipe.step_windows(context.stage)
        tokens = max(1, context.windows.scored(range(cursor, cursor + count)))
        totals: dict[str, Tensor] = {}
        for batch, is_last in context.micro_batches(cursor):
            with nullcontext() if is_last else without_sync(accelerator, self._objective):
                sums = self._objective(batch, self._view(context.teacher, batch))
                # Gradients are averaged over processes; the factor makes them their sum.
                accelerator.backward(sums.pop("loss") * (accelerator.num_processes / tokens))
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
        values, stopped = sum_over_processes(context.run, totals)
        return {name: value / tokens for name, value in values.items()}, stopped

    def step(self, rate: float) -> float:
        """Take one step as `StageWork` says."""
        trainable = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        limit = self._context.stage.grad_clip or math.inf
        norm = full_tensor(self._context.run.accelerator.clip_grad_norm_(trainable, limit))
        return take_step(self.optimizer, rate, float(norm))

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        """Measure the student as `StageWork` says."""
        view = TeacherView(teacher.predictions(batch), Captured())
        sums: dict[str, Tensor] = self._objective(batch, view, measuring=True)
        reshard(self._objective)
        return sums


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that keeps only its inputs. It draws no random numbers.

    transformers' own switch works in training mode only, and students are trained in evaluation mode.
    """

    # A function of our own: torch.compile does not look into a partial of torch's.
    def recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recompute
