"""GQA and MQA where a norm follows the projection of heads: of keys (Qwen3, OLMo 2), of values (Gemma 4).

A norm hides the length of a key, and its weight differs between a rotary pair's two dimensions. A multiple of
the pair therefore does not pass through it, as it does in pooling.py. So multiples are taken of keys and
queries as they are after the weight, and the weight is divided out again. Directions are then exact; only the
root mean square, one number per head and token, is not quite. On three models with key norms this loses
between a fifth and two fifths of what the plain average loses (docs/notes/key-norms.md).

A norm of each value without weights hides its length, and lets nothing pass but turns. So the heads of a
group are brought to one length and turned onto each other before they are averaged, and the turns are undone
in W_O. Where values are the keys, one turn serves both: of each rotary pair by an angle, which commutes with
RoPE.

Nothing is lost when a group's heads are equal up to a factor and a turn of their values; where keys are
values, up to the signs of pairs, or up to turns of pairs where a pair's two weights in the norms are equal.

A layer that reads another layer's keys and values takes over the turns of that layer.

Legend: attention.py; pooling.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..algebra.attention import Attention
from ..algebra.metric import LayerMetric, with_bias, without_bias
from ..algebra.rotary import complex_rows, half_rows
from ..algebra.target import GroupedTarget
from .pooling import Pool, mean_of_turned, merged_norm, phases, rotations

# Least weight of a dimension relative to its pair's other: a turn must not fill one that the norm hides.
FLOOR = 0.1


def by_value(pool: Pool) -> Pool:
    """Return a method for sources with key norms, which pools values by `pool` and keys by `keys`."""

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
    attention = attention.without_means()
    pooled, share_KF = shared_keys(attention, target)
    return taken_over(pooled, share_KF.repeat_interleave(len(attention.q_NHD) // len(share_KF), 0))


def shared_keys(attention: Attention, target: GroupedTarget) -> tuple[Attention, Tensor]:
    """Return a layer with pooled keys and its own queries, and each head's multiples of its key (K, F)."""
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
    weight_GH = k_weight_KH.unflatten(0, (groups, -1)).mean(1)
    k_GHE = half_rows(torch.stack([key_FE for key_FE, _ in found])) / weight_GH[..., None]
    k_GHE *= (length_K.unflatten(0, (groups, -1)).mean(1) / torch.linalg.matrix_norm(k_GHE))[:, None, None]
    k_GHD, k_GH = without_bias(k_GHE, attention.k_KH)
    norm = merged_norm(attention.k_norm_KH, groups)
    pooled = replace(attention, k_KHD=k_GHD, k_KH=k_GH, k_norm_KH=norm)
    return pooled, torch.cat([share_MF for _, share_MF in found])


def taken_over(attention: Attention, share_NF: Tensor) -> Attention:
    """Return a layer whose queries take over the multiple of a shared key that each query head read."""
    q_NHE = with_bias(attention.q_NHD, attention.q_NH)
    q_weight_NH = _usable(attention.q_norm_NH, len(q_NHE))
    z_NFE = complex_rows(q_weight_NH[..., None] * q_NHE)
    q_NHE = half_rows(share_NF.conj()[..., None] * z_NFE) / q_weight_NH[..., None]
    q_NHD, q_NH = without_bias(q_NHE, attention.q_NH)
    return replace(attention, q_NHD=q_NHD, q_NH=q_NH)


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


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The changes of a layer's heads before they were merged, which its queries and outputs take over.

    Attributes:
        share_NF: complex multiples of the shared key, behind the norm's weight, for each query head.
        turn_NHH: orthogonal turns of values, for each query head.
    """

    share_NF: Tensor
    turn_NHH: Tensor


def merged(attention: Attention, target: GroupedTarget, *, key_values: bool) -> tuple[Attention, Turns]:
    """Merge the key/value heads of each group.

    Args:
        attention: with norms of single heads between projections and rotation.
        target: key/value heads of this layer.
        key_values: values are the keys before their norm.

    Returns:
        The layer, and the turns that other layers that read its keys and values need.
    """
    queries, width = len(attention.q_NHD) // len(attention.k_KHD), attention.k_KHD.shape[1]
    if target.num_key_value_heads == len(attention.k_KHD):
        shape = len(attention.q_NHD), width // 2
        return attention, Turns(
            share_NF=torch.ones(shape, dtype=torch.complex128),
            turn_NHH=torch.eye(width, dtype=torch.float64).expand(shape[0], -1, -1),
        )
    if key_values:
        pooled, turn_KF = _tied(attention, target)
        real, imaginary = torch.diag_embed(turn_KF.real), torch.diag_embed(turn_KF.imag)
        turn_KHH = torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)
        share_KF = turn_KF.conj()
    else:
        pooled, share_KF = shared_keys(attention, target)
        v_KHE = _one_length(with_bias(attention.v_KHD, attention.v_KH))
        groups = target.num_key_value_heads
        turn_KHH = torch.cat([rotations(v_MHE) for v_MHE in v_KHE.chunk(groups)])
        v_GHD, v_GH = without_bias(mean_of_turned(turn_KHH @ v_KHE, groups), attention.v_KH)
        pooled = replace(pooled, v_KHD=v_GHD, v_KH=v_GH)
    share_NF, turn_NHH = (rows.repeat_interleave(queries, 0) for rows in (share_KF, turn_KHH))
    found = Turns(share_NF=share_NF, turn_NHH=turn_NHH)
    return followed(pooled, attention, found), found


def turned(*, key_values: bool) -> Pool:
    """Return `merged` as a method of pooling.py."""

    def pooled(
        attention: Attention, target: GroupedTarget, metric: LayerMetric, frequencies_F: Tensor
    ) -> Attention:
        return merged(attention, target, key_values=key_values)[0]

    return pooled


def followed(pooled: Attention, attention: Attention, turns: Turns) -> Attention:
    """Return a layer with the queries and outputs of a source layer, for merged keys and values."""
    return replace(
        taken_over(attention, turns.share_NF),
        k_KHD=pooled.k_KHD,
        k_KH=pooled.k_KH,
        k_norm_KH=pooled.k_norm_KH,
        v_KHD=pooled.v_KHD,
        v_KH=pooled.v_KH,
        o_DNH=torch.einsum("dnh,ngh->dng", attention.o_DNH, turns.turn_NHH),
    )


def _one_length(rows_KHE: Tensor) -> Tensor:
    """Return heads of the same Frobenius norm, their mean one."""
    length_K = torch.linalg.matrix_norm(rows_KHE)
    scaled_KHE: Tensor = rows_KHE * (length_K.mean() / length_K.clamp_min(_least(length_K)))[:, None, None]
    return scaled_KHE


def _tied(attention: Attention, target: GroupedTarget) -> tuple[Attention, Tensor]:
    """Return a layer with merged keys, which are its values, and the turn of each head's pairs (K, F)."""
    groups = target.num_key_value_heads
    k_KHE = _one_length(with_bias(attention.k_KHD, attention.k_KH))
    z_KFE = complex_rows(k_KHE)
    turn_KF = torch.cat([phases(z_MFE) for z_MFE in z_KFE.chunk(groups)])
    k_GHE = mean_of_turned(half_rows(turn_KF[..., None] * z_KFE), groups)
    k_GHD, k_GH = without_bias(k_GHE, attention.k_KH)
    norm = merged_norm(attention.k_norm_KH, groups)
    pooled = replace(attention, k_KHD=k_GHD, k_KH=k_GH, v_KHD=k_GHD, v_KH=k_GH, k_norm_KH=norm)
    return pooled, turn_KF
