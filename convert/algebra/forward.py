"""The executable definition of the three classes of attention.py, in plain torch.

Legend: attention.py; B sequences, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .attention import (
    LATENT_EPSILON,
    Attention,
    IntactAttention,
    LatentAttention,
    NormedLatentAttention,
    Tensors,
)

AnyAttention = Attention | LatentAttention | IntactAttention
# From numbers as they are written to a cache to numbers as they are read from it. Those of one token and head
# are the last dimension: a latent and its rotated rotary key (B, T, C+R), a latent that keys are rebuilt from
# (B, T, C), or rotated keys and then values (B, K, T, H). With `level_CC` the latent is √C A c / |A c|.
Cache = Callable[[Tensor], Tensor]
Caches = Cache | tuple[Cache, ...]  # one of all that a layer caches, or one of keys and another of values


@dataclass(frozen=True, kw_only=True)
class Scoring(Tensors):
    """The part of a layer that is not weights and that no fold changes: norms, and scores to weights.

    Attributes:
        norm_epsilon: added to the mean square in query and key norms.
        soft_cap: c of c · tanh(score / c), which bounds the scores (arXiv 2408.00118, section 2); None: they
            are not bounded.
        bound: of the absolute values of queries, keys and values before rotation; None: they are not bounded.
        window: positions that a query reads, its own and those before it; None: all.
        sinks_N: a score of every query head that takes part in the softmax and brings no value.
        pair_gain_F: what each rotary pair's share of a score is multiplied by, where that is not in the
            weights or the scale.
        late_gain_H: what each dimension of a rotated query is multiplied by: weights of norms behind the
            rotation.
        value_norm: values pass an RMSNorm of each head without weights.
        key_values: values are the keys as they are before norm and rotation; the layer's own are not read.
    """

    norm_epsilon: float = 0.0
    soft_cap: float | None = None
    bound: float | None = None
    window: int | None = None
    sinks_N: Tensor | None = None
    pair_gain_F: Tensor | None = None
    late_gain_H: Tensor | None = None
    value_norm: bool = False
    key_values: bool = False


PLAIN = Scoring()  # softmax over all that came before


def attend(
    layer: AnyAttention,
    input_BTD: Tensor,
    frequencies_F: Tensor,
    scoring: Scoring = PLAIN,
    gain_BT: Tensor | None = None,
    cache: Caches | None = None,
) -> Tensor:
    """Compute causal attention over whole sequences.

    Args:
        layer: weights, in the dtype and on the device of the input.
        input_BTD: the normed residual stream, positions 0 ... T-1.
        frequencies_F: radians per token of the rotary pairs, or of the slots (LatentAttention).
        scoring: of the source, in the dtype and on the device of the input.
        gain_BT: factor on the latent of each token, of a LatentAttention.
        cache: what it does to numbers that pass through it; None: nothing. Of a layer that caches one tensor
            it may be a tuple of one.

    Returns:
        The output projection's result (B, T, D).
    """
    if isinstance(layer, LatentAttention):
        angle_TS, given = _angles(input_BTD, frequencies_F), _each(cache)[0]
        q_BNTH, k_BNTH, v_BNTH = _latent(layer, input_BTD, angle_TS, scoring.norm_epsilon, gain_BT, given)
        return _output(layer, _mix(q_BNTH, k_BNTH, v_BNTH, layer.scale, scoring), input_BTD)
    rebuilt = isinstance(layer, IntactAttention)
    latents = _each(cache)[0] if rebuilt else None
    k_BKTH, v_BKTH = keys_and_values(layer, input_BTD, scoring.norm_epsilon, latents)
    if scoring.key_values:
        assert isinstance(layer, Attention), "no latent form has keys for values"
        v_BKTH = _project(input_BTD, layer.k_KHD, layer.k_KH)
    if scoring.bound is not None:
        k_BKTH, v_BKTH = (rows.clamp(-scoring.bound, scoring.bound) for rows in (k_BKTH, v_BKTH))
    if scoring.value_norm:
        v_BKTH = _normed(v_BKTH, v_BKTH.new_ones(1, v_BKTH.shape[-1]), scoring.norm_epsilon, False)
    return attend_to(layer, input_BTD, k_BKTH, v_BKTH, frequencies_F, scoring, None if rebuilt else cache)


def keys_and_values(
    layer: Attention | IntactAttention | NormedLatentAttention,
    input_BTD: Tensor,
    norm_epsilon: float,
    cache: Cache | None = None,
) -> tuple[Tensor, Tensor]:
    """Return keys behind their norm and before rotation, and values, (B, K, T, H).

    Those of intact rotation are rebuilt from a latent, which passes through the cache; those of normed latent
    attention are the ones that it encodes.
    """
    if isinstance(layer, IntactAttention) and layer.k_KHD is None:
        latent_BTC = _through(cache, input_BTD @ layer.down_CE.mT)
        biased = (layer.k_up_KHC, layer.k_KH), (layer.v_up_KHC, layer.v_KH)
        k_BKTH, v_BKTH = (_project(latent_BTC, *rows_and_bias) for rows_and_bias in biased)
        return k_BKTH, v_BKTH
    assert layer.k_KHD is not None
    assert layer.v_KHD is not None
    k_BKTH = _project(input_BTD, layer.k_KHD, layer.k_KH)
    k_BKTH = _normed(k_BKTH, layer.k_norm_KH, norm_epsilon, layer.centred)
    v_KH = None if isinstance(layer, NormedLatentAttention) else layer.v_KH
    v_BKTH = _project(input_BTD, layer.v_KHD, v_KH)
    if not isinstance(layer, IntactAttention):
        return k_BKTH, v_BKTH
    latent_BTC = _through(cache, concatenate(k_BKTH, v_BKTH) @ layer.down_CE.mT)
    return _project(latent_BTC, layer.k_up_KHC, None), _project(latent_BTC, layer.v_up_KHC, None)


def concatenate(*parts_BKTH: Tensor) -> Tensor:
    """Join all heads of keys, of values, or of both in this order to one vector per token.

    The result is (B, T, KH) or (B, T, 2KH).
    """
    return torch.cat([rows_BKTH.transpose(1, 2).flatten(2) for rows_BKTH in parts_BKTH], -1)


def attend_to(
    layer: Attention | IntactAttention,
    input_BTD: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    frequencies_F: Tensor,
    scoring: Scoring = PLAIN,
    cache: Caches | None = None,
) -> Tensor:
    """Attend to given keys and values, as `keys_and_values` returns them.

    The other arguments are those of `attend`.
    """
    angle_TF = _angles(input_BTD, frequencies_F)
    if isinstance(layer, IntactAttention):
        q_BNTH = _project(query_input(layer, input_BTD), layer.q_NHA, layer.q_NH)
    else:
        q_BNTH = _project(input_BTD, layer.q_NHD, layer.q_NH)
    q_BNTH = _normed(q_BNTH, layer.q_norm_NH, scoring.norm_epsilon, layer.centred)
    if scoring.bound is not None:
        q_BNTH = q_BNTH.clamp(-scoring.bound, scoring.bound)
    q_BNTH = _turned(q_BNTH, angle_TF)
    if scoring.pair_gain_F is not None:
        q_BNTH = q_BNTH * scoring.pair_gain_F.repeat(2)
    if scoring.late_gain_H is not None:
        q_BNTH = q_BNTH * scoring.late_gain_H
    queries = q_BNTH.shape[1] // k_BKTH.shape[1]
    of_keys, of_values = _each(cache)
    read = _through(of_keys, _turned(k_BKTH, angle_TF)), _through(of_values, v_BKTH)
    k_BNTH, v_BNTH = (rows_BKTH.repeat_interleave(queries, 1) for rows_BKTH in read)
    return _output(layer, _mix(q_BNTH, k_BNTH, v_BNTH, layer.scale, scoring), input_BTD)


def _each(cache: Caches | None) -> tuple[Cache | None, Cache | None]:
    """Return the cache of the first tensor, and of the last."""
    return (cache[0], cache[-1]) if isinstance(cache, tuple) else (cache, cache)


def _through(cache: Cache | None, rows: Tensor) -> Tensor:
    return rows if cache is None else cache(rows)


def _angles(input_BTD: Tensor, frequencies_F: Tensor) -> Tensor:
    """Return the angles by which each position turns each pair, (T, F), float64."""
    position_T1 = torch.arange(input_BTD.shape[1], device=input_BTD.device, dtype=torch.float64)[:, None]
    return position_T1 * frequencies_F.to(input_BTD.device)


def _output(layer: AnyAttention, mixed_BNTH: Tensor, input_BTD: Tensor) -> Tensor:
    if layer.gate_NHD is not None:
        mixed_BNTH = mixed_BNTH * _project(input_BTD, layer.gate_NHD, layer.gate_NH).sigmoid()
    output_BTD = torch.einsum("bnth,dnh->btd", mixed_BNTH, layer.o_DNH)
    return output_BTD if layer.o_D is None else output_BTD + layer.o_D


def _mix(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, scale: float, scoring: Scoring) -> Tensor:
    """Mix values by the softmax of scores (B, N, T, H)."""
    length = q_BNTH.shape[2]
    windowed = scoring.window is not None and scoring.window < length
    if scoring.soft_cap is None and scoring.sinks_N is None and not windowed:
        return _fused(q_BNTH, k_BNTH, v_BNTH, is_causal=True, scale=scale)
    seen_TT = torch.ones(length, length, dtype=torch.bool, device=q_BNTH.device).tril()
    if scoring.window is not None:
        seen_TT = seen_TT.triu(1 - scoring.window)
    if scoring.soft_cap is None and scoring.sinks_N is None:
        return _fused(q_BNTH, k_BNTH, v_BNTH, attn_mask=seen_TT, scale=scale)
    scores_BNTT = q_BNTH @ k_BNTH.mT * scale
    if scoring.soft_cap is not None:
        scores_BNTT = torch.tanh(scores_BNTT / scoring.soft_cap) * scoring.soft_cap
    scores_BNTT = scores_BNTT.masked_fill(~seen_TT, -torch.inf)
    if scoring.sinks_N is None:
        return scores_BNTT.softmax(-1) @ v_BNTH
    sinks_BNT1 = scoring.sinks_N[:, None, None].expand(len(scores_BNTT), -1, length, 1)
    return torch.cat([scores_BNTT, sinks_BNT1], -1).softmax(-1)[..., :-1] @ v_BNTH


def _fused(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, **how: Any) -> Tensor:
    """Mix values by a fused kernel.

    It needs keys and values of one width. On a GPU the width must be a multiple of four; otherwise torch
    forms the scores of all heads.
    """
    width, needed = v_BNTH.shape[-1], max(k_BNTH.shape[-1], v_BNTH.shape[-1])
    if v_BNTH.device.type != "cpu":
        needed += -needed % 4
    q_BNTH, k_BNTH, v_BNTH = (
        pad(rows_BNTH, (0, needed - rows_BNTH.shape[-1])) if rows_BNTH.shape[-1] < needed else rows_BNTH
        for rows_BNTH in (q_BNTH, k_BNTH, v_BNTH)
    )
    mixed_BNTH: Tensor = scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, **how)
    return mixed_BNTH[..., :width]


def _normed(rows_BNTH: Tensor, weight_NH: Tensor | None, epsilon: float, centred: bool) -> Tensor:
    """Apply RMSNorm (arXiv 1910.07467) to every head, or to all heads as one vector; see `Attention`."""
    if weight_NH is None:
        return rows_BNTH
    if centred:
        rows_BNTH = rows_BNTH - rows_BNTH.mean(-1, keepdim=True)
    spans = (-1,) if len(weight_NH) == 1 or centred else (1, -1)
    return rows_BNTH * (rows_BNTH.square().mean(spans, keepdim=True) + epsilon).rsqrt() * weight_NH[:, None]


def _latent(
    layer: LatentAttention,
    input_BTD: Tensor,
    angle_TS: Tensor,
    epsilon: float,
    gain_BT: Tensor | None,
    cache: Cache | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of latent attention, (B, N, T, P+R) twice and (B, N, T, H)."""
    if isinstance(layer, NormedLatentAttention):
        encoded_BTD = concatenate(*keys_and_values(layer, input_BTD, epsilon))
    else:
        encoded_BTD = input_BTD
    latent_BTC = _weighted(encoded_BTD @ layer.down_CD.mT, layer.latent_norm_C)
    level_CC = layer.level_CC
    if level_CC is not None:
        latent_BTC = latent_BTC / (latent_BTC @ level_CC.mT).norm(dim=-1, keepdim=True)
    if gain_BT is not None:
        latent_BTC = latent_BTC * gain_BT[..., None]
    k_rope_BTR = encoded_BTD @ layer.k_rope_RD.mT
    if layer.k_rope_R is not None:
        k_rope_BTR = k_rope_BTR + layer.k_rope_R
    k_rope_BTR = _turned(k_rope_BTR[:, None], angle_TS, interleaved=True)[:, 0]
    if cache is not None:
        root: float = latent_BTC.shape[-1] ** 0.5
        written_BTC = latent_BTC if level_CC is None else latent_BTC @ level_CC.mT * root
        widths = [written_BTC.shape[-1], k_rope_BTR.shape[-1]]
        latent_BTC, k_rope_BTR = cache(torch.cat([written_BTC, k_rope_BTR], -1)).split(widths, -1)
        if level_CC is not None:
            latent_BTC = latent_BTC @ torch.linalg.inv(level_CC).mT / root
    k_nope_BNTP = torch.einsum("btc,npc->bntp", latent_BTC, layer.k_up_NPC)
    v_BNTH = torch.einsum("btc,nhc->bnth", latent_BTC, layer.v_up_NHC)
    query_BTA = query_input(layer, input_BTD)
    if isinstance(layer, NormedLatentAttention):
        q_BNTH = _project(query_BTA, layer.q_NHA, layer.q_NH)
        q_BNTH = _normed(q_BNTH, layer.q_norm_NH, epsilon, layer.centred)
        q_nope_BNTP, q_rope_BNTR = q_BNTH @ layer.q_nope_NPA.mT, q_BNTH @ layer.q_rope_NRA.mT
    else:
        q_nope_BNTP = _project(query_BTA, layer.q_nope_NPA, layer.q_nope_NP)
        q_rope_BNTR = _project(query_BTA, layer.q_rope_NRA, layer.q_rope_NR)
    q_rope_BNTR = _turned(q_rope_BNTR, angle_TS, interleaved=True)
    k_rope_BNTR = k_rope_BTR[:, None].expand(-1, len(layer.q_rope_NRA), -1, -1)
    return torch.cat([q_nope_BNTP, q_rope_BNTR], -1), torch.cat([k_nope_BNTP, k_rope_BNTR], -1), v_BNTH


def query_input(layer: LatentAttention | IntactAttention, input_BTD: Tensor) -> Tensor:
    """Return what queries are projected from (B, T, A); without compressed queries the input itself."""
    if layer.q_down_AD is None:
        return input_BTD
    query_BTA = input_BTD @ layer.q_down_AD.mT
    if isinstance(layer, IntactAttention):
        return query_BTA
    return _weighted(query_BTA if layer.q_down_A is None else query_BTA + layer.q_down_A, layer.query_norm)


def _weighted(rows_BTC: Tensor, weight: Tensor | float | None) -> Tensor:
    """RMSNorm with a weight, or one for each feature; None: no norm."""
    if weight is None:
        return rows_BTC
    return rows_BTC * ((rows_BTC.square().mean(-1, keepdim=True) + LATENT_EPSILON).rsqrt() * weight)


def _project(input_BTD: Tensor, weight_NHD: Tensor, bias_NH: Tensor | None) -> Tensor:
    """Project to heads, (B, N, T, H)."""
    rows_BNTH = torch.einsum("btd,nhd->bnth", input_BTD, weight_NHD)
    return rows_BNTH if bias_NH is None else rows_BNTH + bias_NH[:, None]


def _turned(rows_BNTH: Tensor, angle_TF: Tensor, *, interleaved: bool = False) -> Tensor:
    """Apply RoPE (arXiv 2104.09864): turn every pair by its angle.

    The two rows of a pair are neighbours or half a head apart.
    """
    cos_TF, sin_TF = angle_TF.cos().to(rows_BNTH.dtype), angle_TF.sin().to(rows_BNTH.dtype)
    real, imaginary = (rows_BNTH[..., ::2], rows_BNTH[..., 1::2]) if interleaved else rows_BNTH.chunk(2, -1)
    turned = real * cos_TF - imaginary * sin_TF, real * sin_TF + imaginary * cos_TF
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
