"""After the closed form: each layer alone is fitted to what its source's attention gives, on a sample of its own inputs.

The closed form weighs an error in a key as if queries, keys and positions were independent. Here the error is seen where it
arrives, at the output of the attention, through the softmax: ½ E[(ô - o)ᵀ G (ô - o)], with G the Fisher moment of the
gradient there. It is in nats like every other loss of this package, and no other layer, label or evaluation text takes part.

Legend: attention.py; B sequences, T tokens.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .attention import Attention, IntactAttention, LatentAttention
from .forward import AnyAttention, attend

Layer = TypeVar("Layer", Attention, LatentAttention, IntactAttention)

STEPS = 100
BATCH = 8  # sequences in a step
RATE = 0.01  # a step's size in each tensor, as a share of the tensor's root mean square; it falls to nothing like a cosine
HELD_BACK = 8  # one sequence of so many measures the fit and takes no part in it
AGREEMENT = 0.02  # relative error, much of it the sample's rounding, up to which this package's forward is the source's


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one layer is refined on.

    Attributes:
        input_BTD: inputs of the attention, whole sequences from position 0.
        output_BTD: the source model's own output of the attention for the first of them.
        fisher_DD: G, second moment of the gradient of the log likelihood at the attention's output.
    """

    input_BTD: Tensor
    output_BTD: Tensor
    fisher_DD: Tensor


@dataclass(frozen=True, kw_only=True)
class Refined(Generic[Layer]):
    """A layer, and its predicted loss on held-back inputs, nats a token, before and after.

    Attributes:
        layer: the weights, float64, on the CPU.
        folded: loss of the closed form.
        refined: loss of `layer`, never more.
    """

    layer: Layer
    folded: float
    refined: float


def is_plain(source: Attention, frequencies_F: Tensor, sample: Sample) -> bool:
    """Whether `attend` computes what the source model does: not with windows, sinks, caps or norms inside the attention."""
    if source.q_norm_NH is not None or source.k_norm_KH is not None:
        return False
    wanted_BTD = sample.output_BTD.float()
    given_BTD = attend(source.to(torch.float32), sample.input_BTD[: len(wanted_BTD)].float(), frequencies_F)
    return bool((given_BTD - wanted_BTD).norm() <= AGREEMENT * wanted_BTD.norm())


def refine(
    folded: Layer,
    slots_S: Tensor,
    source: Attention,
    frequencies_F: Tensor,
    sample: Sample,
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> Refined[Layer]:
    """Fit a folded layer's weights to its source's outputs by Adam (arXiv 1412.6980).

    Args:
        folded: the closed form.
        slots_S: angular frequencies of its slots or pairs.
        source: the layer it stands for.
        frequencies_F: the source's angular frequencies.
        sample: of the source's inputs.
        steps: 0 only measures.
        seed: of the order in which sequences are taken.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loss = _Loss(source, frequencies_F, slots_S, sample, device)
    start = folded.to(torch.float32, device)
    before = loss.measure(start)
    if steps == 0:
        return Refined(layer=folded, folded=before, refined=before)
    fitted = _descend(start, loss, steps, seed)
    after = loss.measure(fitted)
    if not after < before:
        return Refined(layer=folded, folded=before, refined=before)
    return Refined(layer=fitted.to(torch.float64, "cpu"), folded=before, refined=after)


def measure(folded: AnyAttention, slots_S: Tensor, source: Attention, frequencies_F: Tensor, sample: Sample) -> float:
    """The loss of a folded layer on the sequences that are held back, nats a token; arguments as of `refine`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _Loss(source, frequencies_F, slots_S, sample, device).measure(folded.to(torch.float32, device))


class _Loss:
    """½ E[(ô - o)ᵀ G (ô - o)] against a source layer."""

    def __init__(self, source: Attention, frequencies_F: Tensor, slots_S: Tensor, sample: Sample, device: torch.device) -> None:
        self._fisher_DD, self._device, self._slots_S = sample.fisher_DD.to(device, torch.float32), device, slots_S
        self._input_BTD, teacher = sample.input_BTD, source.to(torch.float32, device)
        with torch.no_grad():
            parts = (attend(teacher, self._on_device(part), frequencies_F) for part in self._input_BTD.split(BATCH))
            self._wanted_BTD = torch.cat(list(parts))
        count = len(self._input_BTD)
        held = max(1, count // HELD_BACK)
        # A single sequence has to serve for both.
        self.used = torch.arange(count - held if held < count else count)
        self.held_back = torch.arange(count - held, count)

    def _on_device(self, input_BTD: Tensor) -> Tensor:
        return input_BTD.to(self._device, torch.float32)

    def of(self, layer: AnyAttention, taken: Tensor) -> Tensor:
        """On the sequences of these numbers, a scalar with a gradient."""
        error_BTD = attend(layer, self._on_device(self._input_BTD[taken]), self._slots_S) - self._wanted_BTD[taken]
        return ((error_BTD @ self._fisher_DD) * error_BTD).sum(-1).mean() / 2

    @torch.no_grad()
    def measure(self, layer: AnyAttention) -> float:
        """On the inputs that are held back."""
        parts = self.held_back.split(BATCH)
        return sum(float(self.of(layer, part)) * len(part) for part in parts) / len(self.held_back)


@torch.enable_grad()
def _descend(start: Layer, loss: _Loss, steps: int, seed: int) -> Layer:
    values = {field.name: getattr(start, field.name) for field in fields(start)}
    weights: dict[str, Any] = {
        name: value.clone().contiguous().requires_grad_() for name, value in values.items() if isinstance(value, Tensor)
    }
    groups = [{"params": [tensor], "size": _size(tensor)} for tensor in weights.values()]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = RATE * group["size"] * (1 + math.cos(math.pi * step / steps)) / 2
        taken = loss.used[torch.randperm(len(loss.used), generator=generator)[:BATCH]]
        adam.zero_grad()
        loss.of(replace(start, **weights), taken).backward()
        adam.step()
    detached: dict[str, Any] = {name: tensor.detach() for name, tensor in weights.items()}
    return replace(start, **detached)


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt()) if tensor.numel() else 0.0
