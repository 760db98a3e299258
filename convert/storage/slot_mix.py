"""Mixes of the rotary slots of one frequency, in which rounding what they cache costs least.

Position t turns every slot of frequency ω by the same angle ωt. So the slots of one frequency are a complex
vector κ, and its turn is a factor exp(iωt). Any invertible complex M commutes with that: with M κ in the
place of κ, and the queries by M⁻ᴴ, scores stay the same at every distance. A slot that is large next to
another of its frequency, as a nearly constant one is, then shares its size and its errors with it.

Legend: attention.py; M slots of one frequency.
"""

import torch
from torch import Tensor

from ..algebra.balance import balanced


def slot_mix(value_RR: Tensor, cost_RR: Tensor, slots_S: Tensor) -> Tensor:
    """Return T (R, R), float64, with T κ to be written in the place of rotated slots κ.

    Numbers of each frequency become as large as errors in them cost (algebra/balance.py). T is zero between
    slots of unlike frequencies.

    Args:
        value_RR: second moment of the rotated slots, interleaved, float64.
        cost_RR: cost of errors in them, float64.
        slots_S: angular frequency of each slot.
    """
    mix_RR = torch.zeros_like(value_RR)
    for frequency in slots_S.unique():
        number_M = (slots_S == frequency).nonzero()[:, 0]
        place_R = torch.stack([2 * number_M, 2 * number_M + 1], -1).flatten()
        value_MM, cost_MM = (_complex(moment_RR[place_R][:, place_R]) for moment_RR in (value_RR, cost_RR))
        mix_RR[place_R[:, None], place_R] = _real(balanced(value_MM, cost_MM))
    return mix_RR


def _complex(moment_RR: Tensor) -> Tensor:
    """Return the moment E κ κᴴ (M, M) of complex numbers from that of their real and imaginary parts."""
    parts_MMPP = moment_RR.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).transpose(1, 2)
    real_MM = parts_MMPP[..., 0, 0] + parts_MMPP[..., 1, 1]
    return torch.complex(real_MM, parts_MMPP[..., 1, 0] - parts_MMPP[..., 0, 1])


def _real(mix_MM: Tensor) -> Tensor:
    """Return a complex map as a real one (2M, 2M) of interleaved real and imaginary parts."""
    upper = torch.stack([mix_MM.real, -mix_MM.imag], -1)
    lower = torch.stack([mix_MM.imag, mix_MM.real], -1)
    return torch.stack([upper, lower], 1).flatten(2).flatten(0, 1)
