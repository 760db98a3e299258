"""MHA to GQA and MQA: the key/value heads of a group become one.

Every method writes the source's own class. A group of one head is left as it is, bit for bit.

Legend: attention.py; G groups, M = K/G heads in each.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..algebra.attention import Attention
from ..algebra.metric import UNWEIGHTED, LayerMetric, with_bias, without_bias
from ..algebra.queries import fit_queries
from ..algebra.rotary import complex_rows, half_rows, interleaved_rows
from ..algebra.subspaces import leading, low_rank
from ..algebra.target import GroupedTarget

Pool = Callable[[Attention, GroupedTarget, LayerMetric, Tensor], Attention]

SWEEPS = 50  # of generalised Procrustes at most
TOLERANCE = 1e-7  # relative gain of the alignment below which the sweeps stop


def mean(
    attention: Attention, target: GroupedTarget, metric: LayerMetric, frequencies_F: Tensor
) -> Attention:
    """Average each group's heads: the reference (Ainslie et al., arXiv 2305.13245)."""

    def pool(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.unflatten(0, (target.num_key_value_heads, -1)).mean(1)

    k_GHD = pool(attention.k_KHD)
    v_GHD = pool(attention.v_KHD)
    assert k_GHD is not None
    assert v_GHD is not None
    return replace(
        attention,
        k_KHD=k_GHD,
        v_KHD=v_GHD,
        k_KH=pool(attention.k_KH),
        v_KH=pool(attention.v_KH),
        k_norm_KH=merged_norm(attention.k_norm_KH, target.num_key_value_heads),
    )


def aligned(
    attention: Attention, target: GroupedTarget, metric: LayerMetric, frequencies_F: Tensor
) -> Attention:
    """Turn the heads of a group onto each other before they are averaged (after arXiv 2412.20677).

    Two kinds of turns leave the source unchanged: of keys by one angle per rotary pair, SO(2), which commutes
    with RoPE and is undone in W_Q; of values by any rotation, O(H), undone in W_O. The turns are generalised
    Procrustes solutions. An average of unlike heads is too small, so it is scaled to the mean Frobenius norm
    of the group.
    """
    heads, groups = len(attention.k_KHD), target.num_key_value_heads
    if heads == groups:
        return attention
    z_KFE = complex_rows(with_bias(attention.k_KHD, attention.k_KH))
    v_KHE = with_bias(attention.v_KHD, attention.v_KH)
    turn_KF = torch.cat([phases(z_MFE) for z_MFE in z_KFE.chunk(groups)])
    turn_KHH = torch.cat([rotations(v_MHE) for v_MHE in v_KHE.chunk(groups)])
    queries = len(attention.q_NHD) // heads
    turn_NF, turn_NHH = (turns.repeat_interleave(queries, 0) for turns in (turn_KF, turn_KHH))
    z_NFE = complex_rows(with_bias(attention.q_NHD, attention.q_NH))
    q_NHD, q_NH = without_bias(half_rows(turn_NF[..., None] * z_NFE), attention.q_NH)
    turned_KHE = half_rows(turn_KF[..., None] * z_KFE)
    k_GHD, k_GH = without_bias(mean_of_turned(turned_KHE, groups), attention.k_KH)
    v_GHD, v_GH = without_bias(mean_of_turned(turn_KHH @ v_KHE, groups), attention.v_KH)
    o_DNH = torch.einsum("dnh,ngh->dng", attention.o_DNH, turn_NHH)
    return replace(
        attention, q_NHD=q_NHD, q_NH=q_NH, k_KHD=k_GHD, k_KH=k_GH, v_KHD=v_GHD, v_KH=v_GH, o_DNH=o_DNH
    )


def subspace(
    attention: Attention, target: GroupedTarget, metric: LayerMetric, frequencies_F: Tensor
) -> Attention:
    """Compute the best shared key and value of each group.

    The part that each head needs of them is folded into W_Q and W_O. Per rotary pair a group's key is the
    best complex rank one of its heads' keys (complex multiples commute with RoPE), and every query head is
    fitted to the whole of it. Values are read from the best H-dimensional subspace of all the group's values.
    The result is exact when the heads are equal up to phases and rotations.
    """
    heads, groups = len(attention.k_KHD), target.num_key_value_heads
    if heads == groups:
        return attention
    queries = len(attention.q_NHD) // heads
    width = attention.k_KHD.shape[1]
    k_KHE = with_bias(attention.k_KHD, attention.k_KH)
    v_KHE = with_bias(attention.v_KHD, attention.v_KH)
    q_NHE = with_bias(attention.q_NHD, attention.q_NH)
    z_KFE = complex_rows(k_KHE)
    pairs_FKK = metric.pairs(heads)
    moment_EE = metric.moment(k_KHE)
    seen_KFE = z_KFE if moment_EE is None else complex_rows(k_KHE @ moment_EE)
    keys, values, maps, fits = [], [], [], []
    for first in range(0, heads, heads // groups):
        group = slice(first, first + heads // groups)
        pairs_FMM, z_MFE, seen_MFE = pairs_FKK[:, group, group], z_KFE[group], seen_KFE[group]
        key_FE = torch.cat(
            [leading(z_MFE[:, f], pairs_FMM[f], seen_MFE[:, f], 1)[0] for f in range(width // 2)]
        )
        keys.append(half_rows(key_FE))
        readers = metric.of_queries(slice(group.start * queries, group.stop * queries))
        slots_RE, none_CE = interleaved_rows(key_FE), k_KHE[0, :0]
        fit_NRH, _ = fit_queries(
            k_KHE[group], frequencies_F, slots_RE, frequencies_F, none_CE, queries, readers
        )
        fits.append(torch.cat([fit_NRH[:, ::2], fit_NRH[:, 1::2]], 1))
        value_HE, map_MH, _ = low_rank(
            v_KHE[group].flatten(0, 1), metric.value_blocks(heads, group), metric.moment(v_KHE), width
        )
        values.append(value_HE)
        maps.append(map_MH.unflatten(0, (-1, width)))
    q_NHD, q_NH = without_bias(torch.cat(fits) @ q_NHE, attention.q_NH)
    k_GHD, k_GH = without_bias(torch.stack(keys), attention.k_KH)
    v_GHD, v_GH = without_bias(torch.stack(values), attention.v_KH)
    o_DNH = torch.einsum("dnh,nhg->dng", attention.o_DNH, torch.cat(maps).repeat_interleave(queries, 0))
    return replace(
        attention, q_NHD=q_NHD, q_NH=q_NH, k_KHD=k_GHD, k_KH=k_GH, v_KHD=v_GHD, v_KH=v_GH, o_DNH=o_DNH
    )


def phases(z_MFE: Tensor) -> Tensor:
    """Return unit complex numbers (M, F) that turn each head's pair onto the sum of the others.

    They are found by alternating projections.
    """
    # All that matters; its size does not depend on E.
    inner_FMM = torch.einsum("mfe,nfe->fmn", z_MFE, z_MFE.conj())
    turn_FM = torch.ones_like(inner_FMM[..., 0])
    before = 0.0
    for _ in range(SWEEPS):
        after = 0.0
        for head in range(len(z_MFE)):
            toward_F = (turn_FM * inner_FMM[:, :, head]).sum(-1) - turn_FM[:, head] * inner_FMM[:, head, head]
            turn_FM[:, head] = torch.where(toward_F == 0, 1, torch.sgn(toward_F))
            after += float(toward_F.abs().sum())
        if after - before <= TOLERANCE * after:
            break
        before = after
    return turn_FM.mT


def rotations(v_MHE: Tensor) -> Tensor:
    """Return orthogonal matrices (M, H, H) that turn each head's values onto the sum of the others.

    They are found by Procrustes steps.
    """
    inner_MMHH = torch.einsum("mhe,nge->mnhg", v_MHE, v_MHE)
    turn_MHH = torch.eye(v_MHE.shape[1], dtype=v_MHE.dtype).repeat(len(v_MHE), 1, 1)
    before = 0.0
    for _ in range(SWEEPS):
        after = 0.0
        for head in range(len(v_MHE)):
            toward_HH = (turn_MHH @ inner_MMHH[:, head]).sum(0) - turn_MHH[head] @ inner_MMHH[head, head]
            u_HH, s_H, vt_HH = torch.linalg.svd(toward_HH)
            turn_MHH[head] = u_HH @ vt_HH
            after += float(s_H.sum())
        if after - before <= TOLERANCE * after:
            break
        before = after
    return turn_MHH


def _renormalised(rows_MHE: Tensor) -> Tensor:
    """Return the mean of a group's heads, scaled to the mean of their Frobenius norms."""
    pooled_HE = rows_MHE.mean(0)
    norm = torch.linalg.matrix_norm(pooled_HE)
    return pooled_HE * (torch.linalg.matrix_norm(rows_MHE).mean() / norm if norm > 0 else 1)


def merged_norm(weight_KH: Tensor | None, groups: int) -> Tensor | None:
    """Return the weight of a norm for fewer heads: a shared one, or the average of each group's."""
    if weight_KH is None or len(weight_KH) == 1:
        return weight_KH
    merged_GH: Tensor = weight_KH.unflatten(0, (groups, -1)).mean(1)
    return merged_GH


def mean_of_turned(rows_KHE: Tensor, groups: int) -> Tensor:
    """Return the mean of each group's turned heads, as long as they are on average, (G, H, E)."""
    return torch.stack([_renormalised(rows_MHE) for rows_MHE in rows_KHE.chunk(groups)])


def by_dimension(pool: Pool) -> Pool:
    """Return a method for sources with gates, which pools keys by `pool` and values dimension by dimension.

    A gate multiplies each dimension of a head's output (Qwen3-Next). It stands between values and W_O, so a
    head's values cannot change their basis, but a factor on each dimension passes through it. So each
    dimension of a group's value is the best rank one of that dimension of its heads, and the factors go into
    W_O. Nothing is lost where, in each dimension, the heads of a group are multiples of each other.
    """

    def pooled(
        attention: Attention, target: GroupedTarget, metric: LayerMetric, frequencies_F: Tensor
    ) -> Attention:
        heads, width = attention.v_KHD.shape[:2]
        if target.num_key_value_heads == heads:
            return attention
        members = heads // target.num_key_value_heads
        v_KHE = with_bias(attention.v_KHD, attention.v_KH)
        moment_EE = metric.moment(v_KHE)
        values, factors = [], []
        for first in range(0, heads, members):
            group = slice(first, first + members)
            if metric is UNWEIGHTED:
                cost_SS = torch.eye(members * width, dtype=torch.float64)
            else:
                cost_SS = torch.block_diag(*metric.value_blocks(heads, group))
            cost_MHMH = cost_SS.view(members, width, members, width)
            found = [
                low_rank(v_KHE[group, h], cost_MHMH[:, h, :, h][None], moment_EE, 1)[:2] for h in range(width)
            ]
            values.append(torch.cat([value_1E for value_1E, _ in found]))
            factors.append(torch.cat([factor_M1 for _, factor_M1 in found], 1))
        v_GHD, v_GH = without_bias(torch.stack(values), attention.v_KH)
        factor_NH = torch.cat(factors).repeat_interleave(attention.o_DNH.shape[1] // heads, 0)
        by_pool = pool(attention, target, metric, frequencies_F)
        return replace(by_pool, v_KHD=v_GHD, v_KH=v_GH, o_DNH=attention.o_DNH * factor_NH)

    return pooled
