"""The coordinates in which a layer writes its cache, chosen for numbers of few bits.

What is cached may be written in other coordinates, in which its numbers are as large as errors in them cost
(algebra/balance.py).

What may be written otherwise depends on the form: a latent in any basis; behind an RMSNorm, turned before it
and with other weights of it; values in any basis of each head; rotated keys with a factor per pair; and the
slots of one frequency mixed. Position t turns every slot of frequency ω by the same angle ωt. So the slots of
one frequency are a complex vector κ, and its turn is a factor exp(iωt). Any invertible complex M commutes
with that: with M κ in the place of κ, and the queries by M⁻ᴴ, scores stay the same at every distance. A slot
that is large next to another of its frequency, as a nearly constant one is, then shares its size and its
errors with it.

Legend: attention.py; W numbers that one token and head caches; M slots of one frequency.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...core.cache_dtypes import CacheDtype
from ..algebra.attention import Attention, IntactAttention, LatentAttention
from ..algebra.balance import LEAST, balanced, floored, geometric_mean
from ..algebra.forward import AnyAttention, Cache
from ..algebra.subspaces import eigh
from ..methods.latent_norm import NormBasis
from ..methods.refinement import Layer
from .cache_fit import Coordinates, fit_coordinates
from .cache_moments import CacheMoments

# Root mean square that stored numbers get, so that a scale of 1 suits them: the largest of fp8_e4m3, 448, is
# far above it, and numbers lose digits only below 2^-7 of it.
SIZE = 2.0


@dataclass(frozen=True, kw_only=True)
class CacheBasis:
    """Coordinates of all that a layer caches: T c is written in the place of c.

    Attributes:
        tensors: T (K, W, W) of each tensor, in the order of `forward.Cache`, float64; K is 1 of a latent.
        norm: the part that is left for `latent_norm.in_level_basis`, of a latent with `level_CC`.
    """

    tensors: tuple[Tensor, ...]
    norm: NormBasis | None = None


def caches_of(dtype: CacheDtype, basis: CacheBasis) -> tuple[Cache, ...]:
    """Return what caches of a format do to the numbers of a layer that will be written in a basis.

    The layer may be trained through them in the coordinates that it has.
    """

    def cache_in(basis_KWW: Tensor) -> Cache:
        there_KWW, back_KWW = basis_KWW.mT, torch.linalg.inv(basis_KWW).mT

        def passed(rows: Tensor) -> Tensor:
            ways = there_KWW.to(rows), back_KWW.to(rows)
            there, back = (way[0] for way in ways) if rows.ndim == 3 else ways  # of a latent and its slots
            read: Tensor = dtype.passed(rows @ there) @ back
            return read

        return passed

    return tuple(map(cache_in, basis.tensors))


def fit_basis(
    layer: AnyAttention, slots_S: Tensor, moments: tuple[CacheMoments, ...], dtype: CacheDtype
) -> CacheBasis:
    """Return coordinates for a format in which the cache of a folded layer, float64, can be written.

    They are fitted where the moments have numbers of tokens. `slots_S` are frequencies of slots or pairs.
    """
    if isinstance(layer, LatentAttention):
        return _of_latent(layer, slots_S, moments[0], dtype)
    if isinstance(layer, IntactAttention):
        return CacheBasis(tensors=(_free(moments[0], dtype),))
    keys, values = moments
    return CacheBasis(tensors=(_of_keys(layer, keys, dtype), _free(values, dtype)))


def in_basis(layer: Layer, basis: CacheBasis) -> Layer:
    """Return the same function with its cache in other coordinates, but for `basis.norm`."""
    made: Any
    first_KWW, last_KWW = basis.tensors[0], basis.tensors[-1]
    if isinstance(layer, LatentAttention):
        made = _latent_in_basis(layer, first_KWW[0])
    elif isinstance(layer, IntactAttention):
        rebuilt: Any = layer  # mypy takes Layer and its own class for two that meet
        back_CC = torch.linalg.inv(first_KWW[0])
        made = replace(
            rebuilt,
            down_CE=first_KWW[0] @ layer.down_CE,
            k_up_KHC=layer.k_up_KHC @ back_CC,
            v_up_KHC=layer.v_up_KHC @ back_CC,
        )
    else:
        made = _with_value_basis(_with_key_scales(layer, first_KWW.diagonal(0, -2, -1)), last_KWW)
    written: Layer = made
    return written


def _free(moments: CacheMoments, dtype: CacheDtype) -> Tensor:
    """Return T (K, W, W) for numbers of heads that may be written in any basis."""
    found = []
    for head, (value_WW, cost_WW) in enumerate(zip(moments.value_KWW, moments.cost_KWW, strict=True)):
        inner_WW = balanced(value_WW, cost_WW)
        start = Coordinates(outer_C=torch.ones(len(inner_WW), dtype=torch.float64), inner_CC=inner_WW)
        found.append(_matrix(_fitted(start, moments, head, dtype)))
    return torch.stack(found)


def _of_latent(
    layer: LatentAttention, slots_S: Tensor, moments: CacheMoments, dtype: CacheDtype
) -> CacheBasis:
    """Return coordinates of a latent with its slots; with `level_CC` turned and then scaled."""
    rank, slots = len(layer.down_CD), len(layer.k_rope_RD) // 2
    value_WW, cost_WW = moments.value_KWW[0], moments.cost_KWW[0]
    pair_R = torch.arange(slots).repeat_interleave(2)
    mix_RR = slot_mix(value_WW[rank:, rank:], cost_WW[rank:, rank:], slots_S)
    scale_S = torch.ones(slots, dtype=torch.float64)
    value_CC, cost_CC = value_WW[:rank, :rank], cost_WW[:rank, :rank]
    if layer.level_CC is None:
        outer_C, inner_CC = torch.ones(rank, dtype=torch.float64), balanced(value_CC, cost_CC)
    else:
        energy_C, basis_CC = eigh(geometric_mean(value_CC, cost_CC))
        outer_C, inner_CC = energy_C.clamp(min=LEAST * float(energy_C[-1])).sqrt(), basis_CC.mT
    start = Coordinates(outer_C=outer_C, inner_CC=inner_CC, scale_S=scale_S, pair_R=pair_R, mix_RR=mix_RR)
    found = _fitted(start, moments, 0, dtype)
    if layer.level_CC is None:
        return CacheBasis(tensors=(_matrix(found)[None],))
    found = replace(found, outer_C=found.outer_C.bfloat16().to(torch.float64))
    norm = NormBasis(turn_CC=found.inner_CC, weight_C=found.outer_C)
    return CacheBasis(tensors=(_matrix(found)[None],), norm=norm)


def _matrix(found: Coordinates) -> Tensor:
    basis_WW: Tensor = torch.block_diag(
        found.outer_C[:, None] * found.inner_CC, found.scale_S[found.pair_R][:, None] * found.mix_RR
    )
    return basis_WW


def _fitted(start: Coordinates, moments: CacheMoments, head: int, dtype: CacheDtype) -> Coordinates:
    """Return coordinates fitted to the numbers of tokens, where there are some, and scaled to `SIZE`."""
    found = start
    if moments.rows_KXW is not None:
        found = fit_coordinates(start, moments.rows_KXW[head], moments.cost_KWW[head], dtype)
    basis_WW = _matrix(found)
    energy = float((basis_WW @ moments.value_KWW[head] @ basis_WW.mT).diagonal().mean())
    size = SIZE / math.sqrt(energy) if energy > 0 else 1.0
    return replace(found, outer_C=found.outer_C * size, scale_S=found.scale_S * size)


def _of_keys(layer: Attention, keys: CacheMoments, dtype: CacheDtype) -> Tensor:
    """Return T (K, H, H) for rotated keys: a factor on each pair, where no norm forbids it."""
    heads, width = layer.k_KHD.shape[:2]
    eye_HH = torch.eye(width, dtype=torch.float64)
    if layer.k_norm_KH is not None or layer.q_norm_NH is not None:
        return eye_HH.repeat(heads, 1, 1)
    pair_H = torch.arange(width // 2).repeat(2)
    found = []
    for head in range(heads):
        energy_F, cost_F = (  # of both numbers of a pair, which a factor makes equal
            torch.zeros(width // 2, dtype=torch.float64).index_add_(0, pair_H, floored(moment_HH).diagonal())
            for moment_HH in (keys.value_KWW[head], keys.cost_KWW[head])
        )
        scale_F = (cost_F / energy_F).pow(0.25)
        start = Coordinates(scale_S=scale_F, pair_R=pair_H, mix_RR=eye_HH)
        found.append(_matrix(_fitted(start, keys, head, dtype)))
    return torch.stack(found)


def _latent_in_basis(layer: LatentAttention, basis_WW: Tensor) -> LatentAttention:
    """Return the same function with other slots, and with another latent where no norm comes first."""
    rank = len(layer.down_CD)
    # The part of the slots commutes with the rotation.
    basis_CC, basis_RR = basis_WW[:rank, :rank], basis_WW[rank:, rank:]
    back_RR = torch.linalg.inv(basis_RR).mT
    layer = replace(
        layer,
        k_rope_RD=basis_RR @ layer.k_rope_RD,
        k_rope_R=None if layer.k_rope_R is None else basis_RR @ layer.k_rope_R,
        q_rope_NRA=back_RR @ layer.q_rope_NRA,
        q_rope_NR=None if layer.q_rope_NR is None else layer.q_rope_NR @ back_RR.mT,
    )
    if layer.level_CC is not None:
        return layer
    back_CC = torch.linalg.inv(basis_CC)
    k_up_NPC, v_up_NHC = layer.k_up_NPC @ back_CC, layer.v_up_NHC @ back_CC
    return replace(layer, down_CD=basis_CC @ layer.down_CD, k_up_NPC=k_up_NPC, v_up_NHC=v_up_NHC)


def _with_value_basis(layer: Attention, basis_KHH: Tensor) -> Attention:
    """Return the same function with T v in the place of each head's values."""
    back_NHH = torch.linalg.inv(basis_KHH).repeat_interleave(len(layer.q_NHD) // len(layer.k_KHD), 0)
    v_KH = None if layer.v_KH is None else torch.einsum("khg,kg->kh", basis_KHH, layer.v_KH)
    o_DNH = torch.einsum("dng,ngh->dnh", layer.o_DNH, back_NHH)
    return replace(layer, v_KHD=basis_KHH @ layer.v_KHD, v_KH=v_KH, o_DNH=o_DNH)


def _with_key_scales(layer: Attention, scale_KH: Tensor) -> Attention:
    """Return the same function with a factor on each key dimension, the same for both of a rotary pair."""
    if layer.k_norm_KH is not None or layer.q_norm_NH is not None:
        return layer
    scale_NH = scale_KH.repeat_interleave(len(layer.q_NHD) // len(layer.k_KHD), 0)
    return replace(
        layer,
        k_KHD=layer.k_KHD * scale_KH[..., None],
        k_KH=None if layer.k_KH is None else layer.k_KH * scale_KH,
        q_NHD=layer.q_NHD / scale_NH[..., None],
        q_NH=None if layer.q_NH is None else layer.q_NH / scale_NH,
    )


def slot_mix(value_RR: Tensor, cost_RR: Tensor, slots_S: Tensor) -> Tensor:
    """Return T (R, R), float64, with T κ to be written in the place of rotated slots κ.

    Numbers of each frequency become as large as errors in them cost. T is zero between slots of unlike
    frequencies. The arguments are the second moment of the rotated slots, interleaved, the cost of errors in
    them, float64, and the angular frequency of each slot.
    """
    mix_RR = torch.zeros_like(value_RR)
    for frequency in slots_S.unique():
        number_M = (slots_S == frequency).nonzero()[:, 0]
        place_R = torch.stack([2 * number_M, 2 * number_M + 1], -1).flatten()
        value_MM, cost_MM = (_complex(moment_RR[place_R][:, place_R]) for moment_RR in (value_RR, cost_RR))
        mix_RR[place_R[:, None], place_R] = _real(balanced(value_MM, cost_MM))
    return mix_RR


def _complex(moment_RR: Tensor) -> Tensor:
    """Return the moment E κ κᴴ (M, M) of complex numbers from that of their real and imaginary parts."""
    parts_MMPP = moment_RR.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).transpose(1, 2)
    real_MM = parts_MMPP[..., 0, 0] + parts_MMPP[..., 1, 1]
    return torch.complex(real_MM, parts_MMPP[..., 1, 0] - parts_MMPP[..., 0, 1])


def _real(mix_MM: Tensor) -> Tensor:
    """Return a complex map as a real one (2M, 2M) of interleaved real and imaginary parts."""
    upper = torch.stack([mix_MM.real, -mix_MM.imag], -1)
    lower = torch.stack([mix_MM.imag, mix_MM.real], -1)
    return torch.stack([upper, lower], 1).flatten(2).flatten(0, 1)
