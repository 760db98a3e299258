"""Best subspaces in a metric: the algebra that pooling and factoring share. Legend: metric.py; M rows, R of them kept."""

import torch
from torch import Tensor


def leading(rows_ME: Tensor, metric_MM: Tensor, input_EE: Tensor | None, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best rank `rank` of complex rows z: keys κ (R, E) and shares a (M, R), z ≈ a κ, least tr(G (z-aκ) C (z-aκ)ᴴ).

    κ = uᴴ G^½ z with u the leading left singular vectors of G^½ z C^½; a is the least-squares solution: no metric is inverted.

    Returns:
        Keys, scaled to the rows' root mean square; shares; the energy of every direction (M,), largest first, the first
        `rank` of which are kept.
    """
    root_MM = matrix_root(metric_MM)
    weighted_ME = root_MM @ rows_ME
    moment_ME = weighted_ME if input_EE is None else weighted_ME @ input_EE.to(weighted_ME.dtype)
    energy_M, vectors_MM = torch.linalg.eigh(moment_ME @ weighted_ME.mH)
    keys_RE = vectors_MM.flip(-1)[:, :rank].mH @ weighted_ME
    keys_RE = keys_RE * _there(energy_M.flip(-1))[:rank, None]
    norm_R = keys_RE.abs().square().sum(-1, keepdim=True).sqrt()
    target = rows_ME.abs().square().sum(-1).mean().sqrt()
    keys_RE = torch.where(norm_R > 0, keys_RE / norm_R * target, 0)
    return keys_RE, _regress(rows_ME, keys_RE, input_EE), energy_M.flip(-1).clamp(min=0)


def low_rank(rows_CD: Tensor, metric_BSS: Tensor, input_DD: Tensor | None, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rank-`rank` factors of W (C rows) that minimise tr(G E C Eᵀ): down (R, D) and up (C, R), W ≈ up down.

    down = Uᵀ G^½ W with U the leading left singular vectors of G^½ W C^½; up is the least-squares solution. Latent dimensions
    are scaled so that both factors have the same root mean square.

    Returns:
        down, up, and the energy of every direction, largest first.
    """
    blocks, size, _ = metric_BSS.shape
    weighted_CD = (matrix_root(metric_BSS) @ rows_CD.view(blocks, size, -1)).flatten(0, 1)
    if len(rows_CD) > rows_CD.shape[1]:  # decompose on the smaller side
        gram_DD = weighted_CD.mT @ weighted_CD
        del weighted_CD  # the largest matrix here, next to the workspace of the largest decomposition
        root_DD = None if input_DD is None else matrix_root(input_DD)
        energy, vectors = torch.linalg.eigh(gram_DD if root_DD is None else root_DD @ gram_DD @ root_DD)
        right_RD = vectors.flip(-1)[:, :rank].mT
        size_R = energy.flip(-1)[:rank].clamp(min=0).sqrt()
        down_RD = (right_RD if root_DD is None else right_RD @ root_DD) @ gram_DD
        down_RD = down_RD * torch.where(_there(energy.flip(-1))[:rank], 1 / size_R, 0)[:, None]
    else:
        moment_CD = weighted_CD if input_DD is None else weighted_CD @ input_DD
        energy, vectors = torch.linalg.eigh(moment_CD @ weighted_CD.mT)
        down_RD = (vectors.flip(-1)[:, :rank] * _there(energy.flip(-1))[:rank]).mT @ weighted_CD
    down_RD = torch.nn.functional.pad(down_RD, (0, 0, 0, rank - len(down_RD)))
    up_CR = _regress(rows_CD, down_RD, input_DD)
    balance_R = (up_CR.square().mean(0) / down_RD.square().mean(-1)).pow(0.25)
    balance_R = torch.where(balance_R.isfinite() & (balance_R > 0), balance_R, 1)
    return down_RD * balance_R[:, None], up_CR / balance_R, energy.flip(-1).clamp(min=0)


def low_rank_energy(rows_CD: Tensor, metric_BSS: Tensor, input_DD: Tensor | None) -> Tensor:
    """The energy of every direction, largest first: what `low_rank` would lose is the sum of those beyond its rank."""
    blocks, size, _ = metric_BSS.shape
    if len(rows_CD) <= rows_CD.shape[1]:
        weighted_CD = (matrix_root(metric_BSS) @ rows_CD.view(blocks, size, -1)).flatten(0, 1)
        gram = (weighted_CD if input_DD is None else weighted_CD @ input_DD) @ weighted_CD.mT
    else:
        gram = rows_CD.mT @ (metric_BSS @ rows_CD.view(blocks, size, -1)).flatten(0, 1)
        if input_DD is not None:
            root_DD = matrix_root(input_DD)
            gram = root_DD @ gram @ root_DD
    energy: Tensor = torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0)
    return energy


def _there(energy: Tensor) -> Tensor:
    """Which energies, largest first, are more than the rounding of the largest."""
    there: Tensor = energy > energy.max().clamp(min=0) * len(energy) * torch.finfo(energy.dtype).eps
    return there


def matrix_root(metric_BSS: Tensor) -> Tensor:
    """Positive square roots of symmetric or Hermitian positive semi-definite matrices."""
    values_BS, vectors_BSS = torch.linalg.eigh(metric_BSS)
    root_BSS: Tensor = vectors_BSS * values_BS.clamp(min=0).sqrt()[..., None, :] @ vectors_BSS.mH
    return root_BSS


def _regress(rows_ME: Tensor, onto_RE: Tensor, input_EE: Tensor | None) -> Tensor:
    """Least-squares coefficients (M, R) of rows on rows whose images under the input are orthogonal."""
    moment_RE = onto_RE if input_EE is None else onto_RE @ input_EE.to(onto_RE.dtype)
    square_R = (moment_RE * onto_RE.conj()).sum(-1).real
    kept_R = square_R > square_R.max() * 1e-13
    return rows_ME @ moment_RE.mH * torch.where(kept_R, 1 / square_R, 0)
