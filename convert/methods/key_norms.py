"""GQA and MQA where keys are normalised after the projection (Qwen3, Gemma 3, OLMo 2).

A norm hides the length of a key, and its weight differs between a rotary pair's two dimensions. A multiple of
the pair therefore does not pass through it, as it does in pooling.py. So multiples are taken of keys and
queries as they are after the weight, and the weight is divided out again. Directions are then exact; only the
root mean square, one number per head and token, is not quite. On three models with key norms this loses
between a fifth and two fifths of what the plain average loses (LOG.md).

Legend: attention.py; pooling.py.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..algebra.attention import Attention
from ..algebra.metric import LayerMetric, with_bias
from ..algebra.rotary import complex_rows, half_rows
from ..algebra.target import GroupedTarget

# Least weight of a dimension relative to its pair's other: a turn must not fill one that the norm hides.
FLOOR = 0.1

Pool = Callable[[Attention, GroupedTarget, LayerMetric, Tensor], Attention]


def by_value(pool: Pool) -> Pool:
    """Return a method for sources with key norms, which pools values by `pool` and keys by `keys`.

    Args:
        pool: a method of pool.py, whose values and output projection are taken.
    """

    def pooled(
        attention: Attention, target: GroupedTarget, metric: LayerMetric, frequencies_F: Tensor
    ) -> Attention:
        if target.num_key_value_heads == len(attention.k_KHD):
            return attention
        by_pool = pool(replace(attention, q_norm_NH=None, k_norm_KH=None), target, metric, frequencies_F)
        return replace(keys(attention, target), v_KHD=by_pool.v_KHD, v_KH=by_pool.v_KH, o_DNH=by_pool.o_DNH)

    return pooled


def keys(attention: Attention, target: GroupedTarget) -> Attention:
    """Pool each group's keys into one, and fold each head's multiple of it into W_Q.

    Keys are first brought to one length, because the norm hides it. The pooled key then has, per rotary pair,
    the best complex multiples of one key. A pair's heads count as much as their queries look at it. A norm
    over all heads is averaged with the keys. Nothing is lost when a group's heads are equal up to a positive
    factor and the signs of pairs, or up to turns of pairs where a pair's two weights are equal.
    """
    groups = target.num_key_value_heads
    queries = len(attention.q_NHD) // len(attention.k_KHD)
    k_KHE = with_bias(attention.k_KHD, attention.k_KH)
    q_NHE = with_bias(attention.q_NHD, attention.q_NH)
    k_weight_KH = _usable(attention.k_norm_KH, len(k_KHE))
    q_weight_NH = _usable(attention.q_norm_NH, len(q_NHE))
    length_K = torch.linalg.matrix_norm(k_KHE)
    z_KFE = complex_rows(k_weight_KH[..., None] * k_KHE / length_K.clamp_min(_least(length_K))[:, None, None])
    z_NFE = complex_rows(q_weight_NH[..., None] * q_NHE)
    looks_KF = z_NFE.abs().square().sum(-1).unflatten(0, (-1, queries)).sum(1)
    found = [_shared(*members) for members in zip(z_KFE.chunk(groups), looks_KF.chunk(groups), strict=True)]
    share_NF = torch.cat([share_MF for _, share_MF in found]).repeat_interleave(queries, 0)
    weight_GH = k_weight_KH.unflatten(0, (groups, -1)).mean(1)
    k_GHE = half_rows(torch.stack([key_FE for key_FE, _ in found])) / weight_GH[..., None]
    k_GHE *= (length_K.unflatten(0, (groups, -1)).mean(1) / torch.linalg.matrix_norm(k_GHE))[:, None, None]
    q_NHE = half_rows(share_NF.conj()[..., None] * z_NFE) / q_weight_NH[..., None]
    hidden = attention.k_KHD.shape[-1]
    return replace(
        attention,
        q_NHD=q_NHE[..., :hidden],
        q_NH=None if attention.q_NH is None else q_NHE[..., -1],
        k_KHD=k_GHE[..., :hidden],
        k_KH=None if attention.k_KH is None else k_GHE[..., -1],
        k_norm_KH=merged_norm(attention.k_norm_KH, groups),
    )


def merged_norm(weight_KH: Tensor | None, groups: int) -> Tensor | None:
    """Return the weight of a norm for fewer heads.

    It does not change where heads share it; otherwise it is the average of each group's.
    """
    return (
        weight_KH
        if weight_KH is None or len(weight_KH) == 1
        else weight_KH.unflatten(0, (groups, -1)).mean(1)
    )


def _least(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).tiny


def _usable(weight: Tensor | None, heads: int) -> Tensor:
    """Return a norm's weight for every head, bounded so that it can be divided out.

    No dimension's weight is far below that of its pair's other dimension.
    """
    assert weight is not None, "queries and keys are both normalised"
    real, imaginary = weight.chunk(2, -1)
    floor = FLOOR * torch.maximum(real.abs(), imaginary.abs()).clamp_min(_least(weight) / FLOOR)
    size = torch.maximum(weight.abs(), torch.cat([floor, floor], -1))
    return torch.where(weight < 0, -size, size).expand(heads, -1)


def _shared(z_MFE: Tensor, looks_MF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key (F, E) that a group's heads are best multiples of, and the multiples (M, F).

    The fit is made pair by pair. Multiples have a mean square of one, so that the queries that take them over
    keep their length. The multiple that counts most is real, so that equal heads are not turned.
    """
    weight_FM = looks_MF.mT.clamp_min(_least(looks_MF)).sqrt()
    weighted_FME = weight_FM[..., None] * z_MFE.transpose(0, 1)
    _, vectors_FMM = torch.linalg.eigh(weighted_FME @ weighted_FME.mH)
    leading_FM = vectors_FMM[..., -1]
    first_F1 = leading_FM.abs().argmax(-1, keepdim=True)
    leading_FM = leading_FM / torch.sgn(leading_FM.gather(-1, first_F1))
    share_FM = leading_FM / weight_FM
    size_F1 = share_FM.abs().square().mean(-1, keepdim=True).sqrt()
    key_FE = size_F1 * torch.einsum("fm,fme->fe", leading_FM.conj(), weighted_FME)
    return key_FE, (share_FM / size_F1).mT
