"""`QuantizeRequest`: everything that a user can ask of a rounding of weights."""

from typing import Annotated, Literal

from pydantic import Field

from ..core.command_options import Option
from ..core.option_types import Bytes, Place
from ..core.settings import Settings
from .scheme_names import SCHEMES


class QuantizeRequest(Settings):
    """A rounding of weights as a user asks for it: `kvfold quantize` takes its fields as options."""

    directory: Place
    """The checkpoint, folded or not; it is not changed."""
    scheme: Literal["fp8", "w4a16", "w8a8"] = Field(
        description="; ".join(f"`{name}`: {scheme.words}" for name, scheme in SCHEMES.items()) + "."
    )
    out: Annotated[Place, Option(metavar="DIR")] | None = None
    """Output; must not exist. Default: ./NAME-SCHEME."""
    group_size: Annotated[int, Field(ge=8), Option(metavar="N")] | None = None
    """Columns of a weight that share a scale, for `w4a16`. Default: the largest of 128, 64 and 32 that
    divides every width, or else the one that leaves the fewest numbers unquantised."""
    shard_size: Bytes = 5 * 10**9
    """Most bytes of a weight file."""
