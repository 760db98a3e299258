"""Best subspaces: the algebra that pooling and factoring share. Legend: attention.py; E = D, plus a column for the bias.

Errors are weighted by what they do to the attention's output for an isotropic normed input: a key error reaches it through the
query and the value it displaces, a value error through W_O. So keys and values are in one unit.
"""

import torch
from torch import Tensor

from .attention import Attention


def best_slots(z_KFE: Tensor, weight_KF: Tensor, nearest_F: Tensor, slots: int) -> tuple[Tensor, Tensor]:
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


def low_rank(stack_BHD: Tensor, metric_BHH: Tensor, rank: int) -> tuple[Tensor, Tensor]:
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
        gram = weighted.mT @ weighted
        del weighted  # the largest matrix here, next to the workspace of the largest decomposition
        values, vectors = torch.linalg.eigh(gram)
        down_CD = vectors.flip(-1)[:, :rank].mT * values.flip(-1)[:rank].clamp(min=0).sqrt()[:, None]
    down_CD = torch.nn.functional.pad(down_CD, (0, 0, 0, rank - len(down_CD)))
    square_C = down_CD.square().sum(-1)
    kept_C = square_C > square_C.max() * 1e-24
    up_BHC = stack_BHD @ down_CD.mT * torch.where(kept_C, 1 / square_C, 0)
    balance_C = (up_BHC.square().mean((0, 1)) / down_CD.square().mean(-1)).pow(0.25)
    balance_C = torch.where(kept_C, balance_C, 1)
    return down_CD * balance_C[:, None], up_BHC / balance_C


def sensitivity(attention: Attention) -> Tensor:
    """Squared output error per squared score error of each query head (N,): scale² times the energy of its output."""
    heads = len(attention.v_KHD)
    out = attention.o_DNH.unflatten(1, (heads, -1))
    gram_NHH = torch.einsum("dkmh,dkmg->kmhg", out, out)
    return attention.scale**2 * torch.einsum("kmhg,khe,kge->km", gram_NHH, attention.v_KHD, attention.v_KHD).flatten()


def value_metric(attention: Attention) -> Tensor:
    """W_O^T W_O of each key/value head (K, H, H): squared output error of a value error."""
    queries = len(attention.q_NHD) // len(attention.v_KHD)
    return per_key_head(torch.einsum("dnh,dng->nhg", attention.o_DNH, attention.o_DNH), queries)


def per_key_head(rows_N: Tensor, queries: int) -> Tensor:
    """Sums (K, ...) over the query heads that read the same key head, of values (N, ...)."""
    sums_K: Tensor = rows_N.unflatten(0, (-1, queries)).sum(1)
    return sums_K


def with_bias(rows_KHD: Tensor, bias_KH: Tensor | None) -> Tensor:
    """Rows with the bias as one more column, whose input is the constant 1."""
    return rows_KHD if bias_KH is None else torch.cat([rows_KHD, bias_KH[..., None]], -1)
