"""A length of the latent that is nearly as level, and with which rounding weights costs less.

A norm leaves the basis A of a latent free, but for the lengths |A c| of tokens. Those hardly see a direction
in which tokens have little energy, and so a fit may count it as much as any other. Then the down-projection
A W has large rows there, which err by a share of their size when weights are rounded, and the norm's other
side multiplies the error by what the direction is worth. Let u = A c / |A c| of tokens x, and

    M = E[u uᵀ],  S = A W E[diag(x²) / |A c|²] (A W)ᵀ,  K = E[∂²loss / ∂n²],  n = √C u.

M, whose trace is 1, is what errors of the up-projections meet, S what those of the down-projection are, and K
what an error in the latent costs. If A is replaced by B A, and every number of both projections errs by a
share ε of it, in the rotation that spreads the errors best (rounding_turn.py), they cost
½ ε² tr(B (S + M) Bᵀ) tr(B⁻ᵀ K B⁻¹). The lengths change by |B u|, and an error in a token's length costs w,
the second derivative of the loss by a factor on its latent. B has the least

    ½ E[w (1 / |B u| - 1)²] + ½ ε² tr(B (S + M) Bᵀ) tr(B⁻ᵀ K B⁻¹).

Legend: attention.py; X tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algebra.attention import LatentAttention
from ..algebra.forward import attend
from ..methods.refinement import BATCH, LayerSample, fitting_device

SHARE = 0.02  # ε; FP8 errs by 0.026 of a number, bfloat16 by 0.0016 (docs/notes/latent-norm.md)
STEPS = 60  # of the search before refinement
FEW_STEPS = 20  # of the one after it, which begins close to its end
# Tokens that costs are estimated on, by one draw: so many, and for each number of the latent. All tokens and
# two draws take eight times as long and give no better folds (docs/notes/latent-norm.md).
_TOKENS, _TOKENS_EACH = 3072, 24
_LEAST = 1e-6  # of the mean: what each direction is taken to have of S and of K at least


@dataclass(frozen=True, kw_only=True)
class LatentCosts:
    """Tokens of a latent behind its norm and the cost of errors in it, float64.

    Attributes:
        unit_XC: u, of length 1.
        weight_X: w, in nats.
        error_CC: S.
        curvature_CC: K, in nats.
    """

    unit_XC: Tensor
    weight_X: Tensor
    error_CC: Tensor
    curvature_CC: Tensor


def sequences_read(rank: int, length: int) -> int:
    """Return how many sequences of `length` tokens the costs of a latent are estimated on, at most."""
    return math.ceil(max(_TOKENS, _TOKENS_EACH * rank) / length)


@torch.enable_grad()
def latent_costs(layer: LatentAttention, slots_S: Tensor, sample: LayerSample, draws: int = 1) -> LatentCosts:
    """Return tokens of a layer's latent and the cost of errors in it, on some that it is fitted on.

    Second derivatives are those that `LayerSample.slopes` estimates.

    Args:
        layer: with `level_CC`, float64.
        slots_S: angular frequencies of its slots.
        sample: of the source's inputs.
        draws: number of draws.
    """
    assert layer.level_CC is not None
    device, rank = fitting_device(), len(layer.down_CD)
    used = sample.used[: sequences_read(rank, sample.input_BTD.shape[1])]
    folded, scoring = layer.to(torch.float32, device), sample.scoring.to(torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    written: list[Tensor] = []

    def watched(rows_BTW: Tensor) -> Tensor:
        written.append(rows_BTW.detach()[..., :rank].requires_grad_())
        return torch.cat([written[-1], rows_BTW[..., rank:]], -1)

    rows_CD = (layer.level_CC @ layer.down_CD).to(device)
    energy_D = rows_CD.new_zeros(rows_CD.shape[1])
    units, weights = [], []
    curvature_CC = rows_CD.new_zeros(rank, rank)
    for part_BTD in sample.input_BTD[used].split(BATCH):
        given_BTD = attend(folded, part_BTD.to(device, torch.float32), slots_S, scoring, cache=watched)
        latent_XC = written[-1].detach().flatten(0, 1).double()
        weight_X = torch.zeros_like(latent_XC[:, 0])
        for (slope_BTC,) in sample.slopes(given_BTD, [written[-1]], draws, generator):
            slope_XC = slope_BTC.flatten(0, 1).double()
            weight_X += (slope_XC * latent_XC).sum(-1).square() / draws
            curvature_CC += slope_XC.mT @ slope_XC / draws
        input_XD = part_BTD.to(rows_CD).flatten(0, 1)
        length_X = (input_XD @ rows_CD.mT).square().sum(-1)
        energy_D += (input_XD.square() / length_X[:, None].clamp(min=torch.finfo(torch.float32).tiny)).sum(0)
        units.append(latent_XC / rank**0.5)
        weights.append(weight_X)
    unit_XC = torch.cat(units)
    return LatentCosts(
        unit_XC=unit_XC,
        weight_X=torch.cat(weights),
        error_CC=(rows_CD * (energy_D / len(unit_XC))) @ rows_CD.mT,
        curvature_CC=curvature_CC / len(unit_XC),
    )


def rounding_cost(costs: LatentCosts, root_CC: Tensor, share: float) -> Tensor:
    """Return ½ ε² tr(B (S + M) Bᵀ) tr(B⁻ᵀ K B⁻¹) of B = `root_CC` and ε = `share`, a scalar in nats."""
    value_CC = _floored(costs.error_CC + costs.unit_XC.mT @ costs.unit_XC / len(costs.unit_XC))
    return _rounding(root_CC, value_CC, _floored(costs.curvature_CC)) * share**2 / 2


@torch.enable_grad()
def rounded_root(costs: LatentCosts, share: float, steps: int) -> Tensor:
    """Return B (C, C), float64, of least cost of lengths and of rounding together, by L-BFGS from 1.

    A step, of at most `steps`, takes about 8 X C² operations. ε = `share` is what every weight errs by; 0
    gives 1.
    """
    present_X = costs.unit_XC.any(dim=-1)  # a token whose latent is zero has no length
    unit_XC, weight_X = costs.unit_XC, costs.weight_X
    if not present_X.all():
        unit_XC, weight_X = unit_XC[present_X], weight_X[present_X]
    value_CC = _floored(costs.error_CC + unit_XC.mT @ unit_XC / len(unit_XC))
    curvature_CC = _floored(costs.curvature_CC)
    root_CC = torch.eye(len(value_CC)).to(value_CC).requires_grad_()
    start = float(value_CC.trace() * curvature_CC.trace()) * share**2 / 2
    if not start > 0:
        return root_CC.detach()
    optimizer = torch.optim.LBFGS([root_CC], max_iter=steps, history_size=10, line_search_fn="strong_wolfe")

    def cost() -> Tensor:
        optimizer.zero_grad()
        length_X = (unit_XC @ root_CC.mT).norm(dim=-1)
        lengths = (weight_X * (1 / length_X - 1).square()).mean() / 2
        found: Tensor = (lengths + _rounding(root_CC, value_CC, curvature_CC) * share**2 / 2) / start
        found.backward()
        return found

    optimizer.step(cost)
    return root_CC.detach()


def _rounding(root_CC: Tensor, value_CC: Tensor, curvature_CC: Tensor) -> Tensor:
    """Return tr(B V Bᵀ) tr(B⁻ᵀ K B⁻¹)."""
    back_CC = torch.linalg.inv(root_CC)
    found: Tensor = ((root_CC @ value_CC) * root_CC).sum() * ((curvature_CC @ back_CC) * back_CC).sum()
    return found


def _floored(matrix_CC: Tensor) -> Tensor:
    return matrix_CC + _LEAST * matrix_CC.diagonal().mean() * torch.eye(len(matrix_CC)).to(matrix_CC)
