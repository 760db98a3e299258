"""Coordinates of a cache fitted to a format: an orthogonal factor, and a scale for every number.

A format rounds each number by a share of the largest of its token, or of the number itself. So a token's
error costs max² Σ_i H_ii, or Σ_i x_i² H_ii, with H in the same coordinates. With four bits and a scale for 16
numbers it is the larger of both, but the largest of the 16 is kept as well as the scale is. The mean over
tokens is minimised. A slot that is always the largest of its token is scaled down until its own error costs
as much as what it spares the others. The orthogonal factor is the exponential of a skew matrix, so it stays
orthogonal.

Legend: attention.py; X tokens, W numbers of one token and head, of which the first C may be turned.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.cache_dtypes import CacheDtype
from ..methods.refinement import fitting_device

STEPS = 100
RATE = 0.03  # of Adam, falling linearly to 0
# Mean squared errors, times 12, of numbers of four bits with a scale for 16. They are floats with one digit
# after the first, so that a step is half to a quarter of the number. The smallest is 1/12 of the largest of
# the 16, whose own error is that of the scale, which has three digits.
SHARE, FLOOR, LARGEST = 0.135, 1 / 144, 0.135 / 16
_NO_FACTORS, _NO_MAP = torch.zeros(0, dtype=torch.float64), torch.zeros(0, 0, dtype=torch.float64)
_NO_PAIRS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Coordinates of one token's numbers: outer · inner · c of the first C, scale · mix · r of the others.

    Attributes:
        outer_C: factors on the turned numbers, positive.
        inner_CC: coordinates of the first C numbers; an orthogonal turn is multiplied into them when fitted.
        scale_S: factors on the other numbers, positive; numbers of one pair share one.
        pair_R: for each of the other numbers the index of its factor.
        mix_RR: coordinates of the other numbers before these factors.
    """

    outer_C: Tensor = _NO_FACTORS
    inner_CC: Tensor = _NO_MAP
    scale_S: Tensor = _NO_FACTORS
    pair_R: Tensor = _NO_PAIRS
    mix_RR: Tensor = _NO_MAP


@torch.enable_grad()
def fit_coordinates(start: Coordinates, rows_XW: Tensor, cost_WW: Tensor, dtype: CacheDtype) -> Coordinates:
    """Return coordinates of less predicted loss, with the turn multiplied into `inner_CC`; all float64.

    Args:
        start: where the search begins.
        rows_XW: numbers as they would be written without coordinates.
        cost_WW: H, cost of errors in them.
        dtype: format that they are rounded to.
    """
    rank, device = len(start.outer_C), fitting_device()
    inner_CC, rows_XW = start.inner_CC.to(device), rows_XW.to(device, torch.float64)
    back_CC = torch.linalg.inv(inner_CC)
    latent_XC = (rows_XW[:, :rank] @ inner_CC.mT).float()
    cost_CC = (back_CC.mT @ cost_WW[:rank, :rank].to(device) @ back_CC).float()
    mix_RR = start.mix_RR.to(device)
    back_RR = torch.linalg.inv(mix_RR)
    other_XR = (rows_XW[:, rank:] @ mix_RR.mT).float()
    cost_R = (back_RR.mT @ cost_WW[rank:, rank:].to(device) @ back_RR).diagonal().float()
    pair_R = start.pair_R.to(device)
    skew_CC = torch.zeros(rank, rank, device=device, requires_grad=True)
    outer_C = start.outer_C.to(device).float().log().requires_grad_()
    scale_S = start.scale_S.to(device).float().log().requires_grad_()

    def loss() -> Tensor:
        turn_CC = torch.matrix_exp(skew_CC - skew_CC.mT)
        factor_C, factor_R = outer_C.exp(), scale_S.exp()[pair_R]
        written_XW = torch.cat([latent_XC @ turn_CC.mT * factor_C, other_XR * factor_R], -1)
        cost_C = ((turn_CC @ cost_CC) * turn_CC).sum(-1) / factor_C.square()
        return rounding_cost(written_XW, torch.cat([cost_C, cost_R / factor_R.square()]), dtype)

    moved = [skew_CC, outer_C, scale_S]
    best, least = [value.detach().clone() for value in moved], float(loss().detach())
    optimizer = torch.optim.Adam(moved, lr=RATE)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        found = loss()
        (found / least).backward()
        if float(found.detach()) < least:
            best, least = [value.detach().clone() for value in moved], float(found.detach())
        optimizer.step()
    skew, outer, scale = (value.to("cpu", torch.float64) for value in best)
    turn_CC = torch.matrix_exp(skew - skew.mT)
    return replace(start, outer_C=outer.exp(), inner_CC=turn_CC @ start.inner_CC, scale_S=scale.exp())


def rounding_cost(written_XW: Tensor, cost_W: Tensor, dtype: CacheDtype) -> Tensor:
    """Return what rounding the numbers of tokens costs a token, up to a factor of the format.

    `cost_W` is the cost of a squared error in each.
    """
    square_XW = written_XW.square()
    if dtype.group == 0:
        return (square_XW * cost_W).sum(-1).mean()
    width = dtype.group or len(cost_W)
    spare = -len(cost_W) % width
    largest_XG1 = pad(square_XW, (0, spare)).unflatten(-1, (-1, width)).amax(-1, keepdim=True)
    error_XW = largest_XG1.expand(-1, -1, width).flatten(-2)[:, : len(cost_W)]
    if dtype.group is not None:
        own_XW = torch.where(square_XW < error_XW, SHARE, LARGEST) * square_XW
        error_XW = torch.maximum(FLOOR * error_XW, own_XW)
    found: Tensor = (error_XW * cost_W).sum(-1).mean()
    return found
