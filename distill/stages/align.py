"""Alignment: each layer's attention learns the output of the teacher's on the teacher's inputs.

No layer depends on another being right, so every layer is a problem of its own. While the teacher runs, the
student's attention of a layer runs on the input of the teacher's, and its graph is freed before the next
layer's begins. The loss is the squared error relative to the teacher's output, Σ ‖ŷ - y‖² / Σ ‖y‖² over all
tokens of a step (as LoLCATs aligns linear attention, arXiv 2410.10254). Gradients are clipped layer by layer.

Shapes: B windows, S tokens of a window, D hidden size.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ...convert.families.recognition import complete, family_of
from ...convert.formats.blocks import folded_block
from ...core.errors import InvalidInput
from ...models.decoder import Decoder, LayerCall
from ..data.batch import Batch
from ..losses.layers import attention_output
from ..recipe.recipe import Stage
from . import state
from .capture import Captured
from .objective import Objective, TeacherView
from .optimizer import adamw, take_step
from .stage_work import StageContext, sum_over_processes
from .teacher import Online, Teacher
from .weights import set_trainable

# From the output of the teacher's attention (B, S, D) to that wanted of the student's.
Adds = Callable[[Tensor], Tensor]


class Alignment:
    """The work of a stage with mode: layerwise; the optimizer and adapters may be those of a saved state.

    Raises:
        InvalidInput: the layers of student and teacher do not correspond, or the stage trains weights outside
            of attention.
    """

    def __init__(self, context: StageContext, found: Path | None) -> None:
        self._context, stage = context, context.stage
        trainable = set_trainable(context.student, stage)
        if found:
            state.restore_weights(found, context.student)  # again, since the adapters exist only now
        assert isinstance(context.teacher, Online), "a cache of last hidden states has no layers"
        self._student, self._teacher = Decoder(context.student), context.teacher
        self._adds = adds(self._student, self._teacher.decoder())
        self._layers = [weights_of(self._student.attention(number)) for number in range(len(self._student))]
        trained = [name for name, weight in context.student.named_parameters() if weight.requires_grad]
        check_inside(stage, trained, self._student)
        self.optimizer = adamw(trainable, stage)
        if found:
            state.restore_optimizer(found, context.student, self.optimizer)

    def accumulate(self, cursor: int) -> tuple[dict[str, float], int]:
        """Form the gradient of one step, as `StageWork` says; the losses include that of each layer."""
        accelerator = self._context.run.accelerator
        totals: dict[str, Tensor] = {}
        for batch, _ in self._context.micro_batches(cursor):
            calls = self._student.calls(**batch.inputs)

            def see(
                number: int, hidden_BSD: Tensor, given_BSD: Tensor, calls: list[LayerCall] = calls
            ) -> None:
                with accelerator.autocast():
                    sums = learn(self._student, number, calls[number], hidden_BSD, self._adds(given_BSD))
                for name, value in zip(("error", "power"), sums, strict=True):
                    totals[f"{name}.{number}"] = totals.get(f"{name}.{number}", 0) + value

            self._teacher.show_layers(batch, see)
        sums, stopped = sum_over_processes(self._context.run, totals)
        errors = []
        for number, weights in enumerate(self._layers):
            power = sums[f"power.{number}"]  # of the targets over all processes
            for weight in weights:
                if weight.grad is not None:
                    weight.grad = accelerator.reduce(weight.grad, "sum") / power
            errors.append(sums[f"error.{number}"] / power)
        return step_losses(errors), stopped

    def step(self, rate: float) -> float:
        """Take one step as `StageWork` says; the norm is that of the whole gradient."""
        norms = [clip(weights, self._context.stage) for weights in self._layers]
        return take_step(self.optimizer, rate, math.hypot(*norms))

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        """Measure the whole student as `StageWork` says."""
        objective = Objective(self._context.student, self._context.stage)
        view = TeacherView(teacher.predictions(batch), Captured())
        with self._context.run.accelerator.autocast():
            return objective.forward(batch, view, measuring=True)


def learn(
    student: Decoder, number: int, call: LayerCall, hidden_BSD: Tensor, wanted_BSD: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the gradient of Σ ‖ŷ - y‖² to those of a layer's attention; the graph is freed afterwards.

    `call` has the arguments with which the student calls the layer, `hidden_BSD` is the input of the
    teacher's attention, and `wanted_BSD` is y, the output that the student's should have.

    Returns:
        Σ ‖ŷ - y‖², and Σ ‖y‖², which is never zero.
    """
    with torch.enable_grad():
        given_BSD = student.attend(number, call, hidden_BSD)
        error, _ = attention_output(given_BSD.flatten(0, 1), wanted_BSD.flatten(0, 1), power=1.0)
        error.backward()
    return error.detach(), wanted_BSD.float().square().sum().clamp_min(torch.finfo(torch.float32).tiny)


def step_losses(errors: list[float]) -> dict[str, float]:
    """Return the metrics of a step: the mean of all layers' relative errors, and each of them."""
    by_layer = {f"align.layer.{number}": error for number, error in enumerate(errors)}
    return {"attention_output": sum(errors) / len(errors), **by_layer}


def clip(weights: list[nn.Parameter], stage: Stage) -> float:
    """Clip the gradient of one layer; return its norm before."""
    return float(nn.utils.clip_grad_norm_(weights, stage.grad_clip or math.inf))


def weights_of(attention: nn.Module) -> list[nn.Parameter]:
    """Return the weights of an attention module that are trained."""
    return [weight for weight in attention.parameters() if weight.requires_grad]


def check_inside(stage: Stage, trained: Sequence[str], student: Decoder) -> None:
    """Refuse to train weights outside of the attention modules, which get no gradient.

    Raises:
        InvalidInput: `trained`, the names of the weights that the stage trains, has one.
    """
    inside = tuple(f"{attention}." for attention in student.attentions)
    if not all(name.startswith(inside) for name in trained):
        raise InvalidInput(
            f"stage {stage.name}: mode: {stage.how} trains only attention, but lora.targets names other "
            "layers; leave them out"
        )


def adds(student: Decoder, teacher: Decoder) -> Adds:
    """Return the function from the output of the teacher's attention to that wanted of the student's.

    It is the identity, unless the student is of the stock latent class, whose weights contain the factors by
    which a source's layer scales what it adds (convert/formats/blocks.py).

    Raises:
        InvalidInput: the layers do not correspond.
    """
    ours, theirs = student.model.config.get_text_config(), teacher.model.config.get_text_config()
    for what, mine, its in (
        ("layers", len(student), len(teacher)),
        ("numbers in a hidden state", ours.hidden_size, theirs.hidden_size),
    ):
        if mine != its:
            raise InvalidInput(
                f"the student has {mine} {what} and the teacher {its}, so layers cannot be aligned; use the "
                "source that the student was converted from as the teacher"
            )
    if ours.model_type == theirs.model_type or ours.model_type != "deepseek_v3":
        return lambda given_BSD: given_BSD
    config = theirs.to_dict()
    family = family_of(config)
    whole = complete(family, config)
    block = folded_block(family, whole)
    # An output for engines has the epsilon of their norms, and a residual stream scaled to suit it.
    block = block.scaled((ours.rms_norm_eps / {**whole, **block.config(whole)}["rms_norm_eps"]) ** 0.5)
    return lambda given_BSD: block.adds(given_BSD.movedim(-1, 0)).movedim(0, -1)
