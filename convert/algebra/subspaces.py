"""Best subspaces in a metric: the algebra that pooling and factoring share.

Legend: metric.py; M rows, R of them kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ...core.errors import InvalidInput

_LARGE = 1024  # rows from which on a matrix is decomposed on the GPU


def leading(rows_ME: Tensor, metric_MM: Tensor, seen_ME: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best approximation of complex rows z of rank `rank`: keys κ (R, E) and shares a (M, R).

    z ≈ a κ has the least tr(G (z-aκ) C (z-aκ)ᴴ). C comes as `seen_ME`, z C, which bands and candidates share:
    all else is as small as M.

    κ = uᴴ Fᴴ z with G = F Fᴴ and u the leading left singular vectors of Fᴴ z C^½; a is the least-squares
    solution: no metric is inverted.

    Returns:
        Keys, scaled to the rows' root mean square; shares; the energy of every direction (M,), largest first,
        the first `rank` of which are kept.
    """
    lower_MM = factor(metric_MM)
    energy_M, vectors_MM = eigh(lower_MM.mH @ (seen_ME @ rows_ME.mH) @ lower_MM)
    made_of_RM = vectors_MM.flip(-1)[:, :rank].mH @ lower_MM.mH * _there(energy_M.flip(-1))[:rank, None]
    keys_RE = made_of_RM @ rows_ME
    norm_R = keys_RE.abs().square().sum(-1, keepdim=True).sqrt()
    target = rows_ME.abs().square().sum(-1).mean().sqrt()
    size_R = torch.where(norm_R > 0, target / norm_R, 0)
    keys_RE = keys_RE * size_R
    shares_MR = _coefficients(rows_ME, keys_RE, made_of_RM @ seen_ME * size_R)
    return keys_RE, shares_MR, energy_M.flip(-1).clamp(min=0)


def low_rank(
    rows_CD: Tensor, metric_BSS: Tensor, input_DD: Tensor | None, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of rank `rank` of W (C rows) that minimise tr(G E C Eᵀ): W ≈ up down.

    They are down (R, D) and up (C, R). down = Uᵀ Fᵀ W with G = F Fᵀ, C = L Lᵀ and U the leading left singular
    vectors of Fᵀ W L; up is the least-squares solution. Latent dimensions are scaled so that both factors
    have the same root mean square.

    Returns:
        down, up, and the energy of every direction, largest first.
    """
    blocks, size, _ = metric_BSS.shape
    if len(rows_CD) > rows_CD.shape[1]:  # decompose on the smaller side, where no root of G is needed
        gram_DD = rows_CD.mT @ (metric_BSS @ rows_CD.view(blocks, size, -1)).flatten(0, 1)
        factor_DD = None if input_DD is None else factor(input_DD)
        energy, vectors = eigh(gram_DD if factor_DD is None else factor_DD.mT @ gram_DD @ factor_DD)
        right_RD = vectors.flip(-1)[:, :rank].mT
        size_R = energy.flip(-1)[:rank].clamp(min=0).sqrt()[:, None]
        there_R = _there(energy.flip(-1))[:rank, None]
        if factor_DD is None:
            down_RD = right_RD * torch.where(there_R, size_R, 0)  # right gram = energy right
        else:
            down_RD = right_RD @ factor_DD.mT @ gram_DD * torch.where(there_R, 1 / size_R, 0)
    else:
        weighted_CD = (factor(metric_BSS).mT @ rows_CD.view(blocks, size, -1)).flatten(0, 1)
        moment_CD = weighted_CD if input_DD is None else weighted_CD @ input_DD
        energy, vectors = eigh(moment_CD @ weighted_CD.mT)
        down_RD = (vectors.flip(-1)[:, :rank] * _there(energy.flip(-1))[:rank]).mT @ weighted_CD
    down_RD = torch.nn.functional.pad(down_RD, (0, 0, 0, rank - len(down_RD)))
    up_CR = regress(rows_CD, down_RD, input_DD)
    balance_R = (up_CR.square().mean(0) / down_RD.square().mean(-1)).pow(0.25)
    balance_R = torch.where(balance_R.isfinite() & (balance_R > 0), balance_R, 1)
    return down_RD * balance_R[:, None], up_CR / balance_R, energy.flip(-1).clamp(min=0)


def low_rank_energy(rows_CD: Tensor, metric_BSS: Tensor, input_DD: Tensor | None) -> Tensor:
    """Return the energy of every direction, largest first.

    `low_rank` loses the sum of those beyond its rank.
    """
    blocks, size, _ = metric_BSS.shape
    if len(rows_CD) <= rows_CD.shape[1]:
        weighted_CD = (factor(metric_BSS).mT @ rows_CD.view(blocks, size, -1)).flatten(0, 1)
        gram = (weighted_CD if input_DD is None else weighted_CD @ input_DD) @ weighted_CD.mT
    else:
        gram = rows_CD.mT @ (metric_BSS @ rows_CD.view(blocks, size, -1)).flatten(0, 1)
        if input_DD is not None:
            factor_DD = factor(input_DD)
            gram = factor_DD.mT @ gram @ factor_DD
    energy: Tensor = torch.linalg.eigvalsh(_placed(gram)).cpu().flip(-1).clamp(min=0)
    return energy


@contextmanager
def decomposing(statistics: str) -> Iterator[None]:
    """Refuse statistics whose values are so extreme that matrices cannot be decomposed, as of a damaged file.

    `statistics` is what they are called, such as `the statistics of layer 3`.
    """
    try:
        yield
    except LinAlgError:
        raise InvalidInput(
            f"{statistics} cannot be decomposed, because their values are extreme; take them again, with "
            "--calibration self or another text"
        ) from None


def _there(energy: Tensor) -> Tensor:
    """Return which energies, largest first, exceed the rounding of the largest."""
    there: Tensor = energy > energy.max().clamp(min=0) * len(energy) * torch.finfo(energy.dtype).eps
    return there


def factor(metric_BSS: Tensor) -> Tensor:
    """Return F with F Fᴴ = M of symmetric or Hermitian positive semi-definite matrices.

    Any such F gives the same subspaces. Cholesky's takes a fourteenth of the time of a decomposition at
    2,048; singular matrices, which have none, take the positive root.
    """
    lower_BSS, failed = torch.linalg.cholesky_ex(metric_BSS)
    return matrix_root(metric_BSS) if failed.any() else lower_BSS


def matrix_root(metric_BSS: Tensor) -> Tensor:
    """Return positive square roots of symmetric or Hermitian positive semi-definite matrices."""
    values_BS, vectors_BSS = eigh(metric_BSS)
    root_BSS: Tensor = vectors_BSS * values_BS.clamp(min=0).sqrt()[..., None, :] @ vectors_BSS.mH
    return root_BSS


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, rising, and eigenvectors of symmetric or Hermitian matrices.

    Large ones are decomposed on the GPU where there is one.
    """
    values, vectors = torch.linalg.eigh(_placed(matrix))
    return values.to(matrix.device), vectors.to(matrix.device)


def _placed(matrix: Tensor) -> Tensor:
    """Return the matrix on the device where it is decomposed soonest.

    Below some size the way to the GPU and back takes longer than the work.
    """
    return matrix.cuda() if matrix.shape[-1] >= _LARGE and torch.cuda.is_available() else matrix


def regress(rows_ME: Tensor, onto_RE: Tensor, input_EE: Tensor | None) -> Tensor:
    """Return least-squares coefficients (M, R) of rows on rows with orthogonal images under the input."""
    return _coefficients(rows_ME, onto_RE, onto_RE if input_EE is None else onto_RE @ input_EE)


def _coefficients(rows_ME: Tensor, onto_RE: Tensor, moment_RE: Tensor) -> Tensor:
    """Return the same coefficients with the images given."""
    square_R = (moment_RE * onto_RE.conj()).sum(-1).real
    kept_R = square_R > square_R.max() * 1e-13
    return rows_ME @ moment_RE.mH * torch.where(kept_R, 1 / square_R, 0)
