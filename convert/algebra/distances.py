"""Attention distances beyond those of the calibration text.

A text of T tokens has T - Δ pairs of positions at the distance Δ, so the mass that a head gives to a distance
is a rate per pair times their number. Rates of distances that the text has are kept. Beyond them, the rate
falls with a power of the distance, which is fitted to the farther half of those that the text has.

Legend: N query heads, T distances of the text, U distances wanted.
"""

from itertools import pairwise

import torch
from torch import Tensor

from .metric import DECAY

# Shares of the text's distances where the fit begins and ends: farther ones are those of few pairs, and much
# of their mass is at the first token of each text.
NEAR, FAR = 0.25, 0.75
STEEPEST = 4.0  # exponent
_SPANS = 5  # whose mean rates are fitted, each longer than the one before by the same factor


def extended(distance_NT: Tensor, span: int) -> Tensor:
    """Return how attention is spread over the distances 0 ... span-1 of texts of `span` tokens.

    Args:
        distance_NT: the same of texts of T tokens, float64; rows sum to 1.
        span: U; where it is T, `distance_NT` is returned.

    Returns:
        (N, U), float64; rows sum to 1.

    Example:
        >>> near_NT = torch.arange(64, 0, -1, dtype=torch.float64)[None]  # every pair alike
        >>> extended(near_NT / near_NT.sum(), 128)[0, ::32] * 64.5
        tensor([1.0000, 0.7500, 0.5000, 0.2500], dtype=torch.float64)
    """
    length = distance_NT.shape[1]
    if span == length:
        return distance_NT
    far_U = torch.arange(span, dtype=torch.float64)
    rate_NT = distance_NT / (length - torch.arange(length, dtype=torch.float64))
    rate_NU = rate_NT[:, :span]
    if span > length:
        end = max(int(length * FAR), 1)
        rate_NU = torch.cat([rate_NT[:, :end], _tail(rate_NT[:, :end], int(length * NEAR), far_U[end:])], 1)
    mass_NU = rate_NU * (span - far_U)
    return mass_NU / mass_NU.sum(-1, keepdim=True)


def _tail(rate_NT: Tensor, start: int, far_V: Tensor) -> Tensor:
    """Return the rates at distances beyond those that are given, by a power fitted from `start` on.

    Where fewer than two spans have a rate, the power is that of the prior over distances.
    """
    distance_T = torch.arange(rate_NT.shape[1], dtype=torch.float64) + 1
    first = max(start, 1)
    cuts = [round(first * (len(distance_T) / first) ** (n / _SPANS)) for n in range(_SPANS + 1)]
    spans = [slice(*ends) for ends in pairwise(cuts) if ends[0] < ends[1]]
    power_N = rate_NT.new_full((len(rate_NT),), DECAY)
    if len(spans) > 1:
        place_S = torch.stack([distance_T[span].log().mean() for span in spans])
        rate_NS = torch.stack([rate_NT[:, span].mean(1) for span in spans], 1)
        seen_NS = (rate_NS > 0).to(rate_NS)
        log_NS = torch.where(rate_NS > 0, rate_NS, 1).log()
        count_N1 = seen_NS.sum(1, keepdim=True).clamp(min=1)
        from_mean_NS = seen_NS * (place_S - (seen_NS * place_S).sum(1, keepdim=True) / count_N1)
        slope_N = (from_mean_NS * log_NS).sum(1) / from_mean_NS.square().sum(1).clamp(min=1e-12)
        power_N = torch.where(seen_NS.sum(1) > 1, -slope_N, power_N).clamp(0, STEEPEST)
    level_N = rate_NT[:, start:].mean(1) / (distance_T[start:] ** -power_N[:, None]).mean(1)
    return level_N[:, None] * (far_V + 1) ** -power_N[:, None]
