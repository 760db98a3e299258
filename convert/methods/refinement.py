"""Refinement after the closed form: each layer is fitted to its source's attention on a sample.

The closed form weighs an error in a key as if queries, keys and positions were independent. Here the error is
measured where it arrives, at the output of the attention, through the softmax: ½ E[(ô - o)ᵀ G (ô - o)], with
G the Fisher moment of the gradient there. It is in nats like every other loss of this package. No other
layer, label or evaluation text takes part.

Legend: attention.py; B sequences, T tokens.
"""

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..algebra.attention import Attention, IntactAttention, LatentAttention
from ..algebra.forward import PLAIN, AnyAttention, Caches, Scoring, attend
from ..algebra.orthogonal_steps import Moving, order
from ..algebra.subspaces import eigh

Layer = TypeVar("Layer", Attention, LatentAttention, IntactAttention)

STEPS = 100
BATCH = 8  # sequences in a step, and in a forward pass that measures
MOMENTUM = 0.9  # share of the gradients' running mean that is kept from one step to the next
# A step's size in each tensor, as a share of the tensor's root mean square, for a layer whose output is all
# error. It falls in proportion to the relative error that the closed form left, and linearly to nothing over
# the steps. It is the largest that is tried.
RATE = 0.12
QUARTERS = 5  # times that the first rate is divided by four, at most
# Hidden size of layers of which the largest rate is tried first. Of one twice as large it is a quarter of
# that, of one four times as large a sixteenth, ...
SMALL_HIDDEN = 256
LEAST_TRIAL = 20  # steps on which a rate is tried: fewer say little of how far noise leads
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the way from the closed form to what was fitted
# Share of the mean energy of the mixed values that is added to each in a solve for the output projection.
RIDGES = (1e-3, 1e-1)
HELD_BACK = 8  # one sequence of so many measures the fit and takes no part in it
# relative error, much of it the sample's rounding, up to which this package's forward is the source's
AGREEMENT = 0.02


@dataclass(frozen=True, kw_only=True)
class LayerSample:
    """The sample that one layer is refined on.

    Attributes:
        input_BTD: inputs of the attention, whole sequences from position 0.
        output_BTD: the source model's own output of the attention for the first of them.
        fisher_DD: G, second moment of the gradient of the log likelihood at the attention's output.
        scoring: the part of the layer that is not weights.
    """

    input_BTD: Tensor
    output_BTD: Tensor
    fisher_DD: Tensor
    scoring: Scoring = PLAIN

    @property
    def used(self) -> Tensor:
        """Return the numbers of the sequences that a layer is fitted on."""
        # A single sequence has to serve for both.
        return torch.arange(len(self.input_BTD) - self._held if len(self.input_BTD) > 1 else 1)

    @property
    def held_back(self) -> Tensor:
        """Return the numbers of the sequences that measure the fit."""
        return torch.arange(len(self.input_BTD) - self._held, len(self.input_BTD))

    @cached_property
    def output_root(self) -> Tensor:
        """Return F (D, D), float32, with F Fᵀ the Fisher moment at the attention's output."""
        energy_D, basis_DD = eigh(self.fisher_DD.to(torch.float64))
        return (basis_DD * energy_D.clamp(min=0).sqrt()).to(torch.float32)

    def slopes(
        self, output_BTD: Tensor, inputs: Sequence[Tensor], draws: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield gradients by some inputs of the layer's output times a draw from N(0, G) for each token.

        With J the derivative of the output, the mean of their outer products estimates Jᵀ G J, the second
        derivative of the loss.
        """
        root_DD = self.output_root.to(output_BTD.device)
        for draw in range(draws):
            drawn_BTD = torch.randn(output_BTD.shape, generator=generator).to(root_DD.device) @ root_DD.mT
            product = (output_BTD * drawn_BTD).sum()
            yield torch.autograd.grad(product, inputs, retain_graph=draw + 1 < draws)

    @property
    def _held(self) -> int:
        return max(1, len(self.input_BTD) // HELD_BACK)


@dataclass(frozen=True, kw_only=True)
class Refined(Generic[Layer]):
    """A layer, and its predicted loss on held-back inputs before and after, in nats per token.

    Attributes:
        layer: the weights, float64, on the CPU.
        folded: loss of the closed form.
        refined: loss of `layer`, never more.
        quarters: times that the largest rate was divided by four.
    """

    layer: Layer
    folded: float
    refined: float
    quarters: int = 0


def agrees(source: AnyAttention, frequencies_F: Tensor, sample: LayerSample) -> bool:
    """Return whether `attend` computes what the source model computes.

    The model may have a part that no row of the table of families describes.
    """
    wanted_BTD = sample.output_BTD.to(fitting_device(), torch.float32)
    how = wanted_BTD.dtype, wanted_BTD.device
    input_BTD = sample.input_BTD[: len(wanted_BTD)].to(wanted_BTD)
    given_BTD = attend(source.to(*how), input_BTD, frequencies_F, sample.scoring.to(*how))
    return bool((given_BTD - wanted_BTD).norm() <= AGREEMENT * wanted_BTD.norm())


def refine(
    folded: Layer,
    slots_S: Tensor,
    source: AnyAttention,
    frequencies_F: Tensor,
    sample: LayerSample,
    *,
    fixed: Set[str] = frozenset(),
    steps: int = STEPS,
    batch: int = BATCH,
    momentum: float = MOMENTUM,
    passes: bool = False,
    solve: bool = True,
    seed: int = 0,
    quarters: int | None = None,
    cache: Caches | None = None,
) -> Refined[Layer]:
    """Fit a folded layer's weights to its source's outputs.

    First by gradient descent in orthogonalised steps (Muon), at the rate that is best in a fifth of them.
    Then the output projection is solved for by least squares, since the loss is quadratic in it: at no more
    cost than two steps it halves what the closed form loses, and makes up for small steps
    (docs/notes/refinement.md).

    Args:
        folded: the closed form.
        slots_S: angular frequencies of its slots or pairs.
        source: the layer it stands for.
        frequencies_F: the source's angular frequencies.
        sample: of the source's inputs.
        fixed: fields of the layer that are not written, and stay.
        steps: of the descent.
        batch: sequences in a step.
        momentum: share of the gradients' running mean that is kept from one step to the next.
        passes: whether all sequences are taken once before any is taken again.
        solve: whether the output projection is solved for.
        seed: of the order in which sequences are taken.
        quarters: times that the largest rate is divided by four; None: as is best in a fifth of the steps.
        cache: what the output's cache does to numbers, with a gradient; both losses then include it. None:
            nothing.
    """
    device = fitting_device()
    loss = _Loss(source, frequencies_F, slots_S, sample, device, cache)
    start = folded.to(torch.float32, device)
    before = loss.measure(start)
    best, after = start, before
    # A sample that is small for its layer is fitted too well: what is held back says how far to go.
    if steps:
        taken = order(loss.used, steps, batch, passes=passes, seed=seed)
        most = RATE * loss.relative(before)
        if quarters is None:
            quarters = _quarters(start, before, loss, taken[: trial_steps(steps)], most, momentum, fixed)
        fitted = _descend(start, loss, taken, most * 0.25**quarters, momentum, fixed)
        best, after = loss.least(best, *_on_the_way(start, fitted))
    if solve:
        best, after = loss.least(best, *_solved(best, loss))
    if not after < before:
        return Refined(layer=folded, folded=before, refined=before, quarters=quarters or 0)
    layer = best.to(torch.float64, "cpu")
    return Refined(layer=layer, folded=before, refined=after, quarters=quarters or 0)


def measure(
    folded: AnyAttention,
    slots_S: Tensor,
    source: AnyAttention,
    frequencies_F: Tensor,
    sample: LayerSample,
    cache: Caches | None = None,
) -> float:
    """Return the loss of a folded layer on the sequences that are held back, in nats per token.

    Arguments are those of `refine`.
    """
    device = fitting_device()
    loss = _Loss(source, frequencies_F, slots_S, sample, device, cache, sample.held_back)
    return loss.measure(folded.to(torch.float32, device))


def fitting_device() -> torch.device:
    """Return the device on which layers are fitted and measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Loss:
    """½ E[(ô - o)ᵀ G (ô - o)] against a source layer.

    The source's outputs are computed once, of all sequences or of `read` alone.
    """

    def __init__(
        self,
        source: AnyAttention,
        frequencies_F: Tensor,
        slots_S: Tensor,
        sample: LayerSample,
        device: torch.device,
        cache: Caches | None,
        read: Tensor | None = None,
    ) -> None:
        self._cache = cache
        self._fisher_DD = sample.fisher_DD.to(device, torch.float32)
        self._device, self._slots_S = device, slots_S
        self._input_BTD, self._scoring = sample.input_BTD, sample.scoring.to(torch.float32, device)
        teacher = source.to(torch.float32, device)
        read = torch.arange(len(self._input_BTD)) if read is None else read
        with torch.no_grad():
            inputs = (self._on_device(self._input_BTD[part]) for part in read.split(BATCH))
            wanted_BTD = torch.cat([attend(teacher, part, frequencies_F, self._scoring) for part in inputs])
        self._wanted_TD = dict(zip(read.tolist(), wanted_BTD, strict=True))
        self.used, self.held_back = sample.used, sample.held_back

    def _on_device(self, input_BTD: Tensor) -> Tensor:
        return input_BTD.to(self._device, torch.float32)

    def _wanted(self, taken: Tensor) -> Tensor:
        return torch.stack([self._wanted_TD[number] for number in taken.tolist()])

    def of(self, layer: AnyAttention, taken: Tensor) -> Tensor:
        """Return the loss on the sequences of these numbers, a scalar with a gradient."""
        input_BTD = self._on_device(self._input_BTD[taken])
        given_BTD = attend(layer, input_BTD, self._slots_S, self._scoring, cache=self._cache)
        error_BTD = given_BTD - self._wanted(taken)
        return ((error_BTD @ self._fisher_DD) * error_BTD).sum(-1).mean() / 2

    @torch.no_grad()
    def measure(self, layer: AnyAttention) -> float:
        """Return the loss on the inputs that are held back."""
        parts = self.held_back.split(BATCH)
        return sum(float(self.of(layer, part)) * len(part) for part in parts) / len(self.held_back)

    def least(self, *layers: Layer) -> tuple[Layer, float]:
        """Return the first layer of least loss on the inputs that are held back, and that loss."""
        losses = [self.measure(layer) for layer in layers]
        return layers[losses.index(min(losses))], min(losses)

    @torch.no_grad()
    def mixed(self, layer: AnyAttention) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the values (X, NH) that all heads have mixed, and the outputs (X, D) wanted of them."""
        width = layer.o_DNH[0].numel()
        unit_DNH = torch.eye(width, device=self._device).view(width, *layer.o_DNH.shape[1:])
        mixing = replace(layer, o_DNH=unit_DNH, o_D=None)
        for part in self.used.split(BATCH):
            input_BTD = self._on_device(self._input_BTD[part])
            mixed_BTD = attend(mixing, input_BTD, self._slots_S, self._scoring, cache=self._cache)
            wanted_BTD = self._wanted(part)
            if layer.o_D is not None:
                wanted_BTD = wanted_BTD - layer.o_D
            yield mixed_BTD.flatten(0, 1), wanted_BTD.flatten(0, 1)

    def relative(self, loss: float) -> float:
        """Return the root of a loss over that of a zero output, at most 1."""
        wanted_BTD = self._wanted(self.held_back)
        nothing = float(((wanted_BTD @ self._fisher_DD) * wanted_BTD).sum(-1).mean()) / 2
        return min(1.0, math.sqrt(loss / nothing)) if nothing else 0.0


def trial_steps(steps: int) -> int:
    """Return on how many of the first steps of a descent a rate is tried."""
    return min(steps, max(LEAST_TRIAL, steps // 5))


def _quarters(
    start: Layer,
    before: float,
    loss: _Loss,
    taken: list[Tensor],
    most: float,
    momentum: float,
    fixed: Set[str],
) -> int:
    """Return how often `most` is divided by four for the rate whose first steps lose least.

    Loss is that on held-back inputs; `before` is what the start loses.
    An orthogonalised step moves every direction of a matrix alike, also those in which the gradient is noise.
    The wider a layer, the more there are of these: the rate that is best for hidden sizes of 128 and 256
    makes layers of 576 and 640 worse than they were, where a sixteenth of it gains
    (docs/notes/refinement.md). So the search begins at a rate for the layer's width, and goes on while it
    gains.
    """

    def tried(quarters: int) -> float:
        end = _descend(start, loss, taken, most * 0.25**quarters, momentum, fixed)
        lost = loss.measure(end)
        # Where every rate leads too far for so small a sample, they differ by what is gained on the way.
        return lost if lost < before else loss.least(*_on_the_way(start, end))[1]

    first = best = max(0, round(math.log2(len(start.o_DNH) / SMALL_HIDDEN)))
    lost = tried(best)
    for _ in range(QUARTERS):
        smaller = tried(best + 1)
        if lost <= smaller:  # false where the larger rate diverges to NaN
            break
        best, lost = best + 1, smaller
    while 0 < best <= first and (larger := tried(best - 1)) < lost:
        best, lost = best - 1, larger
    return best


@torch.enable_grad()
def _descend(
    start: Layer, loss: _Loss, taken: list[Tensor], rate: float, momentum: float, fixed: Set[str]
) -> Layer:
    """Descend from a layer, with orthogonalised steps for matrices, head by head.

    Every direction of a head moves alike, however small its gradient is. After 100 steps an eighth of the
    cache loses 0.52 nats on a small model where it loses 0.87 by Adam (docs/notes/refinement.md).
    """
    values = {field.name: getattr(start, field.name) for field in fields(start)}
    weights: dict[str, Tensor] = {
        name: value.clone().contiguous().requires_grad_()
        for name, value in values.items()
        if isinstance(value, Tensor) and name not in fixed
    }
    moving = {name: Moving(name, value, momentum) for name, value in weights.items()}
    for step, sequences in enumerate(taken):
        changed: dict[str, Any] = dict(weights)
        loss.of(replace(start, **changed), sequences).backward()
        with torch.no_grad():
            for name, value in weights.items():
                if value.grad is not None:
                    value.sub_(moving[name].step(value.grad, step), alpha=rate * (1 - step / len(taken)))
                    value.grad = None
    detached: dict[str, Any] = {name: tensor.detach() for name, tensor in weights.items()}
    return replace(start, **detached)


@torch.no_grad()
def _solved(layer: Layer, loss: _Loss) -> Iterator[Layer]:
    """Yield the layer with the output projection that fits its mixed values best, for each ridge.

    The ridge pulls towards the present projection. The weight G of the loss changes no solution of least
    squares that is free in every output, so it takes no part.
    """
    o_DW = layer.o_DNH.flatten(1)  # W = N·H
    outputs, width = o_DW.shape
    energy_WW = torch.zeros(width, width, dtype=torch.float64, device=o_DW.device)
    error_WD = torch.zeros(width, outputs, dtype=torch.float64, device=o_DW.device)
    for mixed_XW, wanted_XD in loss.mixed(layer):
        energy_WW += mixed_XW.mT @ mixed_XW
        error_WD += mixed_XW.mT @ (wanted_XD - mixed_XW @ o_DW.mT)
    mean = energy_WW.diagonal().mean()
    for ridge in RIDGES if mean > 0 else ():  # no values, nothing to fit
        damped_WW = energy_WW.clone()
        damped_WW.diagonal().add_(ridge * mean)
        change_WD = torch.cholesky_solve(error_WD, torch.linalg.cholesky(damped_WW))
        yield replace(layer, o_DNH=(o_DW + change_WD.mT).view(layer.o_DNH.shape).to(o_DW.dtype))


def _on_the_way(start: Layer, end: Layer) -> Iterator[Layer]:
    """Yield the fitted layer and those between it and the closed form."""
    for share in SHARES:
        tensors: dict[str, Any] = {
            field.name: torch.lerp(getattr(start, field.name), getattr(end, field.name), share)
            for field in fields(end)
            if isinstance(getattr(end, field.name), Tensor)
        }
        yield replace(end, **tensors)
