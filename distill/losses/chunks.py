"""A head and a criterion over T tokens, one chunk at a time.

[tokens, vocabulary] never exists whole, even in the backward pass.

The gradient is formed in the forward pass, where a chunk's logits are at hand; the backward pass only scales
it. Peak memory is that of one chunk and of the head's gradient, if it has one.

No fused kernel of another library is used, on a GPU either. torch.nn.functional.linear_cross_entropy takes
labels, or probabilities as a dense (T, V) tensor, and no second head. Liger's fused linear JSD keeps a (T, V)
buffer and supports no bias; its chunked distillation divides by the tokens of the call, not of the step.
Neither supports a soft cap or a padded vocabulary, and both return one number, whereas here several losses
and measures use one product with the head. A test compares what they have in common: cross entropy.

Shapes: T tokens, C tokens of a chunk, V vocabulary, D hidden size, K sums.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .predictions import Predictions

# Logits in a chunk, by device. The CPU's number is measured (benchmarks/results/losses-cpu.json): more logits
# take more memory and no less time. On a GPU products are quick, and the head's gradient is read and written
# once per chunk, so chunks are larger: 256 MiB in float32, of which about seven exist at once. That number is
# not measured yet.
CHUNK_ELEMENTS = {"cpu": 2**22}
CHUNK_ELEMENTS_ELSEWHERE = 2**26

# From a chunk's logits (C, V), in float32 or wider, and its rows to K sums, the first of which is the loss,
# and to d loss / d logits (may be overwritten), or None if the loss is constant.
Criterion = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]


def in_chunks(
    student: Predictions, criterion: Criterion, sums: int, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Sum a criterion over all tokens.

    Args:
        student: differentiable with respect to those of hidden states, head weight and bias that require it.
        criterion: see `Criterion`.
        sums: K.
        chunk: tokens at a time; by default as many as give `chunk_elements` logits.

    Returns:
        The loss, differentiable once, and all K sums, constant. They are float32, or float64 for hidden
        states of it.
    """
    chunk = chunk or max(1, chunk_elements(student.hidden_TD.device) // student.vocabulary)
    loss, sums_K = _Chunked.apply(  # type: ignore[no-untyped-call]
        student.hidden_TD,
        student.weight_VD,
        student.bias_V,
        student,
        criterion,
        sums,
        chunk,
        torch.is_grad_enabled(),
    )
    return loss, sums_K


def chunk_elements(device: torch.device) -> int:
    """Return the default number of logits in a chunk."""
    return CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS_ELSEWHERE)


def compute_dtype(predictions: Predictions) -> torch.dtype:
    """Return the dtype of a product with the head: autocast's where it is on."""
    device = predictions.hidden_TD.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(predictions.hidden_TD.dtype, predictions.weight_VD.dtype)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        student: Predictions,
        criterion: Criterion,
        sums: int,
        chunk: int,
        is_training: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs = (hidden_TD, weight_VD, bias_V)
        grads = [
            _accumulator(x) if is_training and ctx.needs_input_grad[i] else None for i, x in enumerate(inputs)
        ]
        dtype = compute_dtype(student)
        sums_K = hidden_TD.new_zeros(sums, dtype=torch.promote_types(dtype, torch.float32))
        with torch.autocast(hidden_TD.device.type, enabled=False):
            head = Predictions(hidden_TD, weight_VD, bias_V, student.form).computed_in(dtype)
            for start in range(0, len(hidden_TD), chunk):
                rows = slice(start, start + chunk)
                logits_CV = head.logits(rows)
                chunk_K, grad_CV = criterion(logits_CV, rows)
                sums_K += chunk_K
                if grad_CV is not None and any(grad is not None for grad in grads):
                    _accumulate(grads, _before_cap(grad_CV, logits_CV, head), head, rows)
                del logits_CV, grad_CV  # before the next chunk's exist
        ctx.grads = grads
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.mark_non_differentiable(sums_K)
        return sums_K[0].clone(), sums_K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, grad_sums_K: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "the gradients of this loss are freed; the first backward pass needs retain_graph=True"
            )
        grads = ctx.grads
        # The running backward pass may have been asked to keep its graph for another one.
        asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
        keeps = asked is None or bool(asked())
        ctx.grads = grads if keeps else None
        scaled: list[Tensor | None] = []
        for grad, dtype in zip(grads, ctx.dtypes, strict=True):
            if grad is None:
                scaled.append(None)
                continue
            # In place unless it is needed again: the head's gradient is as large as the head.
            grad = grad * grad_loss if keeps else grad.mul_(grad_loss)
            scaled.append(grad.to(dtype))
        return *scaled, None, None, None, None, None


def _accumulator(tensor: Tensor | None) -> Tensor | None:
    """Return zeros for sums of many chunks, in a dtype that rounds them little."""
    if tensor is None:
        return None
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _before_cap(grad_CV: Tensor, logits_CV: Tensor, head: Predictions) -> Tensor:
    """Return d loss / d (h Wᵀ + b) from d loss / d logits; `logits_CV` is overwritten."""
    if head.form.soft_cap is not None:  # d (s tanh(x/s)) / dx = 1 - tanh²
        grad_CV = grad_CV.mul_(logits_CV.div_(head.form.soft_cap).square_().neg_().add_(1))
    return grad_CV if head.form.scale == 1 else grad_CV.mul_(head.form.scale)


def _accumulate(grads: list[Tensor | None], grad_CV: Tensor, head: Predictions, rows: slice) -> None:
    """Add a chunk's part to the gradients of hidden states, weight and bias, in the head's dtype."""
    grad_hidden_TD, grad_weight_VD, grad_bias_V = grads
    dtype = head.weight_VD.dtype
    if grad_bias_V is not None:
        grad_bias_V += grad_CV.sum(0)
    grad_CV = grad_CV.to(dtype)
    if grad_hidden_TD is not None:
        grad_hidden_TD[rows] = grad_CV @ head.weight_VD
    if grad_weight_VD is not None:
        if grad_weight_VD.dtype == dtype:  # without a separate product, which would be as large as the head
            grad_weight_VD.addmm_(grad_CV.T, head.hidden_TD[rows])
        else:
            grad_weight_VD += grad_CV.T @ head.hidden_TD[rows]
