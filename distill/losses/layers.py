"""Losses of one layer, on tensors: student against teacher, each token counted once.

Shapes: T tokens, D hidden size, B windows, S tokens of a window, H heads, E numbers of a head, R relation
heads, Q queries of a block of rows, P keys up to its last one, K sums.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ...core.errors import InvalidInput

BLOCK_ELEMENTS = 2**24  # scores in a block of rows: 64 MiB in float32, of which about four exist at once


def hidden_mse(
    student_TD: Tensor, teacher_TD: Tensor, *, power: Tensor | float | None = None
) -> tuple[Tensor, int]:
    """Return the relative squared error of hidden states: |x - y|² per token over the teacher's mean |y|².

    Args:
        student_TD: differentiable.
        teacher_TD: constant.
        power: the mean of |y|² to divide by; by default that of these tokens. A loss that must not depend on
            how a step is cut into micro-batches needs the same number for all of them (`power_of` some fixed
            tokens).

    Returns:
        The sum over tokens in float32, or float64 for such tensors, and T.

    Raises:
        InvalidInput: the hidden sizes differ.
    """
    return _relative("hidden_mse", student_TD, teacher_TD, power)


def hidden_cosine(student_TD: Tensor, teacher_TD: Tensor) -> tuple[Tensor, int]:
    """Return 1 - cos of the angle between hidden states; arguments and result as for `hidden_mse`."""
    student_TD, teacher_TD = comparable("hidden_cosine", student_TD, teacher_TD)
    return (1 - cosine_similarity(student_TD, teacher_TD, dim=-1)).sum(), len(student_TD)


def attention_output(
    student_TD: Tensor, teacher_TD: Tensor, *, power: Tensor | float | None = None
) -> tuple[Tensor, int]:
    """Return the relative squared error of an attention layer's output projection, as `hidden_mse`.

    It is the loss of LoLCATs' attention transfer (arXiv 2410.10254) without its arbitrary factor.
    """
    return _relative("attention_output", student_TD, teacher_TD, power)


def power_of(teacher_TD: Tensor) -> Tensor:
    """Return the mean over tokens of |y|², never zero."""
    wide_TD = teacher_TD.detach().to(torch.promote_types(teacher_TD.dtype, torch.float32))
    return wide_TD.square().sum(-1).mean().clamp_min(torch.finfo(wide_TD.dtype).tiny)


def attention_relation(
    student_BHSE: Tensor,
    teacher_BHSE: Tensor,
    *,
    position_ids_BS: Tensor | None = None,
    scored_BS: Tensor | None = None,
    block: int | None = None,
) -> tuple[Tensor, int]:
    """Return KL(teacher || student) of the rows of softmax(x xᵀ / √E).

    x are the queries, keys or values of an attention layer.

    It compares how tokens relate to each other, which is defined for any widths: the self-attention relations
    of MiniLMv2 (arXiv 2012.15828), causal as in LinearARD (arXiv 2604.00004). If student and teacher have
    different numbers of heads, the heads of both are joined and cut into as many relation heads as divide
    both numbers.

    Args:
        student_BHSE: differentiable once.
        teacher_BHSE: constant; H and E may differ from the student's.
        position_ids_BS: 0 where a packed document starts; tokens are compared only within their document.
        scored_BS: true for the tokens whose rows count; by default all.
        block: rows at a time; by default as many as give `BLOCK_ELEMENTS` scores.

    Returns:
        The sum over scored tokens of the mean over relation heads, in nats, in float32 or wider; and their
        number.
    """
    heads = math.gcd(student_BHSE.shape[1], teacher_BHSE.shape[1])
    student_BRSE, teacher_BRSE = (
        _relation_heads(x_BHSE, heads) for x_BHSE in (student_BHSE, teacher_BHSE.detach())
    )
    windows, _, length, _ = student_BRSE.shape
    block = block or max(1, BLOCK_ELEMENTS // (windows * heads * length))
    if position_ids_BS is None:
        position_ids_BS = torch.arange(length, device=student_BRSE.device).expand(windows, length)
    if scored_BS is None:
        scored_BS = torch.ones_like(position_ids_BS, dtype=torch.bool)
    document_BS = (position_ids_BS == 0).cumsum(-1)
    total: Tensor = _Relation.apply(  # type: ignore[no-untyped-call]
        student_BRSE, teacher_BRSE, document_BS, scored_BS, block
    )
    return total / heads, int(scored_BS.sum())


class _Relation(torch.autograd.Function):
    """The sum over rows and heads, with the gradient formed in the forward pass.

    S² scores exist only for one block of rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_BRSE: Tensor,
        teacher_BRSE: Tensor,
        document_BS: Tensor,
        scored_BS: Tensor,
        block: int,
    ) -> Tensor:
        grad_BRSE = torch.zeros_like(student_BRSE)
        total = student_BRSE.new_zeros(())
        length, scale = document_BS.shape[1], student_BRSE.shape[-1] ** -0.5
        positions_S = torch.arange(length, device=document_BS.device)
        with torch.autocast(student_BRSE.device.type, enabled=False):
            for start in range(0, length, block):
                rows, columns = slice(start, start + block), slice(min(start + block, length))
                masked_BQP = positions_S[rows, None] < positions_S[None, columns]
                masked_BQP = masked_BQP | (document_BS[:, rows, None] != document_BS[:, None, columns])
                log_q_BRQP, log_p_BRQP = (
                    _relation(x_BRSE, rows, columns, masked_BQP) for x_BRSE in (student_BRSE, teacher_BRSE)
                )
                p_BRQP = log_p_BRQP.exp()
                # Both are -inf where they are masked.
                gap_BRQP = (log_p_BRQP - log_q_BRQP).masked_fill_(masked_BQP[:, None], 0)
                scored_B1Q1 = scored_BS[:, None, rows, None]
                total += gap_BRQP.mul_(p_BRQP).mul_(scored_B1Q1).sum()
                grad_BRQP = log_q_BRQP.exp_().sub_(p_BRQP).mul_(scored_B1Q1).mul_(scale)
                grad_BRSE[:, :, rows] += grad_BRQP @ student_BRSE[:, :, columns]  # as rows
                grad_BRSE[:, :, columns] += grad_BRQP.mT @ student_BRSE[:, :, rows]  # as columns
        ctx.save_for_backward(grad_BRSE)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BRSE,) = ctx.saved_tensors
        return grad_BRSE * grad_output, None, None, None, None


def _relation(x_BRSE: Tensor, rows: slice, columns: slice, masked_BQP: Tensor) -> Tensor:
    """Return the logarithm of a block of rows of the relation."""
    scores_BRQP = (x_BRSE[:, :, rows] @ x_BRSE[:, :, columns].mT).mul_(x_BRSE.shape[-1] ** -0.5)
    return torch.log_softmax(scores_BRQP.masked_fill_(masked_BQP[:, None], -math.inf), -1)


def _relation_heads(x_BHSE: Tensor, heads: int) -> Tensor:
    """Return the same numbers as so many heads, in float32 or wider."""
    if x_BHSE.shape[1] != heads:
        x_BHSE = x_BHSE.transpose(1, 2).flatten(2).unflatten(2, (heads, -1)).transpose(1, 2)
    return x_BHSE.to(torch.promote_types(x_BHSE.dtype, torch.float32))


def _relative(
    name: str, student_TD: Tensor, teacher_TD: Tensor, power: Tensor | float | None
) -> tuple[Tensor, int]:
    student_TD, teacher_TD = comparable(name, student_TD, teacher_TD)
    power = power_of(teacher_TD) if power is None else power
    return (student_TD - teacher_TD).square().sum() / power, len(student_TD)


def comparable(name: str, student_TD: Tensor, teacher_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float32 or wider, the teacher as a constant.

    Raises:
        InvalidInput: their sizes D differ, so that the loss `name` cannot be computed.
    """
    if student_TD.shape[-1] != teacher_TD.shape[-1]:
        raise InvalidInput(
            f"{name} compares vectors of one size, but the student's have {student_TD.shape[-1]} numbers and "
            f"the teacher's {teacher_TD.shape[-1]}; use kl with this teacher, or one of the student's size"
        )
    dtype = torch.promote_types(student_TD.dtype, torch.promote_types(teacher_TD.dtype, torch.float32))
    return student_TD.to(dtype), teacher_TD.detach().to(dtype)
