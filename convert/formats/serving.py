"""The rotary table that engines compute for the stock latent class, and a fold's slots in it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..methods.latent import Band
from .serving_widths import Profile

_SAME = 3e-7  # relative: frequencies that differ by a rounding of float32


def table(profile: Profile, theta: float) -> Tensor:
    """Return the frequencies (S,) of the class's slots, which engines compute from theta alone.

    They are float64, fastest first.
    """
    return (theta ** -(torch.arange(0, profile.rope, 2).float() / profile.rope)).double()


def nearest_bands(frequencies_F: Tensor, slots_S: Tensor, still: float) -> tuple[Band, ...]:
    """Give each of the source's pairs the slot with the nearest frequency.

    Slots without a pair near them stay empty.

    Args:
        frequencies_F: the source's, radians per token.
        slots_S: the class's table.
        still: frequency of pairs that do not rotate, which need no slot.
    """
    step = math.log(float(slots_S[0] / slots_S[1]))
    members: dict[int, list[int]] = {}
    for pair, frequency in enumerate(frequencies_F.tolist()):
        if frequency > still:
            # A pair in the middle goes to the faster slot; what is slower than the table goes to its end.
            nearest = math.ceil(math.log(float(slots_S[0]) / frequency) / step - 0.5 - 1e-4)
            members.setdefault(min(max(nearest, 0), len(slots_S) - 1), []).append(pair)
    return tuple(
        Band(frequency=float(slots_S[slot]), pairs=tuple(members[slot]), slots=1) for slot in sorted(members)
    )


def find_places(frequencies: Sequence[float], slots_S: Tensor) -> tuple[int, ...] | None:
    """Return the class's slots that turn at some frequencies, each used once.

    The result is None where a frequency has no slot of its own.
    """
    places = []
    for frequency in frequencies:
        same = ((slots_S / frequency - 1).abs() < _SAME).nonzero().flatten().tolist()
        if not same or same[0] in places:
            return None
        places.append(same[0])
    return tuple(places)
