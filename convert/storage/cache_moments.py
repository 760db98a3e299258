"""The size of what a layer caches, and the cost of errors in it: by a sample of text, or by weights alone.

Legend: attention.py; B sequences, T tokens, X = B·T; W numbers that one token and head caches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..algebra.attention import Attention, IntactAttention, LatentAttention
from ..algebra.forward import attend
from ..algebra.metric import with_bias
from ..methods.refinement import BATCH, LayerSample, fitting_device

TOKENS = 4096  # at most, whose numbers are kept
DRAWS = 4  # for the cost of errors: with more the coordinates hardly change


@dataclass(frozen=True, kw_only=True)
class CacheMoments:
    """Moments of one tensor of the cache, for each of its heads; float64, on the CPU.

    Attributes:
        value_KWW: S, second moment of the numbers.
        cost_KWW: H, second derivative of the loss by them, up to a common factor.
        rows_KXW: the numbers of some tokens, float32; None without a sample.
    """

    value_KWW: Tensor
    cost_KWW: Tensor
    rows_KXW: Tensor | None = None


@torch.enable_grad()
def sampled_moments(
    layer: Attention | LatentAttention | IntactAttention, slots_S: Tensor, sample: LayerSample
) -> tuple[CacheMoments, ...]:
    """Return the moments of each tensor that a layer caches, in the order of `forward.Cache`.

    H is the second derivative of the loss, as `LayerSample.slopes` estimates it.

    Args:
        layer: folded, float64.
        slots_S: angular frequencies of its slots or pairs.
        sample: of the source's inputs, in nats.
    """
    device = fitting_device()
    folded, scoring = layer.to(torch.float32, device), sample.scoring.to(torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    seen: list[Tensor] = []

    def watched(rows: Tensor) -> Tensor:
        seen.append(rows.detach().requires_grad_())
        return seen[-1]

    sums: list[list[Tensor]] = []
    kept: list[tuple[Tensor, ...]] = []
    tokens = 0
    for part_BTD in sample.input_BTD[sample.used].split(BATCH):
        seen.clear()
        given_BTD = attend(folded, part_BTD.to(device, torch.float32), slots_S, scoring, cache=watched)
        sums = sums or [[torch.zeros(()), torch.zeros(())] for _ in seen]
        if tokens < TOKENS:
            kept.append(tuple(_by_head(rows.detach()) for rows in seen))
        tokens += given_BTD.shape[0] * given_BTD.shape[1]
        for both, rows in zip(sums, seen, strict=True):
            both[0] = both[0] + _moment(rows.detach())
        for slopes in sample.slopes(given_BTD, seen, DRAWS, generator):
            for both, slope in zip(sums, slopes, strict=True):
                both[1] = both[1] + _moment(slope) / DRAWS
    some = [torch.cat(parts, 1)[:, :TOKENS] for parts in zip(*kept, strict=True)]
    return tuple(
        CacheMoments(value_KWW=value / tokens, cost_KWW=cost / tokens, rows_KXW=rows_KXW)
        for (value, cost), rows_KXW in zip(sums, some, strict=True)
    )


def _by_head(rows: Tensor) -> Tensor:
    """Return rows (B, K, T, W) or (B, T, W) as (K, X, W) on the CPU; K = 1 of the latter."""
    heads_BKTW = rows[:, None] if rows.ndim == 3 else rows
    return heads_BKTW.transpose(0, 1).flatten(1, 2).cpu()


def _moment(rows: Tensor) -> Tensor:
    """Return the summed moment (K, W, W) of rows (B, K, T, W) or (B, T, W)."""
    rows_KXW = _by_head(rows).to(torch.float64)
    return rows_KXW.mT @ rows_KXW


def weights_moments(layer: Attention | LatentAttention | IntactAttention) -> tuple[CacheMoments, ...]:
    """Return the same moments without text: inputs are isotropic, and so are errors of the output.

    A key error moves a score by scale · q·δ, and the score moves the output by the value it displaces, as in
    `metric.weights_only`.

    Args:
        layer: folded, float64, without `level_CC`.
    """
    gram_NHH = torch.einsum("dnh,dng->nhg", layer.o_DNH, layer.o_DNH)
    if isinstance(layer, Attention):
        heads, queries = len(layer.k_KHD), len(layer.q_NHD) // len(layer.k_KHD)
        k_KHE, v_KHE = with_bias(layer.k_KHD, layer.k_KH), with_bias(layer.v_KHD, layer.v_KH)
        q_NHE = with_bias(layer.q_NHD, layer.q_NH)
        value_KHH = v_KHE @ v_KHE.mT
        displaced_N = layer.scale**2 * (gram_NHH * value_KHH.repeat_interleave(queries, 0)).sum((1, 2))
        costs = displaced_N[:, None, None] * (q_NHE @ q_NHE.mT), gram_NHH
        key_cost_KHH, cost_KHH = (rows.unflatten(0, (heads, queries)).sum(1) for rows in costs)
        return (
            CacheMoments(value_KWW=k_KHE @ k_KHE.mT, cost_KWW=key_cost_KHH),
            CacheMoments(value_KWW=value_KHH, cost_KWW=cost_KHH),
        )
    if isinstance(layer, IntactAttention):
        queries = len(layer.q_NHA) // len(layer.k_up_KHC)
        k_up_NPC, v_up_NHC = (rows.repeat_interleave(queries, 0) for rows in (layer.k_up_KHC, layer.v_up_KHC))
        q_NPA, rows_WE = layer.q_NHA, layer.down_CE
        slots = 0
    else:
        k_up_NPC, v_up_NHC = layer.k_up_NPC, layer.v_up_NHC
        q_NPA, rows_WE = layer.q_nope_NPA, torch.cat([layer.down_CD, layer.k_rope_RD])
        slots = len(layer.k_rope_RD)
    rank = len(rows_WE) - slots
    v_NHE = v_up_NHC @ rows_WE[:rank]
    displaced_N = layer.scale**2 * torch.einsum("nhg,nhe,nge->n", gram_NHH, v_NHE, v_NHE)
    read_NCA = k_up_NPC.mT @ q_NPA
    cost_WW = torch.einsum("n,nca,nba->cb", displaced_N, read_NCA, read_NCA)
    cost_WW = cost_WW + torch.einsum("nhc,nhg,ngb->cb", v_up_NHC, gram_NHH, v_up_NHC)
    if isinstance(layer, LatentAttention):
        q_NRA = layer.q_rope_NRA
        cost_WW = torch.block_diag(cost_WW, torch.einsum("n,nra,nsa->rs", displaced_N, q_NRA, q_NRA))
    return (CacheMoments(value_KWW=(rows_WE @ rows_WE.mT)[None], cost_KWW=cost_WW[None]),)
