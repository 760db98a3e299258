"""MHA and GQA to latent attention with rotation left intact: keys are rebuilt from the latent, then rotated.

Nothing positional is lost, because keys are compressed before they are rotated. But keys must be rebuilt
whenever they are attended to: this saves memory, not arithmetic.

Legend: attention.py; E columns of what is encoded, with or without the constant 1.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..algebra.attention import Attention, IntactAttention, LatentAttention
from ..algebra.forward import attend_to, concatenate, keys_and_values
from ..algebra.metric import LayerMetric, weights_only, with_bias
from ..algebra.spectrum import spectrum
from ..algebra.subspaces import low_rank, matrix_root
from ..algebra.target import LatentTarget
from ..calibration.layer_metric import first_token_factor, of_keys
from ..calibration.statistics import LayerStatistics
from .latent import behind_values
from .refinement import BATCH, LayerSample, fitting_device

_REBUILT = {"q_NHD", "k_KHD", "v_KHD"}  # fields of a source layer that its fold has otherwise
RIDGE = 1e-4  # of the mean energy: what the linear model of a norm cannot see still costs something


def full_rank(hidden_size: int, rows: int, normed: bool) -> int:
    """Return the rank at which nothing is lost.

    It is that of all key and value rows, or of their input where that is narrower. Normed keys are no linear
    function of the input, so there the rows themselves must be kept.
    """
    return rows if normed else min(rows, hidden_size)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The vectors that the latent of a layer with key norms encodes, z = [norm(k); v], on a sample, float64.

    Attributes:
        moment_EE: E[z zᵀ], E = 2KH.
        key_BSS, value_BSS: what errors cost there, as in `LayerMetric`.
    """

    moment_EE: Tensor
    key_BSS: Tensor
    value_BSS: Tensor


def encoded(attention: Attention, frequencies_F: Tensor, sample: LayerSample) -> Encoded:
    """Compute the vectors that a latent encodes, and the cost of an error in them, on a sample.

    Sequences that are held back take no part, and first tokens count as in `metric.of_keys`. The cost is the
    loss of refinement.py to second order: where e is drawn from N(0, G) at every token's output o, the
    gradient g of eᵀo has E[g gᵀ] = E[Jᵀ G J] (Gauss-Newton). Gradients before the norm would leave out the
    cost of an error in a key's length.
    """
    device = fitting_device()
    source = attention.to(torch.float32, device)
    scoring = sample.scoring.to(torch.float32, device)
    root_DD = matrix_root(sample.fisher_DD).to(device, torch.float32)
    draw = torch.Generator().manual_seed(0)
    keys = attention.k_KHD.shape[0] * attention.k_KHD.shape[1]
    sizes = 2 * keys, keys, keys
    sums, firsts = ([torch.zeros(size, size, dtype=torch.float64) for size in sizes] for _ in range(2))
    for part in sample.used.split(BATCH):
        input_BTD = sample.input_BTD[part].to(device, torch.float32)
        error_BTD = torch.randn(input_BTD.shape, generator=draw).to(device) @ root_DD
        with torch.enable_grad():
            k_BKTH, v_BKTH = (
                rows.detach().requires_grad_()
                for rows in keys_and_values(source, input_BTD, scoring.norm_epsilon)
            )
            score = (attend_to(source, input_BTD, k_BKTH, v_BKTH, frequencies_F, scoring) * error_BTD).sum()
        gradients = torch.autograd.grad(score, (k_BKTH, v_BKTH))
        seen = concatenate(k_BKTH, v_BKTH).detach(), *map(concatenate, gradients)
        for total_EE, first_EE, rows_BTE in zip(sums, firsts, seen, strict=True):
            total_EE += _products(rows_BTE)
            first_EE += _products(rows_BTE[:, :1])
    tokens = len(sample.used) * sample.input_BTD.shape[1]
    moment_EE, key_SS, value_SS = (total_EE / tokens for total_EE in sums)
    first_EE, *first = (first_EE / tokens for first_EE in firsts)
    rest = key_SS - first[0], value_SS - first[1]
    energies = moment_EE[:keys, :keys], moment_EE[keys:, keys:]
    factor = first_token_factor(first, rest, energies, sample.input_BTD.shape[1])
    if factor is None:
        return Encoded(moment_EE=moment_EE, key_BSS=key_SS[None], value_BSS=value_SS[None])
    moment_EE += (factor - 1) * first_EE
    return Encoded(moment_EE=moment_EE, key_BSS=rest[0][None], value_BSS=rest[1][None])


def _products(rows_BTE: Tensor) -> Tensor:
    rows_XE = rows_BTE.flatten(0, 1)
    return (rows_XE.mT @ rows_XE).to("cpu", torch.float64)


def to_intact(
    attention: Attention, target: LatentTarget, metric: LayerMetric, moment_EE: Tensor | None = None
) -> IntactAttention:
    """Fold one layer to a latent whose linear functions give keys and values with least error in the metric.

    With key norms, the latent encodes the normed keys with the values.

    Args:
        attention: the source's weights, float64.
        target: `kv_lora_rank` is the rank; from `full_rank` on the result is exact.
        metric: what errors cost, at keys behind their norm.
        moment_EE: second moment of normed keys and values; that of `linearised` attention where there is
            none.
    """
    plain = linearised(attention, metric.input_EE)
    normed = attention.k_norm_KH is not None
    rows_CE = torch.cat([plain.k_KHD, plain.v_KHD]).flatten(0, 1)
    input_EE = None if metric.input_EE is None else metric.input_EE[:-1, :-1]
    if normed:
        if moment_EE is None:
            moment_EE = (rows_CE if input_EE is None else rows_CE @ input_EE) @ rows_CE.mT
        rows_CE = torch.eye(len(rows_CE), dtype=rows_CE.dtype)
        moment_EE = moment_EE + moment_EE.diagonal().mean() * RIDGE * rows_CE
    else:
        moment_EE = input_EE
    rank = target.kv_lora_rank
    energy_M = None
    if rank >= full_rank(rows_CE.shape[1], len(rows_CE), normed):
        down_CE, up = _exact(rows_CE, rank)
    else:
        down_CE, up, energy_M = low_rank(
            rows_CE, torch.cat([metric.key_BSS, metric.value_BSS]), moment_EE, rank
        )
    k_up_KHC, v_up_KHC = up.unflatten(0, (2, len(attention.k_KHD), -1))
    return IntactAttention(
        q_NHA=attention.q_NHD,
        down_CE=down_CE,
        k_up_KHC=k_up_KHC,
        v_up_KHC=v_up_KHC,
        k_KHD=attention.k_KHD if normed else None,
        v_KHD=attention.v_KHD if normed else None,
        spectrum=None if energy_M is None else spectrum(energy_M),
        **{name: value for name, value in vars(attention).items() if name not in _REBUILT},
    )


def metric_behind_norms(
    attention: Attention, statistics: LayerStatistics | None, span: int, seen: Encoded | None
) -> LayerMetric:
    """Return the metric of a layer that may have key norms; arguments as in `fold_joint`."""
    if statistics is None:
        return weights_only(linearised(attention, None), span)
    if seen is None:
        return behind_norms(of_keys(statistics, attention), attention)
    return replace(of_keys(statistics, attention), key_BSS=seen.key_BSS, value_BSS=seen.value_BSS)


def fold_joint(
    attention: Attention,
    target: LatentTarget,
    statistics: LayerStatistics | None,
    span: int,
    seen: Encoded | None = None,
) -> IntactAttention | LatentAttention:
    """Fold one layer to a latent that is all there is in the cache, by statistics or by the weights alone.

    Args:
        attention: the source's weights, float64.
        target: `rope` says whether what is rebuilt is then rotated, or nothing is.
        statistics: of the layer.
        span: max_position_embeddings.
        seen: of a layer with key norms, where there is a sample of it.
    """
    metric = metric_behind_norms(attention, statistics, span, seen)
    folded = to_intact(attention, target, metric, None if seen is None else seen.moment_EE)
    return folded if target.rope == "intact" else unrotated(folded)


def unrotated(attention: IntactAttention) -> LatentAttention:
    """Return latent attention without a rotary part, for a source that rotates nothing.

    A key bias adds the same to all scores of a query, which softmax cancels. A value bias is a constant of
    the output.
    """
    queries = len(attention.q_NHA) // len(attention.k_up_KHC)
    return LatentAttention(
        q_nope_NPA=attention.q_NHA,
        q_rope_NRA=attention.q_NHA[:, :0],
        down_CD=attention.down_CE,
        k_up_NPC=attention.k_up_KHC.repeat_interleave(queries, 0),
        v_up_NHC=attention.v_up_KHC.repeat_interleave(queries, 0),
        k_rope_RD=attention.down_CE[:0],
        q_nope_NP=attention.q_NH,
        q_rope_NR=None if attention.q_NH is None else attention.q_NH[:, :0],
        k_rope_R=None if attention.k_KH is None else attention.down_CE[:0, 0],
        spectrum=attention.spectrum,
        **behind_values(attention),
    )


def linearised(attention: Attention, input_EE: Tensor | None) -> Attention:
    """Replace the norms of attention by the linear maps that they are on average."""
    if attention.k_norm_KH is None:
        return attention
    attention = attention.without_means()
    q_gain_NH, k_gain_KH = gains(attention, input_EE)
    return replace(
        attention,
        q_NHD=q_gain_NH[..., None] * attention.q_NHD,
        k_KHD=k_gain_KH[..., None] * attention.k_KHD,
        q_NH=None if attention.q_NH is None else q_gain_NH * attention.q_NH,
        k_KH=None if attention.k_KH is None else k_gain_KH * attention.k_KH,
        q_norm_NH=None,
        k_norm_KH=None,
    )


def behind_norms(metric: LayerMetric, attention: Attention) -> LayerMetric:
    """Move a metric that was measured at keys as they are projected to the keys behind their norm."""
    if attention.k_norm_KH is None:
        return metric
    gain_BS = gains(attention, metric.input_EE)[1].reshape(metric.key_BSS.shape[:2])
    return replace(metric, key_BSS=metric.key_BSS / gain_BS[:, :, None] / gain_BS[:, None, :])


def gains(attention: Attention, input_EE: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the average factors of the query and key norms, (N, H) and (K, H).

    They are the weights over the root of the mean square.
    """
    attention = attention.without_means()
    found = []
    for rows, bias, norm in (
        (attention.q_NHD, attention.q_NH, attention.q_norm_NH),
        (attention.k_KHD, attention.k_KH, attention.k_norm_KH),
    ):
        rows_NHE = with_bias(rows, bias)
        width = rows_NHE.shape[-1]
        moved = rows_NHE if input_EE is None else rows_NHE @ input_EE[:width, :width]
        square_NH = (moved * rows_NHE).sum(-1)
        if norm is None:
            found.append(torch.ones_like(square_NH))
            continue
        # The mean of one head, or of all heads as one vector.
        by_head = len(norm) == 1 or attention.centred
        mean = square_NH.mean(1, keepdim=True) if by_head else square_NH.mean()
        found.append(norm * mean.clamp(min=1e-12).rsqrt() * torch.ones_like(square_NH))
    return found[0], found[1]


def _exact(rows_CE: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return down (rank, E) and up (C, rank) whose product is the rows; one of them is the identity."""
    rows, width = rows_CE.shape
    identity = torch.eye(min(rows, width), dtype=rows_CE.dtype)
    down_CE, up = (identity, rows_CE) if width <= rows else (rows_CE, identity)
    spare = rank - len(down_CE)
    return torch.nn.functional.pad(down_CE, (0, 0, 0, spare)), torch.nn.functional.pad(up, (0, spare))
