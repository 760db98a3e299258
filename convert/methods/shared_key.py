"""Parts that the published rules share: key heads merged to one, in a real basis that gives some pairs slots.

Legend: published.py; A the real and the imaginary part of a pair.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from ..algebra.attention import Attention, LatentAttention
from ..algebra.rotary import complex_rows, half_rows, interleaved_rows
from ..algebra.subspaces import low_rank
from ..algebra.target import LatentTarget
from .latent import Band

# Relative to the values: anything smaller is no key, but the rounding of one that the slots hold whole.
ROUNDING = 1e-10

# Down (C, D), up (B, C) and constant (B,): rows are up down x + constant.
Compressed = tuple[Tensor, Tensor, Tensor]


def components(attention: Attention, bands: tuple[Band, ...], input_EE: Tensor | None) -> Tensor:
    """Return real principal components of keys over heads and pairs (K, F, M), orthonormal.

    There is one for each slot, then the others. Bands that serve the same pairs share a decomposition, the
    first of them with its first component.
    """
    z_KFE = complex_rows(affine(attention.k_KHD, attention.k_KH))
    if input_EE is None:  # weights alone: a bias is none of them
        z_KFE = z_KFE[..., :-1]
    heads, pairs, _ = z_KFE.shape
    leading, others = [], []
    for members, served in groupby(bands, key=lambda band: list(band.pairs)):
        slots = sum(band.slots for band in served)
        rows_ME = z_KFE[:, members].flatten(0, 1)
        moment_ME = rows_ME if input_EE is None else rows_ME @ input_EE.to(rows_ME.dtype)
        vectors_MM = torch.linalg.eigh((moment_ME @ rows_ME.mH).real)[1].flip(-1)
        spread_KFM = vectors_MM.new_zeros(heads, pairs, len(vectors_MM))
        spread_KFM[:, members] = vectors_MM.unflatten(0, (heads, -1))
        leading.append(spread_KFM[..., :slots])
        others.append(spread_KFM[..., slots:])
    return torch.cat(leading + others, -1)


def assemble(
    attention: Attention,
    rotation_KFM: Tensor,
    target: LatentTarget,
    compress: Callable[[Tensor], Compressed],
) -> LatentAttention:
    """Return the layer in another real orthonormal basis of heads' pairs.

    The first get the slots, and `compress` the others.
    """
    heads = len(attention.k_KHD)
    queries = len(attention.q_NHD) // len(attention.k_KHD)
    slots = target.qk_rope_head_dim // 2
    q_NHE = affine(attention.q_NHD, attention.q_NH)
    z_KFE = complex_rows(affine(attention.k_KHD, attention.k_KH))
    z_ME = torch.einsum("kfm,kfe->me", rotation_KFM.to(z_KFE.dtype), z_KFE)
    share_NFS = rotation_KFM[..., :slots].repeat_interleave(queries, 0)
    q_NSE = torch.einsum("nfs,nfe->nse", share_NFS.to(z_KFE.dtype), complex_rows(q_NHE))
    values_BE = affine(attention.v_KHD, attention.v_KH).flatten(0, 1)
    down_CD, up_BC, constant_B = compress(torch.cat([half_rows(z_ME[slots:]), values_BE]))
    k_up_BC, v_up_BC = up_BC.split([len(up_BC) - len(values_BE), len(values_BE)])
    k_up_KPC = torch.einsum(
        "kft,atc->kafc", rotation_KFM[..., slots:], k_up_BC.unflatten(0, (2, -1))
    ).flatten(1, 2)
    return written(
        attention,
        (q_NHE, interleaved_rows(q_NSE)),
        interleaved_rows(z_ME[:slots]),
        down_CD,
        (k_up_KPC, v_up_BC.unflatten(0, (heads, -1))),
        constant_B[-len(values_BE) :].unflatten(0, (heads, -1)),
    )


def written(
    attention: Attention,
    q_NXE: tuple[Tensor, Tensor],
    k_rope_RE: Tensor,
    down_CD: Tensor,
    up_KHC: tuple[Tensor, Tensor],
    v_constant_KH: Tensor,
) -> LatentAttention:
    """Assemble a layer from queries, a rotary key, and a latent that keys and values are read from.

    The constant of values goes to the output, since attention sums to one. Softmax cancels that of un-rotated
    keys.
    """
    queries = len(attention.q_NHD) // len(attention.k_KHD)
    (q_nope_NPE, q_rope_NRE), o_D = q_NXE, attention.o_D
    k_up_NPC, v_up_NHC = (up.repeat_interleave(queries, 0) for up in up_KHC)
    if attention.v_KH is not None:
        moved_D = torch.einsum("dnh,nh->d", attention.o_DNH, v_constant_KH.repeat_interleave(queries, 0))
        o_D = moved_D if o_D is None else o_D + moved_D
    return LatentAttention(
        q_nope_NPA=q_nope_NPE[..., :-1],
        q_rope_NRA=q_rope_NRE[..., :-1],
        q_nope_NP=None if attention.q_NH is None else q_nope_NPE[..., -1],
        q_rope_NR=None if attention.q_NH is None else q_rope_NRE[..., -1],
        down_CD=down_CD,
        k_up_NPC=k_up_NPC,
        v_up_NHC=v_up_NHC,
        k_rope_RD=k_rope_RE[:, :-1],
        k_rope_R=None if attention.k_KH is None else k_rope_RE[:, -1],
        o_DNH=attention.o_DNH,
        o_D=o_D,
        scale=attention.scale,
    )


def truncated(rows_BE: Tensor, rank: int) -> Compressed:
    """Return down, up and constant of a truncated SVD of weights; biases do not change."""
    down_CD, up_BC, _ = low_rank(rows_BE[:, :-1], unweighted(rows_BE), None, rank)
    return down_CD, up_BC, rows_BE[:, -1]


def split(rows_BE: Tensor, values: int, rank: int) -> Compressed:
    """Return down, up and constant of two truncated SVDs of weights, of the key rows and of the values.

    The values are the last rows. Each SVD gets half of the rank; what one has no rows for goes to the other.
    """
    keys = len(rows_BE) - values
    key_rank = min(max(rank // 2, rank - values), keys)
    downs, ups = [], []
    for part_BE, width in zip(rows_BE.split([keys, values]), (key_rank, rank - key_rank), strict=True):
        if width:
            down_CD, up_BC, _ = truncated(part_BE, width)
        else:
            down_CD = part_BE.new_zeros(0, part_BE.shape[1] - 1)
            up_BC = part_BE.new_zeros(len(part_BE), 0)
        downs.append(down_CD)
        ups.append(up_BC)
    return torch.cat(downs), torch.block_diag(*ups), rows_BE[:, -1]


def projected(down_CE: Tensor, up_BC: Tensor) -> Compressed:
    """Return down, up and constant of a projection of activations, which biases pass through too."""
    return down_CE[:, :-1], up_BC, up_BC @ down_CE[:, -1]


def unweighted(rows_BE: Tensor) -> Tensor:
    """Return a metric that counts all rows alike, as diagonal blocks of size one."""
    return rows_BE.new_ones(len(rows_BE), 1, 1)


def balance(rows_BE: Tensor, values: int, input_EE: Tensor) -> Tensor:
    """Return scales (B,) that bring key rows' activations to the mean norm of the values'.

    The values are the last rows.
    """
    norm_B = ((rows_BE @ input_EE) * rows_BE).sum(-1).clamp(min=0).sqrt()
    key = norm_B[:-values].mean()
    value = norm_B[-values:].mean()
    scale_B = torch.ones_like(norm_B)
    if key > ROUNDING * value and value > 0:
        scale_B[:-values] = value / key
    return scale_B


def affine(rows_KHD: Tensor, bias_KH: Tensor | None) -> Tensor:
    """Return rows with one more column for the input 1: the bias, or zero."""
    constant_KH = rows_KHD.new_zeros(rows_KHD.shape[:-1]) if bias_KH is None else bias_KH
    return torch.cat([rows_KHD, constant_KH[..., None]], -1)
