"""The widths and the epsilon that other engines take the stock latent class in, and an output in them.

vLLM, SGLang and llama.cpp have kernels for few widths, one epsilon and no biases; engine_rules.py says what
they do with anything else. A narrower fold is padded with zeros, which changes no score and no sum.
"""

from dataclasses import dataclass

from ...core.errors import InvalidInput
from ..algebra.attention import LATENT_EPSILON

# Of the latent's norm: fixed in transformers' class, whatever rms_norm_eps says.
NORM_EPSILON = LATENT_EPSILON


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
NARROW = Profile(latent=256, rope=64, heads=((64, 128), (128, 128)), epsilon=NORM_EPSILON)
PROFILES = (SERVING, NARROW)  # the widest first


@dataclass(frozen=True, kw_only=True)
class Served:
    """One output in a profile.

    Attributes:
        profile: the profile.
        nope, value: widths of a head, of `profile.heads`.
        places: for each of the fold's rotary slots the number of the class's.
        stream_scale: factor on the residual stream that gives its norms the profile's epsilon.
        compressed: queries go through the class's query compression, which llama.cpp wants.
    """

    profile: Profile
    nope: int
    value: int
    places: tuple[int, ...]
    stream_scale: float = 1.0
    compressed: bool = False


def choose_heads(profile: Profile, nope: int, value: int) -> tuple[int, int]:
    """Return the narrowest heads of a profile that hold un-rotated queries and values of some widths."""
    for heads in profile.heads:
        if nope <= heads[0] and value <= heads[1]:
            return heads
    widest = max(profile.heads)
    raise InvalidInput(
        f"the source's heads are {max(nope, value)} wide, but the serving profile {profile} has room for at "
        f"most {widest[0]} un-rotated dimensions and {widest[1]} of a value; use --container remote"
    )
