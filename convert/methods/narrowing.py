"""Latent attention with a narrower latent.

Keys and values of all heads are linear functions of the latent c behind its norm. So an error e in c costs
½ E[eᵀ G e] with G the second moment of the gradient there, through keys and values of every head at once.
With C that of c, the best c' = P c and the best U with c ≈ U P c are one low rank of the identity
(subspaces.py); queries, rotary key and outputs stay. The norm in front of c' divides by the length of P c.
So P c is brought into a basis in which that length is the same for every token, as the latent of any other
source (latent_norm.py), with c in the place of the layer's input.

Legend: attention.py; r width of the source's latent; X tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..algebra.attention import LATENT_EPSILON, LatentAttention
from ..algebra.spectrum import spectrum
from ..algebra.subspaces import low_rank, low_rank_energy
from ..calibration.layer_metric import SHRINKAGE, first_token_factor
from ..calibration.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class LatentMetric:
    """The cost of errors in a source's latent, float64.

    Attributes:
        moment_rr: C.
        fisher_rr: G.
    """

    moment_rr: Tensor
    fisher_rr: Tensor

    def lost(self, rank: int) -> float:
        """Return the predicted loss at a rank, nats per token where the metric comes from data."""
        identity_rr = torch.eye(len(self.moment_rr)).to(self.moment_rr)
        energy = low_rank_energy(identity_rr, self.fisher_rr[None], self.moment_rr)
        return float(energy[rank:].sum()) / 2


def source_latents(source: LatentAttention, input_BTD: Tensor) -> Tensor:
    """Return the latents c (B, T, r) of a source's layer for its inputs, float64."""
    assert source.latent_norm_C is not None
    latents = []
    for input_TD in input_BTD:  # in float64 all inputs at once are many bytes
        latent_Tr = input_TD.to(source.down_CD) @ source.down_CD.mT
        size_T1 = latent_Tr.square().mean(-1, keepdim=True) + LATENT_EPSILON
        latents.append(latent_Tr * size_T1.rsqrt() * source.latent_norm_C)
    return torch.stack(latents)


def latent_metric(
    source: LatentAttention, latent_BTr: Tensor, statistics: LayerStatistics | None
) -> LatentMetric:
    """Return the metric of a layer's latent, by statistics or by the weights alone.

    First tokens count as in `layer_metric.of_keys`.

    Args:
        source: the layer, float64.
        latent_BTr: its latents on some inputs, as `source_latents` returns them.
        statistics: of the layer, in which the latent stands for its keys.
    """
    latent_Xr = latent_BTr.flatten(0, 1)
    moment_rr = latent_Xr.mT @ latent_Xr / len(latent_Xr)
    if statistics is None:
        fisher_rr = _by_weights(source)
    else:
        first_rr, fisher_rr = statistics.first_key_fisher, statistics.key_fisher
        rest_rr, length = fisher_rr - first_rr, latent_BTr.shape[1]
        factor = first_token_factor([first_rr], [rest_rr], [moment_rr], length)
        if factor is not None:
            first_Br = latent_BTr[:, 0]
            moment_rr += (factor - 1) * (first_Br.mT @ first_Br) / (len(first_Br) * length)
            fisher_rr = rest_rr
    size_r = moment_rr.diagonal()
    size_r += SHRINKAGE * torch.where(size_r > 0, size_r, size_r.mean())
    return LatentMetric(moment_rr=moment_rr, fisher_rr=fisher_rr)


def _by_weights(source: LatentAttention) -> Tensor:
    """Return G without data, in the unit of `metric.weights_only`."""
    assert source.latent_norm_C is not None
    weight = 1.0 if source.query_norm is None else source.query_norm
    q_NPA, v_NHC = source.q_nope_NPA * weight, source.v_up_NHC * source.latent_norm_C
    gram_NHH = torch.einsum("dnh,dng->nhg", source.o_DNH, source.o_DNH)
    displaced_N = source.scale**2 * (gram_NHH * (v_NHC @ v_NHC.mT)).sum((1, 2))
    key_NPP = displaced_N[:, None, None] * (q_NPA @ q_NPA.mT)
    return torch.einsum("npc,npq,nqd->cd", source.k_up_NPC, key_NPP, source.k_up_NPC) + torch.einsum(
        "nhc,nhg,ngd->cd", source.v_up_NHC, gram_NHH, source.v_up_NHC
    )


def narrowed(source: LatentAttention, metric: LatentMetric, rank: int) -> tuple[LatentAttention, Tensor]:
    """Return a layer with a latent of `rank` numbers of least predicted loss and no norm yet, and P."""
    assert source.latent_norm_C is not None
    identity_rr = torch.eye(len(source.down_CD), dtype=source.down_CD.dtype)
    down_Cr, up_rC, energy_r = low_rank(identity_rr, metric.fisher_rr[None], metric.moment_rr, rank)
    layer = replace(
        source,
        down_CD=down_Cr * source.latent_norm_C @ source.down_CD,
        k_up_NPC=source.k_up_NPC @ up_rC,
        v_up_NHC=source.v_up_NHC @ up_rC,
        latent_norm_C=None,
        spectrum=spectrum(energy_r),
    )
    return layer, down_Cr
