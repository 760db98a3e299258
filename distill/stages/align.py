"""Alignment: each layer's attention learns what the teacher's gives on the same inputs, those of the teacher.

No layer waits for another to be right, so every layer is a problem of its own: while the teacher runs, the
student's attention of a layer runs on what the teacher's has just read, and its graph is gone before the next
layer's begins. The loss is the squared error as a share of what the teacher's gives, Σ ‖ŷ - y‖² / Σ ‖y‖² over
all tokens of a step (as LoLCATs aligns linear attention, arXiv 2410.10254), and gradients are clipped layer
by layer.

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
from ..losses import attention_output
from ..losses.objective import Objective, Seen
from ..recipe.recipe import Stage
from ..run import state
from ..run.state import Progress
from .capture import Captured
from .loop import Run, adamw, sum_over_processes, take_step, train_stage
from .teacher import Online, Teacher
from .weights import set_trainable

Adds = Callable[
    [Tensor], Tensor
]  # from what the teacher's attention gives (B, S, D) to what the student's should


def align_stage(run: Run, progress: Progress, found: Path | None) -> Progress:
    """Align layer by layer in memory; arguments, result and errors as of `train_stage`.

    Raises:
        InvalidInput: also when the layers of student and teacher do not correspond, or the stage trains what
        is in none.
    """
    return train_stage(run, progress, found, Alignment)


class Alignment:
    """The work of a stage with mode: layerwise, as the loop asks for it.

    Args:
        run: what the stage is given.
        stage: the stage.
        found: a saved state to take optimizer and adapters from.

    Raises:
        InvalidInput: see `align_stage`.
    """

    def __init__(self, run: Run, stage: Stage, found: Path | None) -> None:
        self._run, self._stage = run, stage
        trainable = set_trainable(run.student, stage)
        if found:
            state.restore_weights(found, run.student)  # once more: the adapters are there only now
        assert isinstance(run.teacher, Online), "a cache of last hidden states has no layers"
        self._student, self._teacher = Decoder(run.student), run.teacher
        self._adds = adds(self._student, self._teacher.decoder())
        self._layers = [weights_of(self._student.attention(number)) for number in range(len(self._student))]
        check_inside(
            stage,
            [name for name, weight in run.student.named_parameters() if weight.requires_grad],
            self._student,
        )
        self.optimizer = adamw(trainable, stage)
        if found:
            state.restore_optimizer(found, run.student, self.optimizer)

    def accumulate(self, cursor: int) -> tuple[dict[str, float], int]:
        """Form the gradient of one step; returns the loss, each layer's too, and a signal's number or 0."""
        run, count = self._run, self._run.recipe.step_windows(self._stage)
        mine = range(cursor + run.accelerator.process_index, cursor + count, run.accelerator.num_processes)
        totals: dict[str, Tensor] = {}
        for first in range(0, len(mine), self._stage.micro_batch):
            batch = run.windows.batch(mine[first : first + self._stage.micro_batch]).to(
                run.accelerator.device
            )
            calls = self._student.calls(**batch.inputs)

            def see(
                number: int, hidden_BSD: Tensor, given_BSD: Tensor, calls: list[LayerCall] = calls
            ) -> None:
                with run.accelerator.autocast():
                    sums = learn(self._student, number, calls[number], hidden_BSD, self._adds(given_BSD))
                for name, value in zip(("error", "power"), sums, strict=True):
                    totals[f"{name}.{number}"] = totals.get(f"{name}.{number}", 0) + value

            self._teacher.show_layers(batch, see)
        sums, stopped = sum_over_processes(run, totals)
        return self._divide(sums), stopped

    def _divide(self, sums: dict[str, float]) -> dict[str, float]:
        """Make of every layer's gradient that of its share of error, over all processes."""
        shares = []
        for number, weights in enumerate(self._layers):
            power = sums[f"power.{number}"]
            for weight in weights:
                if weight.grad is not None:
                    weight.grad = self._run.accelerator.reduce(weight.grad, "sum") / power
            shares.append(sums[f"error.{number}"] / power)
        return step_losses(shares)

    def step(self, rate: float) -> float:
        """Step at a learning rate; returns the norm of the whole gradient, before it was clipped."""
        return take_step(
            self.optimizer, rate, math.hypot(*(clip(weights, self._stage) for weights in self._layers))
        )

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        """Measures of the student as a whole, summed over a batch."""
        objective = Objective(self._run.student, self._stage)
        with self._run.accelerator.autocast():
            sums: dict[str, Tensor] = objective(
                batch, Seen(teacher.predictions(batch), Captured()), measuring=True
            )
        return sums


def learn(
    student: Decoder, number: int, call: LayerCall, hidden_BSD: Tensor, wanted_BSD: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the gradient of Σ ‖ŷ - y‖² to those of a layer's attention; the graph is gone afterwards.

    Args:
        student: the decoder.
        number: the layer.
        call: how the student calls it.
        hidden_BSD: what the teacher's attention read.
        wanted_BSD: y, what the student's should give.

    Returns:
        Σ ‖ŷ - y‖² and Σ ‖y‖², never zero.
    """
    with torch.enable_grad():
        given_BSD = student.attend(number, call, hidden_BSD)
        error, _ = attention_output(given_BSD.flatten(0, 1), wanted_BSD.flatten(0, 1), power=1.0)
        error.backward()
    return error.detach(), wanted_BSD.float().square().sum().clamp_min(torch.finfo(torch.float32).tiny)


def step_losses(shares: list[float]) -> dict[str, float]:
    """What metrics say of a step: the mean of all layers' shares of error, and each."""
    return {"attention_output": sum(shares) / len(shares)} | {
        f"align.layer.{n}": share for n, share in enumerate(shares)
    }


def clip(weights: list[nn.Parameter], stage: Stage) -> float:
    """Clip the gradient of one layer; returns its norm before."""
    return float(nn.utils.clip_grad_norm_(weights, stage.grad_clip or math.inf))


def weights_of(attention: nn.Module) -> list[nn.Parameter]:
    """What is trained of an attention module."""
    return [weight for weight in attention.parameters() if weight.requires_grad]


def check_inside(stage: Stage, trained: Sequence[str], student: Decoder) -> None:
    """Refuse to train what gets no gradient.

    Args:
        stage: runs attention modules alone.
        trained: names of what it trains.
        student: the decoder.

    Raises:
        InvalidInput: something to train is in no attention module.
    """
    inside = tuple(f"{attention}." for attention in student.attentions)
    if not all(name.startswith(inside) for name in trained):
        raise InvalidInput(
            f"stage {stage.name}: mode: {stage.how} reaches attention alone, and lora.targets name other "
            f"layers; leave them out"
        )


def adds(student: Decoder, teacher: Decoder) -> Adds:
    """What the student's attention should give for what the teacher's gives: the same, unless the student is
    of the stock latent class, whose weights have taken up factors on what a source's layer adds
    (containers/blocks.py).

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
                f"the student has {mine} {what} and the teacher {its}, so that layers cannot be aligned; "
                "align with the source that the student was converted from"
            )
    if ours.model_type == theirs.model_type or ours.model_type != "deepseek_v3":
        return lambda given_BSD: given_BSD
    config = theirs.to_dict()
    family = family_of(config)
    whole = complete(family, config)
    block = folded_block(family, whole)
    # An output for engines has their norms' epsilon, and a residual stream scaled to suit it.
    block = block.scaled((ours.rms_norm_eps / {**whole, **block.config(whole)}["rms_norm_eps"]) ** 0.5)
    return lambda given_BSD: block.adds(given_BSD.movedim(-1, 0)).movedim(0, -1)
