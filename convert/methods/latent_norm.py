"""A basis of the latent in which every token has nearly the same length, so that a norm changes little.

For any invertible A the maps (A down, up A⁻¹) and (down, up) are the same. With an RMSNorm between them,
the map of a token c changes by the factor 1/|A c|. So A is chosen with M = AᵀA of least E[(cᵀ M c - 1)²].
Such an M exists, because the input of attention is normed itself: its features x_i have shares d_i with Σ
d_i x_i² = 1 for every token. The search for M starts at the form that these shares give the latent, and
ends where tokens that were held back stop gaining: with a rank of hundreds there are more numbers in M than
tokens. All algebra is in float64.

Legend: attention.py; X tokens.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..algebra.attention import LatentAttention

STEPS = 64  # of conjugate gradients at most
PATIENCE = 6  # steps without a gain on held-back tokens after which the search ends
GAIN = 1e-3  # of the error on held-back tokens, relative, that counts as one
FLOOR = 0.02  # least eigenvalue of M for a whitened latent, as a share of the mean: A⁻¹ is part of a weight
_LEAST = (
    1e-6  # energy of a direction of the latent, as a share of the largest, that it is taken to have at least
)
_SMALLEST_SHARE = 1e-3  # of the mean share


def feature_shares(input_XD: Tensor) -> Tensor:
    """Return d (D,) with Σ d_i x_i² as close to 1 as possible for every token; all positive.

    Args:
        input_XD: inputs of an attention, float64; behind an RMSNorm with weight γ the result is 1 / (D γ²).
    """
    energy_XD = input_XD.square()
    mean_D = energy_XD.mean(0)
    mean_D = torch.where(mean_D > 0, mean_D, 1)  # a feature that is always zero has any share
    energy_XD = energy_XD / mean_D
    gram_DD = energy_XD.mT @ energy_XD / len(energy_XD)
    ridge_D = 1e-9 * gram_DD.diagonal().mean() * torch.ones_like(mean_D)
    shares_D: Tensor = torch.linalg.solve(gram_DD + ridge_D.diag(), energy_XD.mean(0))
    return shares_D.clamp(min=_SMALLEST_SHARE / len(shares_D)) / mean_D


def level_basis(down_CD: Tensor, input_XD: Tensor, held_XD: Tensor, shares_D: Tensor) -> Tensor:
    """Return A (C, C), invertible, with |A c| as close to 1 as possible for c = down x.

    Args:
        down_CD: the latent's rows, float64.
        input_XD: inputs that A is fitted on, float64.
        held_XD: inputs that say when to stop.
        shares_D: of the features, as `feature_shares` gives them.
    """
    latent_XC, held_XC = input_XD @ down_CD.mT, held_XD @ down_CD.mT
    white_CC = _whitening(latent_XC)
    latent_XC, held_XC = latent_XC @ white_CC.mT, held_XC @ white_CC.mT
    rows_CD = white_CC @ down_CD / shares_D.sqrt()
    starts = [
        _scaled(form, latent_XC)
        for form in (torch.eye(len(rows_CD)).to(rows_CD), _pseudo_inverse(rows_CD @ rows_CD.mT))
    ]
    start_CC = min(starts, key=lambda form: _error(form, held_XC))
    return _root(fit_form(latent_XC, held_XC, start_CC)) @ white_CC


def fit_form(latent_XC: Tensor, held_XC: Tensor, start_CC: Tensor, steps: int = STEPS) -> Tensor:
    """Return the symmetric M (C, C) of least mean (cᵀ M c - 1)², by conjugate gradients with early stopping.

    A step takes 4 X C² operations and C² memory: the normal equations of the C²/2 numbers of M are never
    formed.

    Args:
        latent_XC: tokens of a latent that is about white, float64.
        held_XC: tokens that measure the error; the M with the least is returned, which may be the start.
        start_CC: first M.
        steps: most steps.
    """
    form_CC, best_CC, least, gained = start_CC, start_CC, _error(start_CC, held_XC), 0
    residual_CC = _gradient(latent_XC, 1 - _lengths(form_CC, latent_XC))
    way_CC, size = residual_CC, residual_CC.square().sum()
    for step in range(1, steps + 1):
        if not size > 0 or step - gained > PATIENCE:
            break
        image_CC = _gradient(latent_XC, _lengths(way_CC, latent_XC))
        share = size / (way_CC * image_CC).sum()
        form_CC, residual_CC = form_CC + share * way_CC, residual_CC - share * image_CC
        before, size = size, residual_CC.square().sum()
        way_CC = residual_CC + size / before * way_CC
        error = _error(form_CC, held_XC)
        if error < least * (1 - GAIN):
            gained = step
        if error < least:
            best_CC, least = form_CC, error
    return best_CC


def variation(latent_XC: Tensor) -> float:
    """Return the coefficient of variation of the tokens' lengths.

    What a norm of this latent would change, relatively.
    """
    length_X = latent_XC.norm(dim=-1)
    return float(length_X.std() / length_X.mean())


def with_latent_norm(layer: LatentAttention, input_XD: Tensor, held_XD: Tensor) -> LatentAttention:
    """Return the layer with its latent divided by the length that the norm of the stock class will see.

    Args:
        layer: without the norm, float64.
        input_XD: inputs of the layer, float64.
        held_XD: other inputs, which take no part in the fit but say when it ends.
    """
    return replace(layer, level_CC=level_basis(layer.down_CD, input_XD, held_XD, feature_shares(input_XD)))


def in_level_basis(layer: LatentAttention, size: float) -> LatentAttention:
    """Return the same function with an RMSNorm of the latent itself, in the basis of `level_CC`.

    Args:
        layer: with `level_CC`, float64.
        size: root mean square that the down-projection gets; the weight of the norm gives the up-projections
            about the same.
    """
    assert layer.level_CC is not None
    down_CD = layer.level_CC @ layer.down_CD
    # The norm makes all lengths √C, whatever the scale of the down-projection is.
    back_CC = torch.linalg.inv(layer.level_CC) / len(down_CD) ** 0.5
    up_NPC = torch.cat([layer.k_up_NPC, layer.v_up_NHC], 1) @ back_CC
    weight = _power_of_two(_rms(up_NPC) / size)
    k_up_NPC, v_up_NHC = (up_NPC / weight).split([layer.k_up_NPC.shape[1], layer.v_up_NHC.shape[1]], 1)
    return replace(
        layer,
        down_CD=down_CD * (size / _rms(down_CD)),
        k_up_NPC=k_up_NPC,
        v_up_NHC=v_up_NHC,
        level_CC=None,
        latent_norm=weight,
    )


def with_query_norm(
    layer: LatentAttention, input_XD: Tensor, held_XD: Tensor, size: float, *, biased: bool
) -> LatentAttention:
    """Return nearly the same layer with an RMSNorm on what its queries are projected from.

    Where that is the layer's input, which is normed, it is rescaled so that the norm changes next to nothing.

    Args:
        layer: the layer, float64.
        input_XD: inputs of its attention on the tokens of the fit, float64.
        held_XD: the same of held-back tokens.
        size: root mean square that the queries' down-projection gets.
        biased: whether one more feature, a constant, takes the place of the queries' biases.
    """
    shares_D = feature_shares(input_XD)
    if layer.q_down_AD is None:
        root_D = shares_D.sqrt()
        down_AD, back_AA = root_D.diag(), (1 / root_D).diag()
    else:
        basis_AA = level_basis(layer.q_down_AD, input_XD, held_XD, shares_D)
        down_AD, back_AA = basis_AA @ layer.q_down_AD, torch.linalg.inv(basis_AA)
    rank, scale = len(down_AD), size / _rms(down_AD)
    back_AA = back_AA / rank**0.5
    changed: dict[str, Any] = {
        "q_nope_NPA": layer.q_nope_NPA @ back_AA,
        "q_rope_NRA": layer.q_rope_NRA @ back_AA,
    }
    down_A = None
    if biased:
        down_A = down_AD.new_zeros(rank + 1)
        down_A[-1] = scale / rank**0.5  # the root mean square of the others, which the norm makes 1
        down_AD = torch.cat([down_AD, down_AD.new_zeros(1, down_AD.shape[1])])
        for name, bias in (("q_nope_NPA", layer.q_nope_NP), ("q_rope_NRA", layer.q_rope_NR)):
            column_NP = changed[name].new_zeros(changed[name].shape[:2]) if bias is None else bias
            changed[name] = torch.cat([changed[name], column_NP[..., None]], -1)
    weight = _power_of_two(_rms(torch.cat([changed["q_nope_NPA"], changed["q_rope_NRA"]], 1)) / size)
    changed = {name: rows / weight for name, rows in changed.items()}
    return replace(
        layer,
        **changed,
        q_down_AD=down_AD * scale,
        q_down_A=down_A,
        q_nope_NP=None,
        q_rope_NR=None,
        query_norm=weight,
    )


def _lengths(form_CC: Tensor, latent_XC: Tensor) -> Tensor:
    """cᵀ M c of every token."""
    return ((latent_XC @ form_CC) * latent_XC).sum(-1)


def _gradient(latent_XC: Tensor, value_X: Tensor) -> Tensor:
    """Return E[value c cᵀ]."""
    return (latent_XC * value_X[:, None]).mT @ latent_XC / len(latent_XC)


def _error(form_CC: Tensor, latent_XC: Tensor) -> float:
    return float((_lengths(form_CC, latent_XC) - 1).square().mean())


def _scaled(form_CC: Tensor, latent_XC: Tensor) -> Tensor:
    """Return the multiple of a form that gives lengths nearest to 1."""
    length_X = _lengths(form_CC, latent_XC)
    return form_CC * (length_X.sum() / length_X.square().sum())


def _whitening(latent_XC: Tensor) -> Tensor:
    """Return W (C, C) with E[W c (W c)ᵀ] = 1, but for directions that hardly a token has."""
    energy_C, basis_CC = torch.linalg.eigh(latent_XC.mT @ latent_XC / len(latent_XC))
    white_CC: Tensor = basis_CC.mT / energy_C.clamp(min=_LEAST * energy_C[-1]).sqrt()[:, None]
    return white_CC


def _pseudo_inverse(gram_CC: Tensor) -> Tensor:
    energy_C, basis_CC = torch.linalg.eigh(gram_CC)
    inverse_CC: Tensor = (basis_CC / energy_C.clamp(min=_LEAST * energy_C[-1])) @ basis_CC.mT
    return inverse_CC


def _root(form_CC: Tensor) -> Tensor:
    """Return M^½, with the eigenvalues of M floored."""
    value_C, basis_CC = torch.linalg.eigh(form_CC)
    root_CC: Tensor = (basis_CC * value_C.clamp(min=FLOOR / len(value_C)).sqrt()) @ basis_CC.mT
    return root_CC


def _rms(rows: Tensor) -> float:
    return float(rows.square().mean().sqrt()) or 1.0


def _power_of_two(value: float) -> float:
    """Return the nearest power of two, which every dtype keeps."""
    return float(2.0 ** torch.tensor(value).log2().round())
