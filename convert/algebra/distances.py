"""Attention distances beyond those of the calibration text.

A query's attention is shared among the keys before it, so a key at the same distance gets less of it in a
longer text. What is the same in all texts is the weight w(Δ) of a key before the shares are taken: a query at
position t gives w(Δ) / (w(0) + ... + w(t)) to the distance Δ. Weights are found from the mass that the
calibration text gives to each distance, and beyond it they fall with a power of the distance, which is fitted
to the farther half of those that the text has. The first key has a share of its own: models attend to it
however far it is (arXiv 2309.17453), and with it attention would seem not to fall with distance at all.

Legend: N query heads, T distances of the text, U distances wanted.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .metric import DECAY

# Shares of the text's distances where the fit begins and ends: farther ones are those of few pairs.
NEAR, FAR = 0.25, 0.75
STEEPEST = 4.0  # exponent
_SPANS = 5  # whose mean weights are fitted, each longer than the one before by the same factor
_ROUNDS = 60  # of finding weights; from 20 on nothing changes by more than 1e-3
_STEP = 0.7  # exponent of a correction; 1 oscillates
_LEAST = 1e-200  # sum of weights, of 1 in all; below it a query's attention counts as none


def extended(distance_NT: Tensor, lengths: Sequence[int], first_NT: Tensor) -> Tensor:
    """Return how attention is spread over distances in texts of some lengths, each as frequent as the others.

    Args:
        distance_NT: the same of texts of T tokens, float64; rows sum to 1.
        lengths: of the texts, in tokens; where T is the only one, `distance_NT` is returned.
        first_NT: the part of `distance_NT` at the first key.

    Returns:
        (N, U), with U the greatest length, float64; rows sum to 1.

    Example:
        >>> uniform_NT = torch.tensor([[1 + 1 / 2, 1 / 2]], dtype=torch.float64) / 2  # two queries
        >>> extended(uniform_NT, [4], 0 * uniform_NT)[0] * 4 - torch.tensor([25 / 12, 13 / 12, 7 / 12, 1 / 4])
        tensor([0., 0., 0., 0.], dtype=torch.float64)
    """
    length, longest = distance_NT.shape[1], max(lengths)
    if list(lengths) == [length]:
        return distance_NT
    first_N1 = first_NT.sum(1, keepdim=True)
    weight_NU = _weights((distance_NT - first_NT).clamp(min=0))
    if longest > length:
        end, far_U = max(int(length * FAR), 1), torch.arange(longest, dtype=torch.float64)
        tail_NV = _tail(weight_NU[:, :end], int(length * NEAR), far_U[end:])
        weight_NU = torch.cat([weight_NU[:, :end], tail_NV], 1)
    found_NU = distance_NT.new_zeros(len(distance_NT), longest)
    for tokens in lengths:
        mass_NU = weight_NU[:, :tokens] * _shares_of_queries(weight_NU[:, :tokens])
        found_NU[:, :tokens] += ((1 - first_N1) * mass_NU + first_N1) / tokens / len(lengths)
    return found_NU


def _weights(mass_NT: Tensor) -> Tensor:
    """Return the weights of keys (N, T) that make queries at all positions give this mass to distances.

    Heads without any mass look at their own position.
    """
    length, whole_N1 = mass_NT.shape[1], mass_NT.sum(1, keepdim=True)
    own_T = torch.eye(1, length, dtype=mass_NT.dtype)
    wanted_NT = torch.where(whole_N1 > 0, mass_NT / whole_N1, own_T) * length
    weight_NT = wanted_NT / torch.arange(length, 0, -1)
    for _ in range(_ROUNDS):
        given_NT = weight_NT * _shares_of_queries(weight_NT)
        weight_NT = weight_NT * torch.where(given_NT > 0, wanted_NT / given_NT, 0) ** _STEP
        weight_NT = weight_NT / weight_NT.sum(1, keepdim=True)
    return weight_NT


def _shares_of_queries(weight_NT: Tensor) -> Tensor:
    """Return the sum over all queries that see a distance of what a weight of 1 gets there (N, T)."""
    seen_NT = weight_NT.cumsum(1)
    share_NT = torch.where(seen_NT > _LEAST, 1 / seen_NT, 0)
    return share_NT.flip(1).cumsum(1).flip(1)


def _tail(weight_NT: Tensor, start: int, far_V: Tensor) -> Tensor:
    """Return the weights at distances beyond those that are given, by a power fitted from `start` on.

    Where fewer than two spans have a weight, the power is that of the prior over distances.
    """
    distance_T = torch.arange(weight_NT.shape[1], dtype=torch.float64) + 1
    first = max(start, 1)
    cuts = [round(first * (len(distance_T) / first) ** (n / _SPANS)) for n in range(_SPANS + 1)]
    spans = [slice(*ends) for ends in pairwise(cuts) if ends[0] < ends[1]]
    power_N = weight_NT.new_full((len(weight_NT),), DECAY)
    if len(spans) > 1:
        place_S = torch.stack([distance_T[span].log().mean() for span in spans])
        weight_NS = torch.stack([weight_NT[:, span].mean(1) for span in spans], 1)
        seen_NS = (weight_NS > 0).to(weight_NS)
        log_NS = torch.where(weight_NS > 0, weight_NS, 1).log()
        count_N1 = seen_NS.sum(1, keepdim=True).clamp(min=1)
        from_mean_NS = seen_NS * (place_S - (seen_NS * place_S).sum(1, keepdim=True) / count_N1)
        slope_N = (from_mean_NS * log_NS).sum(1) / from_mean_NS.square().sum(1).clamp(min=1e-12)
        power_N = torch.where(seen_NS.sum(1) > 1, -slope_N, power_N).clamp(0, STEEPEST)
    level_N = weight_NT[:, start:].mean(1) / (distance_T[start:] ** -power_N[:, None]).mean(1)
    return level_N[:, None] * (far_V + 1) ** -power_N[:, None]
