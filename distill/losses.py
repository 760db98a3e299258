"""Losses over the vocabulary that never hold [tokens, vocabulary] whole: value and gradient are formed chunk by chunk.

Every loss returns a sum over tokens and their count; the loop divides once per optimizer step. The gradient with respect to
logits is known in closed form for each, so that the backward pass only scales what the forward pass has accumulated.

Shapes: T tokens, C tokens of a chunk, V vocabulary, D hidden size (the teacher's may differ).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .head import Predictions
from .recipe import LossName

CHUNK_ELEMENTS = 2**26  # logits in a chunk: 256 MiB in float32, of which about five exist at once

# From a chunk's logits_CV in float32 (may be overwritten) and its rows to the summed loss and d loss / d logits_CV.
Criterion = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def kl(student: Predictions, teacher: Predictions, labels_T: Tensor, chunk: int | None = None) -> tuple[Tensor, int]:
    """Forward KL divergence KL(teacher || student) at temperature 1, in nats.

    Args:
        student: differentiable with respect to hidden states, head weight and bias.
        teacher: of the same tokens and vocabulary; a constant.
        labels_T: not read; all losses have one signature.
        chunk: tokens at a time.

    Returns:
        The sum over tokens (float32 scalar) and the number of tokens.
    """

    def criterion(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_q_CV = torch.log_softmax(logits_CV, -1)
        log_p_CV = torch.log_softmax(_logits(teacher, rows), -1)
        p_CV = log_p_CV.exp()
        value = (p_CV * log_p_CV.sub_(log_q_CV)).sum()
        return value, log_q_CV.exp_().sub_(p_CV)

    return _chunked(student, criterion, chunk), len(student.hidden_TD)


def ce(student: Predictions, teacher: Predictions, labels_T: Tensor, chunk: int | None = None) -> tuple[Tensor, int]:
    """Cross entropy to the next token of the text, in nats; arguments and result as for `kl`, the teacher is not read."""

    def criterion(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_q_CV = torch.log_softmax(logits_CV, -1)
        labels_C1 = labels_T[rows, None]
        value = -log_q_CV.gather(1, labels_C1).sum()
        return value, log_q_CV.exp_().scatter_add_(1, labels_C1, torch.full_like(labels_C1, -1, dtype=log_q_CV.dtype))

    return _chunked(student, criterion, chunk), len(student.hidden_TD)


Loss = Callable[[Predictions, Predictions, Tensor], tuple[Tensor, int]]
LOSSES: dict[LossName, Loss] = {"kl": kl, "ce": ce}


def _chunked(student: Predictions, criterion: Criterion, chunk: int | None) -> Tensor:
    chunk = chunk or max(1, CHUNK_ELEMENTS // len(student.weight_VD))
    total: Tensor = _Chunked.apply(student.hidden_TD, student.weight_VD, student.bias_V, criterion, chunk)  # type: ignore[no-untyped-call]
    return total


def _logits(predictions: Predictions, rows: slice) -> Tensor:
    return linear(predictions.hidden_TD[rows], predictions.weight_VD, predictions.bias_V).float()


class _Chunked(torch.autograd.Function):
    """Sum of a criterion over all tokens. Matrix products run in the autocast dtype, everything else in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, criterion: Criterion, chunk: int
    ) -> Tensor:
        device = hidden_TD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TD.dtype
        inputs = (hidden_TD, weight_VD, bias_V)
        grads = [torch.zeros_like(x) if x is not None and ctx.needs_input_grad[i] else None for i, x in enumerate(inputs)]
        grad_hidden_TD, grad_weight_VD, grad_bias_V = grads
        total = hidden_TD.new_zeros((), dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            head = Predictions(hidden_TD.to(dtype), weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype))
            for start in range(0, len(hidden_TD), chunk):
                rows = slice(start, start + chunk)
                value, grad_CV = criterion(_logits(head, rows), rows)
                total += value
                if grad_bias_V is not None:
                    grad_bias_V += grad_CV.sum(0)
                grad_CV = grad_CV.to(dtype)
                if grad_hidden_TD is not None:
                    grad_hidden_TD[rows] = grad_CV @ head.weight_VD
                if grad_weight_VD is not None:
                    grad_weight_VD += grad_CV.T @ head.hidden_TD[rows]
        ctx.grads = grads
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # scaled in place: the head's gradient is as large as the head
        return *(None if grad is None else grad.mul_(grad_output) for grad in grads), None, None
