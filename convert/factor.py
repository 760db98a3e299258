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

import torch
from torch import Tensor

from .attention import Attention, LatentAttention
from .rotary import complex_rows, half_rows, interleaved_rows
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
    z_KFE = complex_rows(_with_bias(attention.k_KHD, attention.k_KH))
    q_NFE = complex_rows(_with_bias(attention.q_NHD, attention.q_NH))
    queries = len(q_NFE) // len(z_KFE)
    sensitivity_N = _sensitivity(attention)
    energy_NF = sensitivity_N[:, None] * q_NFE.abs().square().sum(-1)
    energy_KF = energy_NF.unflatten(0, (-1, queries)).sum(1)

    nearest_F = (frequencies_F.log()[:, None] - slots_S.log()).abs().argmin(1)
    in_slot_F = fidelity(frequencies_F - slots_S[nearest_F], span)
    unrotated_F = fidelity(frequencies_F, span)
    gain_F = (in_slot_F.abs().square() - unrotated_F.abs().square()).clamp(min=1e-6)

    slot_SE, share_KF = _slots(z_KFE, energy_KF * gain_F, nearest_F, len(slots_S))
    rest_KFE = z_KFE - share_KF[..., None] * slot_SE[nearest_F]
    turned_NFE = (share_KF.repeat_interleave(queries, 0) * in_slot_F).conj()[..., None] * q_NFE
    q_slot_NSE = q_NFE.new_zeros(len(q_NFE), len(slots_S), q_NFE.shape[-1]).index_add(1, nearest_F, turned_NFE)
    q_nope_NPE = half_rows(unrotated_F.conj()[:, None] * q_NFE)

    # A constant added to an un-rotated key shifts all scores of a query alike: softmax does not see it, so its bias goes.
    k_nope_KPD = half_rows(rest_KFE)[..., : attention.k_KHD.shape[-1]]
    key_KPP = (sensitivity_N[:, None, None] * q_nope_NPE @ q_nope_NPE.mT).unflatten(0, (-1, queries)).sum(1)
    value_KHH = torch.einsum("dnh,dng->nhg", attention.o_DNH, attention.o_DNH).unflatten(0, (-1, queries)).sum(1)
    stack = torch.cat([k_nope_KPD, attention.v_KHD])
    down_CD, up_KPC = _low_rank(stack, torch.cat([key_KPP, value_KHH]), target.kv_lora_rank)
    k_up_KPC, v_up_KHC = up_KPC.chunk(2)

    q_rope_NRE, k_rope_RE = interleaved_rows(q_slot_NSE), interleaved_rows(slot_SE)
    width = attention.q_NHD.shape[-1]
    return LatentAttention(
        q_nope_NPD=q_nope_NPE[..., :width],
        q_rope_NRD=q_rope_NRE[..., :width],
        q_nope_NP=None if attention.q_NH is None else q_nope_NPE[..., -1],
        q_rope_NR=None if attention.q_NH is None else q_rope_NRE[..., -1],
        down_CD=down_CD,
        k_up_NPC=k_up_KPC.repeat_interleave(queries, 0),
        v_up_NHC=v_up_KHC.repeat_interleave(queries, 0),
        k_rope_RD=k_rope_RE[..., :width],
        k_rope_R=None if attention.k_KH is None else k_rope_RE[..., -1],
        o_DNH=attention.o_DNH,
        o_D=_output_bias(attention),
        scale=attention.scale,
    )


def fidelity(frequency_F: Tensor, span: int) -> Tensor:
    """ρ(f): the mean of e^(-i f Δ) over attention distances, complex, at most 1 in magnitude.

    Without data the distances Δ < span are weighted (Δ + 1)^-DECAY: near tokens matter most.
    """
    distance = torch.arange(min(span, SPAN), dtype=torch.float64)
    weight = (distance + 1) ** -DECAY
    angle = frequency_F[:, None] * distance
    return (torch.polar(torch.ones_like(angle), -angle) * weight).sum(-1) / weight.sum()


def _slots(z_KFE: Tensor, weight_KF: Tensor, nearest_F: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The shared key of each slot (S, E), and the share (K, F) of it in every head's every pair."""
    slot_SE = torch.zeros(slots, z_KFE.shape[-1], dtype=z_KFE.dtype)
    share_KF = torch.zeros(z_KFE.shape[:2], dtype=z_KFE.dtype)
    for slot in range(slots):
        members = nearest_F == slot
        rows_ME = z_KFE[:, members].flatten(0, 1)
        weighted_ME = weight_KF[:, members].flatten().sqrt()[:, None] * rows_ME
        _, vectors_MM = torch.linalg.eigh(weighted_ME @ weighted_ME.mH)
        key_E = vectors_MM[:, -1].conj() @ weighted_ME
        norm = key_E.abs().square().sum().sqrt()
        if norm > 0:
            slot_SE[slot] = key_E / norm * rows_ME.abs().square().sum(-1).mean().sqrt()
            shares_M = rows_ME @ slot_SE[slot].conj() / slot_SE[slot].abs().square().sum()
            share_KF[:, members] = shares_M.view(len(z_KFE), -1)
    return slot_SE, share_KF


def _low_rank(stack_BHD: Tensor, metric_BHH: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The rank-`rank` factors of stacked blocks W that minimise Σ_b tr(E_b^T G_b E_b): down (C, D) and up (B, H, C).

    down = U^T G^½ W with U the leading left singular vectors of G^½ W; up is the least-squares solution, so no metric is
    inverted. Latent dimensions are scaled so that both factors have the same root mean square.
    """
    blocks, height, width = stack_BHD.shape
    values_BH, vectors_BHH = torch.linalg.eigh(metric_BHH)
    root_BHH = vectors_BHH * values_BH.clamp(min=0).sqrt()[:, None] @ vectors_BHH.mT
    weighted = (root_BHH @ stack_BHD).flatten(0, 1)
    if blocks * height <= width:
        u = torch.linalg.eigh(weighted @ weighted.mT)[1].flip(-1)[:, :rank]
        down_CD = u.mT @ weighted
    else:
        right = torch.linalg.eigh(weighted.mT @ weighted)[1].flip(-1)[:, :rank]
        down_CD = right.mT * torch.linalg.vector_norm(weighted @ right, dim=0)[:, None]
    down_CD = torch.nn.functional.pad(down_CD, (0, 0, 0, rank - len(down_CD)))
    square_C = down_CD.square().sum(-1)
    kept_C = square_C > square_C.max() * 1e-24
    up_BHC = stack_BHD @ down_CD.mT * torch.where(kept_C, 1 / square_C, 0)
    balance_C = (up_BHC.square().mean((0, 1)) / down_CD.square().mean(-1)).pow(0.25)
    balance_C = torch.where(kept_C, balance_C, 1)
    return down_CD * balance_C[:, None], up_BHC / balance_C


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


def _with_bias(rows_KHD: Tensor, bias_KH: Tensor | None) -> Tensor:
    return rows_KHD if bias_KH is None else torch.cat([rows_KHD, bias_KH[..., None]], -1)


def _sensitivity(attention: Attention) -> Tensor:
    """Squared output error per squared score error of each query head (N,): scale² times the energy of its output."""
    heads = len(attention.v_KHD)
    out = attention.o_DNH.unflatten(1, (heads, -1))
    gram_NHH = torch.einsum("dkmh,dkmg->kmhg", out, out)
    return attention.scale**2 * torch.einsum("kmhg,khe,kge->km", gram_NHH, attention.v_KHD, attention.v_KHD).flatten()


def _output_bias(attention: Attention) -> Tensor | None:
    """Attention weights sum to one, so a value bias is a constant of the output."""
    if attention.v_KH is None:
        return attention.o_D
    queries = len(attention.q_NHD) // len(attention.v_KHD)
    constant_D = torch.einsum("dnh,nh->d", attention.o_DNH, attention.v_KH.repeat_interleave(queries, 0))
    return constant_D if attention.o_D is None else constant_D + attention.o_D
