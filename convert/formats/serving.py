"""The rotary tables that engines compute for the stock latent class, and a fold's slots in them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..algebra.rotary import frequencies, rope_parameters
from ..families.source import Source
from ..methods.latent import Band
from .serving_widths import Profile

# Steps between the frequencies of tables to choose from, by the step between those of the source.
_STEPS = (1.0, 1 / 2, 1 / 3, 1 / 4)
_LARGEST = 1e9  # value of `rope_theta`; published models have up to 1e7
_SAME = 3e-7  # relative: frequencies that differ by a rounding of float32


def table(profile: Profile, theta: float) -> Tensor:
    """Return the frequencies (S,) of the class's slots, which engines compute from theta alone.

    They are float64, fastest first.
    """
    return (theta ** -(torch.arange(0, profile.rope, 2).float() / profile.rope)).double()


def thetas(source: Source, profile: Profile) -> tuple[float, ...]:
    """Return values of `rope_theta` to choose from, the source's own first.

    Any value is one number in config.json, which all engines read. With the source's own, the slots of 128
    dimensions that rotate are spread over twice the step when they get 64: every second of the source's
    pairs has a slot, and slow pairs, which need none, as many as fast ones. With the root of it, the slots
    turn like the fastest half of the pairs; with smaller steps, several are near each of the fastest.
    """
    own = float(rope_parameters(source.config)["rope_theta"])
    table_F, _ = source.slot_frequencies()
    step = own ** (2 / source.rotary_width)
    found = float(table_F[0] / table_F[1]) if source.rotary_width > 2 else step
    step = step if math.isclose(step, found, rel_tol=1e-5) else found  # scaled rotation is not theta's alone
    powers = [share * profile.rope / 2 * math.log(step) for share in _STEPS]
    others = [float(f"{math.exp(power):.7g}") for power in powers if 0 < power < math.log(_LARGEST)]
    return own, *(each for each in others if not math.isclose(each, own, rel_tol=1e-4))


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


def find_places(slots: Sequence[float], slots_S: Tensor) -> tuple[int, ...] | None:
    """Return the class's slots that turn at some frequencies, each used once.

    The result is None where a frequency has no slot of its own.
    """
    places = []
    for frequency in slots:
        same = ((slots_S / frequency - 1).abs() < _SAME).nonzero().flatten().tolist()
        if not same or same[0] in places:
            return None
        places.append(same[0])
    return tuple(places)


def slot_rope(source: Source, bands: tuple[Band, ...]) -> dict[str, Any]:
    """Return rope parameters that put the slots where the bands are.

    A table that is theta^(-2i/R) stays `default`, which every engine knows. Any other is written as
    `longrope` factors relative to that table, which transformers takes literally.
    """
    theta = rope_parameters(source.config)["rope_theta"]
    wanted_S = torch.tensor(
        [band.frequency for band in bands for _ in range(band.slots)], dtype=torch.float64
    )
    default = {"rope_type": "default", "rope_theta": theta}
    stock_S, _ = frequencies(default, 2 * len(wanted_S), source.positions)
    if torch.equal(stock_S, wanted_S):
        return default
    factors = _factors(wanted_S, theta)
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": source.positions,
    }


def _factors(wanted_S: torch.Tensor, theta: float) -> list[float]:
    """Return longrope factors from which transformers computes exactly these frequencies.

    It computes 1 / (factor · theta^(2i/R)) in float32. A frequency that is off by one unit in the last place
    turns a pair by position · 6e-8 of its angle too far.
    """
    width = 2 * len(wanted_S)
    base_S = theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    guess_S = (1 / (wanted_S * base_S.double())).float()
    steps = torch.arange(-4, 5).float()[:, None] * torch.finfo(torch.float32).eps
    candidates = guess_S * (1 + steps)
    off = (1.0 / (candidates * base_S)).double().sub(wanted_S).abs()
    return [float(factor) for factor in candidates.gather(0, off.argmin(0, keepdim=True))[0]]
