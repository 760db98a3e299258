"""`AssembleRequest`: everything that a user can ask when a tower is put back."""

from typing import Annotated

from ...core.command_options import Option
from ...core.option_types import Bytes, Place
from ...core.settings import Settings


class AssembleRequest(Settings):
    """A tower to be put back: `kvfold assemble` takes its fields as options."""

    tower: Place
    """The directory of the folded or distilled tower."""
    whole: str
    """The multimodal checkpoint that it was taken from, a directory or a Hub id."""
    out: Annotated[Place, Option(metavar="DIR")] | None = None
    """Output; must not exist. Default: ./NAME-TARGET."""
    shard_size: Bytes = 5 * 10**9
    """Most bytes of a weight file."""
