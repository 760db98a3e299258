"""The widths in which other engines take the stock latent class, and a fold's place in them.

vLLM, SGLang and llama.cpp have kernels for few widths, one rotary table, one epsilon and no biases;
decide/engine_rules.py says what they do with anything else. A narrower fold is padded with zeros, which
changes no score and no sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ..algebra.attention import LATENT_EPSILON
from ..methods.latent import Band

NORM_EPSILON = (
    LATENT_EPSILON  # of the latent's norm: fixed in transformers' class, whatever rms_norm_eps says
)
_SAME = 3e-7  # relative: frequencies that differ by a rounding of float32


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The widths and the epsilon that engines take.

    Attributes:
        latent, rope: widths of the latent and of the rotary key: what is cached.
        heads: widths of a head's un-rotated queries and of its values, narrowest first.
        epsilon: rms_norm_eps, which the latent's norm gets too.
    """

    latent: int
    rope: int
    heads: tuple[tuple[int, int], ...]
    epsilon: float

    @property
    def cached(self) -> int:
        """Return the elements cached per token and layer."""
        return self.latent + self.rope

    def __str__(self) -> str:
        return f"{self.latent}+{self.rope}"


SERVING = Profile(latent=512, rope=64, heads=((64, 128), (128, 128), (192, 256)), epsilon=NORM_EPSILON)


@dataclass(frozen=True, kw_only=True)
class Served:
    """One output in a profile.

    Attributes:
        profile: the profile.
        nope, value: widths of a head, of `profile.heads`.
        places: for each of the fold's rotary slots the number of the class's.
        stream_scale: factor on the residual stream, by which its norms get the profile's epsilon.
        compressed: queries go through the class's query compression, which llama.cpp wants.
    """

    profile: Profile
    nope: int
    value: int
    places: tuple[int, ...]
    stream_scale: float = 1.0
    compressed: bool = False


def choose_heads(profile: Profile, nope: int, value: int) -> tuple[int, int]:
    """Return the narrowest heads of a profile that hold un-rotated queries and values of some widths.

    Raises:
        InvalidInput: there are none.
    """
    for heads in profile.heads:
        if nope <= heads[0] and value <= heads[1]:
            return heads
    widest = max(profile.heads)
    raise InvalidInput(
        f"the source's heads are {max(nope, value)} wide, but engines other than transformers "
        f"have kernels for at most {widest[0]} un-rotated dimensions and {widest[1]} of a value; "
        "use --container remote"
    )


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
