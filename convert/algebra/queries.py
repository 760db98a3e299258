"""Queries that suit a folded layer's keys best: each head's scores fitted by what is cached.

The fit covers all distances at once. A token x caches slots, which turn at φ_j per token of distance, and a
latent, which does not turn. A query q of head h reads them with coefficients t = T_h q. Over the distances Δ
that the head's attention spans, the squared error of its scores, E_{Δ,x}[(qᵀ R(Δ) W_h x - tᵀ R̂(Δ) K̂ x)²],
is least at

    T_h = E_Δ[R̂ K̂ C K̂ᵀ R̂ᵀ]⁻¹ E_Δ[R̂ K̂ C W_hᵀ Rᵀ]

for every q at once, so no moment of the queries is needed. Slots, and the mean rotation of the part without
slots, are corrected for each other's share: a direction that is both in a slot and in the latent is not
counted twice.

Legend: attention.py and metric.py; Q = R + C rounded up to even, features; pairs of rows turn together,
interleaved.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .metric import LayerMetric
from .rotary import complex_rows, interleaved_rows
from .subspaces import eigh

# Energies of combinations of features, as shares of a feature's: below the first, which is what rounding to
# bfloat16 leaves of one, a combination is always left out.
_LEAST, _FIRM = 2.0**-18, 2.0**-10
# Those between the two are left out of a head where they make its weights more than so many times as large
# and hold at most this share of the energy of its scores (docs/notes/queries.md has what other values gave).
_GROWTH, _SHARE = 2.0, 2.0**-5


def fit_queries(
    keys_KHE: Tensor,
    frequencies_F: Tensor,
    slots_RE: Tensor,
    slots_S: Tensor,
    latent_CE: Tensor,
    queries: int,
    metric: LayerMetric,
) -> tuple[Tensor, Tensor]:
    """Return T of every head, split into the part that reads the slots and the part that reads the latent.

    Args:
        keys_KHE: the source's keys in the half layout, bias included.
        frequencies_F: of their pairs, radians per token.
        slots_RE: slot keys, interleaved.
        slots_S: their frequencies.
        latent_CE: the latent's rows.
        queries: query heads for each key head.
        metric: gives C and the distances.

    Returns:
        (N, R, H) and (N, C, H): columns are the dimensions of the source's query in the half layout.
    """
    rope = len(slots_RE)
    rank = len(latent_CE)
    width = keys_KHE.shape[-1]
    features_QE = torch.cat([slots_RE, latent_CE, latent_CE.new_zeros(rank % 2, width)])
    turn_P = torch.cat([slots_S, slots_S.new_zeros((len(features_QE) - rope) // 2)])
    seen_QE = features_QE if metric.input_EE is None else features_QE @ metric.input_EE[:width, :width]
    gram_QQ = seen_QE @ features_QE.mT
    # One scale for both rows of a pair: it has to commute with their turning.
    size_Q = gram_QQ.diagonal().view(-1, 2).sum(1).clamp(min=0).sqrt().repeat_interleave(2)
    scale_Q = torch.where(size_Q > 0, 1 / size_Q, 0)
    gram_QQ, seen_QE = scale_Q[:, None] * gram_QQ * scale_Q, scale_Q[:, None] * seen_QE
    values_V, index = torch.cat([turn_P, frequencies_F]).unique(return_inverse=True)
    row_P = index[: len(turn_P)]
    column_F = index[len(turn_P) :]
    angle_VT = values_V[:, None] * torch.arange(metric.distance_NT.shape[1], dtype=torch.float64)
    turn_VT = torch.polar(torch.ones_like(angle_VT), -angle_VT)
    fitted: list[Tensor] = []
    for head, weight_T in enumerate(metric.distance_NT.to(turn_VT.dtype)):
        # Without data all are alike.
        if not head or not torch.equal(metric.distance_NT[head], metric.distance_NT[head - 1]):
            shift_VV = (turn_VT * weight_T) @ turn_VT.mH
            sum_VV = (turn_VT * weight_T) @ turn_VT.mT
            solve = _solver(turned(gram_QQ, shift_VV[row_P][:, row_P], sum_VV[row_P][:, row_P]))
        source_HE = interleaved_rows(complex_rows(keys_KHE[head // queries]))
        right_QH = turned(seen_QE @ source_HE.mT, shift_VV[row_P][:, column_F], sum_VV[row_P][:, column_F])
        fitted.append(scale_Q[:, None] * solve(right_QH))
    fit_NQH = torch.stack(fitted).unflatten(-1, (-1, 2)).mT.flatten(2)  # columns to the half layout
    return fit_NQH[:, :rope], fit_NQH[:, rope : rope + rank]


def _solver(left_QQ: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a least-squares solver that leaves out combinations of features that all but cancel.

    Large weights on them would drown in rounding. Where slots that hardly turn and the latent hold the same
    keys, weights that are still exact can make the scores of both many times their sum: that rounds badly,
    and refinement from there loses more (docs/notes/queries.md). A Cholesky factorisation of what is above
    the threshold shows where there are none; then no decomposition is needed.
    """
    _, below = torch.linalg.cholesky_ex(left_QQ - _FIRM * torch.eye(len(left_QQ), dtype=left_QQ.dtype))
    if not below:
        lower_QQ = torch.linalg.cholesky(left_QQ)
        return lambda right_QH: torch.cholesky_solve(right_QH, lower_QQ)
    energy_Q, basis_QQ = eigh(left_QQ)
    inverse_Q = torch.where(energy_Q > _LEAST, 1 / energy_Q, 0)
    firm_Q = energy_Q > _FIRM

    def solve(right_QH: Tensor) -> Tensor:
        weights_QH = inverse_Q[:, None] * (basis_QQ.mT @ right_QH)
        size_Q = weights_QH.square().sum(1)
        score_Q = energy_Q * size_Q
        grows = size_Q.sum() > _GROWTH**2 * size_Q[firm_Q].sum()
        if grows and score_Q[~firm_Q].sum() <= _SHARE * score_Q.sum():
            weights_QH[~firm_Q] = 0
        return basis_QQ @ weights_QH

    return solve


def turned(rows: Tensor, shift_PG: Tensor, sum_PG: Tensor) -> Tensor:
    """Return E_Δ[R_p(Δ) M R_g(Δ)ᵀ] of the 2 x 2 blocks M of a matrix.

    As maps of complex numbers z, M z = a z + b z̄; turning both sides multiplies a by e^(-i(f_p - f_g)Δ) and
    b by e^(-i(f_p + f_g)Δ).
    """
    pairs, others = shift_PG.shape
    block = rows.view(pairs, 2, others, 2)
    real = block[:, 0]
    imaginary = block[:, 1]
    a = torch.complex(real[..., 0] + imaginary[..., 1], imaginary[..., 0] - real[..., 1]) / 2 * shift_PG
    b = torch.complex(real[..., 0] - imaginary[..., 1], imaginary[..., 0] + real[..., 1]) / 2 * sum_PG
    top = torch.stack([a.real + b.real, b.imag - a.imag], -1)
    bottom = torch.stack([a.imag + b.imag, a.real - b.real], -1)
    return torch.stack([top, bottom], 1).view(rows.shape)
