"""A basis of the latent in which every token has nearly the same length, so that a norm changes little.

For any invertible A the maps (A down, up A⁻¹) and (down, up) are the same. With an RMSNorm between them,
the map of a token c changes by the factor 1/|A c|. So A is chosen with M = AᵀA of least E[(cᵀ M c - 1)²].
Such an M exists, because the input of attention is normed itself: its features x_i have shares d_i with Σ
d_i x_i² = 1 for every token. The search for M (length_form.py) starts at the form that these shares give the
latent. Tokens weigh as much as an error in their length costs. All algebra is in float64.

Legend: attention.py; B sequences, T tokens; X tokens of all sequences.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..algebra.attention import LatentAttention
from ..algebra.forward import attend
from ..algebra.rounding_turn import least_rounded
from .length_form import first_form, fit_form, fit_root, raised_root, whitening
from .refinement import BATCH, LayerSample, fitting_device

# Smallest parts of a direction in the length, of the mean part, that are tried after refinement.
LEAST_PARTS = (0.02, 0.05, 0.1, 0.2)
_SMALLEST_SHARE = 1e-3  # of the mean share


@dataclass(frozen=True, kw_only=True)
class LatentTokens:
    """Inputs of a layer's attention that a norm is fitted on, float64, and how much each of them counts.

    Attributes:
        input_XD: inputs that the fit is made on.
        held_XD: other inputs, which take no part in the fit but say when it ends.
        weight_X: of the former, with a mean of 1.
        held_weight_X: of the latter.
        shares_D: of the features, as `feature_shares` gives them.
    """

    input_XD: Tensor
    held_XD: Tensor
    weight_X: Tensor
    held_weight_X: Tensor
    shares_D: Tensor

    @classmethod
    def of(
        cls,
        input_XD: Tensor,
        held_XD: Tensor,
        weight_X: Tensor | None = None,
        held_weight_X: Tensor | None = None,
    ) -> Self:
        """Return tokens that weigh as given, or all the same."""
        return cls(
            input_XD=input_XD,
            held_XD=held_XD,
            weight_X=_mean_one(weight_X, input_XD),
            held_weight_X=_mean_one(held_weight_X, held_XD),
            shares_D=feature_shares(input_XD),
        )

    def unweighted(self) -> Self:
        """Return the same tokens, all of the same weight."""
        ones_X, held_ones_X = torch.ones_like(self.weight_X), torch.ones_like(self.held_weight_X)
        return replace(self, weight_X=ones_X, held_weight_X=held_ones_X)


@dataclass(frozen=True, kw_only=True)
class NormBasis:
    """Coordinates behind a norm: D U n is written for a latent n of root mean square 1.

    Attributes:
        turn_CC: U, orthogonal.
        weight_C: D, the weights of the norm; numbers that bfloat16 holds.
    """

    turn_CC: Tensor
    weight_C: Tensor


def feature_shares(input_XD: Tensor) -> Tensor:
    """Return d (D,) with Σ d_i x_i² as close to 1 as possible for every token; all positive.

    Args:
        input_XD: inputs of an attention, float64; behind an RMSNorm with weight γ the result is 1 / (D γ²).
    """
    energy_XD = input_XD.square()
    mean_D = energy_XD.mean(0)
    mean_D = torch.where(mean_D > 0, mean_D, 1)  # a feature that is always zero has any share
    energy_XD /= mean_D  # in place: tokens times features are many numbers
    gram_DD = energy_XD.mT @ energy_XD / len(energy_XD)
    ridge_D = 1e-9 * gram_DD.diagonal().mean() * torch.ones_like(mean_D)
    shares_D: Tensor = torch.linalg.solve(gram_DD + ridge_D.diag(), energy_XD.mean(0))
    return shares_D.clamp(min=_SMALLEST_SHARE / len(shares_D)) / mean_D


def level_basis(tokens: LatentTokens, down_CD: Tensor) -> Tensor:
    """Return A (C, C), invertible, with |A c| as close to 1 as possible for c = down x."""
    latent_XC, held_XC = tokens.input_XD @ down_CD.mT, tokens.held_XD @ down_CD.mT
    white_CC = whitening(latent_XC, tokens.weight_X)
    rows_CD = white_CC @ down_CD / tokens.shares_D.sqrt()
    fitted = (latent_XC @ white_CC.mT, held_XC @ white_CC.mT, tokens.weight_X, tokens.held_weight_X)
    del latent_XC, held_XC  # as large as the copies in the other basis
    form_CC = fit_form(*fitted, first_form(*fitted, rows_CD @ rows_CD.mT))
    return fit_root(*fitted, form_CC) @ white_CC


@torch.enable_grad()
def length_weights(layer: LatentAttention, slots_S: Tensor, sample: LayerSample, draws: int) -> Tensor:
    """Return how much an error in the length of each token's latent costs (B, T), float64, on the CPU.

    It is the second derivative of the loss by a factor on that latent, as `LayerSample.slopes` estimates it.
    The layer has no latent norm yet.
    """
    device = fitting_device()
    folded, scoring = layer.to(torch.float32, device), sample.scoring.to(torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    weights = []
    for part_BTD in sample.input_BTD.split(BATCH):
        gain_BT = torch.ones(part_BTD.shape[:2], device=device, requires_grad=True)
        given_BTD = attend(folded, part_BTD.to(device, torch.float32), slots_S, scoring, gain_BT)
        weight_BT = torch.zeros_like(gain_BT)
        for (slope_BT,) in sample.slopes(given_BTD, [gain_BT], draws, generator):
            weight_BT += slope_BT.square() / draws
        weights.append(weight_BT.to("cpu", torch.float64))
    return torch.cat(weights)


def with_latent_norm(layer: LatentAttention, tokens: LatentTokens) -> LatentAttention:
    """Return the layer with its latent divided by the length that the norm of the output will see."""
    return replace(layer, level_CC=level_basis(tokens, layer.down_CD))


def with_least_parts(layer: LatentAttention, input_BTD: Tensor, least: float) -> LatentAttention:
    """Return the layer with a length in which no direction of its latent has next to no part.

    Refinement trains the length, and may leave directions out of it. In the basis of the norm such a
    direction has a tiny row in the down-projection and a weight of up to thousands in the norm: then one
    step of an optimizer, or rounding, destroys the layer (docs/notes/latent-norm.md).

    Args:
        layer: with `level_CC`, float64.
        input_BTD: inputs of the layer, from which the part of each direction is measured.
        least: smallest part of a direction, as a share of the mean part.
    """
    assert layer.level_CC is not None
    moment_CC = torch.zeros_like(layer.level_CC)
    for input_TD in input_BTD:
        latent_TC = input_TD.to(layer.down_CD) @ layer.down_CD.mT
        moment_CC += latent_TC.mT @ latent_TC
    return replace(layer, level_CC=raised_root(layer.level_CC, moment_CC, least))


def in_level_basis(
    layer: LatentAttention, input_BTD: Tensor, size: float, basis: NormBasis | None = None
) -> LatentAttention:
    """Return the same function with an RMSNorm of the latent itself, in a basis that makes it level.

    Args:
        layer: with `level_CC`, float64.
        input_BTD: inputs of the layer.
        size: root mean square that the down-projection gets; the weight of the norm gives every column of the
            up-projections about the same.
        basis: coordinates behind the norm; None: of those that the length does not see, the ones in which
            weights and latent are rounded at the least cost.
    """
    assert layer.level_CC is not None
    down_CD = layer.level_CC @ layer.down_CD
    # The norm makes all lengths √C, whatever the scale of the down-projection is.
    back_CC = torch.linalg.inv(layer.level_CC) / len(down_CD) ** 0.5
    up_NPC = torch.cat([layer.k_up_NPC, layer.v_up_NHC], 1) @ back_CC
    turn_CC = least_rounded(input_BTD, down_CD, up_NPC.flatten(0, 1)) if basis is None else basis.turn_CC
    down_CD, up_NPC = turn_CC @ down_CD, up_NPC @ torch.linalg.inv(turn_CC)
    if basis is None:
        weight_C = torch.tensor([_power_of_two(_rms(column) / size) for column in up_NPC.unbind(-1)])
        weight_C = weight_C.to(up_NPC)
    else:
        weight_C = basis.weight_C
    k_up_NPC, v_up_NHC = (up_NPC / weight_C).split([layer.k_up_NPC.shape[1], layer.v_up_NHC.shape[1]], 1)
    return replace(
        layer,
        down_CD=down_CD * (size / _rms(down_CD)),
        k_up_NPC=k_up_NPC,
        v_up_NHC=v_up_NHC,
        level_CC=None,
        latent_norm_C=weight_C,
    )


def turned_like(root_CC: Tensor, wanted_CC: Tensor) -> Tensor:
    """Return a root turned to be as close to another as a turn brings it; lengths do not change by that.

    This is the orthogonal Procrustes problem (Schönemann, 1966).
    """
    left_CC, _, right_CC = torch.linalg.svd(wanted_CC @ root_CC.mT)
    turned_CC: Tensor = left_CC @ right_CC @ root_CC
    return turned_CC


def with_query_norm(
    layer: LatentAttention, tokens: LatentTokens, size: float, *, biased: bool
) -> LatentAttention:
    """Return nearly the same layer with an RMSNorm on what its queries are projected from.

    Where that is the layer's input, which is normed, it is rescaled so that the norm changes next to nothing.
    Then the down-projection is diagonal, and rounding it costs next to nothing too.

    Args:
        layer: the layer, float64.
        tokens: of the layer.
        size: root mean square that the queries' down-projection gets.
        biased: whether one more feature, a constant, takes the place of the queries' biases; otherwise they
            stay as they are.
    """
    if layer.q_down_AD is None or _is_identity(layer.q_down_AD):
        root_D = tokens.shares_D.sqrt()
        down_AD, back_AA = root_D.diag(), (1 / root_D).diag()
    else:
        basis_AA = level_basis(tokens, layer.q_down_AD)
        rows_QA = torch.cat([layer.q_nope_NPA, layer.q_rope_NRA], 1).flatten(0, 1)
        back_AA = torch.linalg.inv(basis_AA)
        turn_AA = least_rounded(tokens.input_XD[None], basis_AA @ layer.q_down_AD, rows_QA @ back_AA)
        down_AD, back_AA = turn_AA @ basis_AA @ layer.q_down_AD, back_AA @ turn_AA.mT
    rank, scale = len(down_AD), size / _rms(down_AD)
    back_AA = back_AA / rank**0.5
    changed: dict[str, Any] = {
        "q_nope_NPA": layer.q_nope_NPA @ back_AA,
        "q_rope_NRA": layer.q_rope_NRA @ back_AA,
    }
    down_A = None
    biases: dict[str, Any] = {}
    if biased:
        biases = {"q_nope_NP": None, "q_rope_NR": None}
        down_A = down_AD.new_zeros(rank + 1)
        down_A[-1] = scale / rank**0.5  # the root mean square of the others, which the norm makes 1
        down_AD = torch.cat([down_AD, down_AD.new_zeros(1, down_AD.shape[1])])
        for name, bias in (("q_nope_NPA", layer.q_nope_NP), ("q_rope_NRA", layer.q_rope_NR)):
            column_NP = changed[name].new_zeros(changed[name].shape[:2]) if bias is None else bias
            changed[name] = torch.cat([changed[name], column_NP[..., None]], -1)
    weight = _power_of_two(_rms(torch.cat([changed["q_nope_NPA"], changed["q_rope_NRA"]], 1)) / size)
    changed = {name: rows / weight for name, rows in changed.items()}
    return replace(layer, **changed, **biases, q_down_AD=down_AD * scale, q_down_A=down_A, query_norm=weight)


def _mean_one(weight_X: Tensor | None, input_XD: Tensor) -> Tensor:
    """Return weights divided by their mean; without weights, or where all are 0, ones."""
    if weight_X is None or not weight_X.sum() > 0:
        return torch.ones_like(input_XD[:, 0])
    return weight_X / weight_X.mean()


def _is_identity(rows: Tensor) -> bool:
    return rows.shape[0] == rows.shape[1] and bool((rows == torch.eye(len(rows)).to(rows)).all())


def _rms(rows: Tensor) -> float:
    return float(rows.square().mean().sqrt()) or 1.0


def _power_of_two(value: float) -> float:
    return float(2.0 ** torch.tensor(value).log2().round())
