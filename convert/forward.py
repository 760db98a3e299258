"""What a layer's weights compute, in plain torch: the executable definition of the three classes of attention.py.

Legend: attention.py; B sequences, T tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention import Attention, IntactAttention, LatentAttention

AnyAttention = Attention | LatentAttention | IntactAttention


def attend(layer: AnyAttention, input_BTD: Tensor, frequencies_F: Tensor) -> Tensor:
    """Causal attention over whole sequences, without a cache.

    Args:
        layer: weights, in the dtype and on the device of the input.
        input_BTD: the normed residual stream, positions 0 ... T-1.
        frequencies_F: radians per token of the rotary pairs, or of the slots (LatentAttention).

    Returns:
        The output projection's result (B, T, D).

    Raises:
        NotImplementedError: the layer has query or key norms.
    """
    angle_TF = torch.arange(input_BTD.shape[1], device=input_BTD.device, dtype=torch.float64)[:, None] * frequencies_F.to(
        input_BTD.device
    )
    if isinstance(layer, LatentAttention):
        q_BNTH, k_BNTH, v_BNTH = _latent(layer, input_BTD, angle_TF)
    else:
        q_BNTH, k_BNTH, v_BNTH = _grouped(layer, input_BTD, angle_TF)
    mixed_BNTH = scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True, scale=layer.scale)
    output_BTD = torch.einsum("bnth,dnh->btd", mixed_BNTH, layer.o_DNH)
    return output_BTD if layer.o_D is None else output_BTD + layer.o_D


def _grouped(layer: Attention | IntactAttention, input_BTD: Tensor, angle_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if layer.q_norm_NH is not None or layer.k_norm_KH is not None:
        raise NotImplementedError("query and key norms")
    if isinstance(layer, IntactAttention):
        q_BNTH = _project(_query_input(layer, input_BTD), layer.q_NHA, layer.q_NH)
        latent_BTC = input_BTD @ layer.down_CE.mT
        k_BKTH = _project(latent_BTC, layer.k_up_KHC, layer.k_KH)
        v_BKTH = _project(latent_BTC, layer.v_up_KHC, layer.v_KH)
    else:
        q_BNTH = _project(input_BTD, layer.q_NHD, layer.q_NH)
        k_BKTH = _project(input_BTD, layer.k_KHD, layer.k_KH)
        v_BKTH = _project(input_BTD, layer.v_KHD, layer.v_KH)
    queries = q_BNTH.shape[1] // k_BKTH.shape[1]
    k_BNTH, v_BNTH = (rows.repeat_interleave(queries, 1) for rows in (_turned(k_BKTH, angle_TF), v_BKTH))
    return _turned(q_BNTH, angle_TF), k_BNTH, v_BNTH


def _latent(layer: LatentAttention, input_BTD: Tensor, angle_TS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    latent_BTC = input_BTD @ layer.down_CD.mT
    k_rope_BTR = input_BTD @ layer.k_rope_RD.mT
    if layer.k_rope_R is not None:
        k_rope_BTR = k_rope_BTR + layer.k_rope_R
    k_nope_BNTP = torch.einsum("btc,npc->bntp", latent_BTC, layer.k_up_NPC)
    v_BNTH = torch.einsum("btc,nhc->bnth", latent_BTC, layer.v_up_NHC)
    query_BTA = _query_input(layer, input_BTD)
    q_nope_BNTP = _project(query_BTA, layer.q_nope_NPA, layer.q_nope_NP)
    q_rope_BNTR = _turned(_project(query_BTA, layer.q_rope_NRA, layer.q_rope_NR), angle_TS, interleaved=True)
    k_rope_BNTR = _turned(k_rope_BTR[:, None], angle_TS, interleaved=True).expand(-1, len(layer.q_rope_NRA), -1, -1)
    return torch.cat([q_nope_BNTP, q_rope_BNTR], -1), torch.cat([k_nope_BNTP, k_rope_BNTR], -1), v_BNTH


def _query_input(layer: LatentAttention | IntactAttention, input_BTD: Tensor) -> Tensor:
    return input_BTD if layer.q_down_AD is None else input_BTD @ layer.q_down_AD.mT


def _project(input_BTD: Tensor, weight_NHD: Tensor, bias_NH: Tensor | None) -> Tensor:
    """(B, N, T, H)."""
    rows_BNTH = torch.einsum("btd,nhd->bnth", input_BTD, weight_NHD)
    return rows_BNTH if bias_NH is None else rows_BNTH + bias_NH[:, None]


def _turned(rows_BNTH: Tensor, angle_TF: Tensor, *, interleaved: bool = False) -> Tensor:
    """RoPE (arXiv 2104.09864): every pair turned by its angle; pairs lie side by side or half a head apart."""
    cos_TF, sin_TF = angle_TF.cos().to(rows_BNTH.dtype), angle_TF.sin().to(rows_BNTH.dtype)
    real, imaginary = (rows_BNTH[..., ::2], rows_BNTH[..., 1::2]) if interleaved else rows_BNTH.chunk(2, -1)
    turned = real * cos_TF - imaginary * sin_TF, real * sin_TF + imaginary * cos_TF
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
