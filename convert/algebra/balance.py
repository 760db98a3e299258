"""Coordinates in which numbers are as large as errors in them cost.

Where T n is written in the place of n, whatever reads n takes T⁻¹, and the function stays the same. Rounding
errors do not. Let S be the second moment of n and H the cost of an error in it. Errors as large as the
numbers cost about tr(T S Tᵀ) tr(T⁻ᵀ H T⁻¹). That is least where both matrices are equal: then TᵀT is the
geometric mean of H and S⁻¹. An orthogonal factor is still free. A cosine transform of the directions spreads
both evenly, so that no coordinate stands out of those that share a scale.

Legend: W numbers.
"""

import math

import torch
from torch import Tensor

from .subspaces import eigh, matrix_root

LEAST = 1e-9  # energy of a direction, as a share of the mean, that it is taken to have at least


def balanced(value_WW: Tensor, cost_WW: Tensor) -> Tensor:
    """Return T (W, W) with T S Tᵀ = T⁻ᵀ H T⁻¹, both with nearly equal entries on the diagonal.

    Of complex numbers T is complex, and each transpose a conjugate transpose.

    Args:
        value_WW: S, second moment of the numbers, float64 or complex128.
        cost_WW: H, cost of errors in them, of the same dtype.
    """
    root_WW = matrix_root(geometric_mean(value_WW, cost_WW))
    _, basis_WW = eigh(_symmetric(root_WW @ floored(value_WW) @ root_WW))
    return cosine(len(value_WW)).to(value_WW.dtype) @ basis_WW.mH @ root_WW


def cosine(width: int) -> Tensor:
    """Return the orthogonal cosine transform (DCT-II, Ahmed et al., 1974) of some width, float64."""
    position_W = torch.arange(width, dtype=torch.float64)
    rows_WW: Tensor = (
        torch.cos(math.pi / width * (position_W + 0.5) * position_W[:, None]) * (2 / width) ** 0.5
    )
    rows_WW[0] /= 2**0.5
    return rows_WW


def geometric_mean(value_WW: Tensor, cost_WW: Tensor) -> Tensor:
    """Return the geometric mean of H and S⁻¹: N (W, W) with N S N = H; both are floored first."""
    root_WW = matrix_root(floored(value_WW))
    back_WW = torch.linalg.inv(root_WW)
    return _symmetric(back_WW @ matrix_root(_symmetric(root_WW @ floored(cost_WW) @ root_WW)) @ back_WW)


def floored(moment_WW: Tensor) -> Tensor:
    """Return a symmetric moment (W, W) in which no direction is without energy, so that it has an inverse."""
    mean = float(moment_WW.diagonal().real.mean())
    least = LEAST * mean if mean > 0 else 1.0
    return _symmetric(moment_WW) + least * torch.eye(len(moment_WW), dtype=moment_WW.dtype)


def _symmetric(moment_WW: Tensor) -> Tensor:
    return (moment_WW + moment_WW.mH) / 2
