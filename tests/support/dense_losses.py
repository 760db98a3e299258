"""The losses of the vocabulary by their definitions, on whole logits."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.distill.losses.predictions import Predictions
from kvfold.distill.losses.vocabulary import mix
from kvfold.distill.recipe.recipe import LossName
from kvfold.models.head import HeadForm

T, V, D = 13, 37, 8
LABELS = torch.arange(T) % V
VOCABULARY: tuple[LossName, ...] = ("kl", "reverse_kl", "jsd", "ce")


def predictions(
    seed: int, *, bias: bool = True, width: int = V, dtype: torch.dtype = torch.float64, **form: Any
) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, D), (width, D), (width,))
    hidden, weight, row = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    )
    return Predictions(hidden, weight, row if bias else None, HeadForm(**form))


def log_probabilities(of: Predictions, temperature: float = 1.0, width: int | None = None) -> Tensor:
    logits = functional.linear(of.hidden_TD, of.weight_VD, of.bias_V) * of.form.scale
    if of.form.soft_cap:
        logits = of.form.soft_cap * torch.tanh(logits / of.form.soft_cap)
    return torch.log_softmax(logits[:, :width] / temperature, -1)


def divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b)."""
    return functional.kl_div(log_b, log_a, reduction="sum", log_target=True)


def dense(
    name: str,
    student: Predictions,
    teacher: Predictions,
    temperature: float = 1.0,
    beta: float = 0.5,
    width: int | None = None,
    labels: Tensor = LABELS,
) -> Tensor:
    """The definitions, on whole logits, with autograd's gradients."""
    if name == "ce":
        return functional.nll_loss(log_probabilities(student, 1, width), labels, reduction="sum")
    log_q, log_p = (
        log_probabilities(student, temperature, width),
        log_probabilities(teacher, temperature, width).detach(),
    )
    if name == "kl" or (name == "jsd" and beta == 0):
        value = divergence(log_p, log_q)
    elif name == "reverse_kl" or (name == "jsd" and beta == 1):
        value = divergence(log_q, log_p)
    else:
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        value = beta * divergence(log_p, log_m) + (1 - beta) * divergence(log_q, log_m)
    return value * temperature**2


def chunked(
    name: LossName, student: Predictions, teacher: Predictions | None, labels: Tensor = LABELS, **how: Any
) -> Tensor:
    """One of the losses as a stage computes it."""
    return mix(student, teacher, labels, {name: 1.0}, **how)[0]


def check_gradients(ours: Predictions, theirs: Predictions, **tolerance: float) -> None:
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        if mine is not None and other is not None:
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, other.grad, **tolerance)
