"""The schemes of `kvfold quantize`, and everything that a user can ask of it.

Nothing heavy is imported, since `--help` goes through this file.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ..core.command_options import Option
from ..core.option_types import Bytes, Place
from ..core.settings import Settings

LEAST_GROUP = 8  # columns; smaller groups would spend more on scales than they save
GROUPS = (128, 64, 32)  # that vLLM's kernels take, the usual one first


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """A row.

    Attributes:
        preset: its name in compressed-tensors.
        words: what it stores and computes in, a sentence's part.
        bits: of a weight.
        grouped: whether groups of columns share a scale, instead of whole rows.
    """

    preset: str
    words: str
    bits: int
    grouped: bool = False


SCHEMES = {
    "fp8": WeightScheme(
        preset="FP8_DYNAMIC", bits=8, words="FP8 (E4M3) weights and activations, scales per row and per token"
    ),
    "w4a16": WeightScheme(
        preset="W4A16", bits=4, grouped=True, words="4-bit weights with scales per group, 16-bit activations"
    ),
    "w8a8": WeightScheme(
        preset="W8A8", bits=8, words="int8 weights and activations, scales per row and per token"
    ),
}


class QuantizeRequest(Settings):
    """A rounding of weights as a user asks for it: `kvfold quantize` takes its fields as options."""

    directory: Place
    """The checkpoint, folded or not; it is not changed."""
    scheme: Literal["fp8", "w4a16", "w8a8"] = Field(
        description="; ".join(f"`{name}`: {scheme.words}" for name, scheme in SCHEMES.items()) + "."
    )
    out: Annotated[Place, Option(metavar="DIR")] | None = None
    """Output; must not exist. Default: ./NAME-SCHEME."""
    group_size: Annotated[int, Field(ge=LEAST_GROUP), Option(metavar="N")] | None = None
    """Columns of a weight that share a scale, for `w4a16`. Default: the largest of 128, 64 and 32 that
    divides every width, or else the one that leaves the fewest numbers unquantised."""
    shard_size: Bytes = 5 * 10**9
    """Most bytes of a weight file."""
