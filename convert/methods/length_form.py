"""The quadratic form in which all tokens of a latent have nearly the same length.

A form that is positive definite is found in two steps. The least squares problem of all symmetric forms is
linear, and conjugate gradients solve it (`fit_form`). Its solution often has negative eigenvalues, which a
length cannot have: from its positive part a root of the form is fitted (`fit_root`). Both end where tokens
that were held back stop gaining: with a rank of hundreds there are more numbers in the form than tokens.

Legend: attention.py; X tokens.
"""

import torch
from torch import Tensor

STEPS = 64  # of each search at most
PATIENCE = 6  # steps without a gain on held-back tokens after which a search ends
GAIN = 1e-3  # of the error on held-back tokens, relative, that counts as one
FLOOR = 0.02  # least eigenvalue of a white latent's form, as a share of 1 / C: its inverse goes into weights
_LEAST = 1e-6  # energy of a direction, as a share of the largest, that it is taken to have at least


def first_form(
    latent_XC: Tensor, held_XC: Tensor, weight_X: Tensor, held_weight_X: Tensor, gram_CC: Tensor
) -> Tensor:
    """Return the better of two forms to start from, M (C, C): the identity, and the inverse of `gram_CC`.

    Each is scaled to lengths about 1. The other arguments are those of `fit_form`.
    """
    forms = []
    energy_C, basis_CC = torch.linalg.eigh(gram_CC)
    inverse_CC = (basis_CC / energy_C.clamp(min=_LEAST * energy_C[-1])) @ basis_CC.mT
    for form_CC in (torch.eye(len(gram_CC)).to(gram_CC), inverse_CC):
        length_X = _lengths(form_CC, latent_XC)
        forms.append(form_CC * ((weight_X * length_X).sum() / (weight_X * length_X.square()).sum()))
    return min(forms, key=lambda form_CC: _error(form_CC, held_XC, held_weight_X))


def whitening(latent_XC: Tensor, weight_X: Tensor) -> Tensor:
    """Return W (C, C) with E[W c (W c)ᵀ] = 1, but for directions that hardly a token has."""
    energy_C, basis_CC = torch.linalg.eigh((latent_XC * weight_X[:, None]).mT @ latent_XC / len(latent_XC))
    white_CC: Tensor = basis_CC.mT / energy_C.clamp(min=_LEAST * energy_C[-1]).sqrt()[:, None]
    return white_CC


def raised_root(root_CC: Tensor, moment_CC: Tensor, least: float) -> Tensor:
    """Return a root A (C, C) of a form AᵀA in which every direction has a part of the length.

    Directions that hardly a token has stay as they are.

    Args:
        root_CC: the root to start from.
        moment_CC: E[c cᵀ] of the latent.
        least: smallest part of a direction of the white latent, as a share of the mean part. Those below are
            raised to it, and all are scaled so that E|A c|² stays.
    """
    energy_C, basis_CC = torch.linalg.eigh(moment_CC)
    has_tokens_C = energy_C > _LEAST * energy_C[-1]
    deviation_K, basis_CK = energy_C[has_tokens_C].sqrt(), basis_CC[:, has_tokens_C]
    image_CK = root_CC @ basis_CK * deviation_K
    part_K, turn_KK = torch.linalg.eigh(image_CK.mT @ image_CK)
    lacking_K = (least * part_K.mean() - part_K).clamp(min=0)
    rows_KC = lacking_K.sqrt()[:, None] * (turn_KK.mT @ (basis_CK / deviation_K).mT)
    _, raised_CC = torch.linalg.qr(torch.cat([root_CC, rows_KC]))
    found_CC: Tensor = raised_CC * (part_K.sum() / (part_K.sum() + lacking_K.sum())).sqrt()
    return found_CC


def fit_form(
    latent_XC: Tensor,
    held_XC: Tensor,
    weight_X: Tensor,
    held_weight_X: Tensor,
    start_CC: Tensor,
    steps: int = STEPS,
) -> Tensor:
    """Return the symmetric M (C, C) of least mean (cᵀ M c - 1)², by conjugate gradients with early stopping.

    A step takes 4 X C² operations and C² memory: the normal equations of the C²/2 numbers of M are never
    formed.

    Args:
        latent_XC: tokens of a latent that is about white, float64.
        held_XC: tokens that measure the error; the M with the least is returned, which may be the start.
        weight_X: of the tokens in the mean, with a mean of 1.
        held_weight_X: of the tokens that measure.
        start_CC: first M.
        steps: most steps.
    """

    def gradient(value_X: Tensor) -> Tensor:
        return (latent_XC * (value_X * weight_X)[:, None]).mT @ latent_XC / len(latent_XC)

    form_CC = best_CC = start_CC
    least, gained = _error(start_CC, held_XC, held_weight_X), 0
    residual_CC = gradient(1 - _lengths(form_CC, latent_XC))
    way_CC, size = residual_CC, residual_CC.square().sum()
    for step in range(1, steps + 1):
        if not size > 0 or step - gained > PATIENCE:
            break
        image_CC = gradient(_lengths(way_CC, latent_XC))
        share = size / (way_CC * image_CC).sum()
        form_CC, residual_CC = form_CC + share * way_CC, residual_CC - share * image_CC
        before, size = size, residual_CC.square().sum()
        way_CC = residual_CC + size / before * way_CC
        error = _error(form_CC, held_XC, held_weight_X)
        if error < least * (1 - GAIN):
            gained = step
        if error < least:
            best_CC, least = form_CC, error
    return best_CC


@torch.enable_grad()
def fit_root(
    latent_XC: Tensor,
    held_XC: Tensor,
    weight_X: Tensor,
    held_weight_X: Tensor,
    form_CC: Tensor,
    steps: int = STEPS,
) -> Tensor:
    """Return a symmetric A (C, C) of least mean (1 / |A c| - 1)², which is the error that a norm makes.

    The eigenvalues of AᵀA are at least `FLOOR` / C. What is fitted, by L-BFGS, is a root of the rest, from
    the positive part of `form_CC` on. The other arguments are those of `fit_form`.
    """
    floor = FLOOR / len(form_CC)
    value_C, basis_CC = torch.linalg.eigh(form_CC)
    root_CC = ((basis_CC * (value_C - floor).clamp(min=floor).sqrt()) @ basis_CC.mT).requires_grad_()
    least_XC = [floor * rows_XC.square().sum(-1) for rows_XC in (latent_XC, held_XC)]

    def error(rows_XC: Tensor, rows_weight_X: Tensor, least_X: Tensor) -> Tensor:
        length_X = ((rows_XC @ root_CC.mT).square().sum(-1) + least_X).clamp(min=_LEAST).sqrt()
        found: Tensor = (rows_weight_X * (1 / length_X - 1).square()).mean()
        return found

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = error(latent_XC, weight_X, least_XC[0])
        found.backward()
        return found

    optimizer = torch.optim.LBFGS([root_CC], max_iter=1, history_size=10, line_search_fn="strong_wolfe")
    best_CC, gained = root_CC.detach().clone(), 0
    least = float(error(held_XC, held_weight_X, least_XC[1]).detach())
    for step in range(1, steps + 1):
        optimizer.step(closure)
        held = float(error(held_XC, held_weight_X, least_XC[1]).detach())
        if held < least * (1 - GAIN):
            gained = step
        if held < least:
            best_CC, least = root_CC.detach().clone(), held
        if step - gained > PATIENCE:
            break
    value_C, basis_CC = torch.linalg.eigh(best_CC.mT @ best_CC)
    found_CC: Tensor = (basis_CC * (value_C + floor).sqrt()) @ basis_CC.mT
    return found_CC


def _lengths(form_CC: Tensor, latent_XC: Tensor) -> Tensor:
    return (latent_XC @ form_CC).mul_(latent_XC).sum(-1)


def _error(form_CC: Tensor, latent_XC: Tensor, weight_X: Tensor) -> float:
    return float((weight_X * (_lengths(form_CC, latent_XC) - 1).square()).mean())
