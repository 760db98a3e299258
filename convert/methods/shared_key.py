"""Parts that the published rules share: key heads merged to one, in a real basis that gives some pairs slots.

TransMLA and the rules that were built on it differ in how they decompose the merged heads.
Keys of all heads are rotated pair by pair to their principal components (RoRoPE), of which some rotate and
the others stop; the latter are balanced with the values, and the stack z = [k/α; v] is decomposed. The
published converters share everything but the last step:

| name | the map on z |
|---|---|
| transmla | the projection onto the leading eigenvectors of E[z zᵀ] |
| care | V_r (S_r U_rᵀ C^-½) with C^½ Wᵀ = U S Vᵀ, C = E[z zᵀ] shrunken |
| no-sqrt-care | the same with C in the place of C^½ |
| transmla-care | the projection onto the left singular vectors of C⁴ Wᵀ |

W is the map from z to keys and values; up to isometries it is A = diag(α, 1).

They differ in the activations, too: those of the model whose rotation was removed (transmla, transmla-care),
or those behind the layers that are decomposed already, one layer after the other (care, no-sqrt-care).

Settings follow a name behind colons: `:fold2`, `:fold4`, ... multiplies the number of neighbouring pairs that
share a decomposition (FreqFold), and `:balance0.5` multiplies the size that keys get next to values.

Legend: published.py; A the real and the imaginary part of a pair.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ..algebra.attention import Attention, LatentAttention
from ..algebra.rotary import complex_rows, half_rows, interleaved_rows
from ..algebra.subspaces import low_rank
from ..algebra.target import LatentTarget
from ..calibration.statistics import LayerStatistics
from .latent import Band, behind_values

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
    q_nope_NPE, q_rope_NRE = q_NXE
    k_up_NPC, v_up_NHC = (up.repeat_interleave(queries, 0) for up in up_KHC)
    biased = attention if attention.v_KH is None else replace(attention, v_KH=v_constant_KH)
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
        **behind_values(biased),
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


# Shares of C's mean diagonal that CARE's published code adds to C's diagonal, by decomposition.
CARE_DAMPING, DAMPING = 0.1, 0.01
POWER = 4  # of C in transmla-care, as published

# From rows (B, E), their scales next to each other (B,), C at the input (E, E) and a rank.
Decomposition = Callable[[Tensor, Tensor, Tensor, int], Compressed]


def folded_bands(frequencies_F: Tensor, slots: int, multiple: int) -> tuple[Band, ...]:
    """Group neighbouring pairs, whose components turn as the pairs at even steps in the group do.

    This is FreqFold (TransMLA, arXiv 2502.07864, section 4). It takes as many pairs for a slot as there are,
    F/S, times a multiple. The published search doubles that while perplexity on the test text falls; nothing
    here is tuned on a text that is evaluated.

    Raises:
        InvalidInput: the pairs do not divide into equal groups of that size.
    """
    pairs = len(frequencies_F)
    if pairs % slots:
        fitting = ", ".join(str(2 * n) for n in range(1, pairs + 1) if pairs % n == 0)
        raise InvalidInput(
            f"{2 * slots} rotary dimensions do not divide the head dimension {2 * pairs} into the equal "
            f"shares that FreqFold needs; these would: --rope-dim {fitting}"
        )
    step = pairs // slots
    width = step * multiple
    if pairs % width:
        raise InvalidInput(
            f"fold{multiple} groups {width} rotary pairs, and {pairs} do not divide into such groups; "
            "choose a smaller fold"
        )
    return tuple(
        Band(frequency=float(frequencies_F[first + at]), pairs=tuple(range(first, first + width)), slots=1)
        for first in range(0, pairs, width)
        for at in range(0, width, step)
    )


def merged_heads(
    attention: Attention,
    target: LatentTarget,
    bands: tuple[Band, ...],
    statistics: LayerStatistics | None,
    input_EE: Tensor | None = None,
    *,
    decompose: Decomposition,
    weight: float = 1.0,
) -> LatentAttention:
    """Fold by TransMLA's steps (arXiv 2502.07864, section 4): merged heads, RoRoPE, balance, decomposition.

    Heads of a grouped source are merged to one latent [K; V] that each query reads through its own head's
    block. RoRoPE: over all heads' pairs that a slot serves, one real orthogonal map of real and imaginary
    parts alike diagonalises E[Re Reᵀ + Im Imᵀ] of key activations; the leading components rotate, the others
    stop. Balance: un-rotated keys are divided by the ratio α of the mean norms of key and value columns.
    RoRoPE reads the source's activations; balance and decomposition read those of `input_EE`.

    Left out: ranks that differ by layer. As in the paper, all value columns count in α; the published code
    skips as many as the rotary key is wide. Its damping of the PCAs changes no eigenvector.

    Args:
        attention: of the source.
        target: widths of the latent and the rotary key.
        bands: the slots.
        statistics: of the layer.
        input_EE: second moment of the layer's input behind the layers that were changed before it; None: the
            source's.
        decompose: the last step, of `DECOMPOSITIONS`.
        weight: size of the keys next to the values, `balance_kv_ratio` of the published code.
    """
    assert statistics is not None
    seen_EE = statistics.input_EE if input_EE is None else input_EE
    values = attention.v_KHD[..., 0].numel()

    def compress(rows_BE: Tensor) -> Compressed:
        scale_B = balance(rows_BE, values, seen_EE)
        scale_B[:-values] *= weight
        return decompose(rows_BE, scale_B, seen_EE, target.kv_lora_rank)

    return assemble(attention, components(attention, bands, statistics.input_EE), target, compress)


def pca(rows_BE: Tensor, scale_B: Tensor, input_EE: Tensor, rank: int) -> Compressed:
    """Project z onto the leading eigenvectors of E[z zᵀ], uncentred, biases included."""
    down_CE, up_BC, _ = low_rank(rows_BE * scale_B[:, None], unweighted(rows_BE), input_EE, rank)
    return projected(down_CE, up_BC / scale_B[:, None])


def care(rows_BE: Tensor, scale_B: Tensor, input_EE: Tensor, rank: int) -> Compressed:
    """Decompose by CARE (arXiv 2603.17946, section 3): the uniform CARE-U.

    V holds the eigenvectors of A C A, and the map on [k; v] is the projection V_r V_rᵀ; neither root nor
    inverse need be computed.
    """
    moment_BB = rows_BE @ input_EE @ rows_BE.mT
    damping = CARE_DAMPING * (moment_BB.diagonal() * scale_B.square()).mean()
    vectors_BB = torch.linalg.eigh(moment_BB + torch.diag(damping / scale_B.square()))[1].flip(-1)
    return projected(vectors_BB[:, :rank].mT @ rows_BE, vectors_BB[:, :rank])


def no_sqrt_care(rows_BE: Tensor, scale_B: Tensor, input_EE: Tensor, rank: int) -> Compressed:
    """Decompose as CARE with C in the place of its root: V holds the left singular vectors of A C."""
    weighted_BB = _moment(rows_BE, scale_B, input_EE) / scale_B[:, None]
    up_BC = torch.linalg.svd(weighted_BB)[0][:, :rank]
    return projected(up_BC.mT @ rows_BE, up_BC)


def transmla_care(rows_BE: Tensor, scale_B: Tensor, input_EE: Tensor, rank: int) -> Compressed:
    """Project z onto the left singular vectors of C⁴ A, as CARE's published code does for TransMLA."""
    moment_BB = _moment(rows_BE, scale_B, input_EE)
    moment_BB = moment_BB / moment_BB.diagonal().mean()
    powered_BB = torch.linalg.matrix_power(moment_BB, POWER) / scale_B
    basis_BC = torch.linalg.svd(powered_BB)[0][:, :rank]
    return projected(basis_BC.mT @ (rows_BE * scale_B[:, None]), basis_BC / scale_B[:, None])


def whole(rows_BE: Tensor, scale_B: Tensor, input_EE: Tensor, rank: int) -> Compressed:
    """Keep all of z, as a layer does whose rotation was removed and that is not decomposed yet."""
    return rows_BE[:, :-1], torch.eye(len(rows_BE), dtype=rows_BE.dtype), rows_BE[:, -1]


def _moment(rows_BE: Tensor, scale_B: Tensor, input_EE: Tensor) -> Tensor:
    """Return C = E[z zᵀ], shrunken as the published code does."""
    scaled_BE = rows_BE * scale_B[:, None]
    moment_BB: Tensor = scaled_BE @ input_EE @ scaled_BE.mT
    moment_BB.diagonal().add_(DAMPING * moment_BB.diagonal().mean())
    return moment_BB


DECOMPOSITIONS: dict[str, Decomposition] = {
    "transmla": pca,
    "care": care,
    "no-sqrt-care": no_sqrt_care,
    "transmla-care": transmla_care,
}
