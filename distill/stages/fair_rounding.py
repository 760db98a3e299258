"""Rounding of trained weights to 16 bits that keeps, in the mean, what training changed.

A weight of a bfloat16 checkpoint lies on a grid with steps of 2⁻⁸ to 2⁻⁷ of it. Few steps at a low rate move
most weights by less than half of that, and rounding to the nearest number would take them back to where they
were (docs/notes/distillation.md). Here a weight is rounded up with a probability that is its distance from
the lower number, as a share of the step (stochastic rounding; Gupta et al. 2015). The mean of many weights is
then that of the trained ones, and numbers on the grid stay.
"""

import hashlib

import torch
from torch import Tensor

_AT_ONCE = 2**24  # weights, which bounds the memory of the intermediate results
# Share of a step that a weight may be off the grid and is still taken for a number on it: what was scaled for
# training and back was rounded twice in float32, whose own steps are 2⁻¹³ of those of float16.
_SCALED_BACK = 2.0**-11


def round_fairly(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a weight in another dtype, on the CPU; each number is one of the two next to the weight's.

    The random numbers depend on the name alone, so the same weights give the same bits.

    Args:
        weight: float32, of any shape and on any device.
        dtype: of the result; all but bfloat16 and float16 are rounded to the nearest number.
        name: of the weight.

    Returns:
        The rounded weight. A number beyond the dtype becomes infinite.
    """
    if dtype not in {torch.bfloat16, torch.float16}:
        return weight.detach().to("cpu", dtype)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    generator = torch.Generator().manual_seed(seed)
    parts = weight.detach().to("cpu", torch.float32).flatten().split(_AT_ONCE)
    return torch.cat([_rounded(part, dtype, generator) for part in parts]).view(weight.shape)


def _rounded(weight_X: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    nearest_X = weight_X.to(dtype)
    # Read as integers, numbers of one sign count up by one from each to the next one away from zero.
    beyond_X = nearest_X.float().abs() > weight_X.abs()
    inner_X = nearest_X.view(torch.int16) - beyond_X.short()
    outer_X = (inner_X + 1).view(dtype)
    inner_X = inner_X.view(dtype)
    share_X = (weight_X - inner_X.float()) / (outer_X.float() - inner_X.float())
    share_X = torch.where((share_X - share_X.round()).abs() < _SCALED_BACK, share_X.round(), share_X)
    chance_X = torch.rand(weight_X.shape, generator=generator)
    return torch.where(nearest_X.isfinite(), torch.where(chance_X < share_X, outer_X, inner_X), nearest_X)
