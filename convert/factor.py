"""MHA and GQA to MLA: a few rotary slots shared by all heads, and one latent for everything else.

Legend: attention.py, and E = D, plus one column for the bias where the source has one (its input is the constant 1).

A *slot* is one complex key dimension that turns at a frequency φ and is shared by all heads. Any complex-linear map across
heads at one frequency commutes with RoPE and folds into W_Q and W_K, so a slot carries the best complex rank one of all
heads' keys near its frequency; a real orthogonal map could not undo the phases between heads. What no slot carries is kept
without rotation: over the distances Δ that attention spans, e^(-i f Δ) is replaced by its mean ρ(f). Those keys and the values
then share the latent of least weighted squared error.

The weights here are in one unit, the squared error of the attention's output for an isotropic normed input: a key error
reaches it through the query and the value it displaces, a value error through W_O.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Attention, LatentAttention
from .rotary import complex_rows, half_rows, interleaved_rows
from .subspaces import best_slots, low_rank, per_key_head, sensitivity, value_metric, with_bias
from .target import MLA

SPAN = 4096  # distances that the prior over attention distances reaches, at most
DECAY = 1.5  # exponent of that prior; of 1, 1.25, 1.5, 2, 3 the least total loss on two models (benchmarks/results)


def to_mla(attention: Attention, target: MLA, frequencies_F: Tensor, slots_S: Tensor, span: int) -> LatentAttention:
    """Fold one layer to multi-head latent attention.

    Args:
        attention: the source's weights, float64.
        target: widths; `slots == "source"` keeps every head's every pair and is exact.
        frequencies_F: the source's angular frequencies, float64.
        slots_S: the slots' angular frequencies, float64, from plan.py.
        span: distances Δ = 0 ... span-1 that attention can reach (max_position_embeddings).
    """
    if target.slots == "source":
        return _exact(attention)
    queries = len(attention.q_NHD) // len(attention.k_KHD)
    sensitivity_N = sensitivity(attention)
    parts = _separate(attention, sensitivity_N, frequencies_F, slots_S, span)
    width = attention.k_KHD.shape[-1]

    key_KPP = per_key_head(sensitivity_N[:, None, None] * (parts.q_nope_NPE @ parts.q_nope_NPE.mT), queries)
    value_KHH = value_metric(attention)
    # A constant added to an un-rotated key shifts all scores of a query alike: softmax does not see it, so its bias goes.
    stack_BHD = torch.cat([parts.k_nope_KPE[..., :width], attention.v_KHD])
    down_CD, up_BHC = low_rank(stack_BHD, torch.cat([key_KPP, value_KHH]), target.kv_lora_rank)
    k_up_KPC, v_up_KHC = up_BHC.chunk(2)
    return LatentAttention(
        q_nope_NPD=parts.q_nope_NPE[..., :width],
        q_rope_NRD=parts.q_rope_NRE[..., :width],
        q_nope_NP=None if attention.q_NH is None else parts.q_nope_NPE[..., -1],
        q_rope_NR=None if attention.q_NH is None else parts.q_rope_NRE[..., -1],
        down_CD=down_CD,
        k_up_NPC=k_up_KPC.repeat_interleave(queries, 0),
        v_up_NHC=v_up_KHC.repeat_interleave(queries, 0),
        k_rope_RD=parts.k_rope_RE[..., :width],
        k_rope_R=None if attention.k_KH is None else parts.k_rope_RE[..., -1],
        o_DNH=attention.o_DNH,
        o_D=_output_bias(attention),
        scale=attention.scale,
    )


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Queries and keys in the slots, and what is left of them without rotation."""

    q_rope_NRE: Tensor
    k_rope_RE: Tensor
    q_nope_NPE: Tensor
    k_nope_KPE: Tensor


def _separate(attention: Attention, sensitivity_N: Tensor, frequencies_F: Tensor, slots_S: Tensor, span: int) -> _Parts:
    """Give every slot the best share of the keys near its frequency; the rest of the keys stays, un-rotated."""
    z_KFE = complex_rows(with_bias(attention.k_KHD, attention.k_KH))
    q_NFE = complex_rows(with_bias(attention.q_NHD, attention.q_NH))
    queries = len(q_NFE) // len(z_KFE)
    energy_KF = per_key_head(sensitivity_N[:, None] * q_NFE.abs().square().sum(-1), queries)

    nearest_F = (frequencies_F.log()[:, None] - slots_S.log()).abs().argmin(1)
    in_slot_F = fidelity(frequencies_F - slots_S[nearest_F], span)
    unrotated_F = fidelity(frequencies_F, span)
    # What a slot saves is the rotation that the mean over distances loses; a slow pair loses next to nothing.
    gain_F = (in_slot_F.abs().square() - unrotated_F.abs().square()).clamp(min=1e-6)

    slot_SE, share_KF = best_slots(z_KFE, energy_KF * gain_F, nearest_F, len(slots_S))
    k_nope_KPE = half_rows(z_KFE - share_KF[..., None] * slot_SE[nearest_F])
    turned_NFE = (share_KF.repeat_interleave(queries, 0) * in_slot_F).conj()[..., None] * q_NFE
    q_slot_NSE = q_NFE.new_zeros(len(q_NFE), len(slots_S), q_NFE.shape[-1]).index_add(1, nearest_F, turned_NFE)
    return _Parts(
        q_rope_NRE=interleaved_rows(q_slot_NSE),
        k_rope_RE=interleaved_rows(slot_SE),
        q_nope_NPE=half_rows(unrotated_F.conj()[:, None] * q_NFE),
        k_nope_KPE=k_nope_KPE,
    )


def fidelity(frequency_F: Tensor, span: int) -> Tensor:
    """ρ(f): the mean of e^(-i f Δ) over attention distances, complex, at most 1 in magnitude.

    Without data the distances Δ < span are weighted (Δ + 1)^-DECAY: near tokens matter most.
    """
    distance = torch.arange(min(span, SPAN), dtype=torch.float64)
    weight = (distance + 1) ** -DECAY
    angle = frequency_F[:, None] * distance
    return (torch.polar(torch.ones_like(angle), -angle) * weight).sum(-1) / weight.sum()


def _exact(attention: Attention) -> LatentAttention:
    """Every key head's every pair in its own slot, every value in the latent: the same function, nothing saved."""
    heads, queries = len(attention.k_KHD), len(attention.q_NHD) // len(attention.k_KHD)
    owner_NK = torch.eye(heads, dtype=attention.q_NHD.dtype).repeat_interleave(queries, 0)

    def spread(rows: Tensor) -> Tensor:
        """Query rows (N, H, E) at the slots of their own key head, pair-major: (N, 2FK, E)."""
        return interleaved_rows((complex_rows(rows)[:, :, None] * owner_NK[:, None, :, None]).flatten(1, 2))

    def slots(rows: Tensor) -> Tensor:
        """Key rows (K, H, E) as slots, pair-major: (2FK, E)."""
        return interleaved_rows(complex_rows(rows).transpose(0, 1).flatten(0, 1))

    width = attention.v_KHD.shape[1]
    v_up_NHC = torch.einsum("nk,hg->nhkg", owner_NK, torch.eye(width, dtype=owner_NK.dtype)).flatten(2)
    return LatentAttention(
        q_nope_NPD=attention.q_NHD[:, :0],
        q_rope_NRD=spread(attention.q_NHD),
        q_nope_NP=None if attention.q_NH is None else attention.q_NH[:, :0],
        q_rope_NR=None if attention.q_NH is None else spread(attention.q_NH[..., None]).squeeze(-1),
        down_CD=attention.v_KHD.flatten(0, 1),
        k_up_NPC=v_up_NHC[:, :0],
        v_up_NHC=v_up_NHC,
        k_rope_RD=slots(attention.k_KHD),
        k_rope_R=None if attention.k_KH is None else slots(attention.k_KH[..., None]).squeeze(-1),
        o_DNH=attention.o_DNH,
        o_D=_output_bias(attention),
        scale=attention.scale,
    )


def _output_bias(attention: Attention) -> Tensor | None:
    """Attention weights sum to one, so a value bias is a constant of the output."""
    if attention.v_KH is None:
        return attention.o_D
    queries = len(attention.q_NHD) // len(attention.v_KHD)
    constant_D = torch.einsum("dnh,nh->d", attention.o_DNH, attention.v_KH.repeat_interleave(queries, 0))
    return constant_D if attention.o_D is None else constant_D + attention.o_D
